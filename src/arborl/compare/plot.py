"""A comparison for the eye: score against compute and against seconds, and who holds the front."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..tools.files import atomic
from .results import Comparison, Point, Row, band, mean_curve, pareto

COLOURS = (
    "#1b6ca8", "#d1495b", "#2e933c", "#8e5ea2", "#e39a2d", "#3a9da6", "#7a5230", "#e377c2", "#6b7280", "#a3b118",
)  # fmt: skip


def plot(comparison: Comparison, path: Path) -> Path:
    """Three panels in one PNG; a band is the standard error over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    rows = sorted(comparison.rows, key=lambda row: -row.score_at_equal_compute)
    colour = {row.cell: COLOURS[i % len(COLOURS)] for i, row in enumerate(rows)}
    figure = Figure(figsize=(15, 4.8 + 0.12 * len(rows)), dpi=110, layout="constrained")
    compute, seconds, front = figure.subplots(1, 3)
    for row in rows:
        lines = list(row.curves.values())
        for axes, across in ((compute, "compute"), (seconds, "seconds")):
            _band(axes, lines, across, colour[row.cell], textwrap.shorten(row.cell, 90, placeholder=" …"))
    _front(front, rows, colour)
    for axes, label in (
        (compute, "compute (forward 1, forward+backward 3)"),
        (seconds, "training seconds"),
        (front, "compute"),
    ):
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        if axes is not seconds:
            axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.grid(alpha=0.25)
        axes.spines[["right", "top"]].set_visible(False)
    compute.set_ylabel(f"{comparison.reward} on {comparison.evaluated_on}")
    compute.set_title("score against compute", fontsize=10)
    seconds.set_title("score against seconds", fontsize=10)
    front.set_title("Pareto front: no cell reaches more with less", fontsize=10)
    figure.legend(*compute.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    with atomic(path) as aside:
        figure.savefig(aside, format="png", facecolor="white")
    return path


def _band(axes: Any, lines: Sequence[Sequence[Point]], across: str, colour: str, label: str) -> None:
    """The mean over seeds, evaluation by evaluation, and its standard error."""
    x, y, errors = zip(*band(lines, across), strict=True)
    axes.plot(x, y, color=colour, label=label, lw=1.8, marker=".", ms=4)
    if len(lines) > 1:
        low, high = ([v + sign * e for v, e in zip(y, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)


def _front(axes: Any, rows: Sequence[Row], colour: dict[str, str]) -> None:
    for row in rows:
        points = mean_curve(list(row.curves.values()))
        axes.scatter(*zip(*points, strict=True), s=10, color=colour[row.cell], alpha=0.35, lw=0)
    best = pareto(rows)
    axes.step([x for x, _, _ in best], [y for _, y, _ in best], where="post", color="#444444", lw=1)
    axes.scatter([x for x, _, _ in best], [y for _, y, _ in best], s=34, color=[colour[cell] for _, _, cell in best])
