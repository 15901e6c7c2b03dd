"""From run folders to one table: scores over seeds, at equal compute, and what it took to reach the baseline's."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from ..core.errors import InputError
from ..engine.cost import BACKWARD_COST
from ..run.environment import evaluated_on
from ..run.folder import read_metrics, training_seconds
from ..run.paths import REPORT, SUMMARY
from ..tools.files import kind_of, write_atomically
from ..tools.finite_json import finite_json
from .runs import Cell, PlannedRun, Protocol

TABLE, CHART = "compare.md", "compare.png"


@dataclass(frozen=True)
class Point:
    """An evaluation, and what training had taken by then."""

    compute: float
    seconds: float
    score: float
    stderr: float | None  # over the evaluated pictures


@dataclass(frozen=True)
class Row:
    """A cell over its seeds. What could not be measured is None."""

    cell: str
    plan: str
    seeds: list[int]
    epochs: float
    before: float
    score: float
    stderr: float | None  # over seeds
    forwards: float
    forward_backwards: float
    compute: float
    seconds: float
    peak_memory: int
    score_at_equal_compute: float
    stderr_at_equal_compute: float | None
    compute_to_baseline: float | None
    scores: dict[int, float]
    curves: dict[int, list[Point]]


@dataclass(frozen=True)
class Comparison:
    protocol: Protocol
    reward: str
    baseline: str | None
    target: float | None  # the baseline's score, which others are to reach
    equal_compute: float
    rows: list[Row]
    evaluated_on: str = "evaluation prompts"

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Comparison":
        """The inverse of `as_json`. JSON's keys are texts; seeds are numbers again."""
        given = finite_json(text)
        rows: list[Row] = []
        for row in given["rows"]:
            curves = {int(seed): [Point(**point) for point in line] for seed, line in row["curves"].items()}
            scores = {int(seed): score for seed, score in row["scores"].items()}
            rows.append(Row(**row | {"curves": curves, "scores": scores}))
        protocol = given["protocol"] | {name: tuple(given["protocol"][name]) for name in ("seeds", "common")}
        return cls(**given | {"protocol": Protocol(**protocol), "rows": rows})

    def table(self, code: Callable[[str], str] = str) -> list[list[str]]:
        """A row of titles and one for each cell, the best first; `code` marks what a user would type."""
        columns: dict[str, Callable[[Row], str]] = {
            "cell": lambda row: code(row.cell),
            "seeds": lambda row: str(len(row.seeds)),
            "epochs": lambda row: f"{row.epochs:.0f}",
            f"{self.reward} before": lambda row: f"{row.before:.3f}",
            "after": lambda row: _pm(row.score, row.stderr),
            f"at compute {_short(self.equal_compute)}": lambda row: _pm(
                row.score_at_equal_compute, row.stderr_at_equal_compute
            ),
            "forwards": lambda row: _short(row.forwards),
            "forward+backwards": lambda row: _short(row.forward_backwards),
            "compute": lambda row: _short(row.compute),
            "seconds": lambda row: f"{row.seconds:.0f}",
            "peak memory": lambda row: f"{row.peak_memory / 2**20:.0f} MiB",
        }
        if base := next((row for row in self.rows if row.cell == self.baseline), None):
            columns[f"compute to reach the {self.target:.3f} of {code(base.cell)}"] = lambda row: (
                "never"
                if row.compute_to_baseline is None
                else f"{_short(row.compute_to_baseline)} ({row.compute_to_baseline / base.compute:.2f}×)"
            )
        rows = sorted(self.rows, key=lambda row: -row.score_at_equal_compute)
        return [list(columns), *([show(row) for show in columns.values()] for row in rows)]

    def notes(self, code: Callable[[str], str] = str) -> str:
        """Notes that explain the table."""
        budget = f"{_short(self.protocol.compute)} forwards" if self.protocol.compute else f"{self.protocol.seconds} s"
        common = " ".join(map(code, self.protocol.common)) or "none"
        return (
            f"Budget of a run: {budget} (a forward counts 1, a forward+backward {BACKWARD_COST}; evaluation apart). "
            f"Settings of all cells: {common}. Scores are means over seeds ± standard error over seeds, of pictures of "
            f"{self.evaluated_on} by the ODE; compute to reach a score is linear between the evaluations of the mean "
            "over seeds."
        )

    def as_markdown(self) -> str:
        head, *rows = self.table(_code)
        lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
        return "\n".join(lines) + f"\n\n{self.notes(_code)}\n"


def _code(text: str) -> str:
    return f"`{text}`"


def _pm(value: float, error: float | None) -> str:
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def _short(value: float) -> str:
    return f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value / 1e3:.0f} k" if value >= 1e4 else f"{value:.0f}"


def read(runs: Sequence[PlannedRun], protocol: Protocol, baseline: str | None = None) -> Comparison:
    """Results of the finished runs. The baseline is the named cell, or the flat one with the best score."""
    finished = [run for run in runs if run.finished and curve(run)]
    if not finished:
        raise InputError("cells", None, "no run has come to a score")
    reward = next(iter(finished[0].config.rewards))
    by_cell: dict[Cell, list[PlannedRun]] = {}
    for run in finished:
        by_cell.setdefault(run.cell, []).append(run)
    curves = {cell: {run.seed: curve(run) for run in of_cell} for cell, of_cell in by_cell.items()}
    equal = min(line[-1].compute for lines in curves.values() for line in lines.values())
    finals = {cell: mean_curve(list(lines.values()))[-1][1] for cell, lines in curves.items()}
    flat = [cell for cell, of_cell in by_cell.items() if of_cell[0].config.tree.plan == "flat"]
    named = [cell for cell in by_cell if cell.text == baseline]
    base = named[0] if named else max(flat, key=lambda cell: finals[cell], default=None)
    rows = [_row(cell, by_cell[cell], curves[cell], equal, finals[base] if base else None) for cell in by_cell]
    target = finals[base] if base else None
    prompts = evaluated_on(finished[0].folder, finished[0].config)
    return Comparison(protocol, reward, base.text if base else None, target, equal, rows, prompts)


