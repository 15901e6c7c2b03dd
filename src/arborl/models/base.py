"""The protocol between engine and model, and code that all models share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..config.schema import Config
from ..core.errors import InputError
from ..core.noise import Key, normal
from ..core.schedule import Schedule, shifted
from ..data.embedding_cache import Embeddings
from . import lora


@dataclass(frozen=True)
class Cond:
    """A batch of conditioning: named tensors whose first axis is the prompt. Gathered by index."""

    tensors: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: Tensor | slice) -> "Cond":
        return Cond({name: tensor[index] for name, tensor in self.tensors.items()})


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

    module: nn.Module
    """What is trained; `predict` calls it each time. The engine's `Policy` puts its wrapped form in its place, and for
    a call another policy's.
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
    def path(cls, config: Config) -> str:
        return config.model.path or cls.default_path

    @classmethod
    def check(cls, config: Config, may_fetch: bool) -> None:
        """Raise an `InputError` for what is known to be missing or wrong before weights are loaded (or fetched)."""
        if config.sample.num_frames != 1 and not cls.video:
            raise InputError("sample.num_frames", config.sample.num_frames, "this model makes pictures, no videos", "1")

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
            lora.inject(self.module, rank, alpha, targets or self.lora_targets)
        else:
            self.module.float().requires_grad_(True)
        # Rollout and update must be the same function; dropout would make them two.
        self.module.eval()

    def compile_decoder(self) -> list[str]:
        """Run `decode` as compiled code from now on, where a family says how; returns messages for the user."""
        return []

    def check_decoder(self, latents: Float[Tensor, "n *latent"]) -> list[str]:
        """Compare `decode` with full precision. Where they differ, full precision is used from now on, and a
        message returned.
        """
        return []
