"""What a comparison's page shows: its table, curves and front, and each cell's pictures of the same captions."""

from pathlib import Path
from typing import Any

from .. import __version__
from ..compare.results import Comparison, band, pareto
from ..compare.runs import Cell
from ..core.errors import InputError
from .data import sheets_of
from .pictures import spread_within

FILE = "compare.json"
PICTURES = 6_000_000
"""Bytes that all cells' pictures may take."""


def is_comparison(folder: Path) -> bool:
    return (folder / FILE).is_file()


def comparison_data(folder: Path) -> dict[str, Any]:
    """Everything a comparison's page shows: what compare.json holds, and pictures of the runs that are beside it."""
    try:
        comparison = Comparison.from_json((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("comparison", folder / FILE, f"cannot be read ({error})") from None
    rows = sorted(comparison.rows, key=lambda row: -row.score_at_equal_compute)
    head, *cells = comparison.table()
    return {
        "kind": "comparison",
        "name": folder.resolve().name,
        "folder": str(folder),
        "version": __version__,
        "finished": True,
        "reward": comparison.reward,
        "baseline": comparison.baseline,
        "target": comparison.target,
        "notes": comparison.notes(),
        "table": {"head": head, "rows": cells},
        "cells": [
            {
                "cell": row.cell,
                "curves": {across: band(list(row.curves.values()), across) for across in ("compute", "seconds")},
                "pictures": _pictures(folder, row.cell, row.seeds[0], PICTURES // len(rows)),
                "reports": _reports(folder, row.cell, row.seeds),
            }
            for row in rows
        ],
        "front": [{"x": compute, "y": score, "cell": cell} for compute, score, cell in pareto(rows)],
    }


def _pictures(folder: Path, cell: str, seed: int, most: int) -> dict[str, Any] | None:
    """The first and the last evaluation's pictures of a cell's first seed, where its run is still there."""
    found = sheets_of(folder / Cell(cell).folder / f"seed-{seed}")
    if not found:
        return None
    first, last = found[0]["pictures"], found[-1]["pictures"]
    both = [{"before": before, "after": after} for before, after in zip(first, last, strict=False)]
    return {"epoch": found[-1]["epoch"], "pictures": spread_within(both, most)}


def _reports(folder: Path, cell: str, seeds: list[int]) -> dict[int, str]:
    """Where each run's own page lies, seen from the comparison's."""
    places = {seed: f"{Cell(cell).folder}/seed-{seed}/report.html" for seed in seeds}
    return {seed: place for seed, place in places.items() if (folder / place).is_file()}
