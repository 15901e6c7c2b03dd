"""The comparison of docs/results.md: every preset on the scenes, each with its own best setting of one small search.

    python -m bench.family search      # the same cells for every preset at two budgets, one seed, training captions
    python -m bench.family final       # the best cell of each: five seeds, on held-out captions, each budget a run
    python -m bench.family tables      # what docs/results.md says of it

All cells share the base weights, captions, 32 prompts an epoch with 8 leaves each (or 16 with 16), 10 steps, AdamW,
clip 1e-3, full fine-tune in float32, a learning rate that falls linearly to 0 at the end of the budget, and windows
that stay on the first steps. Every finished run is a line of the record, which travels between machines; what stands
there is not run again.
"""

import json
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click

from arborl.compare import Cell, PlannedRun, Protocol, execute, plan_runs
from arborl.compare.results import curve
from arborl.worlds.scenes.grammar import split

RECORD = Path("bench/family.jsonl")
COMMON = (
    "sample.num_steps=10",
    "sample.group_size=8",
    "loss.clip=1e-3",
    "train.mixed_precision=no",
    "train.schedule=linear",
    "tree.s=0",
    "eval.every=0",
)
SEARCH_SEED, SEEDS = 100, (0, 1, 2, 3, 4)
"""The seed of the search is not one of those that count."""
SEARCHED_AT = {25_000: 33_000, 33_000: 33_000, 50_000: 33_000, 100_000: 100_000, 200_000: 100_000, 400_000: 100_000}
"""The budget of a run, and that of the search which its settings are from."""
BUDGETS_IN_ORDER = sorted(SEARCHED_AT)
JUDGED_AT, LONGEST, MOST_LONGEST = 200_000, 400_000, 6
"""The longest budget is for those that are best at the one before."""
RATES, UPDATES = ("1e-4", "2e-4", "4e-4"), ("2", "8")


@dataclass(frozen=True)
class Entry:
    """A preset, what makes it fit ten steps and eight leaves, and two values each of its own noise (or trust region)
    and of what an epoch of it costs.
    """

    name: str
    shape: str
    noise: tuple[str, str]
    knob: tuple[str, str]

    @property
    def cells(self) -> list[str]:
        """Half of rate × updates × noise × knob, the same half for all: where an even number of the last three has its
        second value.
        """
        choices = enumerate(product(UPDATES, self.noise, self.knob))
        half = [chosen for number, chosen in choices if number.bit_count() % 2 == 0]
        return [
            " ".join(f"{self.name} {self.shape} train.learning_rate={rate} train.updates={u} {n} {k}".split())
            for rate in RATES
            for u, n, k in half
        ]


def either(key: str, first: str, second: str) -> tuple[str, str]:
    return f"{key}={first}", f"{key}={second}"


UNDIVIDED = "advantage.std=none"
FLOW, DANCE = either("kernel.eta", "0.7", "0.85"), either("kernel.eta", "0.9", "1.2")
# Where splits scale the noise by 4.
SPLIT = either("kernel.eta", "0.3", "0.6")
SHARE = either("prune.step_fraction", "1", "0.5")
TAIL = ("sample.tail_steps=0", "sample.tail_solver=dpmpp_2m sample.tail_steps=3")
FAMILY = (
    Entry("tree", f"tree.w=3 {UNDIVIDED}", FLOW, TAIL),
    Entry("tree_fast", "", FLOW, either("sample.tail_steps", "3", "4")),
    # The whole way to the picture is what makes it tree_long: its knob is the prompts of an epoch.
    Entry("tree_long", "", FLOW, either("sample.num_prompts", "16", "32")),
    # BranchGRPO splits at 0, 3, 6 and 9 of 20 steps: three splits over the same part of ten are 0, 2 and 4.
    Entry("branch_mix", f"tree.split_points=[0,2,4] tree.mix_sde_window=2 {UNDIVIDED}", SPLIT, TAIL),
    Entry("mix", f"tree.w=3 {UNDIVIDED}", FLOW, TAIL),
    Entry("mix_flash", f"tree.w=3 {UNDIVIDED}", FLOW, either("sample.tail_steps", "4", "5")),
    Entry("dance", UNDIVIDED, DANCE, either("prune.step_fraction", "0.6", "0.3")),
    Entry("flow_grpo", UNDIVIDED, FLOW, SHARE),
    Entry("flow_grpo_fast", f"loss.kl=0 {UNDIVIDED}", either("kernel.eta", "0.6", "0.8"), either("tree.w", "2", "3")),
    Entry("ddpo", UNDIVIDED, FLOW, SHARE),
    Entry(
        "nft", "loss.kl=0", either("loss.options.beta", "1", "0.1"), either("loss.options.levels_per_leaf", "4", "9")
    ),
    Entry("awm", "loss.kl=0", either("loss.options.ema", "1", "0.3"), either("loss.options.levels_per_leaf", "3", "6")),
    Entry("tempflow", f"tree.split_points=[0,2] tree.k=4 {UNDIVIDED}", FLOW, TAIL),
)


