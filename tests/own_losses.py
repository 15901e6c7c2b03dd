"""Losses as a user writes them: a policy gradient, and regressions that ask other policies and need no densities."""

from dataclasses import dataclass

import torch

from arborl.core.losses import EdgeLoss, LeafLoss


@dataclass(frozen=True)
class Reinforce(EdgeLoss):
    """The plain policy gradient."""

    metrics = ("loss",)

    def __call__(self, answers, batch):
        loss = -batch.advantage * batch.transition(answers["policy"]).log_density(batch.child)
        return loss.sum(), {"loss": loss}


@dataclass(frozen=True)
class Regression(LeafLoss):
    """Advantage-weighted regression (arXiv 1910.00177) on leaves that are noised again, held near the old policy."""

    levels_per_leaf: int = 3
    temperature: float = 0.5
    hold: float = 1.0
    keep: float = 0.0
    metrics = ("error", "distance")
    asks = ("old",)

    def old_decay(self, steps):
        return self.keep

    def __call__(self, answers, batch):
        error = ((answers["policy"] - batch.target) ** 2).flatten(1).mean(1)
        distance = ((answers["policy"] - answers["old"]) ** 2).flatten(1).mean(1)
        loss = torch.exp(batch.advantage / self.temperature) * error + self.hold * distance
        return loss.sum(), {"error": error, "distance": distance}


@dataclass(frozen=True)
class OldRollsOut(Regression):
    """The same, of what an old policy draws that is slow to follow, and beside the untrained model too."""

    keep: float = 0.8
    sampler = "old"
    asks = ("old", "reference")
    has_regularizer = True

    def __call__(self, answers, batch):
        loss, seen = super().__call__(answers, batch)
        return loss + 0.01 * ((answers["policy"] - answers["reference"]) ** 2).flatten(1).mean(1).sum(), seen
