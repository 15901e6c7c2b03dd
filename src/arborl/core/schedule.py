"""The table of denoising steps, and where a moving window stands at an epoch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .errors import InputError
from .plain import floats


@dataclass(frozen=True)
class Schedule:
    """Step i goes from noise level `sigma[i]` to `sigma_next[i]`; the model is told `timestep[i]`.

    A table rather than a grid, so that a tail with fewer steps is further rows. All float64: the coefficients
    of a transition are computed from it exactly and rounded once. Flow: x_σ = (1-σ)·x0 + σ·noise.
    """

    sigma: Float[Tensor, " steps"]
    sigma_next: Float[Tensor, " steps"]
    timestep: Float[Tensor, " steps"]

    def __len__(self) -> int:
        return len(self.sigma)

    @classmethod
    def from_sigmas(cls, sigmas: Sequence[float], train_timesteps: int = 1000) -> "Schedule":
        """From T+1 falling noise levels that end at 0; a flow model is told the exact σ·1000."""
        grid = torch.tensor(sigmas, dtype=torch.float64)
        if len(grid) < 2 or not bool((grid[1:] < grid[:-1]).all()) or float(grid[-1]) != 0.0 or float(grid[0]) > 1:
            raise ValueError(f"a σ grid falls strictly from at most 1 to 0, not {list(sigmas)}")
        return cls(grid[:-1], grid[1:], grid[:-1] * train_timesteps)


def shifted(steps: int, shift: float) -> Schedule:
    """shift·t / (1 + (shift-1)·t) on T+1 even times from 1 to 0 (the resolution shift of SD3, arXiv 2403.03206)."""
    if steps < 1:
        raise InputError("sample.num_steps", steps, "a trajectory needs at least one step", "1 or more")
    if shift <= 0:
        raise InputError("sample.shift", shift, "the shift divides the time axis", "above 0")
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return Schedule.from_sigmas(floats(shift * t / (1 + (shift - 1) * t)))


def window_start(epoch: int, s: int, tou: int, positions: int) -> int:
    """l(e) = (s·⌊e/tou⌋) mod positions: the window moves s steps every tou epochs and never leaves the grid."""
    return (s * (epoch // tou)) % positions