NFT_GENTLY = (
    "nft loss.kl=0 train.learning_rate=2e-4 train.updates=8 loss.options.beta=0.1 loss.options.levels_per_leaf=4",
    "nft loss.kl=0 train.learning_rate=4e-4 train.updates=8 loss.options.beta=1 loss.options.levels_per_leaf=9",
)
"""DiffusionNFT's chosen cell falls at twice the budget that it was chosen at; these are gentler ones of its search."""
AWM = "awm loss.kl=0 train.learning_rate=4e-4 train.updates=8 loss.options.ema=1 loss.options.levels_per_leaf=6"
APART = (
    "tree_fast train.learning_rate=2e-4 train.updates=8 kernel.eta=0.7 sample.tail_steps=4 tree.siblings=independent"
)
FURTHER: tuple[tuple[int, tuple[int, ...], tuple[str, ...]], ...] = (
    (400_000, SEEDS, ("tree_long",)),
    (200_000, (0, 1, 2), NFT_GENTLY),
    (400_000, (0, 1), (NFT_GENTLY[0], AWM)),
    (50_000, SEEDS, (APART,)),
    (400_000, (0,), (NFT_GENTLY[1],)),
    (66_667, SEEDS, ("tree_fast",)),
    (50_000, SEEDS, ("tree_fast",)),
)
"""Runs that no search chose: presets as they stand, what becomes of forward-process losses in long runs, and
`tree_fast` without what it is built on."""


@dataclass(frozen=True)
class Job:
    """Some cells at one budget and on one set of captions."""

    stage: str
    budget: float
    seeds: tuple[int, ...]
    cells: tuple[str, ...]
    common: tuple[str, ...]

    def planned(self, out: Path, known: set[tuple[Any, ...]]) -> list[PlannedRun]:
        protocol = Protocol(self.seeds, self.budget, common=self.common, points=1)
        folder = out / self.stage / f"{self.budget:.0f}"
        runs = plan_runs([Cell(text) for text in self.cells], protocol, folder) if self.cells else []
        return [one for one in runs if (self.stage, self.budget, one.cell.text, one.seed) not in known]


def captions(out: Path) -> Path:
    """Captions to choose settings by: some that reinforcement learning may see, none that is held out."""
    path = out / "captions.txt"
    out.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(random.Random(0).sample(list(split()[0]), 512)) + "\n")
    return path


