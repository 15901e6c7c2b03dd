"""A run's folder: configuration, metrics, pictures, trees and checkpoints; and what the terminal shows meanwhile."""

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers, is_tensorboard_available
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .collect import gather
from .config import save_config, with_whole_paths
from .config.schema import Config
from .core.errors import InputError

STAGES = ("encode", "rollout", "score", "advantage", "update", "record", "evaluate", "checkpoint")


class Run:
    """Where a run writes. On ranks other than the first nothing is written or shown."""

    def __init__(self, config: Config, accelerator: Accelerator, resume: Path | None, epoch: int) -> None:
        self.accelerator, self.main = accelerator, accelerator.is_main_process
        self.seconds: dict[str, float] = {}  # of this epoch, by stage
        self.trained = 0.0  # seconds of all epochs, evaluation apart
        self.warned: set[str] = set()
        self.console = Console(stderr=True, quiet=not self.main, highlight=False)
        name = [str(resume or (claim_folder(config) if self.main else ""))]
        self.folder = Path(broadcast_object_list(name)[0])
        config.run_name = self.folder.name
        if self.main:
            save_config(with_whole_paths(config), self.folder / "config.yaml")
            self._drop_metrics_from(epoch)
            self.trained = sum(map(training_seconds, self.read_metrics()))
        accelerator.project_configuration.logging_dir = str(self.folder)
        # Epochs that are done again must not be drawn twice.
        options = {"tensorboard": {"purge_step": epoch}, "wandb": {"name": config.run_name}}
        accelerator.init_trackers("arborl", config=_flat(asdict(config)), init_kwargs=options)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; on a GPU until its work is done, so that the split is true."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.accelerator.device.type == "cuda":
                torch.cuda.synchronize()
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def log(self, epoch: int, metrics: dict[str, float]) -> dict[str, float]:
        """One line of metrics.jsonl and one point in every tracker; the epoch's times are added and begun anew."""
        metrics = {"epoch": epoch, **metrics, "step_time": sum(self.seconds.values())}
        metrics |= {f"time/{name}": spent for name, spent in self.seconds.items()}
        self.seconds = {}
        self.trained += training_seconds(metrics)
        if self.main:
            with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite(metrics)) + "\n")
        self.accelerator.log({name: value for name, value in metrics.items() if value == value}, step=epoch)
        return metrics

    def read_metrics(self) -> list[dict[str, Any]]:
        return read_rows(self.folder)

    def close(self) -> None:
        self.accelerator.end_training()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def warn_once(self, text: str) -> None:
        if text in self.warned:
            return
        self.warned.add(text)
        self.console.print(f"[yellow]warning:[/yellow] {escape(text)}", soft_wrap=True)

    def _drop_metrics_from(self, epoch: int) -> None:
        """A resumed run repeats the epochs after its checkpoint: what was logged of them goes."""
        path = self.folder / "metrics.jsonl"
        if path.is_file():
            kept = [row for row in self.read_metrics() if row["epoch"] < epoch]
            aside = path.with_suffix(".tmp")
            aside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
            aside.replace(path)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Every line of a run's metrics.jsonl; a last one that a kill cut short is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else [""]
    return [json.loads(line) for line in lines[:-1]]


def finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """JSON has no NaN: a number that is none is null."""
    return {name: value if abs(value) < float("inf") else None for name, value in metrics.items()}


def training_seconds(row: dict[str, Any]) -> float:
    """What an epoch took, evaluation apart."""
    return row["step_time"] - row.get("time/evaluate", 0.0)


