"""The learning rate of an optimizer step, by where in the run it stands: nothing is remembered from step to step."""

import math
from collections.abc import Callable

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    # (1 + cos πp) / 2, which as a square is never rounded to 0 before p is 1.
    "cosine": lambda progress: math.cos(math.pi / 2 * progress) ** 2,
}
"""What share of the rate is left, by the share of the run that is over: a number in [0, 1)."""


def learning_rate(base: float, schedule: str, warmup: int, index: int, steps: int, clock: float = 0.0) -> float:
    """The rate of optimizer step `index`, from 0, of a run of so many.

    It rises in equal parts over `warmup` steps, the first of which has one part of warmup + 1, and falls all the while
    as the schedule says, by the steps or by the clock's share of the run, whichever is further.
    """
    progress = max(index / steps, clock)
    return base * min(1.0, (index + 1) / (warmup + 1)) * SCHEDULES[schedule](progress)


SHARES_IN_ALL: dict[str, Callable[[int], float]] = {
    "constant": lambda steps: steps,
    # Σ (1 − i/N) and Σ (1 + cos πi/N) / 2 over i = 0 … N − 1 are both (N + 1) / 2.
    "linear": lambda steps: (steps + 1) / 2,
    "cosine": lambda steps: (steps + 1) / 2,
}
"""What the shares of a run of so many steps add up to."""


def sum_of_rates(base: float, schedule: str, warmup: int, steps: int) -> float:
    """What `learning_rate` gives for the steps of a run, added up. Only those of the warm-up are gone through."""
    if not steps:
        return 0.0
    share = SCHEDULES[schedule]
    missing = sum((1 - (i + 1) / (warmup + 1)) * share(i / steps) for i in range(min(warmup, steps)))
    return base * (SHARES_IN_ALL[schedule](steps) - missing)
