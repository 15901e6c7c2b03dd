"""What is advised of rate, schedule and updates: where it is off, only there, and from what was recorded."""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.cli import main
from arborl.config import load_config, presets, with_settings
from arborl.config.schema import Config
from arborl.doctor import rates_of_the_run
from arborl.engine import rate_advice
from arborl.engine.rate_advice import (
    FEW_STEPS,
    GOOD_SUM,
    LEAST_SUM,
    MOST_SUM,
    MOST_SUM_SLOW,
    RATES,
    SLOW_RATE,
    UPDATES,
    advise,
    describe_sum,
)
from arborl.engine.rates import learning_rates, rate_sum

SCENES, LORA = load_config("tree_fast"), load_config("mixture", ["model.train=lora"])
RECORD = Path(__file__).parents[2] / "bench" / "family.jsonl"


def settings(rate: float, epochs: int, updates: int, schedule: str = "linear", base: Config = SCENES) -> Config:
    values = {"learning_rate": rate, "epochs": epochs, "updates": updates, "schedule": schedule, "max_seconds": 0.0}
    return with_settings(base, {f"train.{key}": value for key, value in values.items()})


def keys(config: Config) -> list[str]:
    return [one.key for one in advise(config)]


def changed(config: Config) -> dict[str, Any]:
    return {key: value for one in advise(config) for key, value in one.changes.items()}


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 7, 40])
def test_the_sum_is_that_of_the_rates_a_run_steps_with(schedule: str, warmup: int):
    config = with_settings(settings(3e-4, 9, 4, schedule), {"train.warmup": warmup})
    one_by_one = sum(rate for epoch in range(9) for rate in learning_rates(config, epoch))
    assert rate_sum(config) == pytest.approx(one_by_one, rel=1e-12)


def test_where_the_clock_ends_a_run_nobody_knows_its_sum():
    config = with_settings(settings(4e-4, 2, 1, "constant"), {"train.max_seconds": 60.0})
    assert rate_sum(config) is None
    assert "not known before the clock" in describe_sum(config)
    assert keys(config) == ["train.schedule"]


@pytest.mark.parametrize(
    ("rate", "epochs", "updates", "schedule", "expected"),
    [
        # Cells of the record: the best, one of too few steps, one that moved too little, one that broke the model.
        (1e-4, 50, 8, "linear", {}),
        (2e-4, 16, 8, "cosine", {}),
        (4e-4, 3, 8, "linear", {}),
        (4e-4, 4, 2, "linear", {"train.updates": 8}),
        (1e-4, 16, 2, "linear", {"train.updates": 8, "train.learning_rate": 2e-4}),
        (4e-4, 57, 8, "linear", {"train.learning_rate": 1e-4}),
        # Falling is enough of a change; or it is not, either way.
        (1e-4, 60, 8, "constant", {"train.schedule": "linear"}),
        (4e-4, 57, 8, "constant", {"train.schedule": "linear", "train.learning_rate": 1e-4}),
        (1e-4, 40, 2, "constant", {"train.schedule": "linear", "train.updates": 8}),
        # The smallest of the rates bore more than the others, as far as it was tried.
        (1e-4, 178, 8, "linear", {}),
        (2e-4, 178, 8, "linear", {"train.learning_rate": 1e-4}),
        (1e-4, 300, 8, "linear", {"train.learning_rate": 5e-5}),
        # Where neither updates nor rate are enough.
        (1e-4, 1, 1, "linear", {"train.updates": 8, "train.learning_rate": 4e-4, "train.epochs": 3}),
        (1e-3, 2, 9, "linear", {"train.epochs": 3}),
        (1e-4, 0, 8, "constant", {}),
    ],
)
def test_what_is_advised_on_the_scenes(rate: float, epochs: int, updates: int, schedule: str, expected: dict[str, Any]):
    assert changed(settings(rate, epochs, updates, schedule)) == expected


@pytest.mark.parametrize(
    ("rate", "epochs", "updates", "schedule", "expected"),
    [
        (1e-6, 40, 1, "linear", []),
        (1e-1, 400, 8, "linear", []),
        (1e-1, 400, 8, "constant", ["train.schedule"]),
        (1e-4, 5, 1, "linear", ["train.updates"]),
        (1e-4, 1, 9, "linear", ["train.epochs"]),
        (1e-4, 1, 1, "constant", ["train.schedule", "train.updates"]),
    ],
)
def test_of_other_models_only_schedule_and_steps(
    rate: float, epochs: int, updates: int, schedule: str, expected: list[str]
):
    """A LoRA on the scenes is another case too: the bounds of the sum are from the full fine-tune."""
    for base in (LORA, with_settings(SCENES, {"model.train": "lora"})):
        config = settings(rate, epochs, updates, schedule, base)
        assert keys(config) == expected
        assert all("the scenes' full fine-tune" in str(one) for one in advise(config))
        assert "measured on the scenes' full fine-tune alone" in describe_sum(config)


@given(
    rate=st.floats(1e-7, 1e-2),
    epochs=st.integers(0, 3000),
    updates=st.integers(1, 12),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 30),
    base=st.sampled_from([SCENES, LORA]),
)
def test_whoever_takes_it_all_gets_no_more(
    rate: float, epochs: int, updates: int, schedule: str, warmup: int, base: Config
):
    config = with_settings(settings(rate, epochs, updates, schedule, base), {"train.warmup": warmup})
    found = advise(config)
    assert len({one.key for one in found}) == len(found) <= 3
    assert advise(with_settings(config, changed(config))) == []


