"""Comparisons: cells, budgets, what is read from runs; and the command, run, interrupted and run again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from arborl.cli import main
from arborl.cli.app import app
from arborl.compare import Cell, Protocol, plan_runs, read
from arborl.compare.results import Point, compute_to_reach, mean_curve, pareto, score_at
from arborl.compare.runs import command_of, cost_of, log_of
from arborl.config import save_config
from arborl.core.errors import InputError
from arborl.engine.rates import learning_rates
from arborl.run.checkpoint import latest_valid
from arborl.tools.files import is_locked, lock

from launching import PATIENCE, Fork, files_below

TREE, FLAT = "mixture loss.kl=0", "flat model=mixture rewards=place loss.kl=0"
SMALL = ("eval.num_prompts=8", "sample.num_prompts=2", "log.record_every=0")


def line(*points: tuple[float, float]) -> list[Point]:
    return [Point(compute, compute / 10, score, 0.01) for compute, score in points]


class TestReading:
    curve = line((0, 0.2), (100, 0.4), (200, 0.8), (300, 0.6))

    @pytest.mark.parametrize(
        ("compute", "score"), [(0, 0.2), (50, 0.3), (150, 0.6), (250, 0.7), (300, 0.6), (999, 0.6)]
    )
    def test_scores_are_linear_between_evaluations(self, compute: float, score: float):
        assert score_at(self.curve, compute) == pytest.approx(score)

    @pytest.mark.parametrize(("target", "compute"), [(0.1, 0), (0.3, 50), (0.6, 150), (0.8, 200), (0.81, None)])
    def test_a_score_is_reached_where_the_curve_first_crosses_it(self, target: float, compute: float | None):
        assert compute_to_reach([(p.compute, p.score) for p in self.curve], target) == pytest.approx(compute)

    @given(st.lists(st.floats(0, 1), min_size=2, max_size=6), st.floats(0, 1))
    def test_what_is_reached_is_the_score_asked_for(self, scores: list[float], target: float):
        points = [(100.0 * i, score) for i, score in enumerate(scores)]
        compute = compute_to_reach(points, target)
        if compute is None:
            assert max(scores) < target
        elif scores[0] < target:
            assert score_at(line(*points), compute) == pytest.approx(target, abs=1e-9)

    def test_the_mean_goes_as_far_as_every_seed(self):
        found = mean_curve([line((0, 0.0), (100, 1.0)), line((0, 0.0), (80, 0.4), (200, 0.4))])
        assert found == [(0, 0.0), (80, pytest.approx(0.6)), (100, pytest.approx(0.7))]

    def test_the_front_rises_and_nothing_is_above_it(self, tmp_path: Path):
        runs = [fake(tmp_path, name, seed) for name in ("tree", "flow_grpo") for seed in (0, 1)]
        front = pareto(read(runs, Protocol((0, 1), 1e4)).rows)
        scores = [score for _, score, _ in front]
        assert scores == sorted(scores)
        assert front[0][0] == 0


def fake(folder: Path, name: str, seed: int):
    """A run that is there already: twice as fast with `tree`, and a little better with every seed."""
    run = plan_runs([Cell(name)], Protocol((seed,), 1e5), folder)[0]
    run.folder.mkdir(parents=True)
    speed = 2 if name == "tree" else 1
    rows = []
    for epoch in range(5):
        evaluation = {"eval/scene": 0.4 + 0.1 * min(speed * epoch, 4) + 0.01 * seed, "eval/scene_stderr": 0.004}
        counts = {"forwards": 1000 * (epoch + 1), "forward_backwards": 500 * (epoch + 1)} if epoch < 4 else {}
        rows.append({"epoch": epoch, **evaluation, **counts, "step_time": 3.0, "time/evaluate": 1.0})
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = {"forwards": 4000, "forward_backwards": 2000, "epochs": 4, "train_seconds": 8.0}
    (run.folder / "summary.json").write_text(json.dumps(counts | {"peak_memory": (seed + 1) * 2**20}))
    return run


class TestTable:
    def test_says_what_its_evaluations_are_of(self, tmp_path: Path):
        runs = [fake(tmp_path, name, 0) for name in ("tree", "flow_grpo")]
        for run in runs:
            start = {"prompts": {"evaluated_on": "training prompts"}}
            text = json.dumps({"format": "arborl.environment", "version": 1, "starts": [start]})
            (run.folder / "environment.json").write_text(text)
        found = read(runs, Protocol((0,), 1e4))
        assert found.evaluated_on == "training prompts"
        assert "training prompts" in found.as_markdown()

    def test_every_number(self, tmp_path: Path):
        runs = [fake(tmp_path, name, seed) for seed in (0, 1) for name in ("tree", "flow_grpo")]
        found = read(runs, Protocol((0, 1), 1e4))
        assert found.baseline == "flow_grpo"
        tree, flat = found.rows
        assert (tree.cell, tree.seeds, tree.plan) == ("tree", [0, 1], "tree")
        assert tree.score == pytest.approx(0.805)
        assert tree.stderr == pytest.approx(0.005)
        assert tree.before == pytest.approx(0.405)
        assert tree.compute == flat.compute == found.equal_compute == 4000 + 3 * 2000
        assert tree.seconds == 8.0
        assert tree.peak_memory == 2 * 2**20
        assert tree.compute_to_baseline == pytest.approx(5000)
        assert flat.compute_to_baseline == pytest.approx(10000)
        text = found.as_markdown()
        assert "| `tree` | 2 | 4 | 0.405 | 0.805 ± 0.005 |" in text
        assert "5000 (0.50×)" in text
        assert json.loads(found.as_json())["rows"][0]["curves"]["0"][2]["compute"] == 5000

    def test_the_baseline_reaches_its_own_score_also_where_seeds_end_apart(self, tmp_path: Path):
        runs = [fake(tmp_path, "flow_grpo", seed) for seed in (0, 1)]
        rows = (runs[1].folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (runs[1].folder / "metrics.jsonl").write_text("".join(rows[:3]))
        found = read(runs, Protocol((0, 1), 1e4))
        assert found.rows[0].compute_to_baseline == 5000

    def test_a_run_without_a_score_is_left_out(self, tmp_path: Path):
        runs = [fake(tmp_path, "flow_grpo", 0), fake(tmp_path, "tree", 0)]
        (runs[1].folder / "metrics.jsonl").write_text(
            json.dumps({"epoch": 0, "eval/scene": None, "step_time": 1.0}) + "\n"
        )
        assert [row.cell for row in read(runs, Protocol((0,), 1e4)).rows] == ["flow_grpo"]
        with pytest.raises(InputError, match="no run has come to a score"):
            read(runs[1:], Protocol((0,), 1e4))

    def test_without_a_flat_cell_there_is_no_such_column(self, tmp_path: Path):
        found = read([fake(tmp_path, "tree", 0)], Protocol((0,), 1e4))
        assert found.baseline is None
        assert "to reach" not in found.as_markdown().splitlines()[0]
        named = read([fake(tmp_path, "mix", 0)], Protocol((0,), 1e4), baseline="mix")
        assert named.baseline == "mix"


class TestPlanning:
    def test_cells_get_the_same_compute(self, tmp_path: Path):
        runs = plan_runs([Cell("tree"), Cell("branch"), Cell("flow_grpo")], Protocol((0, 1), 2e5), tmp_path)
        assert [(run.cell.text, run.seed) for run in runs][:4] == [
            ("tree", 0), ("branch", 0), ("flow_grpo", 0), ("tree", 1),
        ]  # fmt: skip
        for run in runs:
            epoch = cost_of(run.config) / run.config.train.epochs
            assert 2e5 - 1.5 * epoch < cost_of(run.config) <= 2e5

    @pytest.mark.parametrize("preset", ["tree", "flow_grpo"])
    def test_a_rate_that_falls_is_nearly_nothing_where_the_compute_ends(self, tmp_path: Path, preset: str):
        config = plan_runs([Cell(f"{preset} train.schedule=linear")], Protocol((0,), 2e5), tmp_path)[0].config
        train = config.train
        assert learning_rates(config, 0)[0] == train.learning_rate
        last = train.learning_rate / (train.epochs * train.updates)
        assert learning_rates(config, train.epochs - 1)[-1] == pytest.approx(last)
        timed = plan_runs([Cell(f"{preset} train.schedule=linear")], Protocol((0,), seconds=60), tmp_path / "timed")
        assert learning_rates(timed[0].config, 900, clock=0.75)[-1] == pytest.approx(train.learning_rate / 4)

    def test_common_settings_come_first_and_a_cells_own_last(self, tmp_path: Path):
        run = plan_runs([Cell("tree tree.w=2")], Protocol((3,), 1e5, common=("tree.w=4", "tree.k=3")), tmp_path)[0]
        assert (run.config.tree.w, run.config.tree.k, run.config.seed) == (2, 3, 3)

    def test_all_are_evaluated_with_the_same_number_of_steps(self, tmp_path: Path):
        runs = plan_runs([Cell("tree"), Cell("mix"), Cell("dance")], Protocol((0,), 1e5), tmp_path)
        assert [run.config.sample.num_steps for run in runs] == [10, 25, 16]
        assert [run.config.eval.num_steps for run in runs] == [10, 10, 10]

    @pytest.mark.parametrize("name", ["a b", "it's", "back\\slash", "ends\\\\", "a\\'b", "[x]=${y},{z}"])
    def test_any_folder_will_do(self, tmp_path: Path, name: str):
        run = plan_runs([Cell("tree")], Protocol((0,), 1e5), tmp_path / name)[0]
        assert Path(run.config.log.dir) == tmp_path / name / "tree"

    def test_a_folder_that_was_moved_is_still_the_same_run(self, tmp_path: Path):
        run = plan_runs([Cell("tree")], Protocol((0,), 1e5), tmp_path / "here")[0]
        run.folder.mkdir(parents=True)
        save_config(run.config, run.folder / "config.yaml")
        (tmp_path / "here").rename(tmp_path / "there")
        again = plan_runs([Cell("tree")], Protocol((0,), 1e5), tmp_path / "there")[0]
        assert again.folder == tmp_path / "there" / "tree" / "seed-0"

    def test_folders_tell_cells_apart(self):
        texts = ["tree", "tree tree.w=3", "tree tree.w=4", "tree  tree.w=3", "x" * 200, "x" * 201, "tree_tree.w_3"]
        names = [Cell(text).folder for text in texts]
        assert len(set(names)) == len(names)
        assert names[0] == "tree"
        assert all(len(name) < 100 and "/" not in name for name in names)

    def test_a_run_with_other_settings_is_not_taken_for_this_one(self, tmp_path: Path):
        run = plan_runs([Cell("tree")], Protocol((0,), 1e5), tmp_path)[0]
        run.folder.mkdir(parents=True)
        save_config(run.config, run.folder / "config.yaml")
        plan_runs([Cell("tree")], Protocol((0,), 1e5), tmp_path)
        with pytest.raises(InputError, match=r"other settings \(train.learning_rate: 0.0001 -> 0.0002\)"):
            plan_runs([Cell("tree")], Protocol((0,), 1e5, common=("train.learning_rate=2e-4",)), tmp_path)

    def test_a_run_that_was_begun_goes_on_and_nothing_is_removed(self, tmp_path: Path):
        """Also one that came to no checkpoint; but what is no run, or somebody else's, is left to them."""
        run = plan_runs([Cell("tree")], Protocol((0,), 1e5), tmp_path)[0]
        assert command_of(run) == run.command
        run.folder.mkdir(parents=True)
        (run.folder / "notes.txt").write_text("mine")
        with pytest.raises(InputError, match="is there already, and no run"):
            plan_runs([Cell("tree")], Protocol((0,), 1e5), tmp_path)
        save_config(run.config, run.folder / "config.yaml")
        assert plan_runs([Cell("tree")], Protocol((0,), 1e5), tmp_path) == [run]
        assert command_of(run) == ["train", "--resume", str(run.folder)]
        with lock(run.folder / ".lock"), pytest.raises(InputError, match="is being written by another process"):
            command_of(run)
        log_of(run).touch()
        with lock(log_of(run)), pytest.raises(InputError, match="is being written by another process"):
            command_of(run)
        log_of(run).write_text("a diary\n")
        with pytest.raises(InputError, match="no log of a comparison"):
            command_of(run)
        assert {path.name for path in run.folder.iterdir()} == {"notes.txt", "config.yaml", ".lock"}
        assert log_of(run).read_text() == "a diary\n"

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["tree", "tree"], ["named twice"]),
            (["nothing"], ["--config-name=nothing"]),
            (["tree tree.ww=3"], ["tree.ww", "nearest: tree.w"]),
            (["tree tree.w=30"], ["tree.w=30"]),
            (["tree", "--set", "tree.kk=2"], ["tree.kk"]),
            (["tree", "--compute", "5", "--seconds", "5"], ["--seconds", "not both"]),
            (["tree", "--compute", "-5"], ["--compute=-5.0", "above 0"]),
            (["tree", "--seconds", "-5"], ["--seconds=-5.0", "above 0"]),
            (["tree", "--compute", "inf"], ["--compute=inf", "above 0"]),
            (["tree tree.w=30", "--seconds", "5"], ["tree.w=30"]),
            (["branch_width prune.until=0.5", "--seconds", "5"], ["prune.until=0.5", "clock"]),
            ([""], ["names no preset"]),
            (["tree 'x"], ["cannot be read"]),
            (["tree seed=3"], ["seed=3", "itself"]),
            (["tree", "--set", "train.epochs=3"], ["train.epochs=3", "itself"]),
            (["tree", "mixture"], ["not the same in all cells"]),
            (["tree", "tree eval.num_prompts=3"], ["eval.num_prompts", "not the same"]),
            (["tree", "--baseline", "flat"], ["--baseline=flat", "not one of the cells"]),
        ],
    )
    def test_bad_input_is_one_line_before_anything_runs(self, tmp_path: Path, arguments, words):
        result = CliRunner().invoke(app, ["compare", *arguments, "-o", str(tmp_path / "out")])
        assert isinstance(result.exception, InputError)
        assert "\n" not in str(result.exception)
        assert all(word in str(result.exception) for word in words), str(result.exception)
        assert not (tmp_path / "out").exists()


