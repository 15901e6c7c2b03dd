"""Learning rates from the settings to the optimizer: what it steps with is what the run says, wherever it stopped."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import arborl.run.logger as logger_module
import arborl.run.run as run_module
from arborl.cli import main
from arborl.compare.runs import UNLIMITED_EPOCHS
from arborl.config import load_config, with_settings
from arborl.config.schema import Config
from arborl.core.rates import SCHEDULES
from arborl.doctor import _canary_config, _little_shows
from arborl.engine.method import warnings_about
from arborl.engine.rates import course, describe_rates, learning_rates
from arborl.engine.update import partition, update
from arborl.trainer import train

from launching import timeless
from test_update import MIXTURE, Bench

PLAIN = load_config("mixture")
RATE = PLAIN.train.learning_rate
SMALL = ["sample.num_prompts=2", "eval.num_prompts=2", "log.trackers=[]", "log.record_every=0"]


def settings(schedule: str, warmup: int = 0, epochs: int = 4, updates: int = 2, seconds: float = 0.0) -> Config:
    values = {"schedule": schedule, "warmup": warmup, "epochs": epochs, "updates": updates, "max_seconds": seconds}
    return with_settings(PLAIN, {f"train.{key}": value for key, value in values.items()})


@given(
    schedule=st.sampled_from(sorted(SCHEDULES)),
    warmup=st.integers(0, 9),
    epochs=st.integers(1, 12),
    updates=st.integers(1, 4),
    data=st.data(),
)
def test_however_a_run_is_cut_its_rates_are_those_of_one_that_never_stopped(
    schedule: str, warmup: int, epochs: int, updates: int, data: st.DataObject
):
    """Also where it was to be shorter at first: from there on they are those of the longer run."""
    config = settings(schedule, warmup, epochs, updates)
    whole = [rate for epoch in range(epochs) for rate in learning_rates(config, epoch)]
    same_steps_one_by_one = settings(schedule, warmup, epochs * updates, 1)
    assert whole == [learning_rates(same_steps_one_by_one, index)[0] for index in range(epochs * updates)]
    cut = data.draw(st.integers(0, epochs))
    rest = [rate for epoch in range(cut, epochs) for rate in learning_rates(config, epoch)]
    assert rest == whole[cut * updates :]
    assert learning_rates(with_settings(config, {"train.epochs": 2 * epochs}), epochs) == learning_rates(
        settings(schedule, warmup, 2 * epochs, updates), epochs
    )


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The rate of every group of the optimizer, at each of its steps."""
    seen: list[float] = []
    step = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW, *rest, **named):
        seen.extend(group["lr"] for group in self.param_groups)
        return step(self, *rest, **named)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    return seen


def test_the_optimizer_steps_with_these_rates_and_the_metrics_say_the_first(tmp_path: Path, stepped: list[float]):
    own = ["train.schedule=cosine", "train.warmup=1", "train.epochs=3", "train.updates=2", f"log.dir={tmp_path}"]
    config = load_config("mixture", [*SMALL, *own])
    rows = timeless(train(config))
    expected = [learning_rates(config, epoch) for epoch in range(3)]
    assert stepped == [rate for epoch in expected for rate in epoch]
    assert len({*stepped}) == 6
    assert [row["learning_rate"] for row in rows[:3]] == [rates[0] for rates in expected]


def test_the_first_step_of_adamw_is_as_long_as_its_rate():
    """Its two moments cancel: whatever the gradient, a weight moves by the rate. Steps are as many as rates."""
    bench = Bench([*MIXTURE, "train.updates=5"])
    before, advantage = bench.weights(), bench.advantage()
    for group in bench.state.optimizer.param_groups:
        group["weight_decay"] = 0.0
    stats = update(
        bench.policy, bench.state, bench.loss, bench.record, advantage, bench.kept(advantage), rates=(0.0123,)
    )
    assert stats.steps == 1
    assert float((bench.weights() - before).abs().max()) == pytest.approx(0.0123, rel=1e-3)


def test_without_rates_there_are_as_many_steps_as_the_settings_say_at_theirs(stepped: list[float]):
    bench = Bench([*MIXTURE, "train.updates=3", "train.learning_rate=0.007"])
    assert bench.update(bench.advantage()).steps == 3
    assert stepped == [0.007] * 3


