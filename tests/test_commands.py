"""Every command and every Python block of the pages is run as a reader would run it, only smaller.

Not here: what a page says needs a GPU, weights and the like (`test_docs.py` has the phrases); launchers, of which only
what they start is run (`test_processes.py`, `test_cluster.py`); scripts (`test_docs.py`, slow); `docs/extending.md`
(`test_extending.py`); the server in `docs/rewards.md` (`test_remote.py`).
"""

import re
import shlex
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import requests
import uvicorn
from PIL import Image

from arborl.cli import main
from arborl.compare.runs import PlannedRun, command_of
from arborl.config import load_config
from arborl.rewards.serve import app
from arborl.rewards.simple import brightness
from arborl.run.folder import flat
from arborl.worlds.scenes.grammar import split

from conftest import TINY
from test_docs import FENCED, MARK, NEEDS, PAGES, ROOT, SHELLS_OWN, shell

ELSEWHERE = {"extending.md"}
FIRST_HOUR = {"README.md", "tutorial.md"}
"""Pages whose commands every run of the suite runs; those of the others run with -m slow. Names are always checked."""
HERE = [page for page in PAGES if page.name not in ELSEWHERE]
FEW = ["sample.num_prompts=1", "sample.prompts_per_epoch=null", "eval.num_prompts=2", "eval.num_steps=2"]
QUIET = ["log.record_every=0", "log.trackers=[]"]
LESS = {
    "train": ["train.epochs=1", *FEW, *QUIET],
    "eval": ["eval.num_prompts=2"],
    "doctor": ["--canary", "0", *FEW],
    "compare": ["--seeds", "1", "--points", "1", *(word for text in FEW for word in ("--set", text))],
    "serve": ["--port", "0"],
    "report": ["--port", "0"],
}
"""What makes a command short; of a setting or an option that is given twice the last counts."""


def started(words: list[str]) -> list[str] | None:
    """The arguments of `arborl` that a command comes to in a single process; None where it is no such command."""
    match words:
        case ["arborl", *rest] | ["python", "-m", "arborl", *rest]:
            return rest
        case ["python", "train.py", *rest]:
            return ["train", *rest]
        case ["accelerate" | "torchrun", *rest]:
            of = rest.index("train.py") if "train.py" in rest else rest.index("-m")
            return started(["python", *rest[of:]])
        case ["make", "train", *rest]:
            return ["train", *(word for text in rest for word in shlex.split(text.removeprefix("ARGS=")))]
        case ["eval", text]:
            return started(shlex.split(text.removeprefix("$(").removesuffix(")")))
        case _:
            return None


def run_elsewhere(words: list[str]) -> bool:
    """What is no `arborl` and runs all the same: the suite itself, its set-up, other tests, a shell."""
    match words:
        case ["make" | "pip" | "tensorboard", *_]:
            return True
        case ["python", file, *_] if file.startswith("examples/"):  # test_extending.py
            return True
        case [program, *_]:
            return program in SHELLS_OWN or program.startswith("scripts/")
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_run_or_says_what_it_needs(page: Path):
    for command in shell(page):
        words, told = command.words, f"say in a comment what it needs: {', '.join(NEEDS)}"
        assert command.marked or started(words) is not None or run_elsewhere(words), f"{shlex.join(words)}: {told}"


def smaller(words: list[str]) -> list[str]:
    if not words or words[0] not in LESS or {"-h", "--help"} & {*words}:
        return words
    words = [*words, *LESS[words[0]]]
    if words[0] == "compare":
        return [*words, *(["--seconds", "0.01"] if "--seconds" in words else ["--compute", "1"])]
    if "--resume" in words and "auto" not in words:
        words.append("train.epochs=2")  # the run that is there has one
    return words


def to_run() -> Iterator[Any]:
    """Each command once; again only on a page that brings files of its own, such as another reward."""
    seen: set[tuple[object, ...]] = set()
    for page in HERE:
        for command in shell(page):
            words = started(command.words)
            own = [text for name, text in files(page).items() if Path(name).stem in " ".join(command.words)]
            key = (*smaller(words or []), *own)
            if words and words[0] == "compare" and command.marked:
                words.append("--dry-run")  # its cells can be looked at all the same
            elif words is None or command.marked or key in seen:
                continue
            seen.add(key)
            name = f"{page.name}: {shlex.join(command.words)}"
            marks = [] if page.name in FIRST_HOUR else [pytest.mark.slow]
            yield pytest.param(page, smaller(words), command.environment, id=name, marks=marks)


