"""The table of denoising steps, and where a moving window stands at an epoch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .errors import ArgumentError
from .tensors import floats

PREDICTIONS = ("flow", "epsilon", "v_prediction")
"""A model's output: the velocity noise - x0 of a flow, or a diffusion model's noise or v (diffusers' names)."""


@dataclass(frozen=True)
class Schedule:
    """Step i goes from noise level `sigma[i]` to `sigma_next[i]`; the model's time input is `timestep[i]`.

    A table rather than a grid, so that a tail with fewer steps is further rows. All float64: the coefficients
    of a transition are computed from it exactly and rounded once.
    Flow: x_σ = (1-σ)·x0 + σ·noise. Diffusion: x_σ = √(1-σ²)·x0 + σ·noise, so σ² is 1-ᾱ.
    """

    sigma: Float[Tensor, " steps"]
    sigma_next: Float[Tensor, " steps"]
    timestep: Float[Tensor, " steps"]
    prediction: str = "flow"

    def __len__(self) -> int:
        return len(self.sigma)

    @property
    def is_flow(self) -> bool:
        return self.prediction == "flow"

    def alpha(self, sigma: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """α: what is left of the clean sample at noise level σ."""
        return 1 - sigma if self.is_flow else torch.sqrt(1 - sigma**2)

    @classmethod
    def from_sigmas(cls, sigmas: Sequence[float], train_timesteps: int = 1000) -> "Schedule":
        """From T+1 falling noise levels that end at 0; a flow model's timestep is the exact σ·1000."""
        grid = torch.tensor(sigmas, dtype=torch.float64)
        if len(grid) < 2 or not bool((grid[1:] < grid[:-1]).all()) or float(grid[-1]) != 0.0 or float(grid[0]) > 1:
            raise ValueError(f"a σ grid falls strictly from at most 1 to 0, not {list(sigmas)}")
        return cls(grid[:-1], grid[1:], grid[:-1] * train_timesteps)

    @classmethod
    def from_alphas(cls, alphas: Sequence[float], timesteps: Sequence[int], prediction: str) -> "Schedule":
        """Of a diffusion model: ᾱ at each of its T timesteps and, one more, after the last step."""
        grid = torch.tensor(alphas, dtype=torch.float64)
        rises = bool((grid[1:] > grid[:-1]).all()) and float(grid[0]) > 0 and float(grid[-1]) <= 1
        if len(grid) != len(timesteps) + 1 or len(grid) < 2 or not rises:
            raise ValueError(f"ᾱ rises strictly from above 0 to at most 1, one more than timesteps, not {list(alphas)}")
        if prediction not in PREDICTIONS[1:]:
            raise ValueError(f"a diffusion model predicts {' or '.join(PREDICTIONS[1:])}, not {prediction}")
        sigma = torch.sqrt(1 - grid)
        return cls(sigma[:-1], sigma[1:], torch.tensor(timesteps, dtype=torch.float64), prediction)

    def head(self, steps: int) -> "Schedule":
        """The first rows: without a tail's, if there are any."""
        return Schedule(self.sigma[:steps], self.sigma_next[:steps], self.timestep[:steps], self.prediction)

    def strided(self, start: int, steps: int) -> "Schedule":
        """From level `start` to the end in fewer, longer steps.

        They go between levels of the table, spread evenly over it, so every one is a level the model knows and the
        last is the table's own last, σ = 0.
        """
        grid = torch.cat([self.sigma, self.sigma_next[-1:]])
        at = torch.linspace(start, len(self), steps + 1, dtype=torch.float64).round().long()
        return Schedule(grid[at[:-1]], grid[at[1:]], self.timestep[at[:-1]], self.prediction)

    def followed_by(self, other: "Schedule") -> "Schedule":
        """Both tables, one below the other."""
        return Schedule(
            torch.cat([self.sigma, other.sigma]),
            torch.cat([self.sigma_next, other.sigma_next]),
            torch.cat([self.timestep, other.timestep]),
            self.prediction,
        )


def shifted(steps: int, shift: float) -> Schedule:
    """SD3's resolution shift (arXiv 2403.03206, eq. 23): shift·t / (1 + (shift-1)·t) on T+1 even times from 1 to 0."""
    if steps < 1:
        raise ArgumentError("steps", steps, "a trajectory needs at least one step", "1 or more")
    if shift <= 0:
        raise ArgumentError("shift", shift, "the shift divides the time axis", "above 0")
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return Schedule.from_sigmas(floats(shift * t / (1 + (shift - 1) * t)))


def window_start(epoch: int, s: int, tou: int, positions: int) -> int:
    """l(e) = (s·⌊e/tou⌋) mod positions: a window moves s steps every tou epochs and never leaves the schedule."""
    return (s * (epoch // tou)) % positions
