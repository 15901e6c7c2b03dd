"""docs/extending.md and examples/ as a reader would run them, only smaller; and every error that the page shows."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from arborl import read_metrics
from arborl.cli import main

from conftest import ROOT

PAGE = ROOT / "docs" / "extending.md"
SMALL = ["train.epochs=1", "sample.num_prompts=2", "eval.num_prompts=2", "log.record_every=0", "log.trackers=[]"]
MODULES = ("my_rewards", "my_model", "my_advantage", "my_loss")


def files() -> dict[str, str]:
    """The page's files by name: Python and yaml have theirs in the first line, the prompt file in the line before."""
    text = PAGE.read_text()
    found = {name: code for code, name in re.findall(r"```(?:python|yaml)\n(# (\S+)\n.*?)```", text, re.DOTALL)}
    return found | dict(re.findall(r"`(\S+\.jsonl)`, .*?```json\n(.*?)```", text, re.DOTALL))


def commands() -> list[list[str]]:
    """Every line of the page's shell blocks, split into words."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file changed within a second would be read from there
    for name in MODULES:
        sys.modules.pop(name, None)
    return tmp_path


def ends_with(code: int, *words: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    assert stopped.value.code == code


def test_the_page_has_its_files():
    assert {*files()} == {*(f"{name}.py" for name in MODULES), "colours.jsonl", "swatch.yaml"}


LESS = {
    "train": SMALL,
    "doctor": ["--canary", "0", "sample.num_prompts=2", "sample.batch_size=8", "train.batch_size=4"],
    "compare": ["--dry-run"],
}


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_of_the_page_runs(words: list[str], here: Path, capsys):
    ends_with(0, *words[1:], *LESS.get(words[1], []))
    if words[1] == "train":
        (run,) = (here / "runs").iterdir()
        rows = read_metrics(run)
        assert rows[0]["edges"] > 0
        assert rows[0].get("ratio_error", 0.0) <= 1e-6
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    expected = ["evaluations draw the training prompts, as nothing is held out: eval.prompts names others"]
    expected += ["rewards.near answered NaN, no score, for some leaves; such leaves are left out and counted"]
    near = "rewards.near.fn=my_rewards:near" in words
    assert said == ([f"warning: {text}" for text in expected] if near else [])


RED, RANKS = ["-c", "mixture", "rewards=none", "rewards.red.fn=my_rewards:redness"], "advantage.name=my_advantage:ranks"
LEAVES = ["-c", "mixture", "loss.name=my_loss:Regression"]
MISTAKES = [  # in the page's order: a file, what is put in the place of what in it, the settings it is tried with
    ("my_rewards.py", "", "", [*RED[:-1], "rewards.red.fn=my_rewards:rednes"]),
    ("my_rewards.py", "images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))", "images.mean((2, 3))", RED),
    ("my_model.py", "def decode", "def decoded", ["-c", "swatch.yaml"]),
    ("my_model.py", "16, 16)", "16, 16)[:, :1]", ["-c", "swatch.yaml"]),
    ("my_advantage.py", "", "", ["-c", "mixture", RANKS[:-1]]),
    (
        "my_advantage.py",
        "return backup_values(plan, torch.where(scored, rank, torch.nan))",
        "return rank",
        ["-c", "mixture", RANKS],
    ),
    ("my_loss.py", "", "", [*LEAVES, "loss.options.hlod=0.5"]),
    ("my_loss.py", 'return loss.sum(), {"error"', 'return loss, {"error"', LEAVES),
    ("my_loss.py", "", "", ["-c", "mixture", "algo=flat", "kernel.name=ode", "loss.name=my_loss:Reinforce"]),
]
ERRORS = re.findall(r"^error: .*$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("mistake", "error"), zip(MISTAKES, ERRORS, strict=True), ids=ERRORS)
def test_every_error_of_the_page_is_what_is_printed(mistake, error: str, here: Path, capsys):
    name, old, new, settings = mistake
    text = files()[name]
    assert old in text
    (here / name).write_text(text.replace(old, new) if old else text)
    ends_with(2, "train", *settings)
    assert capsys.readouterr().err.strip() == error
    assert not (here / "runs").exists()


EXAMPLES = {
    "own_reward.py": [*SMALL[:3], "eval.every=1"],
    "own_model.py": [*SMALL[:3], "eval.every=1"],
    "reading_a_run.py": [],  # of the newest run
}


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """One after the other, as `python examples/...` runs them, but for the imports, which take most of the time."""
    assert {*EXAMPLES} == {path.name for path in (ROOT / "examples").glob("*.py")}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    for name, arguments in EXAMPLES.items():
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    printed = capsys.readouterr().out
    for told in ("captions that came true", "after 1 epochs", "most was decided at step", "reading.png"):
        assert told in printed
    assert (tmp_path / "runs" / "tree-2" / "reading.png").stat().st_size > 0