ARBORL = [sys.executable, "-m", "arborl"]


def run(*given: str) -> int:
    """In this process; runs still have their own."""
    with pytest.raises(SystemExit) as stopped:
        main(list(given))
    return stopped.value.code


def arguments(out: Path, *more: str) -> list[str]:
    common = [word for text in SMALL for word in ("--set", text)]
    return ["compare", TREE, FLAT, "--seeds", "2", "-o", str(out), *common, *more]


@contextmanager
def interrupted_once(met: Callable[[], bool]) -> Iterator[None]:
    """As a terminal's Ctrl-C comes to this process, as soon as that is so."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            if met():
                os.kill(os.getpid(), signal.SIGINT)
                return

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


class TestCommand:
    def test_runs_writes_and_runs_nothing_twice(self, tmp_path: Path, capsys):
        out = tmp_path / "with space & 'quote'"
        given = arguments(out, "--compute", "4000", "--points", "2", "--workers", "2", "--set", "train.schedule=linear")
        assert run(*given) == 0
        assert {path.name for path in out.glob("compare.*")} == {"compare.md", "compare.json", "compare.png"}
        table = json.loads((out / "compare.json").read_text())
        assert {row["cell"] for row in table["rows"]} == {TREE, FLAT}
        for row in table["rows"]:
            assert row["seeds"] == [0, 1]
            assert 0 < row["compute"] <= 4000
            assert row["peak_memory"] > 0
        assert (out / "compare.md").read_text() in capsys.readouterr().out
        for path in out.rglob("metrics.jsonl"):  # the rate falls to nearly nothing at the end of the compute
            rates = [row["learning_rate"] for row in map(json.loads, path.read_text().splitlines()[:-1])]
            assert len(rates) > 2
            assert rates == pytest.approx([1e-3 * (1 - epoch / len(rates)) for epoch in range(len(rates))])
        summaries = {path: path.stat().st_mtime_ns for path in out.rglob("summary.json")}
        assert len(summaries) == 4
        assert run(*given, "--json") == 0
        assert json.loads(capsys.readouterr().out)["rows"] == table["rows"]
        assert {path: path.stat().st_mtime_ns for path in out.rglob("summary.json")} == summaries

    def test_an_interrupt_loses_nothing_and_the_same_command_goes_on(self, tmp_path: Path, capsys):
        out = tmp_path / "out"
        given = arguments(out, "--compute", "12000", "--points", "10", "--workers", "2")

        def saved() -> int:
            return sum(path.match("checkpoints/epoch_*/SHA256SUMS") for path in files_below(out, "SHA256SUMS"))

        with interrupted_once(lambda: saved() >= 2):
            assert run(*given) == 130
        assert "The same command goes on" in capsys.readouterr().err
        logs = [path.read_text() for path in out.rglob("*.log")]
        assert any("To go on: arborl train --resume" in text for text in logs)
        assert run(*given) == 0
        assert len(list(out.rglob("summary.json"))) == 4
        assert any("--resume" in path.read_text() for path in out.rglob("*.log"))
        for path in out.rglob("metrics.jsonl"):
            epochs = [json.loads(row)["epoch"] for row in path.read_text().splitlines()]
            assert epochs == list(range(len(epochs)))

    def test_failing_runs_are_told_with_their_reason(self, tmp_path: Path, monkeypatch, capsys):
        (tmp_path / "broken.py").write_text(
            "from arborl.worlds.mixture import MixtureModel\n\n\n"
            "class Broken(MixtureModel):\n"
            "    def decode(self, latents):\n"
            "        raise OSError('no pictures today')\n"
        )
        monkeypatch.chdir(tmp_path)
        cells = ["mixture model.family=broken:Broken tree.w=3", "mixture model.family=broken:Broken"]
        assert run("compare", *cells, "--seeds", "1", "--compute", "3000", "-o", "out") == 1
        assert capsys.readouterr().err.count("exit code 1: OSError: no pictures today") == 2
        assert not (tmp_path / "out" / "compare.json").exists()

    def test_terminating_the_whole_group_leaves_no_run_behind(self, tmp_path: Path, capsys):
        out = tmp_path / "out"
        given = arguments(out, "--compute", "1000000", "--workers", "2")
        process = subprocess.Popen(
            [*ARBORL, *given],
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as a script's background jobs have it
        )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not files_below(out, "metrics.jsonl"):
            time.sleep(0.1)
        running = [log for log in files_below(out, "*.log") if is_locked(log)]
        assert running
        assert run(*given) == 2
        assert "is being written by another process" in capsys.readouterr().err
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=120)
        assert process.returncode == 130
        assert not any(is_locked(log) for log in running)
        assert all("To go on: arborl train --resume" in log.read_text() for log in running)

    def test_runs_of_a_comparison_that_is_killed_leave_too_with_a_checkpoint(self, tmp_path: Path):
        out = tmp_path / "out"
        given = arguments(out, "--seconds", "40", "--workers", "2")  # should nobody end them, the clock will
        with Fork(*given, cwd=tmp_path) as comparison:
            comparison.until(lambda: len(files_below(out, "metrics.jsonl")) == 2)
            running = [log for log in files_below(out, "*.log") if is_locked(log)]
            assert len(running) == 2
            os.kill(comparison.pid, signal.SIGKILL)
            comparison.ended()
            deadline = time.monotonic() + PATIENCE
            while any(is_locked(log) for log in running) and time.monotonic() < deadline:
                time.sleep(0.1)
        for log in running:
            assert not is_locked(log), "a run that nobody waits for any more goes on"
            assert "To go on: arborl train --resume" in log.read_text()
            assert latest_valid(log.with_suffix(""))[0] is not None

    def test_equal_seconds(self, tmp_path: Path):
        assert run(*arguments(tmp_path, "--seconds", "0.5", "--workers", "2")) == 0
        rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
        assert all(row["seconds"] >= 0.5 for row in rows)
        assert all(row["epochs"] < 1000 for row in rows)
