"""What a run's page shows, read from its folder as plain lists and numbers: all of it is JSON."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from .. import __version__
from ..config import knobs, load_config, read_config
from ..config.schema import Config
from ..core.errors import InputError
from ..draw import leaf_order, profile
from ..log import STAGES, flat, read_metrics
from ..record import RecordedTree
from ..rewards.base import weights_of
from ..watch import LIMITS, hacking, statistic
from .pictures import as_webp, spread, spread_within

TREES, SHEETS, EPOCHS = 4_000_000, 3_000_000, 48
"""Bytes that a page's trees and its sheets may take, and epochs each; where there are more, some are left out."""


def run_data(folder: Path) -> dict[str, Any]:
    """Everything a run's page shows. A run that is still going on is shown as far as it has come."""
    if not (folder / "config.yaml").is_file():
        raise InputError("run", folder, "is not a run folder (it has no config.yaml)")
    config, rows = read_config(folder / "config.yaml"), read_metrics(folder)
    weights = weights_of(config.rewards, config.eval.rewards)
    # One that is being written has no JSON yet, and waits for the next look.
    trees = sorted((folder / "trees").glob("epoch_*.json"))
    sheets = _sheet_files(folder)
    return {
        "kind": "run",
        "name": folder.name,
        "folder": str(folder),
        "version": __version__,
        "finished": (folder / "summary.json").is_file(),
        "epochs": None if config.train.max_seconds else config.train.epochs,
        "summary": _summary(folder),
        "rewards": [{"name": name, "weight": weight} for name, weight in weights.items()],
        "metrics": columns(rows),
        "stages": list(STAGES),
        "watch": _watch(rows, weights, config),
        "trees": spread_within([_tree(path, path.stat().st_mtime_ns) for path in spread(trees, EPOCHS)], TREES),
        "trees_recorded": len(trees),
        "sheets": spread_within(sheets_of(folder, EPOCHS), SHEETS),
        "sheets_recorded": len(sheets),
        "settings": _settings(config),
    }


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Metrics by name, a value for each row, None where a row has none."""
    names = dict.fromkeys(["epoch", *(name for row in rows for name in row)])
    return {name: [row.get(name) for row in rows] for name in names}


def _summary(folder: Path) -> dict[str, Any] | None:
    path = folder / "summary.json"
    try:
        return json.loads(path.read_bytes()) if path.is_file() else None
    except ValueError:
        raise InputError("run", folder, "its summary.json is damaged", "the run without that file") from None


def _settings(config: Config) -> list[dict[str, Any]]:
    """Every setting, what it says, and whether it is another than `arborl train` alone takes."""
    sentences = {key: item.metadata["help"] for key, item in knobs()}
    usual = flat(load_config("tree"))
    found: list[dict[str, Any]] = []
    for key, value in flat(config).items():
        parts = key.split(".")
        general = f"rewards.<name>.{parts[-1]}" if parts[0] == "rewards" and len(parts) == 3 else key
        own = {"key": key, "value": str(value), "says": sentences.get(general, "")}
        found.append(own | {"usual": None if usual.get(key) == value else str(usual.get(key, "–"))})
    return found


def _watch(rows: list[dict[str, Any]], weights: Mapping[str, float], config: Config) -> dict[str, Any]:
    """When the run looked like reward hacking and by which signs; the bounds that each statistic is held to."""
    trained = {name: -1.0 if weight < 0 else 1.0 for name, weight in weights.items() if weight}
    watched = [name for name in config.eval.rewards if not weights[name]]
    when = [i for i, row in enumerate(rows) if any(row.get(f"eval/{name}") is not None for name in weights)]
    told = {rows[i]["epoch"]: hacking(rows[: i + 1], trained, watched) for i in when}
    bounds: dict[str, dict[str, float]] = {}
    for name, (left, added) in LIMITS.items():
        first = statistic(rows, name)[0]
        if first is not None:
            bounds[name] = {"low": first * left} if left else {"high": first + added}
    signs = [{"epoch": epoch, "signs": found} for epoch, found in told.items() if found]
    return {"mode": config.eval.watch, "watched": watched, "signs": signs, "bounds": bounds}


@lru_cache(maxsize=256)
def _tree(path: Path, changed: int) -> dict[str, Any]:
    """A recorded tree; read and made small once, also by a page that is served for hours."""
    tree = RecordedTree.load(path)
    plan = tree.plan
    noisy = [bool(plan.stochastic[level.edges].any()) for level in plan.levels]
    first = [plan.step[level.edges][0] for level in plan.levels]
    sigmas = [float(plan.schedule.sigma[step]) for step in first]
    std = plan.coefficients.std
    return {
        "epoch": tree.epoch,
        "prompt": tree.prompt,
        "kernel": plan.kernel,
        "profile": profile(plan),
        "roots": plan.roots,
        "parent": plan.parent.tolist(),
        "depth": plan.depth.tolist(),
        "place": leaf_order(plan),
        "leaves": plan.leaves.tolist(),
        "levels": [{"sigma": sigma, "noisy": is_noisy} for sigma, is_noisy in zip(sigmas, noisy, strict=True)],
        "step": plan.step.tolist(),
        "sigma": numbers(plan.schedule.sigma[plan.step]),
        "sigma_next": numbers(plan.schedule.sigma_next[plan.step]),
        "eta": numbers(plan.eta),
        "std": numbers(std),
        "log_density": numbers(torch.where(plan.stochastic, tree.log_density.double(), torch.nan)),
        "ratio": numbers(tree.ratio),
        "advantage": numbers(tree.advantage),
        "kept": tree.kept.tolist(),
        "scores": {name: numbers(values) for name, values in tree.scores.items()},
        "pictures": {
            node: as_webp(Image.fromarray(pixels.permute(1, 2, 0).numpy()))
            for node, pixels in zip(tree.shown.tolist(), tree.pictures, strict=True)
        },
    }


def numbers(values: Tensor) -> list[float | None]:
    """Eight significant digits; JSON has no NaN."""
    return [None if value != value else float(f"{value:.8g}") for value in values.double().tolist()]


def _sheet_files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "samples").glob("epoch_*.json") if path.with_suffix(".png").is_file())


def sheets_of(folder: Path, most: int = 2) -> list[dict[str, Any]]:
    """The pictures of some evaluations of a run, the first and the last among them."""
    return [_sheet(path, path.stat().st_mtime_ns) for path in spread(_sheet_files(folder), most)]


@lru_cache(maxsize=256)
def _sheet(path: Path, changed: int) -> dict[str, Any]:
    """An evaluation's pictures, cut out of its sheet."""
    try:
        index = json.loads(path.read_bytes())
        with Image.open(path.with_suffix(".png"), formats=["PNG"]) as opened:
            page = opened.convert("RGB")
        pictures = [
            {"src": as_webp(page.crop(tuple(item["box"]))), "prompt": item["prompt"], "scores": item["scores"]}
            for item in index["pictures"]
        ]
        return {"epoch": index["epoch"], "pictures": pictures}
    except (OSError, UnidentifiedImageError, ValueError, KeyError, TypeError) as error:
        raise InputError("sheet", path, f"cannot be read ({error})", "the run without that file") from None
