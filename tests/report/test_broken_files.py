"""The page of a run or a comparison whose files are not what was written: a page, or one line."""

import json
import math
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from arborl.cli import main
from arborl.compare import Cell, Comparison, Protocol
from arborl.compare.results import Point, Row
from arborl.config import load_config
from arborl.config.schema import Config
from arborl.core.errors import InputError
from arborl.report import data, read
from arborl.report.data import _sheet, _tree
from arborl.run.reward_hacking import LIMITS
from arborl.run.trees import TreeFile
from arborl.trainer import train

from conftest import recorded_tree

TREE, SHEET = "trees/epoch_000000", "samples/epoch_000001"
TINY = ["train.epochs=1", "eval.num_prompts=2", "eval.every=1", "log.record_every=1", "log.trackers=[]"]
TINY += ["sample.num_prompts=1", "tree.w=1", "sample.num_steps=3"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(load_config("mixture", [*TINY, f"log.dir={tmp_path_factory.mktemp('runs')}", "run_name=made"]))


@pytest.fixture(autouse=True)
def settings_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are whole here, and take longer than all else."""
    monkeypatch.setattr(data, "read_config", lambda path: known())
    monkeypatch.setattr(data, "_settings", lambda config: [])


@cache
def known() -> Config:
    return load_config("mixture", TINY)


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "made"))


def line_of(folder: Path) -> str:
    """What is said of it; nothing of one that can be shown. Anything else that is raised is a failure."""
    _tree.cache_clear()
    _sheet.cache_clear()
    try:
        json.dumps(read(folder), allow_nan=False)  # as it stands on the page
    except InputError as error:
        return str(error)
    return ""


NOT_JSON = [b"", b"{", b"\xff\xfe", b"\0" * 50, b"[" * 100_000, b'{"epoch": ' + b"9" * 6000 + b"}"]
NOT_THIS = [b"[]", b"null", b"3", b'"x"', b"{}", b'[{"epoch": 1}]', b'{"epoch": NaN}', b'{"epoch": 1e999}']


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", f"{TREE}.json", f"{SHEET}.json", f"{SHEET}.png"])
def test_another_file_in_its_place(name: str, run: Path):
    for content in (*NOT_JSON, *NOT_THIS):
        (run / name).write_bytes(content + b"\n" * name.endswith("l"))
        line = line_of(run)
        may_be = (name, content) == ("summary.json", b"{}")
        assert may_be or line.startswith(("run=", "tree file=", "sheet=")), content[:20]


def test_a_damaged_file_is_one_line_of_the_command_too(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / "metrics.jsonl").write_text('{"epoch": 0, "reward": "much"}\n')
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(run)])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: run=")


ODD: list[Any] = [
    "x",
    None,
    [],
    {},
    True,
    -1,
    0,
    [1],
    10**400,
    {"a": [1]},
    2.5,
    "\ud800",
    math.nan,
    math.inf,
    [[0] * 4],
]
ODD += [[0, 0, 10**6, 10**6], [0, 0, 10**30, 10**30], [5, 5, 1, 1], [-5, 0, 5, 5], [0.5, 0, 3, 3], [1, 2, 3]]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands inside a JSON value; of a list, the first."""
    inner = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    return [found for key, each in inner for found in ((*path, key), *places(each, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    """The same with another thing there; with none where `to` is ...."""
    value = json.loads(json.dumps(value))
    at = value
    for key in path[:-1]:
        at = at[key]
    if to is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return value


def tried(value: Any, most: int) -> list[Any]:
    """Some of the ways to change one thing in it, the same ones each time."""
    every = [(path, to) for path in places(value) for to in (*ODD, ...)]
    return [changed(value, path, to) for path, to in random.Random(0).sample(every, min(most, len(every)))]


FRACTIONS = ("diversity", *(f"eval/pictures/{name}" for name in LIMITS))


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", f"{TREE}.json", f"{SHEET}.json"])
def test_another_value_in_it(name: str, run: Path):
    first, *others = (run / name).read_text().split("\n") if name.endswith("l") else [(run / name).read_text()]
    said = set()
    for value in tried(json.loads(first), 30):
        if name.startswith("metrics") and any(type(value.get(key, 0.0)) in (int, bool) for key in FRACTIONS):
            continue  # right, but not to the types that are held to while testing
        (run / name).write_text("\n".join([json.dumps(value), *others]))
        said.add(line_of(run))
    assert len(said) > 1


SHAPES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "gone": lambda values: None,
    "shorter": lambda values: values[:-1],
    "one": lambda values: values.flatten()[:1],
    "nothing": lambda values: values.new_zeros(0),
    "a number alone": lambda values: values.new_zeros(()),
    "another axis": lambda values: values[None],
    "below 0": lambda values: (values.double() * 0 - 5).to(values.dtype),
    "large": lambda values: (values.double() * 0 + 1e9).to(values.dtype),
    "infinite": lambda values: values.double() * 0 + math.inf,
    "NaN": lambda values: values.double() * torch.nan,
    "whole": lambda values: values.long() + 0 * torch.arange(1),
    "counted": lambda values: torch.arange(values.numel()).reshape(values.shape),
    "reversed": lambda values: values.flip(0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_other_tensors_in_a_tree(name: str, run: Path):
    tensors = load_file(run / f"{TREE}.safetensors")
    said: dict[str, str] = {}
    for key, values in tensors.items():
        other = SHAPES[name](values)
        made = tensors | {key: other} if other is not None else {k: v for k, v in tensors.items() if k != key}
        save_file({k: v.contiguous().clone() for k, v in made.items()}, run / f"{TREE}.safetensors")
        said[key] = line_of(run)
    if name in ("gone", "shorter", "nothing", "a number alone", "another axis"):
        needed = said.keys() - ({"ratio"} if name == "gone" else set())  # which version 2 did not have
        assert [key for key in needed if not said[key].startswith("tree file=")] == []


def test_a_recorded_tree_is_read_as_it_was_written(tmp_path: Path):
    tree = recorded_tree(leaves_without_score=True)
    tree.save(tmp_path / "tree")
    assert torch.equal(TreeFile.load(tmp_path / "tree").plan.parent, tree.plan.parent)


def test_a_sheet_that_was_cut_or_whose_bits_turned(run: Path):
    whole = (run / f"{SHEET}.png").read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 15)):
        for content in (whole[:place], whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :]):
            (run / f"{SHEET}.png").write_bytes(content)
            line_of(run)


BOXES: list[Any] = [None, "abcd", {}, [1, 2, 3], [0] * 5, ["a"] * 4, [0.5, 0, 3, 3], [5, 5, 1, 1], [0, 0, 0, 0]]
BOXES += [[-5, 0, 5, 5], [0, -5, 5, 5], [0, 0, 10**6, 5], [0, 0, 5, 10**6], [0, 0, 10**30, 10**30]]


@pytest.mark.parametrize("box", BOXES)
def test_a_picture_that_is_not_on_its_sheet(box: Any, run: Path):
    """One of a million pixels a side would take the memory."""
    index = json.loads((run / f"{SHEET}.json").read_text())
    index["pictures"][0]["box"] = box
    (run / f"{SHEET}.json").write_text(json.dumps(index))
    assert line_of(run).startswith("sheet=")


def test_a_comparison(tmp_path: Path):
    def row(cell: str) -> Row:
        curves = {seed: [Point(100.0 * i, float(i), 0.1 * i, 0.1) for i in range(3)] for seed in (0, 1)}
        numbers = {"epochs": 3.0, "before": 0.1, "score": 0.3, "stderr": 0.1, "forwards": 1.0, "compute": 200.0}
        numbers |= {"forward_backwards": 2.0, "seconds": 3.0, "peak_memory": 10, "compute_to_baseline": None}
        numbers |= {"score_at_equal_compute": 0.3, "stderr_at_equal_compute": 0.1, "scores": {0: 0.2, 1: 0.3}}
        return Row(cell=cell, plan="tree", seeds=[0, 1], curves=curves, **numbers)  # pyright: ignore[reportArgumentType]

    file = tmp_path / "compare.json"
    comparison = Comparison(Protocol((0, 1), 1.0), "place", "tree", 0.3, 200.0, [row(Cell("tree").text), row("mix")])
    file.write_text(comparison.as_json())
    assert line_of(tmp_path) == ""
    for value in tried(json.loads(file.read_text()), 100):
        file.write_text(json.dumps(value))
        line_of(tmp_path)
    for content in (*NOT_JSON, *NOT_THIS):
        file.write_bytes(content)
        assert line_of(tmp_path).startswith("comparison=")
