"""The comparison of docs/results.md: every preset on the scenes, each with its own best setting of one small search.

    python -m bench.family search      # learning rate × η, one seed, on training captions
    python -m bench.family final       # five seeds of the main presets, one of the others, on held-out captions

All cells share the base weights, captions, 32 prompts an epoch, 8 leaves a prompt, 10 steps, 2 optimizer steps an epoch,
float32, and score differences that are not divided by a standard deviation (docs/results.md says why); windows stay on
the first steps, as the scenes' own settings have it. Both stages go on where they were cut off.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from arborl.compare import Cell, Protocol, Run, execute, plan_runs, read, write
from arborl.scenes.grammar import split

COMPUTE = 400_000
COMMON = (
    "sample.num_steps=10",
    "sample.num_prompts=32",
    "sample.group_size=8",
    "train.updates=2",
    "train.clip=1e-3",
    "train.mixed_precision=no",
    "tree.s=0",
    "advantage.std=none",
)
SEARCH_SEED = 100
"""Not one of those that count."""
RATES = ("1e-4", "2e-4", "4e-4")
FLOW, DANCE, SPLIT = ("0.7", "0.85"), ("0.9", "1.2"), ("0.3", "0.6")
"""Noise levels: of flow_sde, of dance_sde, and of dance_sde where splits scale it by 4. The upper ones are near the most that
the first steps can bear."""


@dataclass(frozen=True)
class Entry:
    """A preset, what makes it fit ten steps and eight leaves, and the noise levels it is searched over."""

    preset: str
    shape: str
    etas: tuple[str, ...]
    main: bool = False

    @property
    def text(self) -> str:
        return f"{self.preset} {self.shape}".strip()

    @property
    def grid(self) -> list[Cell]:
        return [Cell(f"{self.text} train.learning_rate={rate} kernel.eta={eta}") for rate in RATES for eta in self.etas]


# BranchGRPO splits at 0, 3, 6 and 9 of 20 steps: three splits over the same part of ten are 0, 2 and 4.
BRANCH = "tree.split_points=[0,2,4]"
FAMILY = (
    Entry("tree", "tree.w=3", FLOW, main=True),
    Entry("tree", "tree.w=3 sample.tail_solver=dpmpp_2m sample.tail_steps=3", FLOW, main=True),
    Entry("branch", BRANCH, SPLIT, main=True),
    Entry("branch_mix", f"{BRANCH} tree.mix_sde_window=2", SPLIT, main=True),
    Entry("mix", "tree.w=3", FLOW, main=True),
    Entry("flow_grpo", "", FLOW, main=True),
    Entry("dance", "", DANCE, main=True),
    Entry("ddpo", "", FLOW, main=True),
    Entry("branch_width", BRANCH, SPLIT),
    Entry("branch_depth", f"{BRANCH} prune.depth=[7,8] prune.stop_depth=5", SPLIT),
    Entry("mix_flash", "tree.w=3 sample.tail_steps=3", FLOW),
    Entry("tempflow", "tree.split_points=[0,2] tree.k=4", FLOW),
)


def captions(out: Path) -> Path:
    """Captions to choose settings by: some that reinforcement learning may see, none that is held out."""
    path = out / "captions.txt"
    out.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(random.Random(0).sample(list(split()[0]), 512)) + "\n")
    return path


def run(cells: list[Cell], protocol: Protocol, out: Path, workers: int | None) -> dict[str, float]:
    """Run the cells, write their table, and return their scores."""
    runs, told = plan_runs(cells, protocol, out), set[Path]()

    def progress(running: Any, done: list[Run], failed: Any) -> None:
        for finished in done:
            if finished.folder not in told:
                told.add(finished.folder)
                click.echo(f"{len(told)} of {len(runs)}: {finished.cell.text}, seed {finished.seed}", err=True)

    try:
        for folder, words in execute(runs, workers, progress).items():
            click.echo(f"error: {folder}: {words}", err=True)
    finally:  # also where it was cut off: what there is, is worth a table
        comparison = read(runs, protocol)
        write(comparison, out)
        click.echo(comparison.as_markdown())
    return {row.cell: row.score for row in comparison.rows}


@click.group()
def main() -> None:
    """The two stages, in their order."""


def with_options(command: Any) -> Any:
    for option in (
        click.option("--out", type=click.Path(path_type=Path), default="runs/family", show_default=True),
        click.option("--compute", default=float(COMPUTE), show_default=True, help="Budget of a run."),
        click.option("--workers", type=int, help="Runs side by side."),
        click.option("--set", "extra", multiple=True, help="A further setting of all cells: batch sizes, say."),
    ):
        command = option(command)
    return command


@main.command()
@with_options
def search(out: Path, compute: float, workers: int | None, extra: tuple[str, ...]) -> None:
    """Every preset at every learning rate and noise level, and what was best."""
    common = (*COMMON, f"eval.prompts={captions(out)}", "eval.num_prompts=512", *extra)
    cells = [cell for entry in FAMILY for cell in entry.grid]
    scores = run(cells, Protocol((SEARCH_SEED,), compute, common=common, points=1), out / "search", workers)
    chosen = {entry.text: max((c.text for c in entry.grid), key=lambda text: scores.get(text, 0.0)) for entry in FAMILY}
    (out / "chosen.json").write_text(json.dumps(chosen, indent=1))
    for text in chosen.values():
        click.echo(f"| `{text}` | {scores[text]:.3f} |")


@main.command()
@with_options
@click.option("--seeds", default=5, show_default=True)
def final(out: Path, compute: float, workers: int | None, extra: tuple[str, ...], seeds: int) -> None:
    """The chosen settings; each held-out caption twice, with different noise."""
    chosen = json.loads((out / "chosen.json").read_text())
    common = (*COMMON, "eval.num_prompts=1022", *extra)
    for stage, main_ones, numbers in (("main", True, tuple(range(seeds))), ("others", False, (0,))):
        cells = [Cell(chosen[entry.text]) for entry in FAMILY if entry.main == main_ones]
        run(cells, Protocol(numbers, compute, common=common), out / stage, workers)


if __name__ == "__main__":
    main()
