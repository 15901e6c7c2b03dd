"""A run of version 0.1.0 can still be read, and gone on with or refused in one line."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from arborl.cli import main
from arborl.config import read_config
from arborl.core.errors import InputError
from arborl.engine.state import Ema, State
from arborl.run.checkpoint import load_checkpoint
from arborl.run.resume import resolve_start

from conftest import ROOT

OLD = ROOT / "tests" / "golden" / "run_0_1_0"
CELL = "tree"
SETTINGS = [
    "sample.num_prompts=8",
    "sample.num_steps=4",
    "tree.w=1",
    "model.train=lora",
    "model.lora.rank=2",
    "model.lora.targets=[attn.to_q]",
    "train.learning_rate=1e-3",
    "train.ema_decay=0.5",
    "eval.num_prompts=2",
    "log.record_every=1",
]
"""What it was run with. A comparison that asks for the same takes it for its own."""
COMPUTE = 160
"""Of its two epochs: 112 forwards and 16 forward+backwards."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "run_0_1_0"))


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """A command, beside the run's folder: its exit code, what it printed and what it said."""
    monkeypatch.chdir(run.parent)

    def called(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        return (int(end.value.code or 0), *capsys.readouterr())

    return called


@pytest.fixture
def told(call: Call) -> Callable[..., dict]:
    """What a command prints as JSON."""

    def printed(*arguments: str) -> dict:
        code, output, said = call(*arguments, "--json")
        assert code == 0, said
        return json.loads(output)

    return printed


def test_it_is_shown(run: Path, told):
    """Its page names the prompts of its trees."""
    told("report", str(run))
    page = (run / "report.html").read_text(encoding="utf-8")
    heads = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(run.glob("trees/*.json"))]
    assert len(heads) == 2
    for head in heads:
        assert head["prompt"] in page


def test_its_weights_are_scored(run: Path, told):
    """With as many prompts and steps as its last evaluation, the score is the one it logged."""
    found = told("eval", "--run", str(run))
    assert found["prompts"] == 2
    assert found["failed"] == 0
    means = {name: values["mean"] for name, values in found["rewards"].items()}
    assert all(math.isfinite(mean) for mean in means.values())
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert means["scene"] == pytest.approx(last["eval/scene"], abs=1e-4)


def test_it_goes_on_by_the_command_it_was_started_with(run: Path, tmp_path: Path):
    """Settings that are newer than the run are what it ran by, unless the command names them."""
    file = tmp_path / "prompts.txt"
    file.write_text("a red circle\n" * 9)
    path = run / "config.yaml"
    content = path.read_text().replace("prompts:\n  path: ''", f"prompts:\n  path: {file}")
    assert str(file) in content
    path.write_text(content)
    given = [*SETTINGS, f"prompts.path={file}", f"run_name={run.name}", f"log.dir={run.parent}"]
    found = resolve_start(Path("auto"), "tree", given)
    assert (found.config.prompts.held_out, found.config.eval.num_between) == (0.0, 0)
    assert "siblings" not in path.read_text()
    assert (read_config(path).tree.siblings, found.config.tree.siblings) == ("independent", "independent")
    with pytest.raises(InputError, match=r"prompts\.held_out=0\.1: cannot change"):
        resolve_start(Path("auto"), "tree", [*given, "prompts.held_out=0.1"])


def test_it_keeps_its_preset_where_the_command_names_none(run: Path):
    """The default is another one now; a job that is started again by the same command goes on as it was."""
    given = [*SETTINGS, f"run_name={run.name}", f"log.dir={run.parent}"]
    found = resolve_start(Path("auto"), None, given)
    assert found.resume
    was = read_config(run / "config.yaml")
    assert (found.config.tree, found.config.advantage) == (was.tree, was.advantage)
    assert found.config.train.schedule == "constant"
    assert resolve_start(Path("auto"), None, [*given[:-2], "run_name=new"]).config.tree.siblings == "balanced"


def test_its_weights_make_pictures(run: Path, told):
    found = told("sample", "--run", str(run), "-n", "2", "-o", "made")
    made = [run.parent / "made" / row["file"] for row in found["pictures"]]
    assert [Image.open(path).size for path in made] == [(64, 64)] * 2


def test_its_weights_are_exported(run: Path, told):
    found = told("export", str(run), "lora")
    assert any(name.endswith(".safetensors") for name in found["files"])
    assert all((run.parent / "lora" / name).stat().st_size for name in found["files"])


def test_a_comparison_takes_it_for_its_own(run: Path, told):
    """It lies where the comparison would have put it, so that nothing is run, and its scores are in the table."""
    place = run.parent / "compared" / CELL / "seed-0"
    place.parent.mkdir(parents=True)
    run.rename(place)
    before = (place / "metrics.jsonl").read_bytes()
    common = [word for setting in SETTINGS for word in ("--set", setting)]
    budget = ["--seeds", "1", "--compute", str(COMPUTE), "--points", "2"]
    told("compare", CELL, *budget, *common, "-o", "compared")
    assert (place / "metrics.jsonl").read_bytes() == before
    (row,) = json.loads((place.parent.parent / "compare.json").read_text())["rows"]
    summary = json.loads((place / "summary.json").read_text())
    assert (row["before"], row["score"]) == (summary["heldout_before"], summary["heldout_after"])


def test_it_goes_on(run: Path, call):
    """A third epoch after its two; what it logged of those stays."""
    before = (run / "metrics.jsonl").read_text().splitlines()
    code, _, said = call("train", "--resume", str(run), "train.epochs=3", "log.record_every=0")
    assert code == 0, said
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert rows[:2] == [json.loads(line) for line in before[:2]]
    assert math.isfinite(rows[-1]["eval/scene"])
    assert json.loads((run / "summary.json").read_text())["epochs"] == 3


def test_its_settings_are_read_by_the_names_they_have_now(run: Path):
    path = run / "config.yaml"
    path.write_text(
        path.read_text().replace("max_broken: 10", "max_broken: 7").replace("width_mode: 0", "width_mode: 2")
    )
    config = read_config(path)
    assert (config.train.max_nonfinite_steps, config.prune.width_mode) == (7, "best_and_worst")
    path.write_text(path.read_text().replace("max_broken: 7", "max_broken: 7\n  max_nonfinite_steps: 5"))
    assert read_config(path).train.max_nonfinite_steps == 5


def test_its_counters_are_read(run: Path):
    """Its count of steps that were not finite has another name in the file."""
    checkpoint = run / "checkpoints" / "epoch_000002"
    head = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(head | {"broken": 3}))
    parameters = {name: nn.Parameter(values) for name, values in load_file(checkpoint / "weights.safetensors").items()}
    state = State(parameters, torch.optim.AdamW(parameters.values()), Ema(parameters, 0.5))
    load_checkpoint(state, checkpoint)
    assert (state.nonfinite_steps, state.epoch, state.forwards) == (3, 2, head["forwards"])
