"""A run that goes on, is cut off and goes on again keeps every evaluation, and its best weights never get worse."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import arborl.run.run as run_module
from arborl import trainer
from arborl.config import load_config, read_config
from arborl.core.errors import InputError
from arborl.data.prompts import Prompts
from arborl.engine.evaluate import Evaluation
from arborl.report.data import run_data
from arborl.run.checkpoint import evaluation_of_best, problem_with, read_header, remove_partial
from arborl.run.evaluations import protocol_of
from arborl.run.folder import read_evaluations, read_metrics, write_rows
from arborl.run.logger import Logger
from arborl.run.resume import resolve_start
from arborl.run.run import Run
from arborl.tools.files import scratch

from launching import ranks

TINY = ["sample.num_prompts=1", "eval.num_prompts=2", "log.record_every=0", "log.trackers=[]", "eval.watch=off"]
MORE = int(os.environ.get("ARBORL_EXAMPLES", "1"))


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


class Story:
    """A run whose evaluations score what is made up, and that may be killed at any change of its files."""

    def __init__(self, folder: Path, scores: list[float], every: int) -> None:
        self.folder, self.scores, self.every = folder, scores, every
        self.made: list[tuple[int, float]] = []  # evaluations whose line was written
        self.part = 0
        self.changes_left = math.inf

    def score(self, epoch: int) -> float:
        return self.scores[(7 * self.part + epoch) % len(self.scores)]

    def evaluate(self, policy: object, rewards: object, prompts: object, *_: object, **__: object):
        score = self.score(self.run.state.epoch)
        values = {"place": torch.full((2,), score)}
        return Evaluation({"place": score}, {"place": 0.0}, 2, {"place": 0}, [], torch.zeros(0), [], [], values)

    def step(self) -> None:
        self.changes_left -= 1
        if self.changes_left < 0:
            raise Killed

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside, evaluations are made up, and files change step by step."""
        rename, replace, log_evaluation, log = Path.rename, Path.replace, Logger.log_evaluation, Logger.log
        begin, leave = Run.__post_init__, Run.leave

        def stepping(change: Callable) -> Callable:
            def changed(*given, **named):
                self.step()
                result = change(*given, **named)
                self.step()
                return result

            return changed

        def logged(logger: Logger, row: dict) -> None:
            self.step()
            log_evaluation(logger, row)
            self.made.append((row["epoch"], row["eval/place"]))
            self.step()

        def begun(run: Run) -> None:
            begin(run)
            self.run = run

        def left(run: Run) -> None:
            if self.changes_left < 0:  # the system alone cleans up
                run.logger.lock.close()
            else:
                leave(run)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_module, "evaluate", self.evaluate)
            patch.setattr(trainer, "write_report", lambda folder, **_: folder)
            patch.setattr(Path, "rename", stepping(rename))
            patch.setattr(Path, "replace", stepping(replace))
            patch.setattr(Logger, "log", stepping(log))
            patch.setattr(Logger, "log_evaluation", logged)
            patch.setattr(Run, "__post_init__", begun)
            patch.setattr(Run, "leave", left)
            yield

    def goes_on(self, epochs: int, killed_after: float) -> bool:
        """Train up to so many epochs; whether it came that far."""
        self.changes_left = killed_after
        run = self.folder / "x"
        length = [f"train.epochs={epochs}"]
        try:
            with self.told():
                if (run / "config.yaml").is_file():
                    trainer.train(read_config(run / "config.yaml", length), resume=run)
                else:
                    every = [f"eval.every={self.every}", "log.save_every=2", f"log.dir={self.folder}", "run_name=x"]
                    trainer.train(load_config("mixture", [*TINY, *length, *every]))
        except Killed:
            return False
        finally:
            self.changes_left = math.inf
        return True


def best_of(run: Path) -> tuple[int, float] | None:
    found = evaluation_of_best(run)
    return found and (found["epoch"], found["eval/place"])


