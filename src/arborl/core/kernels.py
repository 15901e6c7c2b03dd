"""Transitions along an edge. A kernel is three numbers a step: mean = a·x + b·v and standard deviation s.

Every published sampler is linear in the state x and the model's answer v (a flow's velocity, a diffusion's noise), so a
kernel maps noise levels to (a, b, s) in float64 and never touches a latent. Sampling, log-density and KL are
written once, for the Gaussian. σ is the level the edge leaves, σ' the one it reaches, d = σ' - σ < 0. η = 0 makes every
kernel the ODE.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .errors import ArgumentError
from .schedule import Schedule
from .tensors import like


class Coefficients(NamedTuple):
    a: Float[Tensor, " n"]
    b: Float[Tensor, " n"]
    std: Float[Tensor, " n"]


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], Coefficients]
"""(sigma, sigma_next, eta, kappa), one value an edge -> the edge's coefficients."""


def ode(sigma: Tensor, sigma_next: Tensor, eta: Tensor, kappa: Tensor) -> Coefficients:
    """Euler's step, x + d·v; the noise level is not used."""
    return Coefficients(torch.ones_like(sigma), sigma_next - sigma, torch.zeros_like(sigma))


def _reverse_sde(sigma: Tensor, sigma_next: Tensor, g: Tensor, kappa: Tensor) -> Coefficients:
    """Euler-Maruyama of the reverse SDE with diffusion g: x + d·v - ½g²·score·d, score = -(x + (1-σ)v)/σ."""
    d = sigma_next - sigma
    pull = g**2 * d / (2 * sigma)
    return Coefficients(1 + pull, d + pull * (1 - sigma), kappa * g * torch.sqrt(-d))


def flow_sde(sigma: Tensor, sigma_next: Tensor, eta: Tensor, kappa: Tensor) -> Coefficients:
    """Flow-GRPO (arXiv 2505.05470, eq. 8 and 9): g = η√(σ/(1-σ)); at σ = 1 the 1-σ is taken from the next level."""
    below_one = torch.where(sigma < 1, sigma, sigma_next)
    return _reverse_sde(sigma, sigma_next, eta * torch.sqrt(sigma / (1 - below_one)), kappa)


def dance_sde(sigma: Tensor, sigma_next: Tensor, eta: Tensor, kappa: Tensor) -> Coefficients:
    """DanceGRPO (arXiv 2505.07818): the same SDE with g = η at every level."""
    return _reverse_sde(sigma, sigma_next, eta, kappa)


def cps(sigma: Tensor, sigma_next: Tensor, eta: Tensor, kappa: Tensor) -> Coefficients:
    """Coefficients-preserving sampling (arXiv 2509.05952): (1-σ')x̂0 + √(σ'²-s²)x̂1, s = σ' sin(ηπ/2).

    The noise level is kept exactly, the marginals are not: a shifted distribution at many steps.
    """
    std = sigma_next * torch.sin(eta * (math.pi / 2))
    keep = torch.sqrt((sigma_next**2 - std**2).clamp_min(0))
    return Coefficients((1 - sigma_next) + keep, keep * (1 - sigma) - sigma * (1 - sigma_next), std)


def ddim(sigma: Tensor, sigma_next: Tensor, eta: Tensor, kappa: Tensor) -> Coefficients:
    """DDIM (arXiv 2010.02502, eq. 12 and 16) for predicted noise ε: √ᾱ'·x̂0 + √(1-ᾱ'-s²)·ε, with ᾱ = 1-σ².

    s = η√((1-ᾱ')/(1-ᾱ)·(1-ᾱ/ᾱ')) never exceeds the level it reaches.
    """
    alpha, alpha_next = torch.sqrt(1 - sigma**2), torch.sqrt(1 - sigma_next**2)
    std = eta * sigma_next / sigma * torch.sqrt((1 - (alpha / alpha_next) ** 2).clamp_min(0))
    direction = torch.sqrt((sigma_next**2 - std**2).clamp_min(0))
    return Coefficients(alpha_next / alpha, direction - alpha_next / alpha * sigma, std)


KERNELS: dict[str, Kernel] = {"ode": ode, "flow_sde": flow_sde, "dance_sde": dance_sde, "cps": cps, "ddim": ddim}

TAKES_KAPPA = {"flow_sde", "dance_sde"}
"""Kernels whose noise may be scaled by κ while the drift keeps η."""

DEFAULT_ETA = {"flow_sde": 0.7, "dance_sde": 0.3, "cps": 0.7, "ddim": 1.0}
"""The noise level each kernel is published with (Flow-GRPO, DanceGRPO, –, DDPO)."""

