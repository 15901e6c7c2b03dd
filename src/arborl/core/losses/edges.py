"""Losses of transitions: policy gradients over the edges of a plan."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .base import EdgeBatch, EdgeLoss, Who


@dataclass(frozen=True)
class Surrogate(EdgeLoss):
    """PPO's clipped surrogate, max(-A·r, -A·clip(r, 1±c)) (arXiv 1707.06347, eq. 7), plus a KL to the untrained model
    (Flow-GRPO, arXiv 2505.05470).

    `edge_weight="noise"` weighs edges by the noise that they add (TempFlow-GRPO, arXiv 2508.04324).
    """

    clip: float
    kl: float = 0.0
    edge_weight: str = "equal"

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "ratio", "clip_ratio", "approx_kl", *(["kl"] if self.kl else []))

    @property
    def asks(self) -> tuple[Who, ...]:
        return ("reference",) if self.kl else ()

    @property
    def has_regularizer(self) -> bool:
        return self.kl > 0

    def __call__(
        self, answers: Mapping[Who, Float[Tensor, "calls *latent"]], batch: EdgeBatch
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, " edges"]]]:
        policy = batch.transition(answers["policy"])
        new, old = policy.log_density(batch.child), batch.log_density
        weight = batch.noise_weight if self.edge_weight == "noise" else None
        edges, ratio, clipped = clipped_surrogate(new, old, batch.advantage, self.clip, weight)
        loss = edges.sum()
        # Of the divergence the estimate r - 1 - log r, which is never below 0.
        seen = {"loss": edges, "ratio": ratio, "clip_ratio": clipped, "approx_kl": ratio - 1 - (new.detach() - old)}
        if self.kl:
            seen["kl"] = policy.kl(batch.transition(answers["reference"]))
            loss = loss + self.kl * seen["kl"].sum()
        return loss, seen


def clipped_surrogate(
    log_density: Float[Tensor, " n"],
    old_log_density: Float[Tensor, " n"],
    advantage: Float[Tensor, " n"],
    clip: float,
    weight: Float[Tensor, " n"] | None = None,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Each edge's surrogate, weighted; its ratio; and whether the clip is what held it (its gradient is then 0)."""
    ratio = torch.exp(log_density - old_log_density)
    free, held = -advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)
    loss = torch.maximum(free, held)
    if weight is not None:
        loss = loss * weight
    return loss, ratio.detach(), (held > free).detach().float()
