"""What `arborl plan` and `arborl doctor` advise of the learning rate, its schedule and the optimizer steps of an epoch.

All of it is from the searches on the scenes that `bench/family.jsonl` records: 13 presets, 12 cells each at 33 and at
100 thousand forwards, rates of 1e-4, 2e-4 and 4e-4 that fall in a line, 2 or 8 updates, full fine-tune, one seed. A
test reads the numbers below from that record.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..config import with_settings
from ..config.schema import Config
from .rates import rate_sum

RATES, UPDATES = (1e-4, 2e-4, 4e-4), 8
"""The rates that were searched; the updates of the best cell in all 26 searches."""
FEW_STEPS = 24
"""The 66 runs of fewer optimizer steps all ended 0.025 or more behind the best cell of their search."""
LEAST_SUM = 0.005
"""The rates of the 26 best cells add up to 0.005 to 0.0385. Of 138 cells below, one came within 0.02 of the best."""
GOOD_SUM = 0.015
"""About the median of those 26 (0.0153; 0.009 at 33 thousand forwards and 0.020 at 100)."""
MOST_SUM = 0.05
"""The 11 cells above all ended 0.038 or more behind, and the worst of them near where the run began."""
SLOW_RATE, MOST_SUM_SLOW = 1e-4, 0.08
"""At the smallest of the rates no cell of a search came to `MOST_SUM`. The longest run at it, of 200 thousand forwards,
came to 0.071 and ended above those of 100 thousand; beyond that nothing was run.
"""
WHERE = "on the scenes' full fine-tune"


class Advice(NamedTuple):
    """A setting that may be off, and the changes to try; they hold together with those of the advice before it."""

    key: str
    value: float | str
    changes: dict[str, Any]
    reason: str

    def __str__(self) -> str:
        return f"{' '.join(map(_override, self.changes.items()))} ({self.reason})"


def advise(config: Config) -> list[Advice]:
    """From the settings alone; a run that takes all of it gets none."""
    said: list[Advice] = []
    for rule in (_schedule, _steps, _too_little, _too_much):
        found = rule(config)
        if found:
            said.append(found)
            config = with_settings(config, found.changes)
    return said


def describe_advice(config: Config) -> str:
    """The advice as text; empty where there is none."""
    said = "; ".join(map(str, advise(config)))
    return f"try: {said}" if said else ""


def describe_sum(config: Config) -> str:
    """What a run's learning rates add up to, as text; empty for a run without a step."""
    found = rate_sum(config)
    if found is None:
        return "what the learning rates add up to is not known before the clock ends the run"
    if not found:
        return ""
    said = f"learning rates add up to {found:.2g} over the run"
    if not is_measured(config):
        return f"{said} (what is enough, or too much, was measured on the scenes' full fine-tune alone)"
    return f"{said}; the best runs of the searches on the scenes came to {LEAST_SUM:g} to 0.04"


def is_measured(config: Config) -> bool:
    """Whether the bounds of the sum were measured for this model and for what is trained of it."""
    return config.model.family == "scenes" and config.model.train == "full"


def _schedule(config: Config) -> Advice | None:
    train = config.train
    if train.schedule != "constant" or not train.epochs:
        return None
    why = f"the last steps are then small, and the rates add up to about half; all searches {WHERE} had it so"
    return Advice("train.schedule", train.schedule, {"train.schedule": "linear"}, why)


def _steps(config: Config) -> Advice | None:
    train = config.train
    steps = train.epochs * train.updates
    if train.max_seconds or not 0 < steps < FEW_STEPS:
        return None
    changes = _more_updates(config)
    updates = changes.get("train.updates", train.updates)
    if train.epochs * updates < FEW_STEPS:
        changes["train.epochs"] = math.ceil(FEW_STEPS / updates)
    key, value = ("train.updates", train.updates) if "train.updates" in changes else ("train.epochs", train.epochs)
    took = f"{steps} optimizer step{'s' * (steps > 1)} in all"
    return Advice(key, value, changes, f"{took}; {WHERE} no run of fewer than {FEW_STEPS} was the best of its search")


def _too_little(config: Config) -> Advice | None:
    """More updates first, then a larger rate, then more epochs."""
    now, rate = _measured_sum(config), config.train.learning_rate
    if not now or now >= LEAST_SUM:
        return None
    changes = _more_updates(config)
    best = _nearest(with_settings(config, changes), [rate, *(r for r in RATES if r > rate)])
    if best != rate:
        changes["train.learning_rate"] = best
    reached = rate_sum(with_settings(config, changes)) or now
    if reached < LEAST_SUM:
        changes["train.epochs"] = math.ceil(config.train.epochs * LEAST_SUM / reached) + 1
    why = f"the rates add up to {now:.2g} so far; {WHERE} no run below {LEAST_SUM:g} was the best of its search"
    return Advice("train.learning_rate", rate, changes, why)


def _too_much(config: Config) -> Advice | None:
    now, rate = _measured_sum(config), config.train.learning_rate
    if not now or now <= _most(rate):
        return None
    best = _nearest(config, [rate, *(r for r in RATES if r < rate)])
    why = f"the rates add up to {now:.2g}; {WHERE} runs above {_most(rate):g} " + (
        "ended behind, some far; or fewer train.updates" if rate > SLOW_RATE else "were not tried"
    )
    return Advice("train.learning_rate", rate, {"train.learning_rate": best}, why)


def _nearest(config: Config, rates: Sequence[float]) -> float:
    """The rate that brings a run nearest to a good sum, of those that are neither too little nor too much.

    Where none is, the largest of them, halved until it is not too much.
    """
    each = (rate_sum(config) or 0.0) / config.train.learning_rate
    fitting = [rate for rate in rates if LEAST_SUM <= rate * each <= _most(rate)]
    if fitting:
        return min(fitting, key=lambda rate: abs(math.log(rate * each / GOOD_SUM)))
    found = max(rates)
    while found * each > _most(found):
        found /= 2
    return found


def _most(rate: float) -> float:
    return MOST_SUM if rate > SLOW_RATE else MOST_SUM_SLOW


def _measured_sum(config: Config) -> float | None:
    return rate_sum(config) if is_measured(config) else None


def _more_updates(config: Config) -> dict[str, Any]:
    return {"train.updates": UPDATES} if config.train.updates < UPDATES else {}


def _override(change: tuple[str, Any]) -> str:
    key, value = change
    return f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
