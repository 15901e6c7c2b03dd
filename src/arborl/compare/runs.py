"""Runs of a comparison: a process for each cell and seed, side by side where there is room, none twice."""

import hashlib
import multiprocessing
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from accelerate.utils import parse_flag_from_env
from omegaconf import OmegaConf

from ..config import load_config, read_config
from ..config.schema import Config
from ..core.errors import InputError
from ..engine.cost import costs, epochs_within
from ..engine.method import check_plan
from ..run.folder import changes
from ..run.paths import CONFIG, LOCK, METRICS, SUMMARY
from ..tools.files import append, is_locked, kind_of
from . import worker

COMPARISON_SETS = (
    *("seed", "run_name", "train.epochs", "train.max_seconds"),
    *("eval.num_between", "log.dir", "log.save_every", "log.keep"),
)
"""Settings that a comparison makes itself."""
SAME_IN_ALL_CELLS = ("model.", "rewards.", "prompts.", "eval.", "sample.resolution")
"""Settings that must be the same in all cells, or their scores could not be compared."""


@dataclass(frozen=True)
class Cell:
    """A preset with overrides, written as on a command line: `tree tree.w=3`."""

    text: str

    def __post_init__(self) -> None:
        try:
            words = shlex.split(self.text)
        except ValueError as error:
            raise InputError("cell", self.text, f"cannot be read ({error})", "PRESET [KEY=VALUE]...") from None
        if not words:
            raise InputError("cell", repr(self.text), "names no preset", "PRESET [KEY=VALUE]...")
        check_settings(words[1:])

    @property
    def preset(self) -> str:
        return shlex.split(self.text)[0]

    @property
    def overrides(self) -> list[str]:
        return shlex.split(self.text)[1:]

    @property
    def folder(self) -> str:
        """The text as a folder's name; where that loses something, with a few digits that tell it from others."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "_", self.text)[:80]
        return plain if plain == self.text else f"{plain}-{hashlib.sha256(self.text.encode()).hexdigest()[:6]}"


def check_settings(settings: Sequence[str]) -> None:
    for text in settings:
        key, _, value = text.partition("=")
        if key.lstrip("+") in COMPARISON_SETS:
            raise InputError(
                key, value, "is set by the comparison itself", cure="other settings, or --seeds, --compute and the like"
            )


@dataclass(frozen=True)
class Protocol:
    """Settings shared by all cells. Compute counts a forward as 1 and a forward+backward as 3."""

    seeds: tuple[int, ...]
    compute: float = 0.0  # of each run; 0 where seconds are given
    seconds: float = 0.0
    common: tuple[str, ...] = ()  # overrides of every cell, which may put its own in their place
    points: int = 10  # evaluations a run, besides the first


@dataclass(frozen=True)
class PlannedRun:
    cell: Cell
    seed: int
    folder: Path
    config: Config
    command: list[str]

    @property
    def finished(self) -> bool:
        return (self.folder / SUMMARY).is_file()

    @property
    def epochs_done(self) -> int:
        metrics = self.folder / METRICS
        return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


LOG_BEGINS = "$ arborl "
"""The beginning of a run's log, by which a comparison knows it."""
UNLIMITED_EPOCHS = 1_000_000
"""Epochs of a run that the clock ends."""


def cost_of(config: Config) -> int:
    """The compute of a run as it is configured, its evaluations apart."""
    return sum(islice(costs(config), config.train.epochs))


def plan_runs(cells: Sequence[Cell], protocol: Protocol, out: Path) -> list[PlannedRun]:
    """Every run of a comparison, seed by seed; what is wrong with any of them is an `InputError` before the first."""
    check_settings(protocol.common)
    if len({cell.text for cell in cells}) < len(cells):
        raise InputError("cells", [cell.text for cell in cells], "a cell is named twice", "each once")
    # Pictures are judged after the same number of steps, whatever each method trains with.
    first = config_of_run(cells[0], protocol, protocol.seeds[0], out)[0]
    steps = f"eval.num_steps={first.eval.num_steps or first.sample.num_steps}"
    runs = [_plan_run(cell, seed, protocol, out, steps) for seed in protocol.seeds for cell in cells]
    for run in runs[1 : len(cells)]:
        for text in changes(runs[0].config, run.config):
            key = text.split(":")[0]
            if key.startswith(SAME_IN_ALL_CELLS) and key not in ("eval.every", "model.train") and ".lora." not in key:
                problem = f"is not the same in all cells ({text}, of {run.cell.text!r})"
                raise InputError(key, None, problem, "the same for all", cure="--set, which is for all cells")
    return runs


