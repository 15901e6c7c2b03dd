"""Data of a run's page, read from its folder as plain lists and numbers: all of it is JSON."""

import math
from collections.abc import Container, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .. import __version__
from ..config import knobs, load_config, read_config
from ..config.schema import Config
from ..core.errors import InputError, first_line, shortened
from ..rewards.base import reward_weights
from ..run.drawings import BROKEN_SHEET, leaf_order
from ..run.environment import evaluated_on, starts_of
from ..run.folder import (
    STAGES,
    check_is_run,
    evaluation_in,
    flat,
    read_evaluations,
    read_metrics,
    read_summary,
    seconds_by_stage,
    without_evaluation,
)
from ..run.paths import CONFIG, SAMPLES, SUMMARY, TREES, epoch_files
from ..run.reward_hacking import LIMITS, hacking, of, statistic
from ..run.trees import TreeFile
from ..tools.files import as_text
from ..tools.finite_json import finite_json
from .pictures import as_webp, evenly, evenly_within

MAX_TREE_BYTES, MAX_SHEET_BYTES, MAX_EPOCHS = 4_000_000, 3_000_000, 48
"""Bytes that a page's trees and its sheets may take, and epochs each; where there are more, some are left out."""
MAX_ROWS, MAX_EVALUATIONS = 1500, 60
"""Lines of metrics that are drawn besides those with an evaluation; and evaluations that are looked at for hacking."""


def run_data(folder: Path) -> dict[str, Any]:
    """Everything a run's page shows. A run that is still going on is shown as far as it has come."""
    check_is_run(folder)
    config, rows = read_config(folder / CONFIG), read_metrics(folder)
    rows, others = _with_evaluations(rows, read_evaluations(folder))
    weights = reward_weights(config.rewards, config.eval.rewards)
    # One that is being written has no JSON yet, and waits for the next look.
    trees = epoch_files(folder / TREES, ".json")
    sheets = _sheet_files(folder)
    shown = evenly_within([_tree(path, path.stat().st_mtime_ns) for path in evenly(trees, MAX_EPOCHS)], MAX_TREE_BYTES)
    return {
        "kind": "run",
        "name": as_text(folder.resolve().name),
        "folder": as_text(folder),
        "version": __version__,
        "finished": (folder / SUMMARY).is_file(),
        "epochs": None if config.train.max_seconds else config.train.epochs,
        "summary": read_summary(folder),
        "evaluated_on": evaluated_on(folder, config),
        "evaluated": config.eval.num_prompts,
        "evaluated_otherwise": others,
        "between": config.eval.num_between,
        "environment": starts_of(folder),
        "rewards": [{"name": name, "weight": weight} for name, weight in weights.items()],
        "metrics": columns(_some(rows, {tree["epoch"] for tree in shown})),
        "seconds": {name: spent for name, spent in seconds_by_stage(rows).items() if spent},
        "stages": list(STAGES),
        "watch": _watch(rows, weights, config),
        "trees": shown,
        "trees_recorded": len(trees),
        "sheets": evenly_within(sheets_of(folder, MAX_EPOCHS), MAX_SHEET_BYTES),
        "sheets_recorded": len(sheets),
        "settings": _settings(config),
    }


def _with_evaluations(
    rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], int]:
    """Metrics with the evaluations that can be compared with the newest, and the number of the others: a curve of both
    would jump without a reason. Metrics alone lack those of an end that was gone on from, and the one just made.
    """
    made = {row["epoch"]: row for row in evaluations if "undone" not in row}  # of one epoch's the last
    asked = next((row.get("protocol") for row in reversed(made.values())), None)
    kept = {epoch: evaluation_in(row) for epoch, row in made.items() if row.get("protocol") == asked}
    of_epochs = {row["epoch"]: without_evaluation(row) for row in rows}
    found = [of_epochs.get(epoch, {}) | kept.get(epoch, {}) for epoch in sorted(of_epochs.keys() | kept.keys())]
    return found, len(made) - len(kept)


def _some(rows: list[dict[str, Any]], epochs: Container[int] = ()) -> list[dict[str, Any]]:
    """Lines enough to draw a curve by, all evaluations and these epochs among them."""
    plain = [i for i, row in enumerate(rows) if not evaluation_in(row)]
    left_out = {*plain} - {*evenly(plain, MAX_ROWS)}
    return [row for i, row in enumerate(rows) if i not in left_out or row["epoch"] in epochs]


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Metrics by name, a value for each row, None where a row has none."""
    names = dict.fromkeys(["epoch", *(name for row in rows for name in row)])
    return {name: [_short(row.get(name)) for row in rows] for name in names}


def _short(value: float | None) -> float | None:
    """Eight significant digits; JSON has no NaN and no infinity."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.8g}")


def _settings(config: Config) -> list[dict[str, Any]]:
    """Every setting, what it says, and whether it is another than `arborl train` alone takes."""
    sentences, usual = {key: item.metadata["help"] for key, item in knobs()}, _usual()
    found: list[dict[str, Any]] = []
    for key, value in flat(config).items():
        parts = key.split(".")
        general = f"rewards.<name>.{parts[-1]}" if parts[0] == "rewards" and len(parts) == 3 else key
        own = {"key": key, "value": str(value), "says": sentences.get(general, "")}
        found.append(own | {"usual": None if usual.get(key) == value else str(usual.get(key, "–"))})
    return found


