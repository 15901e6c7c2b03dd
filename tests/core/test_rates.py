"""The learning rate of an optimizer step: where it starts, that it only falls, that it is known without a past."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.config.schema import TrainConfig
from arborl.core.rates import SCHEDULES, SHARES_IN_ALL, learning_rate, sum_of_rates

RATES, NAMES = st.floats(1e-12, 1e3), st.sampled_from(sorted(SCHEDULES))
FALLING = NAMES.filter(lambda name: name != "constant")
STEPS = st.integers(1, 200)


def course(base: float, schedule: str, warmup: int, steps: int) -> list[float]:
    return [learning_rate(base, schedule, warmup, index, steps) for index in range(steps)]


def test_every_schedule_has_a_name_in_the_settings():
    assert TrainConfig.__dataclass_fields__["schedule"].metadata["choices"] == tuple(SCHEDULES)


@pytest.mark.parametrize(
    ("schedule", "warmup", "shares"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("linear", 0, [1, 3 / 4, 1 / 2, 1 / 4]),
        ("cosine", 0, [1, (1 + math.sqrt(1 / 2)) / 2, 1 / 2, (1 - math.sqrt(1 / 2)) / 2]),
        ("constant", 2, [1 / 3, 2 / 3, 1, 1]),
        ("linear", 1, [1 / 2, 3 / 4, 1 / 2, 1 / 4]),
        ("cosine", 3, [1 / 4, (1 + math.sqrt(1 / 2)) / 4, 3 / 8, (1 - math.sqrt(1 / 2)) / 2]),
    ],
)
def test_four_steps_by_hand(schedule: str, warmup: int, shares: list[float]):
    assert course(2e-3, schedule, warmup, 4) == pytest.approx([2e-3 * share for share in shares], rel=1e-12)


@given(base=RATES, schedule=NAMES, steps=STEPS)
def test_without_a_warm_up_the_first_step_has_the_whole_rate(base: float, schedule: str, steps: int):
    assert learning_rate(base, schedule, 0, 0, steps) == base


@given(base=RATES, steps=STEPS)
def test_a_constant_rate_is_the_very_number(base: float, steps: int):
    assert course(base, "constant", 0, steps) == [base] * steps


@given(base=RATES, schedule=NAMES, warmup=st.integers(0, 300), steps=STEPS)
def test_never_zero_and_never_above_the_rate(base: float, schedule: str, warmup: int, steps: int):
    assert all(0 < rate <= base for rate in course(base, schedule, warmup, steps))


@given(schedule=NAMES, clock=st.floats(0, 1, exclude_max=True))
def test_the_last_instant_of_the_clock_still_has_a_rate(schedule: str, clock: float):
    for share in (clock, math.nextafter(1.0, 0.0)):
        assert learning_rate(1.0, schedule, 0, 0, 10**6, share) > 0


@given(base=RATES, schedule=FALLING, warmup=st.integers(0, 20), steps=STEPS)
def test_it_rises_while_it_warms_up_alone(base: float, schedule: str, warmup: int, steps: int):
    """From the first step after the warm-up on each is smaller than the one before, and the last nearly nothing."""
    rates = course(base, schedule, warmup, steps)
    fallen = rates[warmup:]
    assert all(after < before for before, after in itertools.pairwise(fallen))
    plain = course(base, schedule, 0, steps)
    assert rates[warmup:] == plain[warmup:]
    risen = [rate / whole for rate, whole in zip(rates, plain, strict=True)][: warmup + 1]
    assert risen == pytest.approx([(index + 1) / (warmup + 1) for index in range(len(risen))])


@given(base=RATES, steps=STEPS)
def test_the_last_step_of_a_line_is_the_rate_over_the_number_of_steps(base: float, steps: int):
    assert course(base, "linear", 0, steps)[-1] == pytest.approx(base / steps)


@given(schedule=FALLING, index=st.integers(0, 99), clocks=st.tuples(*2 * [st.floats(0, 0.999)]))
def test_of_steps_and_clock_the_further_counts(schedule: str, index: int, clocks: tuple[float, float]):
    early, late = sorted(clocks)
    rates = [learning_rate(1.0, schedule, 0, index, 100, clock) for clock in (0.0, early, late)]
    assert rates == sorted(rates, reverse=True)
    assert rates == [SCHEDULES[schedule](max(index / 100, clock)) for clock in (0.0, early, late)]


def test_every_schedule_has_its_sum():
    assert {*SHARES_IN_ALL} == {*SCHEDULES}


@pytest.mark.parametrize(
    ("schedule", "warmup", "shares"),
    [("constant", 0, 4), ("linear", 0, 5 / 2), ("cosine", 0, 5 / 2), ("constant", 2, 3), ("linear", 1, 2)],
)
def test_the_sum_of_four_steps_by_hand(schedule: str, warmup: int, shares: float):
    assert sum_of_rates(2e-3, schedule, warmup, 4) == pytest.approx(2e-3 * shares, rel=1e-12)


@given(base=RATES, schedule=NAMES, warmup=st.integers(0, 300), steps=STEPS)
def test_the_sum_is_that_of_the_steps_one_by_one(base: float, schedule: str, warmup: int, steps: int):
    one_by_one = math.fsum(course(base, schedule, warmup, steps))
    assert sum_of_rates(base, schedule, warmup, steps) == pytest.approx(one_by_one, rel=1e-9)


def test_a_run_without_a_step_has_no_rates_to_add():
    assert {sum_of_rates(1.0, name, 3, 0) for name in SCHEDULES} == {0.0}
