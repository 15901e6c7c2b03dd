"""How the command line behaves: asked nothing, at the Tab key, to machines, on a terminal, given something wrong."""

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import arborl
from arborl.cli import main
from arborl.cli.app import app, out
from arborl.cli.completion import reward_names
from arborl.cli.suggestions import print_suggestions
from arborl.rewards.catalog import BUILT_IN
from arborl.tools.files import is_locked, lock

BIN = Path(sys.executable).parent


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main([*arguments])
    return int(end.value.code or 0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder, finished, by its files alone."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    (folder / "metrics.jsonl").write_text("{}\n{}\n")
    (folder / "summary.json").write_text(
        json.dumps({"eval_before": 0.25, "eval_after": 0.5, "evaluated_on": "held-out prompts", "epochs": 2})
    )
    return folder


def test_alone_it_says_what_to_do_next(run: Path, capsys):
    def said() -> str:
        assert ended() == 0
        return capsys.readouterr().out

    assert "runs/mine: finished, 2 epochs, 0.2500 -> 0.5000 on held-out prompts" in said()
    assert "arborl report --open runs/mine" in said()
    (run / "summary.json").write_text("{")
    assert "damaged" in said()
    (run / "summary.json").unlink()
    with lock(run / ".lock"):
        running = said()
    assert "2 epochs so far, it is running" in running
    assert "arborl report --live runs/mine" in running
    assert "--resume" not in running
    assert "arborl train --resume runs/mine" in said()
    odd = run.with_name("[red]x y")
    shutil.copytree(run, odd)
    os.utime(run / "config.yaml", (0, 0))
    os.utime(run / "metrics.jsonl", (0, 0))
    assert "arborl report --live 'runs/[red]x y'" in said(), "a name is text, and can be copied"
    shutil.rmtree(odd)
    (odd / "config.yaml").mkdir(parents=True)
    (run.parent / "nowhere").symlink_to("gone")
    assert "runs/" in said()
    shutil.rmtree(run.parent)
    assert "arborl train" in said()


def test_everything_it_names_exists(run: Path, capsys):
    print_suggestions(out)
    for line in capsys.readouterr().out.splitlines():
        words = line.split()
        if words[:1] == ["arborl"] and not words[1].startswith("-"):
            assert words[1] in app.commands


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["trian"], ["trian", "train", "see: arborl -h"]),
        (["train", "--resum", "x"], ["--resum", "--resume", "see: arborl train -h"]),
        (["export"], ["RUN", "see: arborl export -h"]),
        (["report", "--port", "many"], ["--port", "many"]),
        (["rewards", "chek"], ["chek", "see: arborl rewards -h"]),
        (["completion", "tcsh"], ["tcsh", "bash", "zsh", "fish"]),
    ],
)
def test_a_slip_of_the_pen_is_one_line(given: list[str], words: list[str], capsys):
    assert ended(*given) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("error: ")
    assert all(word in said for word in words)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_what_a_launcher_says_is_a_number_or_nothing(name: str, monkeypatch: pytest.MonkeyPatch, capsys):
    for value in ("", " ", "1" if name.endswith("SIZE") else "0"):
        monkeypatch.setenv(name, value)
        assert ended("plan", "-c", "mixture") == 0
        assert capsys.readouterr().out
    monkeypatch.setenv(name, "abc")
    assert ended("plan", "-c", "mixture") == 2
    assert capsys.readouterr().err == f"error: {name}=abc: is no number; allowed: what a launcher sets, or nothing\n"


