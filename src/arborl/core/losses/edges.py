"""Losses of transitions: policy gradients over the edges of a plan."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..kernels import Gaussian
from .base import EdgeBatch, EdgeLoss, Who, check_flag, check_number


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(EdgeLoss):
    """What the losses of this file share: edges weighed by the noise that they add (`edge_weight="noise"`,
    TempFlow-GRPO, arXiv 2508.04324), and a KL to the untrained model (Flow-GRPO, arXiv 2505.05470).
    """

    kl: float = 0.0
    edge_weight: str = "equal"
    measures: ClassVar[tuple[str, ...]]

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", *self.measures, *(["kl"] if self.kl else []))

    @property
    def asks(self) -> tuple[Who, ...]:
        return ("reference",) if self.kl else ()

    @property
    def has_regularizer(self) -> bool:
        return self.kl > 0

    @abstractmethod
    def surrogate(
        self, policy: Gaussian, new: Float[Tensor, " edges"], batch: EdgeBatch
    ) -> tuple[Float[Tensor, " edges"], dict[str, Float[Tensor, " edges"]]]:
        """Each edge's loss, and `measures`; `new` is the policy's log-density of what was drawn."""

    def __call__(
        self, answers: Mapping[Who, Float[Tensor, "calls *latent"]], batch: EdgeBatch
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, " edges"]]]:
        policy = batch.transition(answers["policy"])
        edges, seen = self.surrogate(policy, policy.log_density(batch.child), batch)
        if self.edge_weight == "noise":
            edges = edges * batch.noise_weight
        loss, seen = edges.sum(), {"loss": edges} | seen
        if self.kl:
            seen["kl"] = policy.kl(batch.transition(answers["reference"]))
            loss = loss + self.kl * seen["kl"].sum()
        return loss, seen


@dataclass(frozen=True, kw_only=True)
class Surrogate(PolicyGradient):
    """PPO's clipped surrogate, max(-A·r, -A·clip(r, 1±c)) (arXiv 1707.06347, eq. 7)."""

    clip: float
    measures = ("ratio", "clip_ratio", "approx_kl")

    def surrogate(
        self, policy: Gaussian, new: Float[Tensor, " edges"], batch: EdgeBatch
    ) -> tuple[Float[Tensor, " edges"], dict[str, Float[Tensor, " edges"]]]:
        old = batch.log_density
        edges, ratio, clipped = clipped_surrogate(new, old, batch.advantage, self.clip)
        # Of the divergence the estimate r - 1 - log r, which is never below 0.
        return edges, {"ratio": ratio, "clip_ratio": clipped, "approx_kl": ratio - 1 - (new.detach() - old)}


@dataclass(frozen=True, kw_only=True)
class Dppo(PolicyGradient):
    """Flow-DPPO (arXiv 2606.11025, eq. 14 and 18): -A·r without a clip, and without the edges that have gone far from
    the rollout's policy and go on away from it: D = mean((μ - μ_old)²)/2s² is at least `threshold`, and r > 1 with
    A > 0 or r < 1 with A < 0. D is a number of the parent, whatever its children drew.

    The paper's D is summed over the latent's elements; as in its code, and as all densities here, it is their mean.
    """

    needs_old_answers = True
    threshold: float = 1e-5
    measures = ("ratio", "dropped", "divergence")

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold)

    def surrogate(
        self, policy: Gaussian, new: Float[Tensor, " edges"], batch: EdgeBatch
    ) -> tuple[Float[Tensor, " edges"], dict[str, Float[Tensor, " edges"]]]:
        ratio, advantage = torch.exp(new - batch.log_density), batch.advantage
        divergence = policy.kl(batch.drawn_from).detach()
        away = ((ratio > 1) & (advantage > 0)) | ((ratio < 1) & (advantage < 0))
        dropped = (divergence >= self.threshold) & away
        edges = torch.where(dropped, torch.zeros_like(ratio), -advantage * ratio)
        return edges, {"ratio": ratio.detach(), "dropped": dropped.float(), "divergence": divergence}


@dataclass(frozen=True, kw_only=True)
class Guard(PolicyGradient):
    """GRPO-Guard (arXiv 2510.22319): PPO's clipped surrogate of exp(s·(log r + mean((μ - μ_old)²)/2s²)) (eq. 8). Its
    logarithm has the mean 0 at every step, and a spread that is not the step's noise's but the means': how far they
    have moved, √(mean((μ - μ_old)²)/N) for N elements.

    `reweight` divides by the step's size Δσ, so that no step's gradient is larger for its size alone (eq. 12, as in its
    authors' code; Flow-Factory's has it not).
    """

    needs_old_answers = True
    clip: float
    reweight: bool = True
    measures = ("ratio", "clip_ratio", "divergence")

    def __post_init__(self) -> None:
        check_flag("reweight", self.reweight)

    def surrogate(
        self, policy: Gaussian, new: Float[Tensor, " edges"], batch: EdgeBatch
    ) -> tuple[Float[Tensor, " edges"], dict[str, Float[Tensor, " edges"]]]:
        divergence = policy.kl(batch.drawn_from)
        normed = policy.std * (new - batch.log_density + divergence)
        edges, ratio, clipped = clipped_surrogate(normed, torch.zeros_like(normed), batch.advantage, self.clip)
        edges = edges / batch.step_size if self.reweight else edges
        return edges, {"ratio": ratio, "clip_ratio": clipped, "divergence": divergence.detach()}


def clipped_surrogate(
    log_density: Float[Tensor, " n"], old_log_density: Float[Tensor, " n"], advantage: Float[Tensor, " n"], clip: float
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Each edge's surrogate; its ratio; and whether the clip is what held it (its gradient is then 0)."""
    ratio = torch.exp(log_density - old_log_density)
    free, held = -advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)
    return torch.maximum(free, held), ratio.detach(), (held > free).detach().float()