@settings(max_examples=4 * MORE)
@given(
    scores=st.lists(st.integers(-50, 50).map(float), min_size=3, max_size=12),
    every=st.integers(0, 3),
    parts=st.lists(
        st.tuples(st.integers(1, 3), st.one_of(st.just(math.inf), st.integers(0, 40))), min_size=2, max_size=4
    ),
)
@example(scores=[0.0, 9.0, 1.0, 2.0], every=0, parts=[(1, math.inf), (1, math.inf), (2, math.inf)])
@example(scores=[0.0, 1.0, 9.0, 2.0, 3.0], every=1, parts=[(3, 18), (1, math.inf)])
@example(scores=[3.0, 6.0, 2.0, 2.0, 0.0, 0.0], every=1, parts=[(3, 13), (2, math.inf)])
@example(scores=[0.0, 4.0, 3.0, 4.0, 1.0, 9.0, 2.0], every=1, parts=[(1, 20), (3, 20), (3, 55)])
@example(scores=[1.0, 7.0, 3.0, 4.0, 0.0, 6.0, 2.0, 6.0, 4.0], every=1, parts=[(3, 10), (3, 53)])
def test_nothing_that_was_found_out_is_lost(
    tmp_path_factory: pytest.TempPathFactory, scores: list[float], every: int, parts: list[tuple[int, float]]
):
    story = Story(tmp_path_factory.mktemp("story"), scores, every)
    run, epochs = story.folder / "x", 0
    for story.part, (more, killed_after) in enumerate(parts):
        before, epochs = best_of(run), epochs + more
        whole = story.goes_on(epochs, killed_after)
        kept = [(row["epoch"], row["eval/place"]) for row in read_evaluations(run)]
        assert kept == story.made
        after = best_of(run)
        if before:
            assert after
            assert after[1] >= before[1]
        if after:
            assert after in story.made
            assert problem_with(run / "checkpoints" / "best") is None
            assert read_header(run / "checkpoints" / "best")["epoch"] == after[0]
        if whole:
            known = [(row["epoch"], row["eval/place"]) for row in read_evaluations(run) if "undone" not in row]
            trained = [score for epoch, score in known if epoch]
            top = max([*trained, *([before[1]] if before else [])])
            untrained = known[0][1]
            assert after is None or after[1] == top
            assert after or top <= untrained
            assert json.loads((run / "summary.json").read_text())["best"]["value"] == max(top, untrained)
            assert [row["epoch"] for row in read_metrics(run)] == list(range(epochs + 1))


def test_weights_chosen_by_another_measure_are_set_aside_and_not_replaced(tmp_path: Path):
    story = Story(tmp_path, [0.0, 5.0, 3.0, 1.0], every=1)
    run = tmp_path / "x"
    assert story.goes_on(2, math.inf)
    assert best_of(run) == (1, 5.0)
    with story.told():
        trainer.train(read_config(run / "config.yaml", ["train.epochs=4", "eval.num_steps=3"]), resume=run)
    assert best_of(run) == (2, 3.0), "the highest by today's evaluations, lower than that of other ones"
    aside = run / "checkpoints" / "best_epoch_000001"
    assert problem_with(aside) is None
    assert read_header(aside)["evaluation"]["eval/place"] == 5.0


def test_a_run_that_watches_a_reward_goes_on_with_the_evaluations_it_had(tmp_path: Path):
    """By its own settings, which have the watched reward among the others, and by those it was started with."""
    watching = [*TINY, "eval.every=1", "eval.rewards=[brightness]", f"log.dir={tmp_path}", "run_name=x"]
    run = trainer.train(load_config("mixture", [*watching, "train.epochs=2"]))
    first = read_evaluations(run)
    trainer.train(read_config(run / "config.yaml", ["train.epochs=3"]), resume=run)
    config = resolve_start(Path("auto"), "mixture", [*watching, "train.epochs=4"]).config
    trainer.train(config, resume=run)
    rows = read_evaluations(run)
    assert rows[: len(first)] == first
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3, 4], "no evaluation is made twice"
    assert len({row["protocol"] for row in rows}) == 1
    assert not list((run / "checkpoints").glob("best_*"))


