"""Losses of finished samples, noised again: no density, so that the rollout may be a plain ODE."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from .base import LeafBatch, LeafLoss, Who, check_flag, check_number

WEIGHT_FLOOR = 1e-5
"""What DiffusionNFT's adaptive weights are at least."""

POWER_FLOOR = 1e-10
"""What AWM adds to an error before it takes the power, whose slope at 0 has no end."""


@dataclass(frozen=True, kw_only=True)
class ForwardProcess(LeafLoss):
    """What the losses of this file share: an old policy that keeps min(rate·(steps - start), most) of itself after an
    epoch, and `kl`·mean((v - v_ref)²), which holds the answers near the untrained model's.
    """

    kl: float = 0.0
    decay_rate: float = 0.001
    decay_most: float = 0.5
    decay_start: int = 0

    def __post_init__(self) -> None:
        check_number("decay_rate", self.decay_rate)
        check_number("decay_most", self.decay_most, most=1.0)
        check_number("decay_start", self.decay_start)

    @property
    @abstractmethod
    def measures(self) -> tuple[str, ...]:
        """Its metrics besides `loss` and `kl`."""

    @property
    def asks_old(self) -> bool:
        return True

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", *self.measures, *(["kl"] if self.kl else []))

    @property
    def asks(self) -> tuple[Who, ...]:
        everyone: list[tuple[bool, Who]] = [(self.asks_old, "old"), (self.kl > 0, "reference")]
        return tuple(who for asked, who in everyone if asked)

    def old_decay(self, steps: int) -> float:
        return min(self.decay_rate * max(0, steps - self.decay_start), self.decay_most)

    @abstractmethod
    def matching(
        self, answers: Mapping[Who, Float[Tensor, "n *latent"]], batch: LeafBatch
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, " n"]]]:
        """The summed loss but for the KL; and `loss`, each sample's, and `measures`."""

    def __call__(
        self, answers: Mapping[Who, Float[Tensor, "n *latent"]], batch: LeafBatch
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, " n"]]]:
        loss, seen = self.matching(answers, batch)
        if self.kl:
            seen["kl"] = mean_square(answers["policy"] - answers["reference"])
            loss = loss + self.kl * seen["kl"].sum()
        return loss, seen


@dataclass(frozen=True, kw_only=True)
class Nft(ForwardProcess):
    """DiffusionNFT (arXiv 2509.16117, Theorem 3.2): r·|v⁺ - u|² + (1 - r)·|v⁻ - u|² with the implicit positive
    and negative policies v± = v_old ± β·(v - v_old), where r = clamp(½ + A/(2·spread), 0, 1).

    As its published code has it: the errors are those of x̂0, each divided by its own mean absolute value
    (`adaptive`), times spread/β; the old policy rolls out. Without the adaptive weights a flow has
    σ²·[-2A·δ·(u - v_old) + spread·β·δ²], δ = v - v_old: the second term holds the policy near the old one, also where
    no advantage is left.
    """

    beta: float = 1.0
    spread: float = 5.0  # the advantage at which a sample counts as wholly good
    levels_per_leaf: int = 9
    adaptive: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta, above=0.0)
        check_number("spread", self.spread, above=0.0)
        check_flag("adaptive", self.adaptive)

    @property
    def measures(self) -> tuple[str, ...]:
        return ("distance",)

    @property
    def sampler(self) -> Literal["policy", "old"]:
        return "old"

    @property
    def has_regularizer(self) -> bool:
        return True

    def matching(
        self, answers: Mapping[Who, Float[Tensor, "n *latent"]], batch: LeafBatch
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, " n"]]]:
        policy, old = answers["policy"], answers["old"]
        good = (0.5 + batch.advantage / (2 * self.spread)).clamp(0, 1)
        change = self.beta * (policy - old)
        positive, negative = (self._error(batch.predict_x0(old + one), batch.x0) for one in (change, -change))
        samples = self.spread / self.beta * (good * positive + (1 - good) * negative)
        return samples.sum(), {"loss": samples, "distance": mean_square(policy - old)}

    def _error(self, found: Float[Tensor, "n *latent"], x0: Float[Tensor, "n *latent"]) -> Float[Tensor, " n"]:
        error = mean_square(found - x0)
        if not self.adaptive:
            return error
        return error / (found - x0).detach().abs().flatten(1).mean(1).clamp_min(WEIGHT_FLOOR)


@dataclass(frozen=True, kw_only=True)
class Awm(ForwardProcess):
    """Advantage Weighted Matching (arXiv 2509.25050): the policy gradient of -A·ratio, its log-density in the place of
    which stands the matching error at one level, "log p" = -σ/p·[(ℓ + 1e-10)^p - 1e-10^p], ℓ = mean((v - u)²) (the
    published code's weighting; p = 1 is plain matching, weighed by σ), with A divided by `spread`.

    Plus `ema`·mean((v - v_old)²). On policy the ratio is to the policy's own "log p", so it is 1 and has its gradient.
    The published code does the same in an epoch's only optimizer step; in further ones it takes the "log p" of the
    epoch's first weights, which are not kept here: steps after the first go without that correction, which is far
    inside a clip of ±1. `off_policy` is the published code's: the old policy rolls out, and the ratio is to its
    "log p". Levels are drawn from the first 0.9 of a way for each leaf, without replacement; published is one of each
    stratum, the same for a whole batch.
    """

    levels_per_leaf: int = 6
    level_share: float = 0.9
    power: float = 0.25
    spread: float = 5.0
    ema: float = 1.0
    off_policy: bool = False
    ratio_clip: float = 1.0
    decay_most: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("power", self.power, above=0.0, most=1.0)
        check_number("spread", self.spread, above=0.0)
        check_number("ema", self.ema)
        check_flag("off_policy", self.off_policy)
        check_number("ratio_clip", self.ratio_clip, above=0.0)

    @property
    def measures(self) -> tuple[str, ...]:
        further = [(self.asks_old, "distance"), (self.off_policy, "clip_ratio")]
        return ("error", *(name for measured, name in further if measured))

    @property
    def asks_old(self) -> bool:
        return self.ema > 0 or self.off_policy

    @property
    def sampler(self) -> Literal["policy", "old"]:
        return "old" if self.off_policy else "policy"

    @property
    def has_regularizer(self) -> bool:
        return self.ema > 0 or self.kl > 0

    def matching(
        self, answers: Mapping[Who, Float[Tensor, "n *latent"]], batch: LeafBatch
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, " n"]]]:
        policy, advantage = answers["policy"], batch.advantage / self.spread
        error = mean_square(policy - batch.target)
        density = self._log_density(error, batch)
        before = self._log_density(mean_square(answers["old"] - batch.target), batch) if self.off_policy else density
        ratio = torch.exp(density - before.detach())
        free = -advantage * ratio
        held = -advantage * ratio.clamp(1 - self.ratio_clip, 1 + self.ratio_clip)
        samples = torch.maximum(free, held)
        loss, seen = samples.sum(), {"loss": samples, "error": error}
        if self.off_policy:
            seen["clip_ratio"] = (held > free).float()
        if self.asks_old:
            seen["distance"] = mean_square(policy - answers["old"])
            loss = loss + self.ema * seen["distance"].sum()
        return loss, seen

    def _log_density(self, error: Float[Tensor, " n"], batch: LeafBatch) -> Float[Tensor, " n"]:
        raised = (error + POWER_FLOOR) ** self.power - POWER_FLOOR**self.power
        return -batch.sigma / self.power * raised


def mean_square(values: Float[Tensor, "n *latent"]) -> Float[Tensor, " n"]:
    return (values**2).flatten(1).mean(1)
