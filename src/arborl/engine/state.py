"""Training state: weights, their average, the optimizer, and how far the run has come."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.errors import InputError
from ..distributed.fsdp import is_sharded, to_sharding_of


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name, of a module that DDP has not wrapped yet."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not named:
        raise InputError("model.train", None, "the model has no trainable weight: all of them are frozen")
    return named


class Ema:
    """An exponential moving average of the trained weights."""

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float, every: int = 1) -> None:
        self.parameters, self.decay, self.every, self.steps = parameters, decay, every, 0
        self.average = {name: p.detach().clone() for name, p in parameters.items()}
        self._own: dict[str, Tensor] | None = None

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        if self.decay and self.steps % self.every == 0:
            averages, live = list(self.average.values()), [self.parameters[name].detach() for name in self.average]
            torch._foreach_lerp_(averages, live, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights (its own where there is no average)."""
        if not self.decay:
            yield
            return
        self._own = {name: p.detach().clone() for name, p in self.parameters.items()}
        try:
            copy_into(self.parameters, self.average)
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Give the model its own weights back. May be called again: an interrupt can fall into the middle of it."""
        if self._own is not None:
            copy_into(self.parameters, self._own)
            self._own = None


@dataclass
class State:
    """Training state: everything that a checkpoint holds."""

    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    ema: Ema
    epoch: int = 0  # whole epochs behind it
    prompts: int = 0  # dealt out in them
    nonfinite_steps: int = 0  # optimizer steps in a row, the last ones, whose gradient was not finite
    forwards: int = 0
    forward_backwards: int = 0
    prompt_list: str = ""  # a digest of what prompts are dealt from
    saved: int = -1  # the epoch of the newest checkpoint, written or read

    @property
    def sharded(self) -> bool:
        """Whether each process has a part of every tensor, so that all of them are needed to save it."""
        return any(map(is_sharded, self.parameters.values()))


@torch.no_grad()
def copy_into(parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(to_sharding_of(parameter.detach(), tensors[name]))
