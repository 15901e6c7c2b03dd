"""A run's numbers and pictures in TensorBoard, W&B and trackio, each through accelerate."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import (
    GeneralTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
    get_available_trackers,
    is_tensorboard_available,
)
from PIL import Image
from PIL.PngImagePlugin import PngImageFile
from torch import Tensor

from ..config.schema import Config
from ..core.errors import InputError

PROJECT = "arborl"
"""The project that trackers file runs under; for TensorBoard a folder in the run's."""
EXTRAS = ("tensorboard", "wandb", "trackio")
MAX_SIDE = 4096
"""Pixels of a drawing's longer side, so that a browser can show it; the run's folder has it as it was drawn."""
WANDB_FOLDER = re.compile(r"(?:offline-)?run-(\d+_\d+)-(.+)")
"""A folder of W&B's: when it was made, and the run's id."""


def trackers(config: Config) -> list[str]:
    """The trackers to start; a named one that is not installed is an error, `auto` takes what is there."""
    if config.log.trackers == ["auto"]:
        return ["tensorboard"] if is_tensorboard_available() else []
    installed = [str(tracker.value) for tracker in get_available_trackers()]
    for name in config.log.trackers:
        if name not in installed:
            extra = name if name in EXTRAS else EXTRAS[0]
            allowed = ", ".join(["auto", "[]", *installed])
            raise InputError("log.trackers", name, "is not installed", allowed, cure=f"pip install 'arborl[{extra}]'")
    return list(config.log.trackers)


def check_login(names: list[str]) -> None:
    """W&B asks for a key where there is none, and waits: in a job nobody answers. So it is looked for before anything
    is loaded, and tried.
    """
    if "wandb" not in names:
        return
    import wandb
    from wandb.errors import UsageError

    with wandb_error_in_one_line(names):
        online = wandb.setup().settings.mode not in ("offline", "dryrun", "disabled")
        if online and wandb.run is None and not wandb.login(prompt=False):
            raise UsageError("there is no API key")


@contextmanager
def wandb_error_in_one_line(names: list[str]) -> Iterator[None]:
    """An error of W&B at the start becomes one line that says how to go on without it."""
    if "wandb" not in names:
        yield
        return
    from wandb.errors import Error

    try:
        yield
    except Error as error:
        cure = "WANDB_MODE=offline in the environment, or a key in WANDB_API_KEY or by `wandb login`"
        raise InputError("log.trackers", "wandb", f"W&B cannot start ({error})", cure=cure) from None


def start_trackers(accelerator: Accelerator, folder: Path, epoch: int, resumed: bool, settings: dict[str, Any]) -> None:
    """Start what the accelerator was given, with the run's name and place. Of epochs that are done again TensorBoard
    drops what it had, W&B keeps it, and trackio has both.
    """
    names = [str(name) for name in accelerator.log_with]
    if "trackio" in names:
        # Read when it is imported. One place for all runs of a folder: its dashboard has them side by side.
        os.environ.setdefault("TRACKIO_DIR", str((folder.parent / "trackio").absolute()))
    options = {
        "tensorboard": {"purge_step": epoch},
        "wandb": {"name": folder.name, "dir": str(folder), "id": wandb_id(folder), "resume": "allow"},
        "trackio": {"name": folder.name, "resume": "allow" if resumed else "never"},
    }
    with wandb_error_in_one_line(names), redirect_stdout(sys.stderr):  # some greet; stdout is for what was asked for
        accelerator.init_trackers(PROJECT, config=settings, init_kwargs=options)


def wandb_id(folder: Path) -> str | None:
    """Under which W&B has this run, by the folders it made. A run's name would not do: every machine has a `tree-1`."""
    parts = sorted(
        (found[1], found[2]) for path in folder.glob("wandb/*") if (found := WANDB_FOLDER.fullmatch(path.name))
    )
    return parts[-1][1] if parts else None


def log_pictures(
    tracker: GeneralTracker, name: str, epoch: int, drawing: Path, captions: Sequence[str], pictures: Tensor | None
) -> None:
    """TensorBoard knows no captions, so it gets the drawing that has them; others get pictures (uint8, n×3×H×W) with a
    caption each, or where there are none the drawing.
    """
    with PngImageFile(drawing) as opened:  # Image.open refuses what is as large as a tree of a thousand leaves
        page = opened.convert("RGB")
    page.thumbnail((MAX_SIDE, MAX_SIDE))
    if isinstance(tracker, TensorBoardTracker):
        tracker.log_images({name: np.asarray(page)[None]}, step=epoch, dataformats="NHWC")
        # A drawing cuts long captions off. Indented they are code, in which no sign is Markdown's.
        tracker.log({f"{name}/captions": "".join(f"    {' '.join(text.split())}\n" for text in captions)}, step=epoch)
        return
    each = [page] if pictures is None else [Image.fromarray(pixels) for pixels in pictures.permute(0, 2, 3, 1).numpy()]
    if isinstance(tracker, WandBTracker):
        import wandb

        # An explicit step stays open until a later one comes, so this and the epoch's metrics are one row.
        images = [wandb.Image(picture, caption=text) for picture, text in zip(each, captions, strict=True)]
        tracker.log({name: images}, step=epoch)
    if isinstance(tracker, TrackioTracker):
        import trackio  # pyright: ignore[reportMissingImports]

        images = [trackio.Image(picture, caption=text) for picture, text in zip(each, captions, strict=True)]
        tracker.log({f"{name}/{number:02d}": image for number, image in enumerate(images)}, step=epoch)
