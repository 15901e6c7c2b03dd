"""Settings over seeds, side by side: does it learn every time, and how fast?

    python -m bench.seeds --seeds 5                                   # the default run
    python -m bench.seeds --seeds 3 --workers 12 "train.learning_rate=1e-5" "train.learning_rate=3e-5 tree.w=3"

Each argument is a cell: overrides of `--config-name`, in quotes. Prints each run's held-out score over its evaluations,
and mean and standard deviation of the last one over the seeds.
"""

import json
import os
import statistics
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import click


def silence(workers: int) -> None:
    """What a worker starts with: its share of the cores, and nothing to say."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


Curve = list[tuple[int, float]]
"""(epoch, held-out score)."""


def run(preset: str, overrides: list[str], seed: int, folder: str) -> tuple[Curve, dict[str, float]]:
    """One run; its evaluations and its summary."""
    from arborl.config import load_config
    from arborl.core.errors import InputError
    from arborl.trainer import train

    quiet = [
        "log.trackers=[]",
        "log.record_every=0",
        "log.save_every=100000",
        "eval.num_between=0",
        f"log.dir={folder}",
    ]
    try:
        config = load_config(preset, [*quiet, *overrides, f"seed={seed}"])
        where = train(config)
    except InputError as error:
        raise RuntimeError(str(error)) from None  # which travels between processes
    rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    name = f"eval/{next(iter(config.rewards))}"
    curve = [(row["epoch"], row[name]) for row in rows if name in row]
    return curve, json.loads((where / "summary.json").read_text())


@click.command()
@click.argument("cells", nargs=-1)
@click.option("--config-name", "-c", default="tree_fast", show_default=True)
@click.option("--seeds", default=5, show_default=True, help="How many: 0, 1, …")
@click.option("--workers", default=1, show_default=True, help="Runs side by side.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the curves here, as JSON.")
def main(cells: tuple[str, ...], config_name: str, seeds: int, workers: int, out: Path | None) -> None:
    """Run every cell with every seed and print what it came to."""
    start = time.monotonic()
    found: dict[str, dict[int, Curve]] = {cell: {} for cell in cells or ("",)}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(workers, get_context("spawn"), silence, (workers,)) as pool,
    ):
        jobs: dict[Future[tuple[Curve, dict[str, float]]], tuple[str, int]] = {}
        for seed in range(seeds):
            for cell in found:
                jobs[pool.submit(run, config_name, cell.split(), seed, folder)] = (cell, seed)
        for job in as_completed(jobs):
            cell, seed = jobs[job]
            if job.exception():
                click.echo(f"{cell or config_name}, seed {seed}: {job.exception()}", err=True)
                continue
            curve, summary = job.result()
            found[cell][seed] = curve
            shown = " ".join(f"{score:.3f}" for _, score in curve)
            clock, spent = time.monotonic() - start, summary["seconds"]
            click.echo(f"[{clock:4.0f} s] {cell or config_name}, seed {seed}: {shown}  ({spent:.0f} s)")
            if out:
                out.write_text(json.dumps(found))
    click.echo("\n| settings | before | after | gain by seed |\n|---|---|---|---|")
    for cell, curves in found.items():
        if not curves:
            continue
        first, last = ([curve[i][1] for _, curve in sorted(curves.items())] for i in (0, -1))
        spread = f" ± {statistics.stdev(last):.3f}" if len(last) > 1 else ""
        gains = " ".join(f"{b - a:+.3f}" for a, b in zip(first, last, strict=True))
        click.echo(
            f"| {cell or config_name} | {statistics.mean(first):.3f} | {statistics.mean(last):.3f}{spread} | {gains} |"
        )


if __name__ == "__main__":
    main()