@cache
def _usual() -> dict[str, Any]:
    return flat(load_config("tree"))


def _watch(rows: list[dict[str, Any]], weights: Mapping[str, float], config: Config) -> dict[str, Any]:
    """The epochs at which the run looked like reward hacking, with the signs; and each statistic's bounds."""
    trained = {name: -1.0 if weight < 0 else 1.0 for name, weight in weights.items() if weight}
    watched = [name for name in config.eval.rewards if not weights[name]]
    looks = _as_the_run_saw(rows)
    when = [i for i, row in enumerate(looks) if any(of(row, name) is not None for name in weights)]
    signs_at = {looks[i]["epoch"]: hacking(looks[: i + 1], trained, watched) for i in evenly(when, MAX_EVALUATIONS)}
    bounds: dict[str, dict[str, float]] = {}
    for name, (left, added) in LIMITS.items():
        first = statistic(looks, name)[0]
        if first is not None:
            bounds[name] = {"low": first * left} if left else {"high": first + added}
    signs = [{"epoch": epoch, "signs": found} for epoch, found in signs_at.items() if found]
    return {"watched": watched, "signs": signs, "bounds": bounds}


def _as_the_run_saw(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Evaluations by themselves, as they come before their epoch's training, and between them the mean diversity."""
    seen: list[dict[str, Any]] = []
    since: list[float] = []
    for row in rows:
        if evaluation := evaluation_in(row):
            seen += [{"diversity": sum(since) / len(since)}] if since else []
            seen.append(evaluation)
            since = []
        since += [row["diversity"]] if row.get("diversity") is not None else []
    return seen + ([{"diversity": sum(since) / len(since)}] if since else [])


@lru_cache(maxsize=256)
def _tree(path: Path, changed: int) -> dict[str, Any]:
    """A recorded tree; read and made small once, also by a page that is served for hours."""
    tree = TreeFile.load(path)
    plan = tree.plan
    noisy = [bool(plan.stochastic[level.edges].any()) for level in plan.levels]
    steps = [plan.step[level.edges].unique() for level in plan.levels]
    # A tail in fewer steps may be at another noise level than its neighbours of the same depth.
    sigmas = [float(plan.schedule.sigma[step[0]]) if len(step) == 1 else None for step in steps]
    rewards = [name for name in tree.scores if name != "total" and "/" not in name]
    return {
        "epoch": tree.epoch,
        "prompt": tree.prompt,
        "kernel": plan.kernel,
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
        "std": numbers(plan.coefficients.std),
        "log_density": numbers(torch.where(plan.stochastic, tree.log_density.double(), torch.nan)),
        "ratio": numbers(tree.ratio),
        "advantage": numbers(tree.advantage),
        "kept": tree.kept.tolist(),
        "shown": rewards[0] if len(rewards) == 1 else "total",
        "scores": {name: numbers(values) for name, values in tree.scores.items()},
        "pictures": {
            node: as_webp(Image.fromarray(pixels.permute(1, 2, 0).numpy()))
            for node, pixels in zip(tree.shown.tolist(), tree.pictures, strict=True)
        },
    }


def numbers(values: Tensor) -> list[float | None]:
    return [_short(value) for value in values.double().tolist()]


def _sheet_files(folder: Path) -> list[Path]:
    return [path for path in epoch_files(folder / SAMPLES, ".json") if path.with_suffix(".png").is_file()]


def sheets_of(folder: Path, most: int = 2) -> list[dict[str, Any]]:
    """The pictures of some evaluations of a run, the first and the last among them."""
    return [_sheet(path, path.stat().st_mtime_ns) for path in evenly(_sheet_files(folder), most)]


@lru_cache(maxsize=256)
def _sheet(path: Path, changed: int) -> dict[str, Any]:
    """An evaluation's pictures, cut out of its sheet."""
    try:
        index = finite_json(path.read_bytes())
        with Image.open(path.with_suffix(".png"), formats=["PNG"]) as opened:
            page = opened.convert("RGB")
        pictures = [_picture(page, item) for item in index["pictures"]]
        if type(index["epoch"]) is not int:
            raise ValueError("no epoch")
        return {"epoch": index["epoch"], "pictures": pictures}
    except BROKEN_SHEET as error:
        raise InputError(
            "sheet", path, f"cannot be read ({first_line(error)})", cure="the run without that file"
        ) from None


def _picture(page: Image.Image, item: Mapping[str, Any]) -> dict[str, Any]:
    """A picture of a sheet, by its entry in the index."""
    left, top, right, bottom = box = tuple(item["box"])
    if not all(type(side) is int for side in box) or not (0 <= left < right <= page.width):
        raise ValueError(f"{shortened(str(box), 60)} is no place in the sheet")
    if not 0 <= top < bottom <= page.height:
        raise ValueError(f"{shortened(str(box), 60)} is no place in the sheet")
    prompt, scores = item["prompt"], item["scores"]
    if not isinstance(prompt, str) or not all(
        value is None or type(value) in (int, float) for value in scores.values()
    ):
        raise ValueError("a picture without its prompt and scores")
    return {"src": as_webp(page.crop(box)), "prompt": prompt, "scores": scores}