DEFAULT_KAPPA = {"dance_sde": 4.0}
"""BranchGRPO's scale of the noise at its splits; the others keep theirs."""


def coefficients(schedule: Schedule, kernel: str, step: Tensor, eta: Tensor, kappa: Tensor) -> Coefficients:
    """The kernel at some rows of a schedule, for what its model predicts."""
    sigma, sigma_next = schedule.sigma[step], schedule.sigma_next[step]
    a, b, std = KERNELS[kernel](sigma, sigma_next, eta, kappa)
    if schedule.prediction == "v_prediction":  # ε = α·v + σ·x
        a, b = a + b * sigma, b * schedule.alpha(sigma)
    return Coefficients(a, b, std)


def x0_coefficients(schedule: Schedule, sigma: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """(a, b) such that x̂0 = a·x + b·v at noise level σ."""
    if schedule.prediction == "epsilon":
        alpha = schedule.alpha(sigma)
        return 1 / alpha, -sigma / alpha
    return schedule.alpha(sigma) if schedule.prediction == "v_prediction" else torch.ones_like(sigma), -sigma


def transition_std(schedule: Schedule, kernel: str, eta: float, kappa: float = 1.0) -> Float[Tensor, " steps"]:
    """The noise each step would add were it stochastic."""
    ones = torch.ones_like(schedule.sigma)
    return coefficients(schedule, kernel, torch.arange(len(schedule)), eta * ones, kappa * ones).std


def stochastic_kernels(schedule: Schedule) -> str:
    """Those that add noise, for the schedule's kind of model."""
    return "flow_sde, dance_sde or cps" if schedule.is_flow else "ddim"


def sde_able(
    schedule: Schedule, kernel: str, eta: float, excess: bool = False, kappa: float = 1.0
) -> Bool[Tensor, " steps"]:
    """Steps that may be stochastic: they add noise, and no more of it than the level they reach (s ≤ σ'). With the
    kernel "ode" none does, whatever the model.

    Otherwise noise survives into the picture. `excess` drops that bound for methods that break it on purpose;
    the step into σ' = 0 stays deterministic either way, because nothing after it could remove the noise.
    """
    if kernel != "ode" and (kernel == "ddim") == schedule.is_flow:
        kind = "flow" if schedule.is_flow else "diffusion"
        raise ArgumentError("kernel", kernel, f"the model is a {kind} model", stochastic_kernels(schedule))
    if kernel == "cps" and eta > 1:
        raise ArgumentError("eta", eta, "with cps it is an angle in units of π/2", "above 0, at most 1")
    if kernel == "ddim" and eta > 1:
        raise ArgumentError("eta", eta, "with ddim 1 is the most noise that a step can add", "above 0, at most 1")
    std = transition_std(schedule, kernel, eta, kappa)
    return (std > 0) & (schedule.sigma_next > 0) & ((std <= schedule.sigma_next) | excess)


class Gaussian(NamedTuple):
    """A transition: an isotropic Gaussian per sample. `std` 0 is a deterministic edge, which has no density."""

    mean: Float[Tensor, "n *latent"]
    std: Float[Tensor, " n"]

    def sample(self, noise: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
        return self.mean + _per_sample(self.std, noise) * noise

    def log_density(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, " n"]:
        """Mean (not sum) over the latent's elements, so clip ranges do not depend on resolution. 0 where std is 0."""
        std = torch.where(self.std > 0, self.std, torch.ones_like(self.std))
        z = (x - self.mean) / _per_sample(std, x)
        value = -0.5 * (z**2).flatten(1).mean(1) - torch.log(std) - 0.5 * math.log(2 * math.pi)
        return torch.where(self.std > 0, value, torch.zeros_like(value))

    def kl(self, other: "Gaussian") -> Float[Tensor, " n"]:
        """KL to a Gaussian of the same std, mean over elements: (μ-μ')²/(2s²), s with its √Δ. 0 where std is 0."""
        std = torch.where(self.std > 0, self.std, torch.ones_like(self.std))
        value = ((self.mean - other.mean) ** 2).flatten(1).mean(1) / (2 * std**2)
        return torch.where(self.std > 0, value, torch.zeros_like(value))


def transition(x: Float[Tensor, "n *latent"], v: Float[Tensor, "n *latent"], coefficients: Coefficients) -> Gaussian:
    """The Gaussian of each edge, in the state's own precision (float32)."""
    a, b, std = (like(c, x) for c in coefficients)
    return Gaussian(_per_sample(a, x) * x + _per_sample(b, x) * v, std)


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))
