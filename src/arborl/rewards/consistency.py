"""Whether a reward scores each picture by its prompt alone: the same each time, in any order and any company."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.errors import InputError

REPEATED, ROUNDING = 1e-3, 1e-2
"""Shares of the largest score that rounding in half precision may change: in the same call again; in calls of another
size or order, whose kernels may differ.
"""
NOTICEABLE, TOO_MUCH = 0.1, 0.5
"""Shares of the spread between pictures: up to the first nobody minds a difference; beyond the second it drowns what
the pictures differ in.
"""


class Consistency(NamedTuple):
    """A reward's scores of some pictures, and how far they are from those of the same pictures asked for otherwise."""

    scores: Float[Tensor, " n"]
    spread: float  # standard deviation between the pictures
    chance: float  # largest difference between two equal calls
    company: float  # and to the same pictures in another order, or alone
    least: float  # smallest difference of a picture's between two equal calls, of those with a score

    @property
    def peak(self) -> float:
        return float(self.scores.abs().nan_to_num(0).max())

    @property
    def noise(self) -> str:
        """What it does by chance, or by what else is in the call, if that shows; empty otherwise."""
        if self.by_chance:
            how, much = f"score up to {self._apart:.2g} differently each time", self._apart
        elif self.company > self._allowed:
            how, much = f"in another order, or alone, score up to {self.company:.2g} differently", self.company
        else:
            return ""
        if math.isinf(much):
            return "the same pictures have a score in some calls and none in others"
        return f"the same pictures {how}, and differ by {self.spread:.2g}"

    @property
    def fault(self) -> tuple[str, str] | None:
        """What is wrong, and what would be right."""
        return (self.noise, self.cure) if self.noise and self._apart > TOO_MUCH * self.spread else None

    @property
    def cure(self) -> str:
        return f"{STEADY}: {SEEDED}" if self.by_chance else ALONE

    def error(self, reward: str) -> InputError | None:
        """The fault, in one line about the reward of that name."""
        if not self.fault:
            return None
        allowed, cure = (STEADY, SEEDED) if self.by_chance else (ALONE, None)
        return InputError(f"rewards.{reward}", None, self.noise, allowed, cure=cure)

    @property
    def by_chance(self) -> bool:
        return self.chance > max(NOTICEABLE * self.spread, REPEATED * self.peak)

    @property
    def never_twice(self) -> bool:
        """Whether no picture got its score again."""
        return self.least > REPEATED * self.peak

    @property
    def _apart(self) -> float:
        return max(self.chance, self.company)

    @property
    def _allowed(self) -> float:
        """The difference that rounding explains, or chance."""
        return max(NOTICEABLE * self.spread, ROUNDING * self.peak, 2 * self.chance)

    def same_as(self, others: Float[Tensor, " n"]) -> bool:
        """Whether other scores are these but for rounding and chance."""
        return _far(self.scores, others) <= self._allowed


ALONE = "picture i scored by prompt i and by nothing else in the call"
STEADY = "one score for a picture and its prompt"
SEEDED = "its network in eval mode, and what it draws seeded by the picture"


def examine(ask: Callable[[list[int]], Float[Tensor, " n"]], count: int) -> Consistency:
    """Ask for the scores of `count` pictures that differ: twice, the other way round, and for three of them alone. What
    looks like company is asked for again: chance need not show in the first two calls.
    """
    everyone, some = list(range(count)), sorted({0, count // 2, count - 1})

    def in_company() -> tuple[Tensor, Tensor]:
        return ask(everyone[::-1]).flip(0), torch.cat([ask([i]) for i in some])

    scores, again = ask(everyone), ask(everyone)
    turned, alone = in_company()
    known = scores[~scores.isnan()]
    spread = float(known.std(correction=0)) if len(known) else 0.0
    twice = _differences(scores, again)[~(scores.isnan() & again.isnan())]
    chance, least = (float(twice.max()), float(twice.min())) if len(twice) else (0.0, 0.0)
    found = Consistency(scores, spread, chance, max(_far(scores, turned), _far(scores[some], alone)), least)
    if not found.noise or found.by_chance:
        return found
    turned_again, alone_again = in_company()
    return found._replace(chance=max(found.chance, _far(turned, turned_again), _far(alone, alone_again)))


def _differences(one: Tensor, two: Tensor) -> Tensor:
    """The differences: none where both have no score, and no end of it where one of them has."""
    lone = one.isnan() != two.isnan()
    return (one - two).abs().nan_to_num(0).masked_fill(lone, torch.inf)


def _far(one: Tensor, two: Tensor) -> float:
    return float(_differences(one, two).max())


EXPOSURES = 1.0, 0.75, 0.5


def unlike(pictures: Float[Tensor, "3 *picture"]) -> Float[Tensor, "3 *picture"]:
    """The same pictures in three exposures. Where all look alike, a score tells little of what else it looked at; and
    an odd one's score may be so far off that no difference between the others counts.
    """
    return torch.stack([exposure * picture for exposure, picture in zip(EXPOSURES, pictures, strict=True)])
