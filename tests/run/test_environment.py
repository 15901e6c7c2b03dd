"""What a run was made with is told, kept and shown; and which prompts its evaluations are of is said everywhere."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from arborl.cli import main
from arborl.config import load_config, read_config
from arborl.core.errors import InputError
from arborl.data.prompts import Prompts
from arborl.report import write_report
from arborl.report.data import run_data
from arborl.run.environment import environment, evaluated_on, launched_alone, starts_of, too_slow
from arborl.run.resume import load_for_inference
from arborl.run.summary import SUMMARY
from arborl.trainer import train
from arborl.worlds.mixture import PLACES

from launching import ROOT, ranks

TINY = ["train.epochs=1", "eval.num_prompts=8", "log.record_every=0", "log.trackers=[]"]


def test_every_start_of_a_run_is_kept_and_shown(tmp_path: Path, capsys):
    run = train(load_config("mixture", [*TINY, f"log.dir={tmp_path}"]))
    said = capsys.readouterr().err
    assert f"torch {torch.__version__}" in said
    assert "CPU (" in said
    train(read_config(run / "config.yaml", ["train.epochs=2"]), resume=run)
    first, second = starts_of(run)
    assert (first["epoch"], second["epoch"]) == (0, 1)
    assert first["packages"]["torch"] == torch.__version__
    assert first["command"] == sys.orig_argv
    assert first["folder"] == os.getcwd()
    assert first["device"].startswith("CPU")
    assert run_data(run)["environment"] == [first, second]


def test_commits_are_those_of_the_code(tmp_path: Path, monkeypatch):
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.chdir(tmp_path)
    found = environment(Accelerator())["commits"]
    heads = [
        subprocess.run(["git", "-C", str(where), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        for where in (ROOT, tmp_path)
    ]
    assert found["folder"] == heads[1] != ""
    assert (found["arborl"] or "").rstrip("+") == heads[0]
    (tmp_path / "inside").mkdir()
    monkeypatch.setenv("PATH", "")  # no git
    assert environment(Accelerator())["commits"] == {"arborl": None, "folder": None}


def test_a_damaged_file_is_one_line(tmp_path: Path):
    for content in ("", "[]", '{"format": "arborl.environment", "starts": [1]}', "[" * 10_000):
        (tmp_path / "environment.json").write_text(content)
        with pytest.raises(InputError, match=r"environment\.json is damaged"):
            starts_of(tmp_path)


def test_a_damaged_file_stops_no_run(tmp_path: Path, capsys):
    run = train(load_config("mixture", [*TINY, f"log.dir={tmp_path}"]))
    for number, name in enumerate(("damaged_environment.json", "damaged_environment.json-1"), 2):
        (run / "environment.json").write_text(f"damaged {number}")
        train(read_config(run / "config.yaml", [f"train.epochs={number}"]), resume=run)
        assert (
            f"environment.json is damaged; try: the run without that file; it is kept as {name}"
            in capsys.readouterr().err
        )
        assert (run / name).read_text() == f"damaged {number}"
        assert len(starts_of(run)) == 1


def test_what_a_start_warns_of_is_said(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("arborl.run.environment.LARGE", 1)
    monkeypatch.setattr("arborl.run.setup.launched_alone", lambda: ["started alone"])
    train(load_config("mixture", [*TINY, f"log.dir={tmp_path}"]))
    said = capsys.readouterr().err
    assert "runs on the CPU" in said
    assert "warning: started alone" in said


def test_words_that_are_no_text_are_kept_as_far_as_they_are(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["arborl", "train", os.fsdecode(b"x\xff")])
    run = train(load_config("mixture", [*TINY, f"log.dir={tmp_path}"]))
    assert starts_of(run)[0]["command"] == ["arborl", "train", "x\ufffd"]
    odd = run.rename(tmp_path / os.fsdecode(b"x\xff"))
    assert run_data(odd)["name"] == "x\ufffd"
    write_report(odd)


def test_a_large_model_on_a_cpu_is_warned_of():
    assert too_slow(Accelerator(), 7_000_000) == []
    (text,) = too_slow(Accelerator(), 2_243_171_520)
    assert "2.2 billion parameters and runs on the CPU" in text


class TestWhatEvaluationsAreOf:
    """Page, summary, `arborl` alone, comparisons and the log: held-out is said of what is held out, of nothing else."""

    @pytest.fixture
    def lists(self, tmp_path: Path, monkeypatch) -> Path:
        monkeypatch.chdir(tmp_path)
        Path("few.txt").write_text("".join(f"a dot at the {name}\n" for name in PLACES))
        Path("many.txt").write_text("".join(f"dot {i} at the {name}\n" for i in range(200) for name in PLACES))
        Path("others.txt").write_text("another dot at the top left\n")
        Path("mixed.txt").write_text("another dot at the top left\na dot at the top left\n")
        return tmp_path

    @pytest.mark.parametrize(
        ("settings", "words", "warning"),
        [
            (["prompts.path=few.txt"], "training prompts", "evaluations draw the training prompts"),
            (["prompts.path=many.txt"], "held-out prompts", ""),
            (["prompts.path=many.txt", "prompts.held_out=0"], "training prompts", "evaluations draw the training"),
            (["prompts.path=few.txt", "eval.prompts=others.txt"], "held-out prompts", ""),
            (
                ["prompts.path=few.txt", "eval.prompts=mixed.txt"],
                "prompts of which some are trained on",
                "1 of the 2 evaluation prompts are trained on too",
            ),
        ],
    )
    def test_everywhere(self, lists: Path, capsys, settings: list[str], words: str, warning: str):
        run = train(load_config("mixture", [*TINY, *settings, "run_name=x"]))
        said = capsys.readouterr().err
        assert f"eval/place on {words}: " in said
        assert said.count("warning") == said.count(warning or "warning:") == bool(warning), said
        assert json.loads((run / SUMMARY).read_text())["evaluated_on"] == words
        assert evaluated_on(run, read_config(run / "config.yaml")) == words
        assert run_data(run)["evaluated_on"] == words
        with pytest.raises(SystemExit):
            main([])
        assert words in " ".join(capsys.readouterr().out.split())
        with pytest.raises(SystemExit):
            main(["eval", "--run", "runs/x", "--json"])
        told = json.loads(capsys.readouterr().out)["evaluated_on"]
        file = next((text.split("=")[1] for text in settings if text.startswith("eval.prompts=")), "")
        assert told == (f"the prompts of {Path(file).resolve()}" if file else words)
        scripts = "".join(path.read_text() for path in (ROOT / "src/arborl/report/static").glob("*.js"))
        assert "held-out" not in scripts, "a page says what its data says"

    def test_what_a_run_trained_on_is_not_held_out_by_other_settings(self, lists: Path, capsys):
        train(load_config("mixture", [*TINY, "prompts.path=many.txt", "prompts.held_out=0", "run_name=x"]))
        train(load_config("mixture", [*TINY, "prompts.path=few.txt", "run_name=y"]))
        capsys.readouterr()
        for words, told in (
            (["runs/x", "prompts.held_out=0.5"], "training prompts"),
            (["runs/y", "prompts.path=many.txt", "prompts.held_out=0.5"], "held-out prompts"),
        ):
            with pytest.raises(SystemExit):
                main(["eval", "--json", "--run", *words])
            assert json.loads(capsys.readouterr().out)["evaluated_on"] == told
        Path("few.txt").unlink()
        with pytest.raises(SystemExit):
            main(["eval", "--json", "--run", "runs/y", "prompts.path=many.txt"])
        assert json.loads(capsys.readouterr().out)["evaluated_on"] == "evaluation prompts"

    def test_what_is_held_out_is_not_trained_on_and_may_not_change_sides(self, lists: Path):
        run = train(load_config("mixture", [*TINY, "prompts.path=many.txt", "run_name=x"]))
        counts = starts_of(run)[0]["prompts"]
        assert counts["training"] + counts["evaluation"] == 200 * len(PLACES)
        assert 16 <= counts["evaluation"] < 0.1 * counts["training"]
        more = ["train.epochs=2", "eval.prompts=others.txt"]
        with pytest.raises(InputError, match=r"changes which prompts of prompts\.path are trained on"):
            train(read_config(run / "config.yaml", more), resume=run)


def test_several_processes_without_a_gpu_work_together(tmp_path: Path):
    """As torchrun starts them, with nothing said of the CPU: on a machine that has no GPU they are one run."""
    quiet = {"ACCELERATE_USE_CPU": "0", "CUDA_VISIBLE_DEVICES": ""}
    arguments = ["train", "-c", "mixture", *TINY, "run_name=x", "sample.num_prompts=1"]
    for ended in ranks(2, *arguments, cwd=tmp_path, environment=quiet):
        assert ended.code == 0, ended.said
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["x"]
    (start,) = starts_of(tmp_path / "runs" / "x")
    assert start["processes"] == 2


def test_processes_that_do_not_know_of_each_other_are_an_error(tmp_path: Path, monkeypatch):
    Accelerator()  # as a notebook may have begun one before
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match="processes=4: WORLD_SIZE says so, and this one found 1"):
        train(load_config("mixture", [*TINY, f"log.dir={tmp_path}"]))
    assert not list(tmp_path.iterdir())
    # Some platforms set it for whoever works there; what one process does alone needs no other.
    load_for_inference(load_config("mixture", TINY), None, Prompts(["a dot"], {}))
    monkeypatch.setenv("WORLD_SIZE", "")
    train(load_config("mixture", [*TINY, f"log.dir={tmp_path}"]))


def test_a_launcher_that_started_one_of_several_is_warned_of(tmp_path: Path):
    assert launched_alone() == []
    asked = "import arborl.run.environment as e; print(e.launched_alone())"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {asked!r}])"
    command = [sys.executable, "-c", inner, "launch", "--num_processes=8", "train.py"]
    clean = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    said = subprocess.run(command, capture_output=True, text=True, env=clean)
    assert "accelerate launch was asked for 8 processes and started one" in said.stdout, shlex.join(command)