def config_of_run(cell: Cell, protocol: Protocol, seed: int, out: Path, *extra: str) -> tuple[Config, list[str]]:
    """A run's configuration, and the overrides of its preset that make it."""
    # Curves of a comparison are of all pictures: what one costs to reach a score is read off them.
    quiet = ["log.trackers=[]", "log.record_every=0", "log.keep=1", "eval.num_between=0"]
    place = [f"seed={seed}", f"run_name=seed-{seed}", f"log.dir={_quoted(str(out.resolve() / cell.folder))}"]
    settings = [*quiet, *protocol.common, *cell.overrides, *place, *extra]
    return load_config(cell.preset, settings), settings


def _plan_run(cell: Cell, seed: int, protocol: Protocol, out: Path, *extra: str) -> PlannedRun:
    config, settings = config_of_run(cell, protocol, seed, out)
    if protocol.compute:
        epochs = epochs_within(config, protocol.compute)
        length, every = [f"train.epochs={epochs}"], max(1, epochs // protocol.points)
    else:
        length, every = [f"train.max_seconds={protocol.seconds}", f"train.epochs={UNLIMITED_EPOCHS}"], 10
    if not any(text.startswith("eval.every=") for text in settings):
        length.append(f"eval.every={every}")
    config, settings = config_of_run(cell, protocol, seed, out, *extra, *length, f"log.save_every={every}")
    check_plan(config)
    folder = out.resolve() / cell.folder / config.run_name
    _check_same(folder, config, out)
    return PlannedRun(cell, seed, folder, config, ["train", "--config-name", cell.preset, *settings])


def _quoted(text: str) -> str:
    """A value that may hold anything, as Hydra's grammar wants it."""
    quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return "'" + quoted.replace("${", "\\${") + "'"


def _check_same(folder: Path, config: Config, out: Path) -> None:
    """What is there already must be the run that is wanted."""
    path = folder / CONFIG
    if not path.is_file():
        if kind_of(folder):
            raise InputError(
                "--out", folder, f"is there already, and no run (it has no {CONFIG})", cure="another folder"
            )
        return
    wanted = OmegaConf.to_object(OmegaConf.structured(config))
    found = changes(read_config(path), wanted)  # pyright: ignore[reportArgumentType]
    if found := [text for text in found if not text.startswith("log.dir:")]:  # folders may be moved
        problem = f"{folder} was run with other settings ({'; '.join(found)})"
        raise InputError("--out", out, problem, cure="another folder, or the settings of that run")


def command_of(run: PlannedRun) -> list[str]:
    """`arborl`'s arguments to start a run, or to go on with one that was cut off."""
    log = log_of(run)
    if is_locked(log) or is_locked(run.folder / LOCK):
        raise InputError(
            "--out", run.folder, "is being written by another process", cure="another folder, or to wait for it"
        )
    if kind_of(log) and not _is_log(log):
        raise InputError("--out", log, "is there already, and no log of a comparison", cure="another folder")
    # One that came to no checkpoint goes on from its beginning.
    return ["train", "--resume", str(run.folder)] if run.folder.is_dir() else run.command


def _is_log(path: Path) -> bool:
    if kind_of(path) != "file":
        return False
    with path.open("rb") as file:
        return file.read(len(LOG_BEGINS)) == LOG_BEGINS.encode()


class Capacity:
    """Whether another run fits beside those that are running."""

    def __init__(self, workers: int | None) -> None:
        self.workers = workers
        self.cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.on_gpu = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")

    @property
    def max_runs(self) -> int:
        return self.workers or self.cores

    def fits_another(self, running: Sequence[PlannedRun], at_start: dict[Path, int]) -> bool:
        if not running or self.workers or not self.on_gpu:
            return len(running) < self.max_runs
        # What a run needs is known once it has done an epoch; the next may start when a little more than that is free.
        if len(running) >= self.max_runs or any(run.epochs_done <= at_start[run.folder] for run in running):
            return False
        free, total = torch.cuda.mem_get_info()
        return free > 1.2 * (total - free) / len(running)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in worker.ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def execute(
    runs: Sequence[PlannedRun],
    workers: int | None = None,
    on_change: Callable[[list[PlannedRun], list[PlannedRun], dict[str, str]], None] = lambda *_: None,
) -> dict[str, str]:
    """Run what is not finished; returns why those that failed did, by folder.

    An interrupt is passed on once to all running ones, which then leave a checkpoint to go on from. A script that
    calls this needs the usual `if __name__ == "__main__"`, as with all of multiprocessing.
    """
    capacity, failed = Capacity(workers), dict[str, str]()
    waiting = [run for run in runs if not run.finished]
    done = [run for run in runs if run.finished]
    running: dict[int, tuple[PlannedRun, BaseProcess]] = {}
    at_start: dict[Path, int] = {}
    threads = max(1, capacity.cores // min(capacity.max_runs, len(runs)))
    for run in waiting:
        command_of(run)  # what is in the way of one is told before any starts
    with _terminated_like_interrupted():
        try:
            while waiting or running:
                while waiting and capacity.fits_another([run for run, _ in running.values()], at_start):
                    run = waiting.pop(0)
                    process = _start(run, threads)
                    at_start[run.folder] = run.epochs_done
                    running[process.pid or 0] = run, process
                on_change([run for run, _ in running.values()], done, failed)
                time.sleep(0.2)
                for pid, (run, process) in list(running.items()):
                    if process.exitcode is not None:
                        del running[pid]
                        if process.exitcode == 0 and run.finished:
                            done.append(run)
                        else:
                            failed[str(run.folder)] = _reason(run, process.exitcode)
        finally:
            # Each runs in a session of its own, so that a terminal's Ctrl-C reaches it once, by this.
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
            for run, process in running.values():
                process.join()
                while is_locked(log_of(run)):  # the forkserver may be gone before its children
                    time.sleep(0.1)
    on_change([], done, failed)
    return failed


def log_of(run: PlannedRun) -> Path:
    return run.folder.parent / f"{run.folder.name}.log"


def _start(run: PlannedRun, threads: int) -> BaseProcess:
    """A process for the run, from one that has imported everything already where the system can fork."""
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver") if forks else multiprocessing.get_context("spawn")
    context.set_forkserver_preload(["arborl.compare.preload"])
    # Whether there is a GPU must be asked without waking its driver, which does not survive a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    command = command_of(run)
    try:
        log_of(run).parent.mkdir(parents=True, exist_ok=True)
        append(log_of(run), f"{LOG_BEGINS}{shlex.join(command)}\n")
    except OSError as error:
        raise InputError("--out", log_of(run), f"cannot be written to ({error.strerror})") from None
    process = context.Process(target=worker.run, args=(command, log_of(run), threads))
    with _no_modules_from_here():
        process.start()
    return process


@contextmanager
def _no_modules_from_here() -> Iterator[None]:
    """multiprocessing starts its servers by `python -c`, which looks for every module in the current folder first."""
    if os.environ.get(worker.SAFE_PATH):
        yield
        return
    os.environ[worker.SAFE_PATH] = worker.OURS
    try:
        yield
    finally:
        del os.environ[worker.SAFE_PATH]


def _reason(run: PlannedRun, code: int) -> str:
    """An error that the run itself told, or how it ended."""
    if code < 0:
        return f"ended by signal {-code}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
    lines = log_of(run).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"exit code {code}: {lines[-1]}"
