"""A comparison in the terminal: what will run, its progress, and the table it comes to."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..compare.results import check_can_write, read, write
from ..compare.runs import Cell, PlannedRun, Protocol, config_of_run, cost_of, execute, plan_runs
from ..core.errors import InputError
from ..tools.files import remove_abandoned


def run_comparison(
    cells: Sequence[Cell],
    protocol: Protocol,
    to: Path,
    baseline: str | None,
    workers: int | None,
    dry_run: bool,
    as_json: bool,
    out: Console,
) -> None:
    """Plan, run, and write what came of it; exits with 1 where a run failed, with 130 where it was interrupted."""
    if protocol.compute and protocol.seconds:
        raise InputError(
            "--seconds", protocol.seconds, "a budget is compute or seconds, not both", cure="only one of them"
        )
    for name, value in (("--compute", protocol.compute), ("--seconds", protocol.seconds)):
        if not 0 <= value < math.inf:
            raise InputError(name, value, "is no budget", "a number above 0")
    if baseline and baseline not in {cell.text for cell in cells}:
        raise InputError("--baseline", baseline, "is not one of the cells", ", ".join(cell.text for cell in cells))
    if not protocol.compute and not protocol.seconds:
        first, _ = config_of_run(cells[0], protocol, protocol.seeds[0], to)
        protocol = replace(protocol, compute=float(cost_of(first)))
    runs = plan_runs(cells, protocol, to)
    check_can_write(to)
    if dry_run and as_json:
        known = [(run.cell.text, run.config) for run in runs[: len(cells)]] if protocol.compute else []
        costs = [{"cell": text, "epochs": one.train.epochs, "compute": cost_of(one)} for text, one in known]
        print(json.dumps({"protocol": asdict(protocol), "cells": costs}))
    elif not as_json:
        out.print(_planned(runs, protocol))
    if dry_run:
        return
    try:
        to.mkdir(parents=True, exist_ok=True)
        remove_abandoned(to)
    except OSError as error:
        raise InputError("--out", to, f"cannot be made ({error.strerror})") from None
    failed: dict[str, str] = {}
    try:
        with ProgressTable(runs) as shown:
            failed = execute(runs, workers, shown.update)
    except KeyboardInterrupt:
        done = sum(run.finished for run in runs)
        print(f"stopped; {done} of {len(runs)} runs are finished. The same command goes on.", file=sys.stderr)
        sys.exit(130)
    for folder, words in failed.items():
        print(f"error: {folder}: {words} (see {folder}.log)", file=sys.stderr)
    if any(run.finished for run in runs):
        comparison = read(runs, protocol, baseline)
        if baseline and comparison.baseline != baseline:
            print(f"warning: the baseline {baseline!r} has no score; {comparison.baseline!r} is used", file=sys.stderr)
        paths = write(comparison, to)
        print(comparison.as_json() if as_json else comparison.as_markdown(), end="" if not as_json else "\n")
        if not as_json:
            out.print("written: " + ", ".join(map(str, paths)), soft_wrap=True)
    if failed:
        sys.exit(1)


def _planned(runs: Sequence[PlannedRun], protocol: Protocol) -> Table:
    first = [run for run in runs if run.seed == protocol.seeds[0]]
    table = Table("cell", box=None, title=f"{len(first)} cells × {len(protocol.seeds)} seeds", title_justify="left")
    for name in ("epochs", "compute", "evaluated every"):
        table.add_column(name, justify="right")
    for run in first:
        known = bool(protocol.compute)
        epochs = str(run.config.train.epochs) if known else f"as many as fit {protocol.seconds:g} s"
        table.add_row(
            escape(run.cell.text), epochs, f"{cost_of(run.config):,}" if known else "–", str(run.config.eval.every)
        )
    return table


class ProgressTable:
    """Progress: bars on a terminal, a line for each finished run elsewhere."""

    def __init__(self, runs: Sequence[PlannedRun]) -> None:
        console = Console(stderr=True, highlight=False)
        self.total, self.printed = len(runs), 0
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.overall = self.progress.add_task("runs", total=len(runs))
        self.tasks: dict[Path, TaskID] = {}

    def __enter__(self) -> "ProgressTable":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def update(self, running: list[PlannedRun], done: list[PlannedRun], failed: dict[str, str]) -> None:
        self.progress.update(self.overall, completed=len(done) + len(failed))
        for run in running:
            if run.folder not in self.tasks:
                epochs = run.config.train.epochs if not run.config.train.max_seconds else None
                self.tasks[run.folder] = self.progress.add_task(
                    escape(f"{run.cell.text}, seed {run.seed}"), total=epochs
                )
            self.progress.update(self.tasks[run.folder], completed=run.epochs_done)
        over = {run.folder for run in running}
        for folder, task in self.tasks.items():
            if folder not in over:
                self.progress.update(task, visible=False)
        if self.progress.disable:
            for run in done[self.printed :]:
                print(f"{run.cell.text}, seed {run.seed}: done ({len(done)} of {self.total})", file=sys.stderr)
        self.printed = len(done)
