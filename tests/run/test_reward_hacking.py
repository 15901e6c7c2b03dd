"""The watch for reward hacking: a rule that speaks when it should, and the best weights kept."""

import json
import shutil
from pathlib import Path

import pytest

from arborl.cli import main
from arborl.run.checkpoint import checkpoints
from arborl.run.reward_hacking import best, hacking


def row(epoch: int, **values: float) -> dict:
    """A line of metrics: names as they are, rewards with a standard error of 0.01."""
    pictures = {"dark": 0.1, "saturated": 0.1, "entropy": 4.0, "edges": 0.2}
    found: dict = {"epoch": epoch} | {f"eval/pictures/{name}": values.pop(name, pictures[name]) for name in pictures}
    for name, value in values.items():
        found |= {f"eval/{name}": value, f"eval/{name}_stderr": 0.01} if name != "diversity" else {name: value}
    return found


class TestRule:
    FIRST = row(0, hps=0.2, clip=0.3)

    @pytest.mark.parametrize(
        ("now", "told"),
        [
            (row(9, hps=0.3, clip=0.3), []),
            (row(9, hps=0.3, clip=0.29), []),
            (row(9, hps=0.21, clip=0.1), []),
            (row(9, hps=0.1, clip=0.1), []),
            (row(9, hps=0.3, clip=0.2), ["hps 0.2 -> 0.3", "clip 0.3 -> 0.2"]),
            (row(9, hps=0.3, clip=0.3, dark=0.5), ["hps 0.2 -> 0.3", "dark 0.1 -> 0.5"]),
            (row(9, hps=0.3, clip=0.3, saturated=0.4), ["hps 0.2 -> 0.3", "saturated 0.1 -> 0.4"]),
            (row(9, hps=0.3, clip=0.3, entropy=2.0), ["hps 0.2 -> 0.3", "entropy 4 -> 2"]),
            (row(9, hps=0.3, clip=0.3, edges=0.01), ["hps 0.2 -> 0.3", "edges 0.2 -> 0.01"]),
            (row(9, hps=0.2, clip=0.3, edges=0.01), []),
        ],
    )
    def test_speaks_when_the_reward_rises_and_something_else_gets_worse(self, now, told):
        assert hacking([self.FIRST, now], {"hps": 1.0}, ["clip"]) == told

    def test_a_watched_reward_is_held_against_its_best(self):
        rows = [self.FIRST, row(5, hps=0.25, clip=0.4), row(9, hps=0.3, clip=0.33)]
        assert hacking(rows, {"hps": 1.0}, ["clip"])[1:] == ["clip 0.4 -> 0.33"]

    def test_leaves_that_have_become_alike(self):
        rows = [row(0, hps=0.2, diversity=0.3), *({"epoch": i, "diversity": 0.3} for i in range(1, 5))]
        rows += [row(5, hps=0.3, diversity=0.02), *({"epoch": i, "diversity": 0.02} for i in range(6, 10))]
        assert hacking([*rows, row(10, hps=0.3)], {"hps": 1.0}, [])[1:] == ["diversity 0.3 -> 0.02"]

    def test_a_reward_that_is_to_fall(self):
        falling = [row(0, hps=0.3, clip=0.3), row(9, hps=0.2, clip=0.2)]
        assert hacking(falling, {"hps": -1.0}, ["clip"]) == ["hps 0.3 -> 0.2", "clip 0.3 -> 0.2"]
        assert hacking(falling, {"hps": 1.0}, ["clip"]) == []
        assert best(falling, "hps", -1.0) is falling[1]

    def test_evaluations_that_lost_pictures_are_not_compared(self):
        torn = row(9, hps=0.3, clip=0.1) | {"eval/clip_failed": 0.5}
        assert hacking([self.FIRST, torn], {"hps": 1.0}, ["clip"]) == []
        assert best([self.FIRST, row(5, hps=0.9) | {"eval/hps_failed": 0.25}], "hps") is self.FIRST
        always = [row(i, hps=0.1 * i) | {"eval/hps_failed": 0.25} for i in (1, 2)]
        assert best(always, "hps") is always[1], "some rewards have nothing to say of some prompts"

    def test_what_has_no_number_says_nothing(self):
        assert hacking([row(0), row(1)], {"hps": 1.0}, ["clip"]) == []
        missing = row(1, hps=0.4) | {"eval/clip": None}
        assert hacking([self.FIRST, missing], {"hps": 1.0}, ["clip"]) == []

    def test_best_is_the_first_of_equals_and_never_nothing(self):
        rows = [row(0, hps=0.1), row(1, hps=0.3), row(2, hps=0.3), {"epoch": 3}, {"epoch": 4, "eval/hps": None}]
        assert best(rows, "hps") is rows[1]
        assert best(rows[3:], "hps") is None


