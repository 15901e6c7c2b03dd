"""The names of a run's files, and nothing else: whoever looks into a run's folder asks here."""

import re
from pathlib import Path

CONFIG, METRICS, SUMMARY, REPORT = "config.yaml", "metrics.jsonl", "summary.json", "report.html"
EVALUATIONS = "evaluations.jsonl"
"""Every evaluation as soon as it is made; those of epochs that were undone later stay, marked so."""
TREES, SAMPLES, BEFORE_AFTER = "trees", "samples", "before_after.png"
CHECKPOINTS, BEST = "checkpoints", "best"
ENVIRONMENT = "environment.json"
"""What each start of the run had: devices, versions, command, code; and which prompts evaluations are of."""
LOCK = ".lock"
"""Held by the process that writes to the folder."""


def epoch_name(epoch: int) -> str:
    """The beginning of an epoch's file names: a tree, a sheet of samples, a checkpoint."""
    return f"epoch_{epoch:06d}"


def epoch_of(name: str) -> int | None:
    """The epoch of such a name, with or without an ending; None for any other name."""
    found = re.fullmatch(r"epoch_(\d{6,})(\.[a-z]+)?", name)
    return int(found[1]) if found else None


def epoch_files(folder: Path, suffix: str) -> list[Path]:
    """The files of epochs with that ending, oldest first."""
    found = [(epoch, path) for path in folder.glob(f"*{suffix}") if (epoch := epoch_of(path.name)) is not None]
    return [path for _, path in sorted(found)]