def files(page: Path) -> dict[str, str]:
    """What a page has its reader save: blocks with a name in their first line."""
    blocks = FENCED.findall(page.read_text())
    named = [(re.match(r"# (\S+\.(?:py|yaml))\n", text), text) for _, text in blocks]
    return {name[1]: text for name, text in named if name}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the scenes that has come to its end."""
    folder = tmp_path_factory.mktemp("finished")
    ends_well("train", *LESS["train"], "log.record_every=1", f"log.dir={folder}", "run_name=tree-1")
    run = folder / "tree-1"
    if not (run / "checkpoints" / "best").exists():  # an epoch need not help
        shutil.copytree(run / "checkpoints" / "epoch_000001", run / "checkpoints" / "best")
    return run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path) -> Callable[[Path, list[str]], None]:
    """The current folder with what a page and a command take for granted: the checkout, files, pictures, runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file changed within a second would be read from there

    def furnish(page: Path, words: list[str]) -> None:
        for name in ("src", "cluster", "scripts", "examples"):
            (tmp_path / name).symlink_to(ROOT / name)
        (tmp_path / "prompts.txt").write_text("\n".join(split()[0][:4]))
        Image.new("RGB", (64, 64), "red").save(tmp_path / "cat.png")
        for name, text in (files(ROOT / "README.md") | files(page)).items():
            (tmp_path / name).write_text(text)
            sys.modules.pop(Path(name).stem, None)
        if words[:1] in (["train"], ["compare"]) and "--resume" not in words:
            return  # what these name in runs/ is still to come
        text = " ".join(words if words[:1] != ["report"] else [*words, "runs/tree-1"])  # or the newest
        for name, checkpoint in re.findall(r"runs/([\w.-]+)(?:/checkpoints/(\w+))?", text):
            run = tmp_path / "runs" / name
            if name == "compare":
                ends_well("compare", "mixture", "mixture tree.k=3", *smaller(["compare"])[1:])
            elif not run.exists():
                shutil.copytree(finished, run)
            if checkpoint and not (run / "checkpoints" / checkpoint).exists():
                shutil.copytree(run / "checkpoints" / "epoch_000001", run / "checkpoints" / checkpoint)

    return furnish


class Asked(uvicorn.Server):
    """A server that ends once it has been asked something and has answered."""

    def run(self, sockets: Any = None) -> None:
        thread = threading.Thread(target=partial(super().run, sockets))
        thread.start()
        try:
            host, port = sockets[0].getsockname()[:2]
            assert requests.get(f"http://{host}:{port}/", timeout=30).status_code in (200, 401)
        finally:
            self.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A reward at an address of this machine."""
    config = uvicorn.Config(app(brightness, "brightness", None), log_level="warning", lifespan="off")
    served = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=served.run, args=([listener],))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        served.should_exit = True
        thread.join()


compared: dict[str, Path] = {}


def in_this_process(runs: Sequence[PlannedRun], *_: object) -> dict[str, str]:
    """A comparison's runs one after the other; `test_compare.py` has them in processes. Equal ones are run once."""
    for run in runs:
        words = [*command_of(run), *FEW]  # a cell's own numbers were counted with; here they would only take longer
        key = str({**flat(load_config(run.cell.preset, words[3:])), "log.dir": ""})
        if key in compared:
            shutil.copytree(compared[key], run.folder)
        else:
            ends_well(*words)
            compared[key] = run.folder
    return {}


def ends_well(*words: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*words])
    assert stopped.value.code == 0, words


@pytest.mark.parametrize(("page", "words", "environment"), to_run())
def test_it_runs(page: Path, words: list[str], environment: dict[str, str], folder, tiny_folder, request, monkeypatch):
    monkeypatch.setattr("arborl.cli.compare_table.execute", in_this_process)
    folder(page, words)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(click, "launch", lambda *_: 0)
    text = "\n".join(words)
    if "path/to/" in text:  # a pipeline of the reader's own
        family = next((word.removeprefix("model=") for word in words if word.startswith("model=")), "sd3")
        words = [re.sub(r"path/to/[\w.-]+", str(tiny_folder(family)), word) for word in words]
        words += [*TINY[family], "model.lora.rank=4"]
    if "http://" in text:
        address = request.getfixturevalue("server")
        words = [re.sub(r"http://[\w.]+:\d+", address, word) for word in words]
    monkeypatch.setattr(uvicorn, "Server", Asked)
    ends_well(*words)


PYTHON = [
    pytest.param(page, code, id=f"{page.name}-{number}")
    for page in HERE
    for number, (kind, code) in enumerate(FENCED.findall(page.read_text()))
    if kind == "python" and "serve_forever" not in code
]


@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_python_runs(page: Path, code: str, folder, monkeypatch):
    """A block that needs what is not here is compiled, and what it imports is there."""
    folder(page, re.findall(r"runs/[\w./-]+", code))
    marked = MARK.match(code.split("\n")[0])
    if marked:
        code = "\n".join(re.findall(r"^(?:import|from) .*$", code, re.MULTILINE))
    code = code.replace("train.epochs=10", "train.epochs=1").replace("epoch_000009", "epoch_000000")
    monkeypatch.setattr(
        "arborl.config.load_config", lambda name, given=(): load_config(name, [*given, *FEW, *QUIET[1:]])
    )
    exec(compile(code, page.name, "exec"), {"__name__": "__main__"})