MINE = """
from arborl.worlds.mixture import place

def away(images, prompts, columns):
    return 1 - place(images, prompts, columns)
"""
RUN = ["train", "-c", "mixture", "run_name=x", "eval.num_prompts=64", "eval.every=5", "log.trackers=[]"]
RUN += ["log.record_every=0", "rewards.away.fn=watched:away", "eval.rewards=[away]", "train.learning_rate=2e-3"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "watched.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_ok(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 0


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class TestRuns:
    def test_stop(self, here, capsys):
        """Placing the dot rises as its opposite falls: seen, said, and the run ends in good order."""
        run_ok(*RUN, "eval.watch=stop", "train.epochs=200")
        told, found = capsys.readouterr().err, rows(here / "runs" / "x")
        assert "this looks like reward hacking: place" in told
        assert "stopped for what looks like reward hacking (eval.watch=stop)" in told
        assert found[-1]["epoch"] < 200
        assert found[-1]["eval/place"] > found[0]["eval/place"]
        assert found[-1]["eval/away"] < found[0]["eval/away"]
        assert [row["epoch"] for row in found] == list(range(len(found))), "no row twice, none missing"
        summary = json.loads((here / "runs" / "x" / "summary.json").read_text())
        assert summary["best"]["reward"] == "away"
        assert summary["best"]["epoch"] == 0
        assert not (here / "runs" / "x" / "checkpoints" / "best").exists(), "no weights beat those it began with"

    def test_the_best_weights_are_kept_and_can_be_used(self, here, capsys):
        run_ok(*RUN, "eval.best=place", "train.epochs=12", "log.keep=1", "train.ema_decay=0.5")
        run = here / "runs" / "x"
        top = best(rows(run), "place")
        kept = run / "checkpoints" / "best"
        assert top is not None
        assert json.loads((kept / "state.json").read_text())["epoch"] == top["epoch"]
        files = {"SHA256SUMS", "weights.safetensors", "ema.safetensors", "state.json"}
        assert {path.name for path in kept.iterdir()} == files
        assert kept not in checkpoints(run / "checkpoints"), "a run never goes on from there"
        run_ok("eval", "--run", str(kept), "--json")
        found = json.loads(capsys.readouterr().out)["rewards"]
        assert found["place"]["mean"] == pytest.approx(top["eval/place"], abs=1e-6)

    def test_going_on_after_a_stop(self, here, capsys):
        """It stops again where it stopped; told not to, it goes on, and no row is lost or doubled."""
        run_ok(*RUN, "eval.watch=stop", "train.epochs=20")
        first = rows(here / "runs" / "x")
        assert first[-1]["epoch"] < 20
        run_ok("train", "--resume", "runs/x")
        assert [row["epoch"] for row in rows(here / "runs" / "x")] == [row["epoch"] for row in first]
        run_ok("train", "--resume", "runs/x", "eval.watch=off")
        assert [row["epoch"] for row in rows(here / "runs" / "x")] == list(range(21))

    def test_the_best_of_epochs_that_are_done_again_goes(self, here, capsys):
        run_ok(*RUN, "eval.best=place", "eval.watch=off", "train.epochs=10", "log.save_every=4", "log.keep=3")
        kept = here / "runs" / "x" / "checkpoints"
        shutil.rmtree(kept / "epoch_000010")
        assert json.loads((kept / "best" / "state.json").read_text())["epoch"] == 10
        lower = ["train.learning_rate=1e-9", "train.epochs=9", "eval.every=0"]
        run_ok("train", "--resume", "runs/x", *lower)
        summary = json.loads((here / "runs" / "x" / "summary.json").read_text())
        if (kept / "best").exists():
            assert json.loads((kept / "best" / "state.json").read_text())["epoch"] == summary["best"]["epoch"]

    def test_a_reward_that_is_no_longer_watched_is_not_trained_on(self, here, capsys):
        run_ok(*RUN, "train.epochs=1")
        run_ok("train", "--resume", "runs/x", "train.epochs=2", "eval.rewards=[]")
        last = rows(here / "runs" / "x")[1]
        assert last["reward"] == pytest.approx(last["rewards/place/mean"])

    def test_off(self, here, capsys):
        run_ok(*RUN, "eval.watch=off", "train.epochs=20")
        assert "hacking" not in capsys.readouterr().err
