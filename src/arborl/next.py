"""`arborl` alone: where one stands, and what to do next."""

import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import __version__

FIRST = {
    "arborl plan": "the default tree, and what an epoch of it costs; loads nothing",
    "arborl train": "post-train the built-in model: two and a half minutes on two cores, no GPU, no download",
    "arborl rewards": "the rewards there are, and what each of them lacks here",
    "arborl -h": "every command; each has a -h of its own",
}
RECENT = 120.0
"""Seconds in which a run that goes on is thought to have written something."""


def print_next(out: Console, base: Path = Path("runs")) -> None:
    """What there is to do, by what lies in runs/. Imports nothing heavy: it must answer at once."""
    out.print(f"[bold]ArboRL {__version__}[/bold], reinforcement learning on denoising trees\n")
    steps, run = dict(FIRST), newest_run(base)
    if run:
        state, own = _standing(run)
        out.print(f"{run}: {state}", markup=False, highlight=False)
        steps = own | {"arborl -h": FIRST["arborl -h"]}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    for command, what in steps.items():
        table.add_row(command, what)
    out.print(table)


def newest_run(base: Path = Path("runs")) -> Path | None:
    """The run that was last written to."""
    return max((path.parent for path in base.glob("*/config.yaml")), key=_written, default=None)


def _standing(run: Path) -> tuple[str, dict[str, str]]:
    """How far a run is, and what goes well with that."""
    if (run / "summary.json").is_file():
        try:
            summary = json.loads((run / "summary.json").read_bytes())
            before, after = (summary[f"heldout_{when}"] for when in ("before", "after"))
            came = f", held-out {before:.4f} -> {after:.4f}" if before is not None and after is not None else ""
            state = f"finished, {summary['epochs']} epochs{came}"
        except (ValueError, KeyError, TypeError):
            state = "finished; its summary.json is damaged"
        return state, {
            f"arborl report --open {run}": "look at it: curves, trees, pictures, times",
            f"arborl sample --run {run}": "pictures by its weights",
            f"arborl eval --run {run}": "scores on held-out prompts",
            f"arborl export {run} my-model": "weights for diffusers and ComfyUI",
            f"arborl train --resume {run} train.epochs=…": "train it further",
            "arborl compare tree mix dance": "methods side by side, at equal compute",
        }
    going_on = time.time() - _written(run) < RECENT
    lines = (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").is_file() else 0
    state = f"{lines} epochs so far{', written to just now' if going_on else '; it was cut off, or waits'}"
    steps = {f"arborl report --live {run}": "watch it in the browser"}
    if not going_on:
        steps[f"arborl train --resume {run}"] = "go on with it"
    return state, steps | {f"arborl doctor --run {run}": "is something wrong with it?"}


def _written(run: Path) -> float:
    return max((run / name).stat().st_mtime for name in ("config.yaml", "metrics.jsonl") if (run / name).is_file())
