"""What a run was made with: machine, devices, versions, command, code. Kept in the run, told at its start."""

import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator

from .. import __version__
from ..config.schema import Config
from ..core.errors import InputError
from ..tools.files import as_text, free_place, write_atomically
from ..tools.finite_json import finite_json
from .paths import ENVIRONMENT

FORMAT = "arborl.environment"
PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy")
GIT_SECONDS = 5.0
LARGE = 500_000_000
"""Parameters of a model that is too slow on a CPU to learn anything."""


def environment(accelerator: Accelerator) -> dict[str, Any]:
    """What this start of a run has, as JSON."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [as_text(word) for word in sys.orig_argv],
        "folder": as_text(os.getcwd()),
        "arborl": __version__,
        "commits": {"arborl": _commit_of_arborl(), "folder": _commit(Path.cwd())},
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "cuda": torch.version.cuda,
        "system": platform.platform(),
        "host": platform.node(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "device": _device(accelerator.device),
        "processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
    }


def described(found: dict[str, Any]) -> str:
    """Devices and versions in one line."""
    several = f"{found['processes']} processes on " if found["processes"] > 1 else ""
    known = found["packages"]
    versions = ", ".join(f"{name} {known[name]}" for name in ("torch", "diffusers") if name in known)
    commit = found["commits"]["arborl"]
    return f"{several}{found['device']}, {versions}, arborl {found['arborl']}{f' at {commit[:9]}' if commit else ''}"


def too_slow(accelerator: Accelerator, parameters: int) -> list[str]:
    """A warning of a large model on a CPU, which is hardly ever meant."""
    if accelerator.device.type != "cpu" or parameters < LARGE:
        return []
    reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
    reason = "as it was told to" if torch.cuda.is_available() else reason
    size = f"{parameters / 1e9:.1f} billion parameters"
    return [f"the model has {size} and runs on the CPU ({reason}): an epoch takes hours, where a GPU takes seconds"]


def launched_alone() -> list[str]:
    """A warning where `accelerate launch` was asked for several processes and started this one only, which it does
    without a word where it sees no GPU.
    """
    if "WORLD_SIZE" in os.environ:
        return []
    try:
        words = " ".join(psutil.Process().parent().cmdline())  # pyright: ignore[reportOptionalMemberAccess]
    except (psutil.Error, AttributeError):
        return []
    asked = re.search(r"\blaunch\b.*--num[_-]processes[ =](\d+)", words)
    if not asked or int(asked[1]) < 2:
        return []
    fix = f"`torchrun --nproc_per_node={asked[1]} train.py …` starts {asked[1]} on the CPU too"
    return [f"accelerate launch was asked for {asked[1]} processes and started one, as it sees no GPU; {fix}"]


def add_start(folder: Path, start: dict[str, Any]) -> list[str]:
    """Keep the environment of a run's start, after those of its earlier ones. A file that is damaged is put aside: it
    is no reason to stop a run; returns what to warn of.
    """
    warnings: list[str] = []
    try:
        earlier = starts_of(folder)
    except InputError as error:
        kept = (folder / ENVIRONMENT).rename(free_place(folder / f"damaged_{ENVIRONMENT}"))
        earlier, warnings = [], [f"{error}; it is kept as {kept.name}"]
    content = {"format": FORMAT, "version": 1, "starts": [*earlier, start]}
    write_atomically(folder / ENVIRONMENT, json.dumps(content, indent=1, ensure_ascii=False))
    return warnings


def starts_of(folder: Path) -> list[dict[str, Any]]:
    """The environments of a run's starts, in their order; none of a run that was made by version 0.1.0."""
    path = folder / ENVIRONMENT
    if not path.is_file():
        return []
    try:
        found = finite_json(path.read_bytes())
        starts = found["starts"]
        if found["format"] != FORMAT or not all(isinstance(start, dict) for start in starts):
            raise ValueError
        return list(starts)
    except (ValueError, KeyError, TypeError):
        problem = f"its {ENVIRONMENT} is damaged"
        raise InputError("run", folder, problem, cure="the run without that file") from None


def evaluated_on(folder: Path, config: Config) -> str:
    """What a run's evaluations are of: held-out prompts, or training prompts. Version 0.1.0 did not write it down, and
    called all of them held-out.
    """
    starts = starts_of(folder)
    prompts = starts[-1].get("prompts") if starts else None
    if isinstance(prompts, dict) and isinstance(known := prompts.get("evaluated_on"), str):
        return known
    return "training prompts" if config.prompts.path and not config.eval.prompts else "evaluation prompts"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit_of_arborl() -> str | None:
    """Of a clone, with a + where its files are others; an installed package may lie in somebody else's repository."""
    package = Path(__file__).parents[1]
    commit = _commit(package) if (package.parents[1] / ".git").exists() else None
    changed = commit and _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return f"{commit}+" if changed else commit


def _commit(folder: Path) -> str | None:
    """The commit that a folder's repository is at; None outside of one."""
    return _git(folder, "rev-parse", "HEAD") or None


def _git(folder: Path, *words: str) -> str:
    """What git prints; nothing where it fails. Of a folder that is not ours only what runs no code of its settings
    may be asked.
    """
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=GIT_SECONDS).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu() -> str:
    """The processor's name where the system tells it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device.type.upper()} ({_cpu()}, {torch.get_num_threads()} threads)"
    facts = torch.cuda.get_device_properties(device)
    return f"{facts.name} ({facts.total_memory / 2**30:.0f} GiB)"
