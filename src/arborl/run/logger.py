"""Metrics, trackers, messages and progress of a run while it goes on."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from ..config import save_config, with_settings
from ..config.schema import Config
from ..distributed.coordination import fail_together
from ..engine.checks import Finding
from ..tools.files import append, atomic, fsync, lock, remove_abandoned
from .folder import (
    check_own_files,
    claim_folder,
    finite,
    flat,
    is_report,
    keep_evaluations,
    read_metrics,
    training_seconds,
    with_absolute_paths,
    write_rows,
    writing,
)
from .paths import CONFIG, EVALUATIONS, LOCK, METRICS, REPORT, SAMPLES, SUMMARY, TREES
from .trackers import log_pictures, start_trackers


class Logger:
    """Writes to the run's folder, trackers and terminal. On ranks other than the first nothing is written or shown."""

    def __init__(
        self,
        config: Config,
        accelerator: Accelerator,
        resume: Path | None,
        epoch: int,
        quiet: bool = False,
        held: IO[bytes] | None = None,  # the lock on a run that goes on
        unmarked: str = "",  # the protocol of its evaluations that have none
    ) -> None:
        self.accelerator, self.main = accelerator, accelerator.is_main_process
        self.seconds: dict[str, float] = {}  # of this epoch, by stage
        self.inside: list[float] = []  # seconds that stages within the open ones took
        self.trained = 0.0  # seconds of all epochs, evaluation apart
        self.unwritten = ""  # a line of metrics that could not be written
        self.warned: set[str] = set()
        self.evaluated: dict[str, Any] = {}  # the evaluation that a resumed run made of the weights it goes on from
        self.console = Console(stderr=True, quiet=quiet or not self.main, highlight=False)
        with fail_together(accelerator):
            name = [str(resume or (claim_folder(config) if self.main else ""))]
        self.folder = Path(broadcast_object_list(name)[0])
        if not resume:
            config = with_settings(config, {"run_name": self.folder.name})
        with fail_together(accelerator):
            with self.writing():
                self.lock = lock(self.folder / LOCK) if self.main and held is None else held
            if self.main and resume:
                self._take_over(config, epoch, unmarked)
        self.evaluated = broadcast_object_list([self.evaluated])[0]
        accelerator.project_configuration.logging_dir = str(self.folder)
        self._hook, threading.excepthook = threading.excepthook, self._thread_failed
        with fail_together(accelerator), self.writing():
            start_trackers(accelerator, self.folder, epoch, resume is not None, flat(config))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, less those within it; on a GPU until its work is done, so that the split is true."""
        start = time.perf_counter()
        self.inside.append(0.0)
        try:
            yield
        finally:
            if self.accelerator.device.type == "cuda":
                torch.cuda.synchronize()
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self.inside.pop()
            if self.inside:
                self.inside[-1] += spent

    def log(self, epoch: int, metrics: dict[str, float]) -> dict[str, float]:
        """One line of metrics.jsonl and one point in every tracker; the epoch's times are added and begun anew."""
        metrics = {"epoch": epoch, **metrics, "step_time": sum(self.seconds.values())}
        metrics |= {f"time/{name}": spent for name, spent in self.seconds.items()}
        self.seconds = {}
        self.trained += training_seconds(metrics)
        with self.writing():
            if self.main:
                self.unwritten = json.dumps(finite(metrics)) + "\n"
                self._write_metrics()
            found = {name: value for name, value in finite(metrics).items() if value is not None}
            self.accelerator.log(found, step=epoch)
        return metrics

    def log_pictures(
        self,
        name: str,
        epoch: int,
        drawing: Path,
        captions: list[str],
        pictures: Tensor | None = None,
        only: str | None = None,
    ) -> None:
        """A drawing in every tracker (or in that one `only`); or the pictures in it, in those that show captions."""
        with self.writing():
            for tracker in self.accelerator.trackers:  # none on other ranks
                if only in (None, tracker.name):
                    log_pictures(tracker, name, epoch, drawing, captions, pictures)

    def log_evaluation(self, row: Mapping[str, Any]) -> None:
        """One line of evaluations.jsonl, at once: the line of metrics comes when its epoch is complete."""
        with self.writing():
            if self.main:
                append(self.folder / EVALUATIONS, json.dumps(row) + "\n")

    def writing(self) -> AbstractContextManager[None]:
        return writing(self.folder)

    def _thread_failed(self, failure: Any) -> None:
        """TensorBoard writes in a thread. Its error is raised again at the next call, and handled there."""
        if not (issubclass(failure.exc_type, OSError) and type(failure.thread).__name__ == "_AsyncWriterThread"):
            self._hook(failure)

    def _write_metrics(self) -> None:
        if self.unwritten:
            append(self.folder / METRICS, self.unwritten)
            self.unwritten = ""

    def sync(self) -> None:
        """Have the metrics on the disk, before a checkpoint that comes after them."""
        with self.writing():
            self._write_metrics()
            for name in (METRICS, EVALUATIONS):
                if self.main and (self.folder / name).is_file():
                    fsync(self.folder / name)

    def read_metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder)

    def close(self) -> None:
        """Finish the trackers. The process group stays: taking gloo's apart may wait for ever (pytorch/pytorch#179291),
        another run in this process can use it, and a process that ends takes it along.
        """
        with self.writing():
            for tracker in self.accelerator.trackers:
                tracker.finish()
        threading.excepthook = self._hook
        if self.lock:
            self.lock.close()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def warn_once(self, text: str) -> None:
        if text in self.warned:
            return
        self.warned.add(text)
        self.console.print(f"[yellow]warning:[/yellow] {escape(text)}", soft_wrap=True)

    def warn_if_wrong(self, finding: Finding) -> None:
        """Warn of a check that failed."""
        if finding.ok is False:
            self.warn_once(f"{finding.what}: {finding.measured}. {finding.advice[:1].upper()}{finding.advice[1:]}")

    def _take_over(self, config: Config, epoch: int, unmarked: str) -> None:
        """Resume in a run's folder: metrics, trees and sheets of epochs that will be repeated are removed. Evaluations
        are kept, all of them; the one of the weights that the run goes on from is this epoch's.
        """
        rows = self.read_metrics()
        kept = [row for row in rows if row["epoch"] < epoch]
        with self.writing():
            repeated = check_own_files(self.folder, epoch)
            for place in (self.folder, self.folder / TREES, self.folder / SAMPLES):
                remove_abandoned(place, alone=True)  # the run is locked
            self.evaluated = keep_evaluations(self.folder, epoch, unmarked)
            self.seconds["evaluate"] = sum(row.get("time/evaluate") or 0.0 for row in rows if row["epoch"] == epoch)
            (self.folder / SUMMARY).unlink(missing_ok=True)  # of an end that is none any more
            if is_report(self.folder / REPORT):
                (self.folder / REPORT).unlink()
            for path in repeated:
                path.unlink()
            write_rows(self.folder / METRICS, kept)
            with atomic(self.folder / CONFIG) as aside:
                save_config(with_absolute_paths(config), aside)
        self.trained = sum(map(training_seconds, kept))