def test_raw_weights_are_not_taken_for_their_average(tmp_path: Path):
    settings = [*TINY, "train.ema_decay=0.99", "train.epochs=2", f"log.dir={tmp_path}"]
    run = trainer.train(load_config("mixture", settings))
    trainer.train(read_config(run / "config.yaml", ["train.ema_decay=0", "train.epochs=3", "eval.every=1"]), resume=run)
    assert [row["epoch"] for row in read_evaluations(run)] == [0, 2, 2, 3]


def test_best_weights_that_were_lost_do_not_keep_others_out(tmp_path: Path):
    story = Story(tmp_path, [0.0, 9.0, 1.0, 2.0, 3.0], every=1)
    run = tmp_path / "x"
    assert story.goes_on(2, math.inf)
    assert best_of(run) == (1, 9.0)
    (run / "checkpoints" / "best" / "weights.safetensors").write_bytes(b"damaged")
    assert story.goes_on(4, math.inf)
    assert best_of(run) == (4, 3.0)


def test_a_kill_while_the_best_is_replaced_leaves_one_of_both(tmp_path: Path):
    run = tmp_path / "x"
    story = Story(tmp_path, [0.0, 1.0, 2.0, 3.0], every=1)
    assert story.goes_on(1, math.inf)
    folder = run / "checkpoints"
    with scratch(folder) as outer:  # as it lies there between the two renames
        (folder / "best").rename(outer / "old_best")
        shutil.copytree(outer, folder / ".arborl-killed")
        shutil.copy(outer / "mark", folder / ".arborl-killed" / "mark")
    assert not (folder / "best").exists()
    remove_partial(folder)
    assert best_of(run) == (1, 1.0)
    assert not list(folder.glob(".arborl-*"))


def test_a_kill_after_the_best_was_replaced_leaves_the_new_one(tmp_path: Path):
    assert Story(tmp_path, [0.0, 1.0, 2.0, 3.0], every=1).goes_on(1, math.inf)
    folder = tmp_path / "x" / "checkpoints"
    with scratch(folder) as outer:
        shutil.copytree(folder / "best", outer / "old_best")
        shutil.copytree(outer, folder / ".arborl-killed")
        shutil.copy(outer / "mark", folder / ".arborl-killed" / "mark")
    remove_partial(folder)
    assert best_of(tmp_path / "x") == (1, 1.0)
    assert not list(folder.glob(".arborl-*"))


def test_an_evaluation_that_was_undone_is_not_the_best(tmp_path: Path):
    """A kill came between its line and its weights."""
    story = Story(tmp_path, [0.0, 1.0, 9.0, 2.0], every=1)
    run = tmp_path / "x"
    assert story.goes_on(1, math.inf)
    rows = read_evaluations(run)
    write_rows(run / "evaluations.jsonl", [*rows, rows[-1] | {"epoch": 2, "eval/place": 50.0}])
    with story.told():
        trainer.train(read_config(run / "config.yaml", ["train.epochs=3", "eval.every=0"]), resume=run)
    assert json.loads((run / "summary.json").read_text())["best"]["value"] < 50


def test_a_reward_that_is_turned_round_has_a_best_of_its_own(tmp_path: Path, capsys):
    """The lowest; and the highest stay beside them, and are the best again once that is what is asked for."""
    story = Story(tmp_path, [0.0, 5.0, 3.0, -4.0, -2.0, 2.0], every=1)
    run, folder = tmp_path / "x", tmp_path / "x" / "checkpoints"
    assert story.goes_on(2, math.inf)
    assert best_of(run) == (1, 5.0)
    said = {
        4: "place was lowest after 3 epochs, -4.0000 (now -2.0000): ",
        5: "place was highest after 1 epochs, 5.0000 (now 2.0000): ",
    }
    for epochs, weight, best, aside in ((4, -1, (3, -4.0), "place"), (5, 1, (1, 5.0), "-place")):
        more = [f"train.epochs={epochs}", f"rewards.place.weight={weight}"]
        with story.told():
            trainer.train(read_config(run / "config.yaml", more), resume=run)
        assert best_of(run) == best
        assert problem_with(folder / "best") is None
        assert json.loads((run / "summary.json").read_text())["best"]["epoch"] == best[0]
        assert [read_header(path)["by"] for path in folder.glob("best_epoch_*")] == [aside]
        assert f"{said[epochs]}{folder / 'best'}" in capsys.readouterr().err
    assert story.goes_on(6, math.inf)


