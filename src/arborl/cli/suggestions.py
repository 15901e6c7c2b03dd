"""`arborl` alone: where one stands, and what to do next."""

import json
import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..run.paths import CONFIG, LOCK, METRICS, SUMMARY
from ..tools.files import is_locked

FIRST = {
    "arborl plan": "the default tree, and what an epoch of it costs; loads nothing",
    "arborl train": "post-train the built-in model: a minute and a half on two cores, no GPU, no download",
    "arborl rewards": "the rewards there are, and what each of them lacks here",
    "arborl -h": "every command; each has a -h of its own",
}


def print_suggestions(out: Console, base: Path = Path("runs")) -> None:
    """The next commands to try, from what lies in runs/. Imports nothing heavy: it must answer at once."""
    out.print(f"[bold]ArboRL {__version__}[/bold], reinforcement learning on denoising trees\n")
    steps, run = dict(FIRST), newest_run(base)
    if run:
        state, own = _standing(run)
        out.print(f"{run}: {state}", markup=False, highlight=False)
        steps = own | {"arborl -h": FIRST["arborl -h"]}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold", style="bold")
    for command, what in steps.items():
        table.add_row(Text(command), what)
    out.print(table)


def newest_run(base: Path = Path("runs")) -> Path | None:
    """The run that was last written to."""
    return max((path.parent for path in base.glob(f"*/{CONFIG}")), key=_written, default=None)


def _standing(run: Path) -> tuple[str, dict[str, str]]:
    """A run's progress, and the commands that fit it."""
    name = shlex.quote(str(run))
    if (run / SUMMARY).is_file():
        try:
            summary = json.loads((run / SUMMARY).read_bytes())
            # Version 0.1.0 called them held-out, which they may not have been.
            before, after = (
                summary.get(f"eval_{when}", summary.get(f"heldout_{when}")) for when in ("before", "after")
            )
            where = f" on {summary['evaluated_on']}" if "evaluated_on" in summary else ""
            came = f", {before:.4f} -> {after:.4f}{where}" if before is not None and after is not None else ""
            state = f"finished, {summary['epochs']} epochs{came}"
        except (ValueError, KeyError, TypeError):
            state = f"finished; its {SUMMARY} is damaged"
        return state, {
            f"arborl report --open {name}": "look at it: curves, trees, pictures, times",
            f"arborl sample --run {name}": "pictures by its weights",
            f"arborl eval --run {name}": "scores on the prompts of its evaluations",
            f"arborl export {name} my-model": "weights for diffusers and ComfyUI",
            f"arborl train --resume {name} train.epochs=…": "train it further",
            "arborl compare tree mix dance": "methods side by side, at equal compute",
        }
    lines = (run / METRICS).read_bytes().count(b"\n") if (run / METRICS).is_file() else 0
    steps = {f"arborl report --live {name}": "watch it in the browser"}
    if not is_locked(run / LOCK):
        steps[f"arborl train --resume {name}"] = "go on with it"
    state = f"{lines} epochs so far, {'it is running' if len(steps) == 1 else 'it was cut off'}"
    return state, steps | {f"arborl doctor --run {name}": "is something wrong with it?"}


def _written(run: Path) -> float:
    files = (run / name for name in (CONFIG, METRICS))
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
