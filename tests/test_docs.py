"""What is written for people: links lead somewhere, and what the pages name exists. `test_commands.py` runs it."""

import ast
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, takewhile
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from arborl.cli.app import app
from arborl.config import RENAMED, knobs, load_config, presets
from arborl.trainer import train
from arborl.worlds.scenes import FOLDER

from conftest import ROOT, tiny_overrides

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link may name after the #: a page's headings as GitHub spells them, a second one of a name with -1."""
    seen: Counter[str] = Counter()
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def test_anchors_are_githubs(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# A `run`, and *more*\n```sh\n# no heading\n```\n## [NaN](a.md) or not?\n## Again\n## Again\n")
    assert anchors(page) == {"a-run-and-more", "nan-or-not", "again", "again-1"}


@every_page
def test_every_internal_link_resolves(page: Path):
    text = FENCED.sub("", page.read_text())
    for link in [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r"(?:src|href)=\"([^\"]+)\"", text)]:
        if re.match(r"https?:|mailto:", link):
            continue
        target, _, anchor = link.partition("#")
        found = page.parent / target if target else page
        assert found.is_dir() or found.stat().st_size > 0, link
        assert not anchor or anchor in anchors(found), link


NEEDS = ("a GPU", "several GPUs", "several machines", "weights", "the network", "a key", "hours")
"""What a page may say that a command needs, as `needs weights`; such a command is not run by a test.

In the command's own comment, or in a comment line of its block, which then speaks for all that follows it there.
"""
MARK = re.compile(rf"#.*\bneeds (?:{'|'.join(NEEDS)})\b")


class Command(NamedTuple):
    words: list[str]
    marked: bool = False
    environment: dict[str, str] = {}  # noqa: RUF012 (never changed)


def shell(page: Path) -> list[Command]:
    """Every command in a page's shell blocks, split into words."""
    found: list[Command] = []
    for kind, block in FENCED.findall(page.read_text()):
        if kind != "sh":
            continue
        marked = False
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("#"):
                marked = marked or MARK.match(line) is not None
            elif line.strip():
                found += [one._replace(marked=marked or MARK.search(line) is not None) for one in parts(line)]
    return found


def parts(line: str) -> Iterator[Command]:
    """The commands of one line, without where their output goes."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    for joined, words in groupby(lexer, lambda word: word in ("&&", ";")):
        if not joined:
            words = list(takewhile(lambda word: not re.fullmatch(r"[|&<>]+", word), words))
            variables = list(takewhile(lambda word: re.match(r"[A-Z_]+=", word), words))
            yield Command(words[len(variables) :], environment=dict(word.split("=", 1) for word in variables))


def commands(page: Path) -> list[list[str]]:
    return [command.words for command in shell(page)]


def test_marks(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\na   # on four GPUs\nb 'x y'  # needs a GPU: any\n# needs weights: all that follows\nc \\\n  d\n```\n"
        "```\nnot a command\n```\n```sh\ne\n```\n"
    )
    assert shell(page) == [Command(["a"]), Command(["b", "x y"], True), Command(["c", "d"], True), Command(["e"])]
    page.write_text('```sh\nA=1 b -c x=[d,e] > f && g "$(h i)" | j\n```\n')
    assert shell(page) == [Command(["b", "-c", "x=[d,e]"], False, {"A": "1"}), Command(["g", "$(h i)"])]


def patterns(page: str) -> list[str]:
    """Lines of shell on a page, and commands inside its text, with what zsh takes for a pattern outside quotes: it
    refuses a command whose pattern no file has.
    """
    blocks = [block for kind, block in FENCED.findall(page) if kind in ("sh", "bash", "console", "shell")]
    inline = re.findall(r"`((?:arborl|python|pip|torchrun|accelerate) [^`]+)`", FENCED.sub("", page))
    plain = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?:^|(?<=\s))#.*""", re.MULTILINE)
    lines = [line for block in blocks for line in plain.sub("", block).splitlines()]
    return [line for line in [*lines, *(plain.sub("", text) for text in inline)] if re.search(r"[\[\]*?]", line)]


def test_patterns():
    page = "```sh\na x=[1]\nb 'x=[1]' \"y=[2]\" z=\\[3\\]  # [4]\nc *.png\n# d?\ne 'f\n[g]'\n```\n"
    page += "`arborl x=[1]` `y=[1]` `arborl 'z=[1]'`\n"
    assert patterns(page) == ["a x=[1]", "c *.png", "arborl x=[1]"]


@every_page
def test_commands_can_be_pasted_into_zsh(page: Path):
    assert patterns(page.read_text()) == []


SHELLS_OWN = {".", "cd", "cat", "ls", "open", "source", "export", "git"}
OF_OTHERS = {"tensorboard", "accelerate", "torchrun", "hf", "wandb"}


def check_names(words: list[str]) -> None:
    """Programs, sub-commands, files, presets and settings of a command are real."""
    match words:
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        case ["pip", "install", *rest]:  # which is how `make` sets up what the tests run in
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert {*re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*?)\]", " ".join(rest))))} <= {*extras}, rest
        case ["python", "-m", module, *rest] if module.startswith("bench."):
            program = getattr(importlib.import_module(module), "main", None)
            if isinstance(program, click.Command):  # options that it does not have are told before the help is
                program.main([*rest, "--help"], standalone_mode=False)
        case ["python", "-m", module, *_]:
            importlib.import_module(module)
        case ["python", file, *_]:
            assert (ROOT / file).is_file(), file
        case ["eval", text]:
            check_names(shlex.split(text.removeprefix("$(").removesuffix(")")))
        case ["arborl"]:
            pass
        case ["arborl", name, *_]:
            assert name in app.commands or name.startswith("-"), name
        case [program, *_]:
            assert program in SHELLS_OWN or (ROOT / program).is_file() or program in OF_OTHERS, program
            assert program not in OF_OTHERS or shutil.which(program, path=TOOLS), program
    if words[0] in ("arborl", "accelerate", "torchrun") and words[1:2] != ["compare"]:
        settings = [word for word in words if re.match(r"^[a-z_.]+=", word)]
        # A pipeline of the reader's own is read for what it is; here there is one.
        settings = [re.sub(r"^(model\.path)=path/to/.*", rf"\1={FOLDER}", word) for word in settings]
        preset = next((words[i + 1] for i, word in enumerate(words) if word in ("--config-name", "-c")), "tree")
        if not preset.endswith(".yaml"):
            assert preset in presets()
            load_config(preset, settings)


TOOLS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@every_page
def test_commands_name_what_exists(page: Path):
    for words in commands(page):
        check_names(words)


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
    known = {key for key, _ in knobs()} | (RENAMED.keys() if page.name in ("CHANGELOG.md", "config.md") else set())
    sections = "model|sample|tree|kernel|advantage|train|eval|log|prompts"
    for key in re.findall(rf"`((?:{sections})\.[a-z_.]+)(?:=[^`]*)?`", page.read_text()):
        generic = re.sub(r"^(model\.call|loss\.options)\.\w+$", r"\1.<name>", key)  # of a user's own names
        assert generic in known or key.endswith((".py", ".yaml", ".txt")), key


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


@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_can_be_imported(path: Path):
    """Most of them need a GPU to run; what they take from the package must be there."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not path.stem.startswith("__"):
            module = importlib.import_module("." * node.level + (node.module or ""), "bench")
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
