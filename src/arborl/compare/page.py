"""Data of a comparison's page: its table, curves and front, and each cell's pictures of the same captions."""

from pathlib import Path
from typing import Any

from .. import __version__
from ..report.data import sheets_of
from ..report.page import COMPARISON
from ..run.paths import REPORT
from ..tools.files import as_text
from .results import Comparison, band, pareto
from .runs import Cell

COLUMNS = 8
"""Captions whose pictures are shown."""


def comparison_data(folder: Path) -> dict[str, Any]:
    """Everything a comparison's page shows: what compare.json holds, and pictures of the runs that are beside it."""
    comparison = Comparison.from_json((folder / COMPARISON).read_text(encoding="utf-8"))
    rows = sorted(comparison.rows, key=lambda row: -row.score_at_equal_compute)
    head, *cells = comparison.table()
    sheets = {row.cell: sheets_of(folder / Cell(row.cell).folder / f"seed-{row.seeds[0]}") for row in rows}
    sheets = {cell: found for cell, found in sheets.items() if found}
    return {
        "kind": "comparison",
        "name": as_text(folder.resolve().name),
        "folder": as_text(folder),
        "version": __version__,
        "finished": True,
        "reward": comparison.reward,
        "evaluated_on": comparison.evaluated_on,
        "notes": comparison.notes(),
        "table": {"head": head, "rows": cells},
        "cells": [
            {
                "cell": row.cell,
                "curves": {across: band(list(row.curves.values()), across) for across in ("compute", "seconds")},
                "pictures": _first(sheets[row.cell][-1]) if row.cell in sheets else None,
                "reports": _reports(folder, row.cell, row.seeds),
            }
            for row in rows
        ],
        "before": _first(next(iter(sheets.values()))[0]) if sheets else None,
        "front": [{"x": compute, "y": score, "cell": cell} for compute, score, cell in pareto(rows)],
    }


def _first(sheet: dict[str, Any]) -> dict[str, Any]:
    """The same captions of every cell."""
    return {"epoch": sheet["epoch"], "pictures": sheet["pictures"][:COLUMNS]}


def _reports(folder: Path, cell: str, seeds: list[int]) -> dict[int, str]:
    """Links from the comparison's page to the runs' own."""
    places = {seed: f"{Cell(cell).folder}/seed-{seed}/{REPORT}" for seed in seeds}
    return {seed: place for seed, place in places.items() if (folder / place).is_file()}