def test_a_step_that_is_left_out_counts_as_one_that_was_taken(stepped: list[float]):
    """Of three steps, one whose edges have no advantage: the others keep their rates."""
    bench = Bench([*MIXTURE, "train.updates=3"])
    advantage = bench.advantage()
    keep = bench.kept(advantage)
    parts = run_parts(bench)
    advantage = torch.where(parts == 1, 0.0, advantage)
    stats = update(bench.policy, bench.state, bench.loss, bench.record, advantage, keep, rates=(0.3, 0.2, 0.1))
    assert (stats.steps, stats.skipped) == (2, 1)
    assert stepped == [0.3, 0.1]


def run_parts(bench: Bench) -> torch.Tensor:
    """Which of three optimizer steps each edge trains in; -1 for those in none."""
    plan = bench.record.plan
    calls = bench.loss.calls(plan)
    of_call = partition(len(calls.node), len(bench.texts), 3, bench.key)
    parts = torch.full((len(bench.texts), plan.edges), -1)
    parts[:, calls.edge] = of_call[:, calls.call]
    return parts


def test_where_the_clock_ends_the_run_the_rate_falls_with_it(
    tmp_path: Path, stepped: list[float], monkeypatch: pytest.MonkeyPatch
):
    """Ten seconds an epoch by the first rank's clock, and any number of epochs; this rank's own says something else."""
    own = ["train.schedule=linear", "train.max_seconds=40", "train.updates=2", f"log.dir={tmp_path}"]
    monkeypatch.setattr(logger_module, "training_seconds", lambda row: 10.0)
    gathered: list[float] = []

    def first_ranks(values: torch.Tensor, _: object) -> torch.Tensor:
        gathered.append(float(values[0]))
        return torch.cat([values, 3 * values])

    monkeypatch.setattr(run_module, "gather", first_ranks)
    rows = timeless(train(load_config("mixture", [*SMALL, *own, f"train.epochs={UNLIMITED_EPOCHS}"])))
    assert gathered == [0, 10, 20, 30, 40]
    expected = [RATE * share for share in (1, 0.75, 0.5, 0.25)]
    assert stepped == pytest.approx([rate for rate in expected for _ in range(2)], rel=1e-5)
    assert [row["learning_rate"] for row in rows[:-1]] == pytest.approx(expected, rel=1e-5)


def test_where_epochs_end_before_the_clock_they_count():
    config = settings("linear", epochs=4, updates=1, seconds=1000)
    assert learning_rates(config, 3, clock=0.01) == (pytest.approx(RATE / 4),)
    assert learning_rates(config, 0, clock=0.9) == (pytest.approx(RATE / 10),)


def test_its_course_is_told(capsys: pytest.CaptureFixture[str]):
    assert course(settings("linear", epochs=40)) == (RATE, pytest.approx(RATE / 80), 80)
    assert course(settings("constant")) == (RATE, RATE, 8)
    assert course(settings("linear", seconds=5)) == (RATE, None, None)
    assert course(settings("constant", seconds=5)) == (RATE, RATE, None)
    assert course(settings("linear", epochs=0)) is None
    assert "0.001 at the first of the run's 80 optimizer steps, 1.25e-05 at the last" in describe_rates(
        settings("linear", epochs=40)
    )
    assert "train.schedule=cosine and train.warmup=3" in describe_rates(settings("cosine", 3))
    with pytest.raises(SystemExit):
        main(["plan", "-c", "mixture", "train.schedule=linear", "train.epochs=40", "train.updates=2"])
    assert "Learning rate 0.001 at the first of the run's 80 optimizer steps" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(("warmup", "epochs", "warned"), [(7, 4, 0), (8, 4, 1), (99, 4, 1), (99, 0, 0), (0, 4, 0)])
def test_a_warm_up_that_a_run_never_leaves_is_warned_of(warmup: int, epochs: int, warned: int):
    said = warnings_about(settings("constant", warmup, epochs, updates=2))
    assert len(said) == warned
    assert all(text.startswith(f"train.warmup={warmup}: the run has 8 optimizer steps") for text in said)


def test_a_canary_is_judged_at_the_rate_itself(tmp_path: Path):
    """In its short time a rate that falls or still rises would say nothing of the one that is set."""
    own = _canary_config(settings("cosine", warmup=500), ["a dot"], 1, tmp_path, 10.0, 5.0)
    assert learning_rates(own, 3, clock=0.9) == (10 * RATE,) * 2
    assert "with train.schedule=cosine and train.warmup=500 yours has less of it" in _little_shows(
        settings("cosine", 500)
    )
    assert _little_shows(PLAIN).endswith("raise it, or train longer")