class TwoRewards(Story):
    """What is made up are the scores by two rewards, the same in every part."""

    def __init__(self, folder: Path, place: list[float], brightness: list[float]) -> None:
        super().__init__(folder, place, every=1)
        self.brightness = brightness

    def score(self, epoch: int) -> float:
        return self.scores[epoch]

    def evaluate(self, *given, **named):
        found = super().evaluate(*given, **named)
        bright = self.brightness[self.run.state.epoch]
        failed = {"place": 0, "brightness": 2 if math.isnan(bright) else 0}
        values = found.values | {"brightness": torch.full((2,), bright)}
        mean, stderr = found.mean | {"brightness": bright}, found.stderr | {"brightness": 0.0}
        return replace(found, mean=mean, stderr=stderr, failed=failed, values=values)

    def told_by(self, epochs: int, best_by: str) -> Path:
        run, more = self.folder / "x", [f"train.epochs={epochs}", f"eval.best={best_by}"]
        first = [*TINY, "rewards=[place,brightness]", "eval.every=1", f"log.dir={self.folder}", "run_name=x"]
        with self.told():
            if run.is_dir():
                return trainer.train(read_config(run / "config.yaml", more), resume=run)
            return trainer.train(load_config("mixture", [*first, *more]))


@pytest.mark.parametrize(("by_the_way", "best", "aside"), [(6.0, 2, 1), (4.0, 1, 2)])
def test_what_another_reward_chose_may_be_the_best_by_this_one_too(
    tmp_path: Path, by_the_way: float, best: int, aside: int, capsys
):
    """What was set aside comes back only where it is better."""
    story = TwoRewards(tmp_path, [0.0, 5.0, by_the_way, 1.0, 2.0], [0.0, 0.0, 9.0, 1.0, 1.0])
    for epochs, best_by in ((1, "place"), (2, "brightness"), (3, "brightness"), (4, "place")):
        run = story.told_by(epochs, best_by)
    assert best_of(run) == (best, story.scores[best])
    assert [path.name for path in (run / "checkpoints").glob("best_epoch_*")] == [f"best_epoch_{aside:06d}"]
    assert (
        f"after {best} epochs, {story.scores[best]:.4f} (now 2.0000): {run}/checkpoints/best" in capsys.readouterr().err
    )


def test_what_was_set_aside_comes_back_with_what_a_user_put_there(tmp_path: Path):
    story = TwoRewards(tmp_path, [0.0, 5.0, 4.0, 1.0], [0.0, 0.0, 9.0, 1.0])
    kept = story.told_by(1, "place") / "checkpoints"
    (kept / "best" / "notes.txt").write_text("mine")
    story.told_by(2, "brightness")
    assert (kept / "best_epoch_000001" / "notes.txt").read_text() == "mine"
    story.told_by(3, "place")
    assert best_of(tmp_path / "x") == (1, 5.0)
    assert (kept / "best" / "notes.txt").read_text() == "mine"


def test_an_evaluation_that_one_reward_has_no_score_of_is_one_of_the_others(tmp_path: Path):
    run = TwoRewards(tmp_path, [3.0, 5.0], [math.nan, 1.0]).told_by(1, "brightness")
    assert json.loads((run / "summary.json").read_text())["eval_before"] == 3.0


