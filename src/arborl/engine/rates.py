"""The learning rates of a run's optimizer steps, as the settings say: each is known from its place in the run."""

from typing import NamedTuple

from ..config.schema import Config
from ..core.rates import learning_rate, sum_of_rates


def learning_rates(config: Config, epoch: int, clock: float = 0.0) -> tuple[float, ...]:
    """Those of an epoch's optimizer steps; `clock` is the share of `train.max_seconds` that is over when it begins.

    A step that is left out is counted too, so that a run which goes on has the rates of one that never stopped.
    """
    updates = config.train.updates
    return tuple(_rate(config, epoch * updates + part, clock) for part in range(updates))


def _rate(config: Config, index: int, clock: float = 0.0) -> float:
    train = config.train
    steps = train.epochs * train.updates
    return learning_rate(train.learning_rate, train.schedule, train.warmup, index, steps, clock)


class Course(NamedTuple):
    """A run's learning rates from end to end; None is what cannot be known before the clock ends the run."""

    first: float
    last: float | None
    steps: int | None


def course(config: Config) -> Course | None:
    """None where a run has no epoch."""
    train = config.train
    if not train.epochs:
        return None
    first, steps = _rate(config, 0), train.epochs * train.updates
    if train.max_seconds:
        return Course(first, None if rate_settings(config) else first, None)
    return Course(first, _rate(config, steps - 1), steps)


def rate_sum(config: Config) -> float | None:
    """The learning rates of all optimizer steps, added up; None where the clock ends the run, so that nobody can know.

    AdamW moves a weight by about the rate a step, so this is how far a run may go.
    """
    train = config.train
    if train.max_seconds and train.epochs:
        return None
    return sum_of_rates(train.learning_rate, train.schedule, train.warmup, train.epochs * train.updates)


def rate_settings(config: Config) -> list[str]:
    """The settings by which the rate is not always `train.learning_rate`, as text."""
    train = config.train
    falls = [f"train.schedule={train.schedule}"] if train.schedule != "constant" else []
    return [*falls, *([f"train.warmup={train.warmup}"] if train.warmup else [])]


def describe_rates(config: Config) -> str:
    """The course as a line of text."""
    found, why = course(config), " and ".join(rate_settings(config))
    if found is None:
        return "no optimizer step, so no learning rate"
    if found.steps is None:
        seconds = f"until {config.train.max_seconds:g} s are over (train.max_seconds)"
        where = f"at the first optimizer step, then by {why}" if why else "at every optimizer step"
        return f"learning rate {found.first:.3g} {where}, {seconds}"
    steps = f"{found.steps} optimizer step" + "s" * (found.steps > 1)
    if not why:
        return f"learning rate {found.first:.3g} at every one of the run's {steps}"
    return f"learning rate {found.first:.3g} at the first of the run's {steps}, {found.last:.3g} at the last ({why})"


def warm_up_without_end(config: Config) -> list[str]:
    """A warning where a run is over before its rate has risen to what is set."""
    train = config.train
    steps = train.epochs * train.updates
    if not 0 < steps <= train.warmup:
        return []
    return [f"train.warmup={train.warmup}: the run has {steps} optimizer steps, and never comes to train.learning_rate"]
