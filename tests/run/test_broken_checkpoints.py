"""A checkpoint that was made by others, and sealed as ours are, is gone on with or refused in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from arborl.cli import main
from arborl.config import load_config
from arborl.run.checkpoint import _seal
from arborl.trainer import train

NAME = "epoch_000001"
TINY = ["train.epochs=1", "eval.num_prompts=1", "log.record_every=0", "log.trackers=[]", "sample.num_prompts=1"]
TINY += ["tree.w=1", "sample.num_steps=3", "model.train=lora", "model.lora.rank=1", "train.ema_decay=0.5"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(load_config("mixture", [*TINY, f"log.dir={tmp_path_factory.mktemp('runs')}", "run_name=made"]))


@pytest.fixture
def checkpoint(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "made")
    return tmp_path / "made" / "checkpoints" / NAME


def call(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The error of a command, in one line; empty where it did its work. Anything else that is raised is a failure."""
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert (stopped.value.code or 0, len(lines)) in ((0, 0), (2, 1)), lines
    return "".join(lines)


def reseal(checkpoint: Path) -> Path:
    (checkpoint / "SHA256SUMS").unlink()
    _seal(checkpoint)
    return checkpoint.parent.parent


def test_a_run_goes_on_from_an_evaluation_without_a_standard_error(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
):
    """One picture has none, and the file says null."""
    run = checkpoint.parent.parent
    assert not call("train", "--resume", str(run), "train.epochs=2", capsys=capsys)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["eval/place_stderr"] for row in rows if "eval/place" in row] == [None] * 3


HEADERS: dict[str, bytes | dict[str, Any]] = {
    "nothing": b"",
    "a list": b"[1]",
    "null": b"null",
    "no text": b"\xff\xfe",
    "lists in lists": b"[" * 100_000,
    "a number of 6,000 digits": b'{"version": ' + b"2" * 6000 + b"}",
    "NaN": b'{"version": NaN}',
    "another version": {"version": [2]},
    "an epoch in words": {"epoch": "1"},
    "an epoch below 0": {"epoch": -1},
    "another epoch": {"epoch": 7},
    "half an epoch": {"epoch": 1.5},
    "no epoch": {"epoch": None},
    "prompts in words": {"prompts": "4"},
    "prompts without end": {"prompts": 10**40},
    "a list of forwards": {"forwards": [3]},
    "a list of skipped steps": {"broken": {}},
    "forwards and backwards below 0": {"forward_backwards": -3},
    "averaged in words": {"ema_steps": "many"},
    "no list of prompts": {"prompt_list": None},
    "an evaluation in words": {"evaluation": "good"},
    "an evaluation of words": {"evaluation": {"epoch": 1, "eval/place": "good"}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_no_run_writes(name: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]):
    change, file = HEADERS[name], checkpoint / "state.json"
    if isinstance(change, dict):
        changed = {k: v for k, v in (json.loads(file.read_text()) | change).items() if v is not None}
        change = json.dumps(changed).encode()
    file.write_bytes(change)
    run = reseal(checkpoint)
    line = call("train", "--resume", str(run), "train.epochs=2", capsys=capsys)
    assert line.startswith("error: checkpoint=")


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "a number alone": lambda values: torch.zeros((2,) * (values.ndim + 1)),
    "a longer one": lambda values: torch.zeros((*values.shape[:-1], 11)),
    "whole numbers": lambda values: values.long(),
    "NaN": lambda values: values * torch.nan,
    "infinity": lambda values: values * 0 + torch.inf,
}
FILES = ["weights", "ema", "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.step"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_no_run_writes(name: str, file: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]):
    path = checkpoint / f"{file}.safetensors"
    tensors = load_file(path)
    first = min(tensors)
    save_file(tensors | {first: CHANGES[name](tensors[first])}, path)
    run = reseal(checkpoint)
    assert "checkpoint=" in call("train", "--resume", str(run), "train.epochs=2", capsys=capsys)
    if name == "NaN" and file in ("weights", "ema"):  # the average is what is looked at
        for command in (["eval"], ["sample", "-n", "1", "-o", str(run / "pictures")]):
            assert ("checkpoint=" in call(*command, "--run", str(run), capsys=capsys)) == (file == "ema")


@pytest.mark.parametrize("file", FILES)
def test_names_that_the_model_does_not_have(file: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]):
    path = checkpoint / f"{file}.safetensors"
    tensors = load_file(path)
    first = min(tensors)
    save_file({"nobody" if name == first else name: values for name, values in tensors.items()}, path)
    run = reseal(checkpoint)
    assert "checkpoint=" in call("train", "--resume", str(run), "train.epochs=2", capsys=capsys)


@pytest.mark.parametrize("file", FILES)
def test_files_that_hold_nothing_or_are_gone(file: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]):
    path = checkpoint / f"{file}.safetensors"
    path.write_bytes(b"")
    run = reseal(checkpoint)
    assert "checkpoint=" in call("train", "--resume", str(run), "train.epochs=2", capsys=capsys)
    path.unlink()
    reseal(checkpoint)
    line = call("train", "--resume", str(run), "train.epochs=2", capsys=capsys)
    assert ("checkpoint=" in line) == (file != "ema"), "an average begins with the weights"


def test_a_step_below_0_and_squares_below_0(checkpoint: Path, capsys: pytest.CaptureFixture[str]):
    for slot in ("step", "exp_avg_sq"):
        path = checkpoint / f"optimizer.{slot}.safetensors"
        whole = path.read_bytes()
        save_file({name: values - 5 for name, values in load_file(path).items()}, path)
        run = reseal(checkpoint)
        assert f"{slot} of" in call("train", "--resume", str(run), "train.epochs=2", capsys=capsys)
        path.write_bytes(whole)


def test_weights_of_another_precision_are_taken(checkpoint: Path, capsys: pytest.CaptureFixture[str]):
    for file in ("weights", "ema", "optimizer.exp_avg"):
        path = checkpoint / f"{file}.safetensors"
        save_file({name: values.double() for name, values in load_file(path).items()}, path)
    run = reseal(checkpoint)
    assert not call("train", "--resume", str(run), "train.epochs=2", capsys=capsys)