def test_best_weights_that_cannot_be_written_cost_no_epoch(tmp_path: Path, monkeypatch):
    """All leave, with a checkpoint of what was learnt."""
    story = Story(tmp_path, [0.0, 1.0, 2.0], every=1)

    def full(*given: object) -> None:
        raise InputError("log.dir", tmp_path, "could not write a checkpoint (No space left on device)")

    monkeypatch.setattr("arborl.run.saver.save_best", full)
    with pytest.raises(InputError, match="could not write"):
        story.goes_on(4, math.inf)
    assert [path.name for path in (tmp_path / "x" / "checkpoints").iterdir()] == ["epoch_000001"]


def test_a_page_has_the_evaluations_of_ends_that_were_gone_on_from(tmp_path: Path):
    """The line of metrics with the last evaluation goes when a run goes on; here nobody makes it again."""
    settings = [*TINY, "train.ema_decay=0.9", "train.epochs=2", f"log.dir={tmp_path}", "run_name=x"]
    run = trainer.train(load_config("mixture", settings))
    for epochs, decay in ((3, 0.0), (4, 0.9)):
        more = [f"train.epochs={epochs}", f"train.ema_decay={decay}"]
        trainer.train(read_config(run / "config.yaml", more), resume=run)
    made = {row["epoch"]: row["eval/place"] for row in read_evaluations(run)}
    assert made.keys() == {0, 2, 3, 4}
    data = run_data(run)["metrics"]
    shown = zip(data["epoch"], data["eval/place"], strict=True)
    assert {e: y for e, y in shown if y is not None} == {e: pytest.approx(y) for e, y in made.items()}
    assert data["epoch"] == [0, 1, 2, 3, 4]


def test_a_file_of_a_file_manager_is_no_damage(tmp_path: Path):
    story = Story(tmp_path, [0.0, 1.0, 2.0, 3.0], every=1)
    assert story.goes_on(2, math.inf)
    folder = tmp_path / "x" / "checkpoints"
    for name in ("best", "epoch_000002"):
        (folder / name / ".DS_Store").write_bytes(b"")
        assert problem_with(folder / name) is None
    assert story.goes_on(4, math.inf)
    assert not list(folder.glob("damaged_epoch*"))
    assert best_of(tmp_path / "x") == (3, 3.0)
    assert list(folder.rglob(".DS_Store")), "what is not the run's stays"


def test_fewer_pictures_in_between_are_a_curve_of_their_own(tmp_path: Path, capsys):
    """An evaluation of all pictures holds the numbers of those that every evaluation has, and the best is by these."""
    every = ["eval.every=1", "train.epochs=3", "train.learning_rate=2e-2", "seed=3", f"log.dir={tmp_path}"]
    rows = read_metrics(
        trainer.train(load_config("mixture", [*TINY, *every, "eval.num_prompts=8", "eval.num_between=3"]))
    )
    said = f"place of the first 3 pictures was highest after 2 epochs, {rows[2]['eval_between/place']:.4f}"
    assert f"{said} (now {rows[3]['eval_between/place']:.4f})" in capsys.readouterr().err
    all_of_it = [row["epoch"] for row in rows if "eval/place" in row]
    assert all_of_it == [0, 3]
    assert [row["epoch"] for row in rows if "eval_between/place" in row] == [0, 1, 2, 3]
    alone = read_metrics(
        trainer.train(load_config("mixture", [*TINY, *every, "eval.num_prompts=3", "eval.num_between=0"]))
    )
    for row, other in zip(rows, alone, strict=True):
        for name in ("place", "place_stderr", "place_failed", "pictures/dark"):
            assert row[f"eval_between/{name}"] == other[f"eval/{name}"]


