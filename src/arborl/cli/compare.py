"""The command compare: presets side by side."""

from pathlib import Path

import click

from .app import app, json_option, out


@app.command()
@click.argument("cells", nargs=-1, required=True, metavar="CELL...")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Runs a cell, of seeds 0, 1, …")
@click.option(
    "--compute",
    type=float,
    help="Budget of a run in forwards; a forward+backward counts 3. [default: what the first cell's train.epochs cost]",
)
@click.option("--seconds", type=float, help="Budget of a run in seconds of training, in place of compute.")
@click.option(
    "--set", "common", multiple=True, metavar="KEY=VALUE", help="A setting of every cell; may be given again."
)
@click.option("--baseline", help="The cell whose final score others are to reach.  [default: the best flat one]")
@click.option(
    "--points",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Evaluations in a run; with --seconds every 10 epochs.",
)
@click.option("--workers", type=click.IntRange(1), help="Runs side by side.  [default: as the device has room]")
@click.option(
    "--out",
    "-o",
    "to",
    type=click.Path(path_type=Path),
    default="runs/compare",
    show_default=True,
    help="Folder for runs, table and plots.",
)
@click.option("--dry-run", is_flag=True, help="Show the runs and their cost, and stop.")
@json_option
def compare(
    cells: tuple[str, ...],
    seeds: int,
    compute: float | None,
    seconds: float | None,
    common: tuple[str, ...],
    baseline: str | None,
    points: int,
    workers: int | None,
    to: Path,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Compare presets at equal compute or equal seconds.

    A cell is a preset with any overrides, in quotes. All cells get the same model, prompts and seeds. Writes
    compare.md, compare.json, compare.png and report.html; the same command again goes on where it was cut off, and
    runs nothing twice.

    Example: arborl compare tree 'tree tree.w=4 sample.num_prompts=16' flow_grpo --seeds 5 --compute 4e5
    """
    from ..compare import Cell, Protocol
    from .compare_table import run_comparison

    protocol = Protocol(tuple(range(seeds)), compute or 0.0, seconds or 0.0, common, points)
    run_comparison([Cell(text) for text in cells], protocol, to, baseline, workers, dry_run, as_json, out)
