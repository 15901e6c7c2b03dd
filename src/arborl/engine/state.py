"""Training state: weights, their average, an old policy's, the optimizer, and how far the run has come."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.errors import InputError
from ..core.tensors import lerp_all
from ..distributed.fsdp import is_sharded, to_sharding_of


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name, of a module that DDP has not wrapped yet."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not named:
        raise InputError("model.train", None, "the model has no trainable weight: all of them are frozen")
    return named


class Shadow:
    """Weights that follow the trained ones, and can take their place in the model for a while."""

    def __init__(self, parameters: dict[str, nn.Parameter], weights: dict[str, Tensor]) -> None:
        self.parameters, self.weights = parameters, weights
        self._own: dict[str, Tensor] | None = None

    @torch.no_grad()
    def follow(self, keep: float) -> None:
        """Keep that share of what they are, and take the rest from the trained weights."""
        live = [self.parameters[name].detach() for name in self.weights]
        lerp_all(list(self.weights.values()), live, 1.0 - keep)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over saved weights."""
        copy_into(self.weights, weights)

    @contextmanager
    def applied(self) -> Generator[None]:
        """Inside, the model has these weights."""
        if self._own is not None:
            raise RuntimeError("the model has these weights already, and its own would be lost")
        self._own = copies_of(self.parameters)
        try:
            copy_into(self.parameters, self.weights)
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Give the model its own weights back. May be called again: an interrupt can fall into the middle of it."""
        if self._own is not None:
            copy_into(self.parameters, self._own)
            self._own = None


class Ema(Shadow):
    """An exponential moving average of the trained weights; none, and no memory, where its decay is 0."""

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float, every: int = 1) -> None:
        super().__init__(parameters, copies_of(parameters) if decay else {})
        self.decay, self.every = decay, every

    def step(self, steps: int) -> None:
        """After so many optimizer steps of the run."""
        if self.decay and steps % self.every == 0:
            self.follow(self.decay)

    @contextmanager
    def applied(self) -> Generator[None]:
        """Inside, the model has the averaged weights (its own where there is no average)."""
        if not self.decay:
            yield
            return
        with super().applied():
            yield


@dataclass
class State:
    """Training state: what a checkpoint holds, and what of it is new since."""

    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    ema: Ema
    old: Shadow | None = None  # the old policy's weights, where the loss asks for it
    epoch: int = 0  # whole epochs behind it
    prompts: int = 0  # dealt out in them
    steps: int = 0  # optimizer steps
    nonfinite_steps: int = 0  # optimizer steps in a row, the last ones, whose gradient was not finite
    forwards: int = 0
    forward_backwards: int = 0
    prompt_list: str = ""  # a digest of what prompts are dealt from
    saved: int = -1  # the epoch of the newest checkpoint, written or read
    check_gradients: bool = True  # whether the next optimizer steps' gradients are looked at; a run's first are

    @property
    def sharded(self) -> bool:
        """Whether each process has a part of every tensor, so that all of them are needed to save it."""
        return any(map(is_sharded, self.parameters.values()))

    def restore(self) -> None:
        """Whoever's weights an interrupt has left in the model: it has its own again."""
        if self.old:  # whatever the model had when this one came, its average maybe
            self.old.restore()
        self.ema.restore()

    def every_weight(self) -> dict[str, Tensor]:
        """The trained weights and those that follow them, by names of their own."""
        found: dict[str, Tensor] = dict(self.parameters)
        for name, shadow in {"ema": self.ema, "old": self.old}.items():
            found |= {f"{name}:{key}": held for key, held in shadow.weights.items()} if shadow else {}
        return found


def copies_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


@torch.no_grad()
def copy_into(held: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, mine in held.items():
        mine.copy_(to_sharding_of(mine.detach(), tensors[name]))
