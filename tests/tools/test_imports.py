"""A user's own module is found in the current folder, and nothing else is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from arborl.core.errors import InputError
from arborl.tools.imports import import_object

OWN = """
import alongside
def score(images, prompts, columns):
    import later                              # at the first call
    from bundle import part                   # a package
    from importlib import import_module
    import_module("by_name")
    return alongside.mean(images) + later.nothing + part.nothing
"""
HOSTILE = (
    'from pathlib import Path\nPath("ran").write_text(__name__)\nraise SystemExit("an import came to the folder")\n'
)
LIBRARIES = ("peft", "sentencepiece", "xformers", "torchvision", "bitsandbytes", "wandb", "tensorboard", "numexpr")
"""What torch, diffusers, transformers and accelerate import, or look for."""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a reward, what it imports, and files by the names of libraries."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "alongside.py").write_text("def mean(images): return images.flatten(1).mean(1)\n")
    (tmp_path / "later.py").write_text("from deeper import nothing\n")
    (tmp_path / "deeper.py").write_text("nothing = 0\n")
    (tmp_path / "by_name.py").write_text("")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "part.py").write_text("import deeper\nnothing = deeper.nothing\n")
    for name in LIBRARIES:
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    return tmp_path


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | {"ACCELERATE_USE_CPU": "1"},
    )


TRAIN = ["train", "model.train=lora", "model.lora.rank=2", "train.epochs=1", "sample.num_prompts=1", "tree.w=1"]
TRAIN += ["sample.num_steps=4", "eval.num_prompts=1", "log.record_every=0", "log.trackers=[]"]
SCRIPT = "import sys; sys.path[0] = sys.argv.pop(); from arborl.cli import main; main(sys.argv[1:])"


@pytest.mark.parametrize("start", ["module", pytest.param("script", marks=pytest.mark.slow)])
def test_a_folder_that_one_stands_in_replaces_no_library(here: Path, tmp_path_factory, start: str):
    """LoRA is peft's, which is imported late; the reward beside it, and all that it imports, is the user's."""
    words = [*TRAIN, "rewards=none", "rewards.own.fn=own:score"]
    elsewhere = str(tmp_path_factory.mktemp("bin"))  # where the console script lies
    done = python(*(["-m", "arborl", *words] if start == "module" else ["-c", SCRIPT, *words, elsewhere]), cwd=here)
    assert done.returncode == 0, done.stderr
    assert not (here / "ran").exists()
    assert (here / "runs" / "tree-1" / "summary.json").exists()


LOOK = """
import importlib.util, os, sys
sys.path[0] = "/nowhere"  # python -c would look in the current folder
os.chdir(sys.argv[1])
before = list(sys.path)
from arborl.tools.imports import import_object
"""
CASES = {
    "nobody, for what is built in": """
import_object("key", "arborl.rewards.simple:jpeg", ())
assert importlib.util.find_spec("deeper") is None
""",
    "nobody else, for what is the user's": """
import_object("key", "own:score", ())
assert importlib.util.find_spec("later") is None
""",
    "what was found there, later and from elsewhere": """
import torch
own = import_object("key", "own:score", ())
os.chdir("/")
assert own(torch.ones(2, 3, 4, 4), [], {}).tolist() == [1, 1]
""",
    "a package": """
import_object("key", "made.there:score", ())
""",
}


@pytest.mark.parametrize("who", CASES)
def test_who_may_look_there(here: Path, who: str):
    (here / "made").mkdir()
    (here / "made" / "__init__.py").write_text("import deeper\n")
    (here / "made" / "there.py").write_text("from . import deeper\nimport alongside\nscore = alongside.mean\n")
    done = python("-c", f"{LOOK}{CASES[who]}assert sys.path == before", str(here), cwd=here)
    assert done.returncode == 0, done.stderr


def test_an_installed_library_wins_over_a_mere_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As for a script: `wandb` is what W&B calls the folder of its runs."""
    (tmp_path / "click").mkdir()
    (tmp_path / "uses_click.py").write_text("import click\ndone = click.command\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "click", raising=False)
    assert import_object("key", "uses_click:done", ())


def test_the_module_of_this_folder_and_not_of_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_name.py").write_text(f"def score(): return {name!r}\n")
        monkeypatch.chdir(tmp_path / name)
        sys.modules.pop("same_name", None)
        assert import_object("key", "same_name:score", ())() == name


@pytest.mark.parametrize("code", ["0", "", "'bye'"])
def test_a_module_that_ends_python_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str):
    (tmp_path / "ends.py").write_text(f"import sys\nsys.exit({code})\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^rewards.x.fn=ends:f: ends ends Python when it is imported \(SystemExit"):
        import_object("rewards.x.fn", "ends:f", ())


def test_a_comparison_imports_nothing_from_the_folder_either(here: Path):
    """Its runs come from servers that multiprocessing starts by `python -c`."""
    for name in ("json", "torch", "yaml", "hydra"):
        (here / f"{name}.py").write_text(HOSTILE)
    words = ["compare", "mixture", "--seeds", "1", "--compute", "900", "--out", "out"]
    words += ["--set", "sample.num_prompts=1", "--set", "eval.num_prompts=2"]
    done = python("-c", SCRIPT, *words, "/nowhere", cwd=here)
    assert not (here / "ran").exists(), done.stderr
    assert done.returncode == 0, done.stderr
    assert list(here.glob("out/*/seed-0/summary.json"))