def test_help_and_version_end_well(capsys):
    assert ended("--version") == 0
    assert arborl.__version__ in capsys.readouterr().out
    for name in app.commands:
        assert ended(name, "-h") == 0
        assert "Usage: arborl" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_settings_values_and_runs(run: Path):
    tries = {
        "arborl tr": {"train"},
        "arborl train kernel.name = fl": {"flow_sde"},
        "arborl train kernel.name =": {"auto", "flow_sde", "dance_sde", "cps", "ddim", "ode"},
        "arborl train sample.num_pr": {"sample.num_prompts="},
        "arborl train sample.pad_batches = f": {"false"},
        "arborl train -c branch_": {"branch_depth", "branch_mix", "branch_width"},
        "arborl report runs/": {"runs/mine"},
        "arborl serve bri": {"brightness"},
    }
    lines = ['eval "$(arborl completion bash)"', "compopt() { :; }"]
    for words in tries:
        lines += [f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()"]
        lines += ["_arborl_completion arborl", 'echo "${COMPREPLY[*]}"']
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, env=environment, check=True)
    assert [set(line.split()) for line in done.stdout.splitlines()] == [*tries.values()], done.stderr


def test_completed_rewards_are_those_there_are():
    assert {item.value for item in reward_names(None, None, "")} == {*BUILT_IN}  # type: ignore[arg-type]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_their_script(shell: str, capsys):
    assert ended("completion", shell) == 0
    assert "_ARBORL_COMPLETE" in capsys.readouterr().out


def test_styles_are_for_terminals(tmp_path: Path):
    """Nothing but text into a pipe; and a terminal that wants no colours gets none."""
    command = [str(BIN / "arborl")]
    plain = subprocess.run(command, capture_output=True, cwd=tmp_path, check=True).stdout
    assert b"\x1b" not in plain
    assert b"\x1b[1m" in on_a_terminal(command, tmp_path)
    script = "from arborl.cli.app import out; out.print('[green]ready[/green]')"
    assert b"\x1b[32m" in on_a_terminal([sys.executable, "-c", script], tmp_path)
    assert b"\x1b" not in on_a_terminal([sys.executable, "-c", script], tmp_path, NO_COLOR="1")


def on_a_terminal(command: list[str], cwd: Path, **environment: str) -> bytes:
    ours, theirs = pty.openpty()
    known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(command, stdout=theirs, cwd=cwd, env=known | {"TERM": "xterm-256color"} | environment)
    process.wait()
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 4096):
            said += part
    except OSError:  # the terminal's end
        pass
    os.close(ours)
    return said


def test_machines_get_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["train.epochs=1", "sample.num_prompts=2", "eval.num_prompts=2", "log.record_every=0", "log.trackers=[]"]
    assert ended("train", "--json", "-c", "mixture", "run_name=x", *small) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"] == "runs/x"
    assert told["epochs"] == 1
    assert ended("sample", "--json", "--run", "runs/x", "-n", "2") == 0
    told = json.loads(capsys.readouterr().out)
    assert [picture["file"] for picture in told["pictures"]] == ["00000.png", "00001.png"]
    assert ended("report", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert Path(told["report"]).stat().st_size == told["bytes"]


def test_a_run_has_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["train.epochs=1", "sample.num_prompts=2", "eval.num_prompts=2", "log.record_every=0", "log.trackers=[]"]
    assert ended("train", "-c", "mixture", "run_name=x", *small) == 0
    assert not is_locked(Path("runs/x/.lock"))
    before = Path("runs/x/metrics.jsonl").read_bytes()
    with lock(Path("runs/x/.lock")):
        assert is_locked(Path("runs/x/.lock"))
        capsys.readouterr()
        assert ended("train", "--resume", "runs/x", "train.epochs=2") == 2
        assert "error: run=runs/x: another process is writing to it" in capsys.readouterr().err
    assert Path("runs/x/metrics.jsonl").read_bytes() == before
    assert ended("train", "--resume", "runs/x", "train.epochs=2") == 0


def test_names_for_notebooks():
    """`arborl.train` is the function, also once its module is imported; every name is there and listed."""
    script = (
        "import arborl, sys; assert 'torch' not in sys.modules; import arborl.trainer; from arborl import train, Plan;"
        "assert callable(train) and arborl.train is train; assert all(hasattr(arborl, n) for n in arborl.__all__);"
        "assert set(arborl.__all__) <= set(dir(arborl))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
