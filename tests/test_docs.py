"""What is written for people: links lead somewhere, and what the pages name exists."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from arborl.cli import app
from arborl.config import knobs, load_config, presets
from arborl.scenes import FOLDER
from arborl.train import train

from conftest import tiny_overrides

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@every_page
def test_every_internal_link_resolves(page: Path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            found = page.parent / target
            assert found.is_dir() or found.stat().st_size > 0, target


def commands(page: Path) -> list[list[str]]:
    """Every line of a page's shell blocks, split into words."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


@every_page
def test_commands_name_what_exists(page: Path):
    """Sub-commands, presets and settings of every command on a page are real (running them is other tests' work)."""
    for words in commands(page):
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            continue
        if words[0] == "arborl":
            assert words[1] in app.commands
        if words[0].startswith("scripts/"):
            assert (ROOT / words[0]).is_file()
            continue
        settings = [word for word in words if re.match(r"^[a-z_.]+=", word)]
        # A pipeline of the reader's own is read for what it is; here there is one.
        settings = [re.sub(r"^(model\.path)=path/to/.*", rf"\1={FOLDER}", word) for word in settings]
        preset = words[words.index("--config-name") + 1] if "--config-name" in words else "tree"
        assert preset in presets()
        load_config(preset, settings)


def test_every_metric_is_explained(tmp_path: Path):
    run = train(load_config("mixture", ["train.epochs=1", "eval.num_prompts=2", f"log.dir={tmp_path}"]))
    explained = set(re.findall(r"`([^`]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    for name in json.loads((run / "metrics.jsonl").read_text().splitlines()[0]):
        generic = re.sub(r"^rewards/place/", "rewards/<name>/", re.sub(r"^eval/place", "eval/<reward>", name))
        generic = "time/<stage>" if name.startswith("time/") else generic
        generic = re.sub(r"^(eval/pictures/.*)_stderr$", r"\1", generic)
        assert {generic, f"/{generic.rsplit('/', 1)[-1]}"} & explained, name


def test_every_preset_is_in_the_readme():
    text = (ROOT / "README.md").read_text()
    assert all(f"| `{name}`" in text for name in presets())


@every_page
def test_settings_named_in_prose_exist(page: Path):
    known = {key for key, _ in knobs()}
    sections = "model|sample|tree|kernel|advantage|train|eval|log|prompts"
    for key in re.findall(rf"`((?:{sections})\.[a-z_.]+)(?:=[^`]*)?`", page.read_text()):
        assert key in known or key.endswith((".py", ".yaml", ".txt")), key


SCRIPTS = {"embed_sd35": "sd3", "embed_flux": "flux", "train_sd35_8gpu": "sd3", "train_flux_8gpu": "flux"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_run(name: str, tiny_folder, tmp_path: Path):
    """With one process, and a tiny pipeline and a reward without weights in the place of the real ones."""
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    own = tiny_overrides(SCRIPTS[name], tiny_folder(SCRIPTS[name]))
    own = [word for word in own if not word.startswith(("tree.", "sample.num_prompts", "sample.num_steps"))]
    own += [f"prompts.cache={tmp_path / 'cache'}", f"log.dir={tmp_path / 'runs'}", "train.epochs=1"]
    command = ["bash", str(ROOT / "scripts" / f"{name}.sh"), "prompts.txt", *own]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "GPUS": "1", "PATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "cache").rglob("*.safetensors"))
    assert (tmp_path / "runs").exists() == name.startswith("train")


def test_every_script_is_tried():
    assert {path.stem for path in (ROOT / "scripts").iterdir()} == {*SCRIPTS}