def recorded(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.is_file() else []


def known_runs(rows: Iterable[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {(row["stage"], row["budget"], row["cell"], row["seed"]) for row in rows}


def run(jobs: Sequence[Job], record: Path, out: Path, workers: int | None, minutes: float) -> None:
    """Run what the record lacks, in order, and add a line for each run that is finished; stop when the time is over."""
    known, start = known_runs(recorded(record)), time.monotonic()
    of_run = {one.folder: (job, one) for job in jobs for one in job.planned(out, known)}
    written = set[Path]()

    def progress(running: Any, done: list[PlannedRun], failed: Any) -> None:
        for one in done:
            if one.folder not in written:
                written.add(one.folder)
                job, line = of_run[one.folder][0], curve(one)
                row = {"stage": job.stage, "budget": job.budget, "cell": one.cell.text, "seed": one.seed}
                row |= {"before": line[0].score, "score": line[-1].score, "compute": line[-1].compute}
                row |= {"epochs": one.config.train.epochs, "seconds": round(line[-1].seconds, 1)}
                with record.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                clock = time.monotonic() - start
                click.echo(f"[{clock:.0f} s] {len(written)}/{len(of_run)} {row['score']:.3f} {one.cell.text}", err=True)
        if minutes and time.monotonic() - start > 60 * minutes:
            raise KeyboardInterrupt

    try:
        for folder, words in execute([one for _, one in of_run.values()], workers, progress).items():
            click.echo(f"error: {folder}: {words}", err=True)
    except KeyboardInterrupt:
        click.echo(f"stopped with {len(written)} of {len(of_run)} runs", err=True)


def searched(rows: Sequence[dict[str, Any]], entry: Entry, budget: float) -> dict[str, float]:
    """The score of each cell of a preset's search at a budget."""
    found = {row["cell"]: row["score"] for row in rows if (row["stage"], row["budget"]) == ("search", budget)}
    return {cell: found[cell] for cell in entry.cells if cell in found}


def chosen(rows: Sequence[dict[str, Any]], budget: int) -> dict[str, str]:
    """The cell of each preset for runs of some budget: the best of its search."""
    found = {entry.name: searched(rows, entry, SEARCHED_AT[budget]) for entry in FAMILY}
    return {name: max(scores, key=lambda cell: scores[cell]) for name, scores in found.items() if scores}


def scores_at(rows: Sequence[dict[str, Any]], cell: str, budget: float, stage: str = "final") -> list[float]:
    return [r["score"] for r in rows if (r["stage"], r["cell"], r["budget"]) == (stage, cell, budget)]


@click.group()
def main() -> None:
    """The stages, in their order."""


def with_options(command: Any) -> Any:
    for option in (
        click.option("--out", type=click.Path(path_type=Path), default="runs/family", show_default=True),
        click.option("--record", type=click.Path(path_type=Path), default=RECORD, show_default=True),
        click.option("--workers", type=int, help="Runs side by side."),
        click.option("--minutes", type=float, default=0.0, help="Stop after so long; the same command goes on."),
        click.option("--only", default="", help="Presets, with commas between them."),
        click.option("--set", "extra", multiple=True, help="A further setting of all cells: batch sizes, say."),
    ):
        command = option(command)
    return command


def entries(only: str) -> list[Entry]:
    return [entry for entry in FAMILY if not only or entry.name in only.split(",")]


@main.command()
@with_options
def search(out: Path, record: Path, workers: int | None, minutes: float, only: str, extra: tuple[str, ...]) -> None:
    """Every preset's twelve cells, at each of the two budgets that settings are searched at."""
    common = (*COMMON, f"eval.prompts={captions(out.resolve())}", "eval.num_prompts=512", *extra)
    # Cell by cell and not preset by preset, so that what is cut off is the same part of every search.
    cells = tuple(cell for together in zip(*(entry.cells for entry in entries(only)), strict=True) for cell in together)
    budgets = sorted(set(SEARCHED_AT.values()), reverse=True)
    run([Job("search", budget, (SEARCH_SEED,), cells, common) for budget in budgets], record, out, workers, minutes)


@main.command()
@with_options
@click.option("--budgets", default="200000,100000,50000,33000,25000,400000", show_default=True, help="In this order.")
def final(
    out: Path,
    record: Path,
    workers: int | None,
    minutes: float,
    only: str,
    extra: tuple[str, ...],
    budgets: str,
) -> None:
    """The chosen cells, five seeds, each budget a run of its own; each held-out caption twice, with different noise.

    The longest budget, and the two best at a constant rate, want the results of the one before.
    """
    names, start = {entry.name for entry in entries(only)}, time.monotonic()
    for budget in map(int, budgets.split(",")):
        rows = recorded(record)
        best = chosen(rows, budget)
        cells, jobs = [cell for name, cell in best.items() if name in names], list[Job]()
        if budget == LONGEST:
            leading = sorted(best.values(), key=lambda cell: -mean_at(rows, cell, JUDGED_AT))
            constant = tuple(f"{cell} train.schedule=constant" for cell in leading[:2])
            jobs.append(Job("final", JUDGED_AT, SEEDS, constant, held_out(extra)))
            cells = [cell for cell in leading[:MOST_LONGEST] if cell in cells]
        jobs.append(Job("final", budget, SEEDS, tuple(cells), held_out(extra)))
        left = minutes - (time.monotonic() - start) / 60
        if minutes and left <= 0:
            break
        run(jobs, record, out, workers, left if minutes else 0.0)


def held_out(extra: tuple[str, ...]) -> tuple[str, ...]:
    """What runs that count have in common: they are judged by each held-out caption twice, with different noise."""
    return (*COMMON, "eval.num_prompts=1022", *extra)


@main.command()
@with_options
def further(out: Path, record: Path, workers: int | None, minutes: float, only: str, extra: tuple[str, ...]) -> None:
    """Runs that no search chose, on held-out captions."""
    names = {entry.name for entry in entries(only)}
    wanted = [(budget, seeds, [c for c in cells if c.split()[0] in names]) for budget, seeds, cells in FURTHER]
    jobs = [Job("further", budget, seeds, tuple(cells), held_out(extra)) for budget, seeds, cells in wanted]
    run(jobs, record, out, workers, minutes)


def mean_at(rows: Sequence[dict[str, Any]], cell: str, budget: float) -> float:
    scores = scores_at(rows, cell, budget)
    return statistics.mean(scores) if scores else 0.0


@main.command()
@click.option("--record", type=click.Path(path_type=Path), default=RECORD, show_default=True)
def tables(record: Path) -> None:
    """The searches and the results, in Markdown."""
    rows = recorded(record)
    for entry in FAMILY:
        click.echo(f"\n`{entry.name} {entry.shape}`\n")
        at = sorted(set(SEARCHED_AT.values()))
        found = [searched(rows, entry, budget) for budget in at]
        for cell in entry.cells:
            shown = cell.removeprefix(f"{entry.name} {entry.shape}".strip()).strip()
            scores = [
                f"{one[cell]:.3f}{'*' * (one[cell] == max(one.values()))}" if cell in one else "" for one in found
            ]
            click.echo(f"| `{shown}` | {' | '.join(scores)} |")
    budgets = sorted(SEARCHED_AT)
    click.echo(f"\n| preset | {' | '.join(f'{b / 1000:.0f} k' for b in budgets)} |\n|{'---|' * (len(budgets) + 1)}")
    for name in chosen(rows, JUDGED_AT):
        for more, label in (("", f"`{name}`"), (" train.schedule=constant", f"`{name}`, constant rate")):
            cells = [chosen(rows, budget).get(name, "") + more for budget in budgets]
            found = [scores_at(rows, cell, budget) for cell, budget in zip(cells, budgets, strict=True)]
            if any(found):
                click.echo(f"| {label} | {' | '.join(map(plus_minus, found))} |")

    click.echo("\n| cell | budget | |\n|---|---|---|")
    for cell, budget in dict.fromkeys((row["cell"], row["budget"]) for row in rows if row["stage"] == "further"):
        click.echo(f"| `{cell}` | {budget / 1000:.0f} k | {plus_minus(scores_at(rows, cell, budget, 'further'))} |")


@main.command()
@click.option("--record", type=click.Path(path_type=Path), default=RECORD, show_default=True)
@click.option("--to", type=click.Path(path_type=Path), default="docs/results.png", show_default=True)
def chart(record: Path, to: Path) -> None:
    """The final scores by budget, as a picture."""
    import matplotlib.pyplot as pyplot

    rows = recorded(record)
    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    for number, name in enumerate(chosen(rows, JUDGED_AT)):
        found = {budget: scores_at(rows, chosen(rows, budget)[name], budget) for budget in BUDGETS_IN_ORDER}
        found = {budget: scores for budget, scores in found.items() if len(scores) > 1}
        means = [statistics.mean(scores) for scores in found.values()]
        errors = [statistics.stdev(scores) / len(scores) ** 0.5 for scores in found.values()]
        ours = name in ("tree_fast", "tree_long")
        style = {"marker": "osD^v<>ph*XPd"[number], "linewidth": 2.5 if ours else 1.2, "markersize": 7 if ours else 5}
        axes.errorbar(
            list(found),
            means,
            errors,
            label=name,
            color=pyplot.get_cmap("tab20").colors[2 * number % 20 + number // 10],
            **style,
        )
    beside = ((NFT_GENTLY[1], JUDGED_AT, "nft, gently", (8, -14), "left"),)
    beside += (("tree_long", LONGEST, "tree_long as it is", (-8, -4), "right"),)
    for cell, budget, label, offset, side in beside:
        where = budget, statistics.mean(scores_at(rows, cell, budget, "further"))
        axes.plot(*where, "*", markersize=13, color="black")
        axes.annotate(label, where, offset, textcoords="offset points", ha=side)
    axes.set(
        xscale="log",
        xlabel="compute of a run: forwards + 3 × forward+backwards",
        ylabel="held-out score",
        ylim=(0.44, 0.89),
    )
    axes.set_xticks(BUDGETS_IN_ORDER, [f"{budget / 1000:.0f} k" for budget in BUDGETS_IN_ORDER])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(ncols=2)
    figure.savefig(to, dpi=110)


def plus_minus(scores: Sequence[float]) -> str:
    if not scores:
        return ""
    error = f" ± {statistics.stdev(scores) / len(scores) ** 0.5:.3f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.3f}{error}" + (f" ({len(scores)})" if len(scores) < len(SEEDS) else "")


if __name__ == "__main__":
    main()
