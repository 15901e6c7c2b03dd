"""What the engine asks of a model, and what all models share."""

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..config.schema import Config
from ..core.errors import InputError
from ..core.noise import Key, normal
from ..core.schedule import Schedule, shifted
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
    default_path: ClassVar[str] = ""
    """Where the weights lie if `model.path` does not say."""
    default_prompts: ClassVar[Sequence[str]] = ()
    heldout_prompts: ClassVar[Sequence[str]] = ()
    """For evaluation, where `eval.prompts` names no file and training takes the default ones."""
    lora_targets: ClassVar[Sequence[str]] = ()

    module: nn.Module
    """What is trained. The loop replaces it by its prepared (wrapped, compiled) form; `predict` goes through it."""
    latent_shape: tuple[int, ...]

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.frozen: nn.Module | None = None  # the KL reference of a full fine-tune

    @abstractmethod
    def encode(self, prompts: Sequence[str]) -> Cond:
        """Text to conditioning, on the model's device."""

    @abstractmethod
    def predict(self, x: Float[Tensor, "n *latent"], t: Float[Tensor, " n"], cond: Cond) -> Float[Tensor, "n *latent"]:
        """The velocity at latents x (a diffusion model's noise or v, as its schedule says), float32 in and out; t is
        each sample's own timestep (for flow models σ·1000).
        """

    @abstractmethod
    def decode(self, latents: Float[Tensor, "n *latent"]) -> Float[Tensor, "n 3 height width"]:
        """Latents to pictures in [0, 1]."""

    def noise(self, key: Key, address: Int[Tensor, "n 3"]) -> Float[Tensor, "n *latent"]:
        """The latents a trajectory starts from, one for each (prompt, tree, node)."""
        return normal(key, address, self.latent_shape)

    @classmethod
    def grid(cls, config: Config, steps: int) -> Schedule:
        """The table of denoising steps, from the configuration alone, so that a plan can be costed without weights.

        A shift is a flow's; a diffusion model has its own scheduler's steps.
        """
        if config.sample.sigmas == "shift" and not cls.diffusion:
            return shifted(steps, config.sample.shift)
        return cls.pipeline_grid(config, steps)

    @classmethod
    def pipeline_grid(cls, config: Config, steps: int) -> Schedule:
        """The table by the pipeline's own scheduler, for families that bring one."""
        raise InputError("sample.sigmas", config.sample.sigmas, "this model brings no scheduler", "shift")

    @classmethod
    def path(cls, config: Config) -> str:
        return config.model.path or cls.default_path

    @classmethod  # noqa: B027 (most families have nothing to check)
    def check(cls, config: Config, may_fetch: bool) -> None:
        """Raise an `InputError` for what is known to be missing or wrong before weights are loaded (or fetched)."""

    def schedule(self, steps: int) -> Schedule:
        return self.grid(self.config, steps)

    def make_trainable(self, how: str, rank: int, alpha: float, targets: Sequence[str]) -> None:
        """Freeze the module but for what is trained, which is kept in float32: bfloat16 cannot hold a step of 1e-5."""
        self.module.requires_grad_(False)
        if how == "lora":
            lora.inject(self.module, rank, alpha, targets or self.lora_targets)
        else:
            self.module.float().requires_grad_(True)
        # Rollout and update must be the same function; dropout would make them two.
        self.module.eval()

    def keep_reference(self) -> None:
        """Remember the current policy as the KL reference: with LoRA it is there already, else it is a frozen copy."""
        if not lora.is_injected(self.module):
            self.frozen = copy.deepcopy(self.module).requires_grad_(False)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, `predict` is the reference policy."""
        if lora.is_injected(self.module):
            with lora.disabled(self.module):
                yield
            return
        if self.frozen is None:
            raise RuntimeError("keep_reference() was not called before training")
        trained, self.module = self.module, self.frozen
        try:
            yield
        finally:
            self.module = trained


def dtypes(config: Config, device: torch.device) -> dict[str, torch.dtype]:
    """The precision to load each part of a pipeline in.

    The VAE stays in float32: half precision leaves bands in pictures, and rewards see them. So do weights that are
    trained: bfloat16 would round the checkpoint before the first step.
    """
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    frozen = auto if config.model.dtype == "auto" else getattr(torch, config.model.dtype)
    trained = torch.float32 if config.model.train == "full" else frozen
    return {"default": frozen, "transformer": trained, "vae": torch.float32}


def read_index(path: Path) -> dict[str, Any]:
    """A pipeline's model_index.json."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError("model.path", path.parent, f"its model_index.json cannot be read ({error})") from None
    return index if isinstance(index, dict) else {}
