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