@pytest.mark.parametrize("name", presets())
def test_a_preset_gets_one_line_at_most(name: str):
    """Those of papers have a constant rate; this library's own get none."""
    config = load_config(name)
    found = keys(config)
    assert found == (["train.schedule"] if config.train.schedule == "constant" else [])
    if name in ("tree_fast", "tree_long"):
        assert not found
        assert LEAST_SUM <= (rate_sum(config) or 0) <= MOST_SUM


def one_line(text: str) -> str:
    return " ".join(text.split())


OFF = ["train.schedule=constant", "train.epochs=8", "train.updates=2", "train.learning_rate=1e-4"]


def test_plan_says_it(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "-c", "tree_fast", *OFF])
    assert stopped.value.code == 0
    said = one_line(capsys.readouterr().out)
    assert "Learning rates add up to 0.0016 over the run; the best runs of the searches on the scenes came to" in said
    tries = said.split("Try: ")[1]
    assert tries.startswith("train.schedule=linear (")
    assert "; train.updates=8 (16 optimizer steps in all" in tries
    assert "; train.learning_rate=0.0004 (the rates add up to 0.0033 so far" in tries


def test_plan_has_nothing_to_try_where_nothing_is_off(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["plan", "-c", "tree_fast"])
    said = one_line(capsys.readouterr().out)
    assert f"Learning rates add up to {rate_sum(SCENES):.2g} over the run" in said
    assert "Try:" not in said


def test_plan_has_it_as_data(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["plan", "-c", "tree_fast", *OFF, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["rate_sum"] == pytest.approx(16e-4)
    assert [(one["key"], one["value"], one["changes"]) for one in found["advice"]] == [
        ("train.schedule", "constant", {"train.schedule": "linear"}),
        ("train.updates", 2, {"train.updates": 8}),
        ("train.learning_rate", 1e-4, {"train.learning_rate": 4e-4}),
    ]
    assert all(one["reason"] for one in found["advice"])


def test_doctor_finds_it_good_to_know():
    found = rates_of_the_run(load_config("tree_fast", OFF))
    assert (found.what, found.ok) == ("learning rates", None)
    assert "learning rate 0.0001 at every one of the run's 16 optimizer steps; learning rates add up" in found.measured
    assert found.advice.startswith("try: train.schedule=linear (")
    fine = rates_of_the_run(SCENES)
    assert (fine.ok, fine.advice) == (None, "")
    assert rates_of_the_run(with_settings(SCENES, {"train.epochs": 0})).measured.startswith("no optimizer step")


class Searched(NamedTuple):
    rate: float
    updates: int
    epochs: int
    score: float

    @property
    def steps(self) -> int:
        return self.updates * self.epochs

    @property
    def sum(self) -> float:
        config = settings(self.rate, self.epochs, self.updates)
        return rate_sum(config) or 0.0


def searches() -> list[list[Searched]]:
    """The cells of each preset at each budget."""
    found = defaultdict[tuple[str, float], list[Searched]](list)
    for row in map(json.loads, RECORD.read_text().splitlines()):
        if row["stage"] == "search":
            preset, *own = row["cell"].split()
            train = dict(setting.split("=", 1) for setting in own)
            rate, updates = float(train["train.learning_rate"]), int(train["train.updates"])
            found[preset, row["budget"]].append(Searched(rate, updates, row["epochs"], row["score"]))
    return [*found.values()]


def test_its_numbers_are_those_of_the_record():
    bests = [max(cells, key=lambda cell: cell.score) for cells in searches()]
    behind = [(cell, best.score - cell.score) for cells, best in zip(searches(), bests, strict=True) for cell in cells]
    assert {best.updates for best in bests} == {UPDATES}
    assert {cell.rate for cell, _ in behind} == {*RATES}
    assert min(best.steps for best in bests) >= FEW_STEPS
    assert min(lag for cell, lag in behind if cell.steps < FEW_STEPS) > 0.025
    assert min(best.sum for best in bests) >= LEAST_SUM
    assert sum(lag < 0.02 for cell, lag in behind if cell.sum < LEAST_SUM) == 1
    assert max(best.sum for best in bests) < 0.04 < MOST_SUM
    assert min(lag for cell, lag in behind if cell.sum > MOST_SUM) > 0.035
    assert max(cell.sum for cell, _ in behind if cell.rate == SLOW_RATE) < MOST_SUM < MOST_SUM_SLOW
    assert statistics.median(best.sum for best in bests) == pytest.approx(GOOD_SUM, rel=0.05)


def test_what_was_best_in_a_search_is_not_advised_against():
    for cells in searches():
        best = max(cells, key=lambda cell: cell.score)
        assert advise(settings(best.rate, best.epochs, best.updates)) == []


def test_the_sum_is_not_judged_where_it_was_not_measured(monkeypatch: pytest.MonkeyPatch):
    config = settings(1e-1, 400, 8, base=LORA)
    assert not advise(config)
    monkeypatch.setattr(rate_advice, "is_measured", lambda config: True)
    assert keys(config) == ["train.learning_rate"]