def seconds_by_stage(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Where the time went, over all logged epochs."""
    return {name: sum(row.get(f"time/{name}") or 0.0 for row in rows) for name in STAGES}


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys with plain values, as trackers want them."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def changes(before: Config, after: Config) -> list[str]:
    """The settings that differ, each as `key: old -> new`."""
    old, new = _flat(asdict(before)), _flat(asdict(after))
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]


def check_folder(config: Config) -> None:
    """A run is never overwritten: its name must be new."""
    folder = Path(config.log.dir) / config.run_name
    if config.run_name != "auto" and folder.exists():
        raise _taken(config, folder)


def _taken(config: Config, folder: Path) -> InputError:
    return InputError("run_name", config.run_name, f"{folder} exists", f"another name, or --resume {folder}")


def claim_folder(config: Config) -> Path:
    """Make `<log.dir>/<run_name>`; `auto` takes the next free number. Whoever makes the folder has it."""
    base, number = Path(config.log.dir), 0
    while True:
        number += 1
        folder = base / (f"{config.tree.plan}-{number}" if config.run_name == "auto" else config.run_name)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if config.run_name != "auto":
                raise _taken(config, folder) from None
        except OSError as error:
            raise InputError("log.dir", config.log.dir, f"cannot make {folder} ({error.strerror})") from None


def trackers(config: Config) -> list[str]:
    """The trackers to start; a named one that is not installed is an error, `auto` takes what is there."""
    if config.log.trackers == ["auto"]:
        return ["tensorboard"] if is_tensorboard_available() else []
    installed = [str(tracker.value) for tracker in get_available_trackers()]
    for name in config.log.trackers:
        if name not in installed:
            fix = ", ".join(installed) or "pip install 'arborl[tensorboard]'"
            raise InputError("log.trackers", name, "is not installed", f"auto, [], or of {fix}")
    return list(config.log.trackers)


class Bar:
    """Epochs done, reward, seconds by stage and time left: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, run: Run, start: int, total: int | None) -> None:
        self.run, self.last_line = run, 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(
            *columns,
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=run.console,
            disable=not (run.main and run.console.is_terminal),
        )
        self.task = self.progress.add_task("epoch", total=total, completed=start, text="")

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def advance(self, metrics: dict[str, float]) -> None:
        split = " ".join(
            f"{name} {metrics[f'time/{name}']:.1f}s" for name in STAGES if metrics.get(f"time/{name}", 0) >= 0.05
        )
        names = [name for name in metrics if name.startswith("rewards/") and name.endswith("/mean")]
        names = [name.split("/")[1] for name in names if name.count("/") == 2]
        if len(names) > 1:  # the score that is optimised is a sum of z-scores, which says little
            text = " ".join(f"{name} {metrics[f'rewards/{name}/mean']:.4f}" for name in names)
        else:
            text = f"reward {metrics['reward']:.4f}"
        text += f" (std within a prompt {metrics['reward_std']:.4f})"
        text += f" {metrics['reward_failed']:.0f} without a score" if metrics["reward_failed"] else ""
        self.progress.update(self.task, advance=1, text=f"{text} {split}")
        if self.progress.disable and (time.monotonic() - self.last_line > 10 or self.progress.finished):
            task = self.progress.tasks[self.task]
            eta = f", {task.time_remaining:.0f} s left" if task.time_remaining else ""
            of = f"/{int(task.total)}" if task.total else ""
            self.run.say(f"epoch {int(task.completed)}{of}: {text}{eta} {split}")
            self.last_line = time.monotonic()


class Interrupts:
    """Ctrl-C and SIGTERM: at once where nothing is half done, after the update where something would be.

    Several processes must leave together, so there they wait for the end of the epoch. Both signals arrive as
    KeyboardInterrupt; a second one is never held back.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.torn = False  # weights, counters and metrics are on their way from one epoch to the next
        self.waiting = False  # an interrupt has come and is held back
        self.together = False  # all processes have agreed to leave
        self.since = 0.0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        together = self.accelerator.num_processes > 1
        if together and self.waiting and time.monotonic() - self.since < 2:
            return  # a launcher passes on the Ctrl-C that the terminal has already sent to everyone
        if (self.torn or together) and not self.waiting:
            self.waiting, self.since = True, time.monotonic()
            if self.accelerator.is_main_process:
                when = "this epoch" if together else "this epoch's update"
                print(f"\nfinishing {when} before leaving; interrupt again to leave at once", file=sys.stderr)
            return
        raise KeyboardInterrupt

    @contextmanager
    def watched(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python hands signals to the main thread alone; elsewhere whoever runs us deals with them
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the first interrupt waits for the end of the block, where all processes agree to leave.

        Whatever else leaves the block early, an error or a second interrupt, leaves it `torn`.
        """
        self.torn = True
        yield
        self.torn = False
        waiting = torch.tensor([float(self.waiting)])
        if bool(gather(waiting, self.accelerator).any()):
            self.waiting, self.together = False, True
            raise KeyboardInterrupt
