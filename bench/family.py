"""The comparison of docs/results.md: every preset on the scenes, each with its own best setting of one small search.

    python -m bench.family search      # learning rate × η, one seed, on training captions
    python -m bench.family final       # five seeds of the main presets, one of the others, on held-out captions

All cells share the base weights, captions, 32 prompts an epoch, 8 leaves a prompt, 10 steps, 2 optimizer steps an
epoch, float32, and score differences that are not divided by a standard deviation (docs/results.md says why); windows
stay on the first steps, as the scenes' own settings have it. Both stages go on where they were cut off.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from arborl.compare import Cell, PlannedRun, Protocol, execute, plan_runs, read, write
from arborl.worlds.scenes.grammar import split

COMPUTE = 400_000
COMMON = (
    "sample.num_steps=10",
    "sample.num_prompts=32",
    "sample.group_size=8",
    "train.updates=2",
    "loss.clip=1e-3",
    "train.mixed_precision=no",
    "tree.s=0",
    "advantage.std=none",
)
SEARCH_SEED = 100
"""Not one of those that count."""
RATES = ("5e-5", "1e-4", "2e-4", "4e-4")
FLOW, DANCE, SPLIT = ("0.7", "0.85"), ("0.9", "1.2"), ("0.3", "0.6")
"""Noise levels: of flow_sde, of dance_sde, and of dance_sde where splits scale it by 4. The upper ones are near the
most that the first steps can bear."""


@dataclass(frozen=True)
class Entry:
    """A preset, what makes it fit ten steps and eight leaves, and the noise levels it is searched over.

    Variants are not searched but take what was best for the preset they are `like`.
    """

    name: str
    text: str
    etas: tuple[str, ...] = ()
    like: str = ""

    @property
    def main(self) -> bool:
        return self.like == self.name

    @property
    def grid(self) -> list[Cell]:
        return [Cell(f"{self.text} train.learning_rate={rate} kernel.eta={eta}") for rate in RATES for eta in self.etas]


def main_entry(name: str, shape: str, etas: tuple[str, ...]) -> Entry:
    return Entry(name, f"{name} {shape}".strip(), etas, name)


# BranchGRPO splits at 0, 3, 6 and 9 of 20 steps: three splits over the same part of ten are 0, 2 and 4.
BRANCH = "tree.split_points=[0,2,4]"
FAMILY = (
    main_entry("tree", "tree.w=3", FLOW),
    main_entry("branch", BRANCH, SPLIT),
    main_entry("branch_mix", f"{BRANCH} tree.mix_sde_window=2", SPLIT),
    main_entry("mix", "tree.w=3", FLOW),
    main_entry("flow_grpo", "", FLOW),
    main_entry("dance", "", DANCE),
    main_entry("ddpo", "", FLOW),
    Entry("tree_flash", "tree_flash tree.w=3", like="tree"),
    Entry("branch_width", f"branch_width {BRANCH}", like="branch"),
    Entry("branch_depth", f"branch_depth {BRANCH} prune.depth=[7,8] prune.stop_depth=5", like="branch"),
    Entry("mix_flash", "mix_flash tree.w=3 sample.tail_steps=3", like="mix"),
    Entry("tempflow", "tempflow tree.split_points=[0,2] tree.k=4", like="tree"),
)


def captions(out: Path) -> Path:
    """Captions to choose settings by: some that reinforcement learning may see, none that is held out."""
    path = out / "captions.txt"
    out.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(random.Random(0).sample(list(split()[0]), 512)) + "\n")
    return path


def run(groups: list[tuple[list[Cell], Protocol, Path]], workers: int | None) -> dict[str, float]:
    """Run all cells of all groups side by side, write a table for each group, and return the scores."""
    planned = [plan_runs(cells, protocol, out) for cells, protocol, out in groups]
    total, told = sum(map(len, planned)), set[Path]()

    def progress(running: Any, done: list[PlannedRun], failed: Any) -> None:
        for finished in done:
            if finished.folder not in told:
                told.add(finished.folder)
                click.echo(f"{len(told)} of {total}: {finished.cell.text}, seed {finished.seed}", err=True)

    scores: dict[str, float] = {}
    try:
        for folder, words in execute([one for runs in planned for one in runs], workers, progress).items():
            click.echo(f"error: {folder}: {words}", err=True)
    finally:  # also where it was cut off: what there is, is worth a table
        for runs, (_, protocol, out) in zip(planned, groups, strict=True):
            if any(one.finished for one in runs):
                comparison = read(runs, protocol)
                write(comparison, out)
                click.echo(comparison.as_markdown())
                scores |= {row.cell: row.score for row in comparison.rows}
    return scores


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
    searched = [entry for entry in FAMILY if entry.main]
    cells = [cell for entry in searched for cell in entry.grid]
    scores = run([(cells, Protocol((SEARCH_SEED,), compute, common=common, points=1), out / "search")], workers)
    best = {entry.name: max((c for c in entry.grid), key=lambda cell: scores.get(cell.text, 0.0)) for entry in searched}
    (out / "chosen.json").write_text(json.dumps({name: _tuned(cell) for name, cell in best.items()}, indent=1))
    for cell in best.values():
        click.echo(f"| `{cell.text}` | {scores.get(cell.text, float('nan')):.3f} |")


def _tuned(cell: Cell) -> str:
    return " ".join(cell.overrides[-2:])


@main.command()
@with_options
@click.option("--seeds", default=5, show_default=True)
def final(out: Path, compute: float, workers: int | None, extra: tuple[str, ...], seeds: int) -> None:
    """The chosen settings; each held-out caption twice, with different noise."""
    chosen = json.loads((out / "chosen.json").read_text())
    common = (*COMMON, "eval.num_prompts=1022", *extra)

    def cells(main_ones: bool) -> list[Cell]:
        return [Cell(f"{entry.text} {chosen[entry.like]}") for entry in FAMILY if entry.main == main_ones]

    several, one = (Protocol(numbers, compute, common=common) for numbers in (tuple(range(seeds)), (0,)))
    run([(cells(True), several, out / "main"), (cells(False), one, out / "others")], workers)


if __name__ == "__main__":
    main()
