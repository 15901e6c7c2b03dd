"""A pipeline's folder whose files say what cannot be: a model, or one line. Folders come from strangers."""

import json
import math
import os
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest

from arborl.cli import main
from arborl.config import load_config
from arborl.config.schema import Config
from arborl.core.errors import InputError
from arborl.engine.method import schedule_of
from arborl.models import load_model, model_class
from arborl.models.sd import SDModel
from arborl.models.sd3 import SD3Model
from arborl.models.source import Source
from arborl.models.wan import WanModel

from conftest import CPU, TINY, tiny_overrides

FILES = ["model_index.json", "scheduler/scheduler_config.json", "vae/config.json", "{trained}/config.json"]


def trained(family: str) -> str:
    return "unet" if family.startswith("sd") and family != "sd3" else "transformer"


@pytest.fixture(params=["sd3", "sd"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(family: str, tiny_folder, tmp_path: Path) -> Path:
    """A copy of a pipeline, to be broken."""
    return Path(shutil.copytree(tiny_folder(family), tmp_path / family, copy_function=link))


def link(source: str, target: str) -> None:
    shutil.copy(source, target) if source.endswith(".json") else os.symlink(source, target)


@cache
def configs(family: str, folder: Path) -> tuple[Config, Config]:
    """Settings for a pipeline in that folder, which is whole when they are made: with a shift, and its own levels."""
    own = [f"model.family={family}", *tiny_overrides(family, folder), "tree.w=1", "prompts.cache=none"]
    last = ["sample.shift=null"] if family.startswith("sd") and family != "sd3" else ["sample.sigmas=pipeline"]
    return load_config("tree", [*own, "sample.shift=null"]), load_config("tree", [*own, *last])


def line_of(family: str, folder: Path, loads: bool = False) -> str:
    """What is said of it; nothing of one that can be used. Anything else that is raised is a failure."""
    shifted, own = configs(family, folder)
    try:
        model_class(own).check(own, may_fetch=True)
        schedule_of(shifted, 5)
        schedule_of(own, 5)
        if loads:
            load_model(own, CPU)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", sorted({name for cls in (SDModel, WanModel, SD3Model) for name in cls.schedulers}))
def test_every_scheduler_may_have_the_settings_it_has_by_default(name: str, tmp_path: Path):
    """Infinity is one of them."""
    if name.startswith("LMS"):
        pytest.importorskip("scipy")
    getattr(diffusers, name)().save_pretrained(tmp_path / "scheduler")
    index = {"_class_name": "StableDiffusionPipeline", "scheduler": ["diffusers", name]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    Source(str(tmp_path)).check_kinds("scheduler")


NOT_SETTINGS = [b"", b"[]", b"null", b"3", b'"x"', b"{", b"\xff\xfe", b"\0" * 50, b"[" * 100_000, b'{"a":' * 100_000]
NOT_SETTINGS += [b'{"x": ' + b"9" * 6000 + b"}", b'[{"in_channels": 4}]']


def test_files_that_hold_no_settings(family: str, folder: Path):
    for name in FILES:
        file = folder / name.format(trained=trained(family))
        whole = file.read_bytes()
        for content in NOT_SETTINGS:
            file.write_bytes(content)
            assert line_of(family, folder).startswith(f"model.path={folder}: its {file.relative_to(folder)} "), content
        file.write_bytes(whole)
    assert line_of(family, folder, loads=True) == ""


CLASSES: list[Any] = ["", "a.b", "_private", "__class__", "utils", "os.path", "DiffusionPipeline", "FluxPipeline"]
CLASSES += [None, 7, True, [1], {}, "x" * 5000, "\ud800", "a\nb"]


def test_a_pipeline_of_no_known_class(family: str, folder: Path):
    file = folder / "model_index.json"
    index = json.loads(file.read_text())
    for name in CLASSES:
        file.write_text(json.dumps(index | {"_class_name": name}))
        line = line_of(family, folder)
        assert line, name
        assert line.isprintable()
        if name != "FluxPipeline":  # as whoever does not name the family
            with pytest.raises(InputError):
                load_config("tree", tiny_overrides(family, folder))
    file.write_text(json.dumps({key: value for key, value in index.items() if key != "_class_name"}))
    assert "names no _class_name" in line_of(family, folder)


PARTS: list[Any] = [None, 3, True, "diffusers", {"a": 1}, [], [None], [None, None], ["diffusers"], ["diffusers", None]]
PARTS += [[None, "AutoencoderKL"], [1, 2], ["diffusers", ["AutoencoderKL"]], ["a", "b", "c"], ["", ""]]
NO_CLASS = [["diffusers", name] for name in ("nothing", "_private", "a.b", "utils", "__class__", "x" * 5000)]


def test_parts_that_are_none(family: str, folder: Path):
    file = folder / "model_index.json"
    index = json.loads(file.read_text())
    for part in (trained(family), "vae", "scheduler", "text_encoder", "tokenizer"):
        for kind in [*PARTS, *(NO_CLASS if part in (trained(family), "vae") else [])]:
            file.write_text(json.dumps(index | {part: kind}))
            assert f"as its {part}" in line_of(family, folder), (part, kind)
        file.write_text(json.dumps({key: value for key, value in index.items() if key != part}))
        assert f"names no {part}" in line_of(family, folder)


@pytest.mark.parametrize(
    "name", ["../x", "/etc", "..", ".", "", "a/b", "text_encoder/../../x", "a\0b", "\ud800", "a\\b"]
)
def test_parts_elsewhere(name: str, tiny_folder, tmp_path: Path):
    """A part is looked for in the folder of its name, and that is one in the pipeline's own."""
    folder = Path(shutil.copytree(tiny_folder("sd3"), tmp_path / "sd3", copy_function=link))
    file = folder / "model_index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: ["diffusers", "AutoencoderKL"]}))
    assert "names a part" in line_of("sd3", folder)


ODD: list[Any] = [
    None,
    "4",
    "x" * 1000,
    -1,
    0,
    2.5,
    True,
    10**30,
    math.nan,
    math.inf,
    [],
    [1],
    ["a"],
    [[1]],
    {},
    {"a": 1},
]
"""Values, of which most are of another kind than what they take the place of."""


@pytest.mark.parametrize("which", ["sd3", "flux", "wan", "sd", "sdxl"])
def test_a_part_that_says_something_odd(which: str, tiny_folder, tmp_path: Path):
    """Some of all changes of a value, the same ones each time; `pytest -m slow` tries more."""
    try_odd(which, tiny_folder, tmp_path, 25)


@pytest.mark.slow
@pytest.mark.parametrize("which", TINY)
def test_a_part_that_says_anything_odd(which: str, tiny_folder, tmp_path: Path):
    try_odd(which, tiny_folder, tmp_path, 600)


def try_odd(family: str, tiny_folder, tmp_path: Path, most: int) -> None:
    folder = Path(shutil.copytree(tiny_folder(family), tmp_path / family, copy_function=link))
    files = [folder / name.format(trained=trained(family)) for name in FILES[1:]]
    every = [(file, key, to) for file in files for key in json.loads(file.read_text()) for to in ODD]
    said: set[bool] = set()
    for file, key, to in random.Random(0).sample(every, min(most, len(every))):
        whole = file.read_text()
        file.write_text(json.dumps(json.loads(whole) | {key: to}))
        said.add(bool(line_of(family, folder)))
        file.write_text(whole)
    assert said == {True, False}


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("transformer", "in_channels", "4"),
        ("transformer", "patch_size", [2]),
        ("transformer", "num_layers", 10**12),
        ("vae", "block_out_channels", 8),
        ("vae", "block_out_channels", "8"),
        ("vae", "scaling_factor", "0.9"),
        ("vae", "scaling_factor", math.nan),
        ("vae", "shift_factor", {"a": 1}),
        ("scheduler", "shift", "3"),
        ("scheduler", "num_train_timesteps", "1000"),
        ("scheduler", "use_dynamic_shifting", "no"),
    ],
)
def test_numbers_of_another_kind(file: str, key: str, value: Any, tiny_folder, tmp_path: Path):
    folder = Path(shutil.copytree(tiny_folder("sd3"), tmp_path / "sd3", copy_function=link))
    path = next((folder / file).glob("*config.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert f"its {file} says {key}=" in line_of("sd3", folder)


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "tokenizer"])
def test_a_part_of_another_kind(part: str, tiny_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Found when it is loaded; by the command line, and nothing is written."""
    folder = Path(shutil.copytree(tiny_folder("sd3"), tmp_path / "sd3", copy_function=link))
    file = folder / "model_index.json"
    other = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: other}))
    own = [*tiny_overrides("sd3", folder), f"prompts.cache={tmp_path / 'cache'}", f"log.dir={tmp_path / 'runs'}"]
    with pytest.raises(SystemExit) as stopped:
        main(["train", *own, "tree.w=1", "train.epochs=1"])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert (stopped.value.code, len(lines)) == (2, 1)
    assert lines[0].startswith(f"error: model.path={folder}: ")
    assert not (tmp_path / "runs").exists()