def curve(run: PlannedRun) -> list[Point]:
    """A run's evaluations. One belongs to the weights its epoch starts from, so it comes before the epoch's cost."""
    points: list[Point] = []
    compute = seconds = 0.0
    name = f"eval/{next(iter(run.config.rewards))}"
    for row in read_metrics(run.folder):
        if row.get(name) is not None:
            points.append(Point(compute, seconds, row[name], row[f"{name}_stderr"]))
        if "forwards" in row:
            compute = row["forwards"] + BACKWARD_COST * row["forward_backwards"]
        seconds += training_seconds(row)
    return points


def _row(cell: Cell, runs: list[PlannedRun], curves: dict[int, list[Point]], equal: float, target: float | None) -> Row:
    summaries = [json.loads((run.folder / SUMMARY).read_text()) for run in runs]
    finals = {seed: line[-1].score for seed, line in curves.items()}
    at_equal = [score_at(line, equal) for line in curves.values()]

    def mean(name: str) -> float:
        return statistics.mean(summary[name] for summary in summaries)

    return Row(
        cell=cell.text,
        plan=runs[0].config.tree.plan,
        seeds=sorted(curves),
        epochs=mean("epochs"),
        before=statistics.mean(line[0].score for line in curves.values()),
        score=statistics.mean(finals.values()),
        stderr=_stderr(list(finals.values())),
        forwards=mean("forwards"),
        forward_backwards=mean("forward_backwards"),
        compute=statistics.mean(line[-1].compute for line in curves.values()),
        seconds=mean("train_seconds"),
        peak_memory=max(summary["peak_memory"] for summary in summaries),
        score_at_equal_compute=statistics.mean(at_equal),
        stderr_at_equal_compute=_stderr(at_equal),
        compute_to_baseline=None if target is None else compute_to_reach(mean_curve(list(curves.values())), target),
        scores=finals,
        curves=curves,
    )


def _stderr(values: list[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def score_at(line: Sequence[Point], compute: float) -> float:
    """The score at some compute, linear between evaluations."""
    for before, after in pairwise(line):
        if compute <= after.compute:
            share = (compute - before.compute) / max(after.compute - before.compute, 1e-9)
            return before.score + share * (after.score - before.score)
    return line[-1].score


def mean_curve(lines: Sequence[Sequence[Point]]) -> list[tuple[float, float]]:
    """(compute, mean score over the seeds) at every compute one of them was evaluated at, as far as all of them go."""
    end = min(line[-1].compute for line in lines)
    grid = sorted({point.compute for line in lines for point in line if point.compute <= end})
    return [(compute, statistics.mean(score_at(line, compute) for line in lines)) for compute in grid]


def band(lines: Sequence[Sequence[Point]], across: str) -> list[tuple[float, float, float | None]]:
    """Evaluation by evaluation, as far as all seeds go: where it stands, the mean score and its standard error."""
    found: list[tuple[float, float, float | None]] = []
    for points in zip(*lines, strict=False):
        scores = [point.score for point in points]
        found.append((statistics.mean(getattr(p, across) for p in points), statistics.mean(scores), _stderr(scores)))
    return found


def compute_to_reach(line: Sequence[tuple[float, float]], target: float) -> float | None:
    """The compute at which a curve first comes to a score, linear between its points; None where it never does."""
    if line[0][1] >= target:
        return line[0][0]
    for (start, low), (stop, high) in pairwise(line):
        if high >= target:
            return start + (target - low) / (high - low) * (stop - start)
    return None


def pareto(rows: Sequence[Row]) -> list[tuple[float, float, str]]:
    """Mean evaluations that no other reaches with less compute: (compute, score, cell), by rising compute."""
    points = [(compute, score, row.cell) for row in rows for compute, score in mean_curve(list(row.curves.values()))]
    front: list[tuple[float, float, str]] = []
    for compute, score, cell in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or score > front[-1][1]:
            front.append((compute, score, cell))
    return front


def check_can_write(out: Path) -> None:
    """Results replace those of an earlier comparison, whose JSON says that they are, and no other files."""
    from ..report import page

    try:
        Comparison.from_json((out / page.COMPARISON).read_text(encoding="utf-8"))
        earlier = True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        earlier = False
    for name in (page.COMPARISON, TABLE, CHART):
        kind = kind_of(out / name)
        if kind and not (earlier and kind == "file"):
            raise InputError(
                "--out", out, f"has a {kind} {name} that is not from an earlier comparison", "a new folder"
            )
    page.check_can_write(out / REPORT)


def write(comparison: Comparison, out: Path) -> list[Path]:
    """compare.json, compare.md, compare.png and report.html, each complete or not there."""
    from ..report import write_report
    from ..report.page import COMPARISON
    from .plot import plot

    check_can_write(out)
    try:
        for name, text in ((COMPARISON, comparison.as_json()), (TABLE, comparison.as_markdown())):
            write_atomically(out / name, text)
        plot(comparison, out / CHART)
    except OSError as error:
        raise InputError("--out", out, f"cannot be written to ({error.strerror})") from None
    return [out / TABLE, out / COMPARISON, out / CHART, write_report(out)]