def test_weights_chosen_by_another_reward_are_set_aside(tmp_path: Path):
    two = [*TINY, "eval.rewards=brightness", "eval.every=1", f"log.dir={tmp_path}", "run_name=x"]
    run = trainer.train(
        load_config("mixture", [*two, "train.epochs=3", "eval.best=brightness", "train.learning_rate=1e-2"])
    )
    header = read_header(run / "checkpoints" / "best")
    assert header["by"] == "brightness"
    number = header["evaluation"]["eval/brightness"]
    other = ["train.epochs=12", "eval.best=place"]
    trainer.train(read_config(run / "config.yaml", other), resume=run)
    assert read_header(run / "checkpoints" / "best")["by"] == "place"
    aside = read_header(run / "checkpoints" / f"best_epoch_{header['epoch']:06d}")
    assert (aside["by"], aside["evaluation"]["eval/brightness"]) == ("brightness", number)


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        (["train.learning_rate=1e-5", "log.keep=1", "rewards.place.url=http://127.0.0.1:9"], True),
        (["rewards.place.path=some/v2.pt"], False),
        (["rewards.place.fn=brightness"], False),
        (["eval.num_steps=3"], False),
        (["eval.rewards=jpeg"], False),
        (["sample.guidance_scale=2"], False),
    ],
)
def test_what_evaluations_ask(changed: list[str], same: bool):
    prompts = Prompts(["a dot"], {})
    before, after = (protocol_of(load_config("mixture", words), prompts) for words in ([], changed))
    assert (before == after) is same
    assert protocol_of(load_config("mixture", changed), Prompts(["another"], {})) != after


def test_evaluations_by_other_settings_are_compared_with_none(tmp_path: Path, capsys):
    """Neither in the summary, nor on the page, nor as signs of reward hacking."""
    few = [*TINY, "eval.rewards=brightness", "eval.every=1", "eval.watch=stop", f"log.dir={tmp_path}", "run_name=x"]
    run = trainer.train(load_config("mixture", [*few, "train.epochs=2"]))
    # The same evaluations with other numbers: as if other pictures were asked for from here on.
    for row in (rows := read_evaluations(run)):
        row |= {"eval/place": -9.0, "eval/brightness": 9.0}
    write_rows(run / "evaluations.jsonl", rows)
    write_rows(run / "metrics.jsonl", [row | {"eval/place": -9.0, "eval/brightness": 9.0} for row in read_metrics(run)])
    trainer.train(read_config(run / "config.yaml", ["train.epochs=4", "eval.num_prompts=6"]), resume=run)
    said = capsys.readouterr().err
    assert "reward hacking" not in said
    assert "eval/place on training prompts: – ± – before" in said
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["epochs"], summary["eval_before"], summary["best"]["epoch"] >= 2) == (4, None, True)
    data = run_data(run)
    assert data["evaluated_otherwise"] == 2
    assert data["metrics"]["eval/place"][:2] == [None, None]
    assert data["metrics"]["eval/place"][2] > -9
    assert not data["watch"]["signs"]


def test_a_run_of_before_goes_on_with_its_evaluations_where_it_asks_the_same(tmp_path: Path):
    """Version 0.1.0 did not write down what its evaluations asked."""
    run = shutil.copytree(Path(__file__).parents[1] / "golden" / "run_0_1_0", tmp_path / "x")
    trainer.train(read_config(run / "config.yaml", ["train.epochs=3"]), resume=run)
    *earlier, last = same = read_evaluations(run)
    assert [row["epoch"] for row in same] == sorted({row["epoch"] for row in same}), "none was made again"
    assert {row["protocol"] for row in earlier} == {last["protocol"]}
    trainer.train(read_config(run / "config.yaml", ["train.epochs=4", "eval.num_prompts=6"]), resume=run)
    *_, again, last = read_evaluations(run)
    assert again["epoch"] == same[-1]["epoch"]
    assert again["protocol"] == last["protocol"] != same[-1]["protocol"]


def test_a_broken_sheet_is_a_warning_on_all_processes(tmp_path: Path):
    story = [*TINY, "log.trackers=tensorboard", "eval.every=1", f"log.dir={tmp_path}", "run_name=x"]
    run = trainer.train(load_config("mixture", [*story, "train.epochs=2"]))
    (run / "samples" / "epoch_000002.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    endings = ranks(2, "train", "--resume", str(run), "train.epochs=3", cwd=tmp_path)
    assert [ended.code for ended in endings] == [0, 0], endings
    assert "TensorBoard lacks the pictures after 2 epochs" in endings[0].said
