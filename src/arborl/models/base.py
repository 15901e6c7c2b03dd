"""The protocol between engine and model, and code that all models share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..config.schema import Config
from ..core.errors import InputError
from ..core.noise import Key, normal
from ..core.schedule import Schedule, shifted
from ..core.tensors import ints, to_device
from ..data.embedding_cache import Embeddings, Request
from ..data.prompts import Prompts
from . import lora


@dataclass(frozen=True)
class Cond:
    """A batch of conditioning: named tensors whose first axis is the prompt, and lists of what stays on the host with
    an item for each prompt. Gathered by index, which had better be on the host: what is there need not be waited for.
    """

    tensors: dict[str, Tensor]
    host: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])

    @property
    def is_alike(self) -> bool:
        """Whether all prompts may share a call; those that may bear the same number."""
        return len(set(self.host.get("alike", ()))) < 2

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: Tensor | slice) -> "Cond":
        rows = range(len(self))[index] if isinstance(index, slice) else ints(index) if self.host else ()
        host = {name: [values[i] for i in rows] for name, values in self.host.items()}
        if isinstance(index, Tensor):
            index = to_device(index, next(iter(self.tensors.values())).device)
        return Cond({name: tensor[index] for name, tensor in self.tensors.items()}, host)


def parts_of(module: nn.Module) -> dict[str, nn.Module]:
    """What is wrapped, split and compiled by itself: the modules that are trained together, or the one that is."""
    return dict(module.items()) if isinstance(module, nn.ModuleDict) else {"": module}


class Model(ABC):
    """A flow or diffusion model. A new family is one file: a subclass with `encode`, `predict` and `decode`, whose
    `__init__(config, device)` calls this one and sets `module` and `latent_shape`. LoRA wants `lora_targets` too.
    """

    diffusion: ClassVar[bool] = False
    """Whether it predicts noise (or v) on a variance-preserving schedule, and not a flow's velocity."""
    video: ClassVar[bool] = False
    """Whether `decode` gives videos."""
    auto_compile: ClassVar[bool] = False
    """Whether `compile=auto` may compile it: its compiled code has been run and measured on a GPU."""
    default_path: ClassVar[str] = ""
    """Where the weights lie if `model.path` does not say."""
    default_prompts: ClassVar[Sequence[str]] = ()
    heldout_prompts: ClassVar[Sequence[str]] = ()
    """For evaluation, where `eval.prompts` names no file and training takes the default ones."""
    lora_targets: ClassVar[Sequence[str]] = ()
    takes_call_settings: ClassVar[bool] = False
    """Whether `model.call` and `model.components` mean something to it."""
    timesteps_on_host: ClassVar[bool] = False
    """Whether `predict` is given its timesteps on the host."""

    module: nn.Module
    """What is trained, several modules in an `nn.ModuleDict`; `predict` calls it each time. The engine's `Policy` puts
    its wrapped form in its place, and for a call another policy's.
    """
    latent_shape: tuple[int, ...]

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device

    @abstractmethod
    def encode(self, prompts: Sequence[str]) -> Cond:
        """Text to conditioning, on the model's device."""

    @abstractmethod
    def predict(self, x: Float[Tensor, "n *latent"], t: Float[Tensor, " n"], cond: Cond) -> Float[Tensor, "n *latent"]:
        """The velocity at latents x (a diffusion model's noise or v, as its schedule says), float32 in and out; t is
        each sample's own timestep (for flow models σ·1000).
        """

    @abstractmethod
    def decode(self, latents: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *picture"]:
        """Latents to pictures in [0, 1], N×3×H×W, or to videos, N×F×3×H×W."""

    def encode_prompts(self, prompts: Prompts) -> Cond:
        """The same of prompts with the columns of their file, for a family that conditions on more than text."""
        return self.encode(prompts.texts)

    def decode_for(
        self, latents: Float[Tensor, "n *latent"], prompts: Prompts | None = None
    ) -> Float[Tensor, "n *picture"]:
        """The same as `decode`, for a family where it takes what the prompts bring beside their text."""
        return self.decode(latents)

    def call_groups(self, t: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Numbers of groups: rows at these timesteps may share a call within their group. Most models take any."""
        return torch.zeros(len(t), dtype=torch.long)

    def noise_of_seed(self, seed: int) -> Float[Tensor, "1 *latent"]:
        """The noise of a diffusers pipeline that is given `torch.Generator().manual_seed(seed)`."""
        return torch.randn(1, *self.latent_shape, generator=torch.Generator().manual_seed(seed))

    def noise(self, key: Key, address: Int[Tensor, "n 3"]) -> Float[Tensor, "n *latent"]:
        """The latents a trajectory starts from, one for each (prompt, tree, node)."""
        return normal(key, address, self.latent_shape)

    @classmethod
    def schedule_for(cls, config: Config, steps: int) -> Schedule:
        """The table of denoising steps, from the configuration alone, so that a plan can be costed without weights.

        A shift is a flow's; a diffusion model has its own scheduler's steps.
        """
        if config.sample.sigmas == "shift" and not cls.diffusion:
            return shifted(steps, cls.default_shift(config) if config.sample.shift is None else config.sample.shift)
        return cls.pipeline_schedule(config, steps)

    @classmethod
    def default_shift(cls, config: Config) -> float:
        """The shift this model is meant to be sampled with."""
        return 3.0

    @classmethod
    def pipeline_schedule(cls, config: Config, steps: int) -> Schedule:
        """The table by the pipeline's own scheduler, for families that bring one."""
        raise InputError("sample.sigmas", config.sample.sigmas, "this model brings no scheduler", "shift")

    @classmethod
    def of(cls, config: Config) -> "type[Model]":
        """The class for these settings, where one of its own is made for each pipeline."""
        return cls

    @classmethod
    def requests(cls, prompts: Prompts, config: Config) -> list[Request]:
        """What of prompts is encoded, and kept."""
        return [Request(text) for text in prompts.texts]

    @classmethod
    def columns(cls, config: Config) -> dict[str, bool]:
        """Columns of the prompt file that `encode_prompts` takes, and whether they name pictures."""
        return {}

    @classmethod
    def example_prompts(cls, config: Config) -> Prompts:
        """A prompt of its own, where a run's may have stayed elsewhere."""
        return Prompts([cls.heldout_prompts[0]], {})

    @classmethod
    def path(cls, config: Config) -> str:
        return config.model.path or cls.default_path

    @classmethod
    def check(cls, config: Config, may_fetch: bool) -> None:
        """Raise an `InputError` for what is known to be missing or wrong before weights are loaded (or fetched)."""
        if config.sample.num_frames != 1 and not cls.video:
            raise InputError("sample.num_frames", config.sample.num_frames, "this model makes pictures, no videos", "1")
        if config.sample.guidance_scale < 1 and not cls.takes_call_settings:
            raise InputError("sample.guidance_scale", config.sample.guidance_scale, "1 is off", "1 or more")
        problem, cure = "this family has a call of its own", "model.family=pipeline"
        if config.model.components and not cls.takes_call_settings:
            raise InputError("model.components", ", ".join(config.model.components), problem, cure=cure)
        if config.model.call and not cls.takes_call_settings:
            name, value = next(iter(config.model.call.items()))
            raise InputError(f"model.call.{name}", value, problem, cure=cure)

    @classmethod
    def embeddings(cls, config: Config, device: torch.device) -> Embeddings | None:
        """The cache of prompts that are encoded beforehand; None for a family that encodes them on the spot."""
        return None

    def schedule(self, steps: int) -> Schedule:
        return self.schedule_for(self.config, steps)

    def make_trainable(self, how: str, rank: int, alpha: float, targets: Sequence[str]) -> None:
        """Freeze the module but for what is trained, which is kept in float32: bfloat16 cannot hold a step of 1e-5."""
        self.module.requires_grad_(False)
        if how == "lora":
            lora.inject(self.module, rank, alpha, targets or self.lora_layers(self.module))
        else:
            self.module.float().requires_grad_(True)
        # Rollout and update must be the same function; dropout would make them two.
        self.module.eval()

    @classmethod
    def lora_layers(cls, module: nn.Module) -> Sequence[str]:
        """The layers that LoRA adapts where nobody says otherwise."""
        return cls.lora_targets

    @property
    def messages(self) -> Sequence[str]:
        """What a user should know of it, a line each."""
        return ()

    def compile_decoder(self) -> list[str]:
        """Run `decode` as compiled code from now on, where a family says how; returns messages for the user."""
        return []

    def check_decoder(self, latents: Float[Tensor, "n *latent"]) -> list[str]:
        """Compare `decode` with full precision. Where they differ, full precision is used from now on, and a
        message returned.
        """
        return []
