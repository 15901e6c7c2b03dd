"""The configuration and weights a command is pointed at: a preset, or a run's own settings and weights."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from ..config import DEFAULT, load_config, read_before, read_config, with_settings
from ..config.schema import Config
from ..core.errors import InputError
from ..data.prompts import Prompts
from ..engine.autotune import find_batch_sizes
from ..engine.batches import BATCH_SIZE_SETTINGS
from ..engine.policy import Policy
from ..engine.precompute import precompute_embeddings
from ..engine.state import trainable
from ..models import load_model
from .checkpoint import Weights, latest_valid, load_weights, problem_with, read_weights, weights_file
from .folder import check_is_run, flat, read_summary, summary_damaged
from .paths import CHECKPOINTS, CONFIG
from .setup import start_accelerator

FIXED_ON_RESUME = ("model.", "seed", "run_name", "log.dir", "prompts.")
FREE_ON_RESUME = ("model.path", "prompts.path", "prompts.cache", "prompts.batch_size")
"""Paths may change from one machine to the next, as long as they lead to the same things; of prompts that is
checked.
"""


FORMER_DEFAULT = "tree"
"""The preset of a command that named none, when a run did not yet say how siblings are drawn."""


class StartPoint(NamedTuple):
    """The settings to begin with, and the run to go on from, if there is one."""

    config: Config
    resume: Path | None
    finished: bool = False  # the run has come to its end already


def resolve_start(resume: Path | None, name: str | None, overrides: Sequence[str]) -> StartPoint:
    """A new run; one that goes on; or with `auto` whichever it is, so that one command starts and restarts a job."""
    if resume is None:
        return StartPoint(load_config(name or DEFAULT, overrides), None)
    if str(resume) != "auto":
        config = config_of(resume, name, overrides)
        check_same(read_config(resume / CONFIG), config)
        return StartPoint(config, resume)
    config = load_config(name or DEFAULT, overrides)
    if config.run_name == "auto":
        raise InputError("run_name", "auto", "--resume auto must know which run it is about", "a name")
    folder = Path(config.log.dir) / config.run_name
    if not (folder / CONFIG).is_file():
        return StartPoint(config, None)
    if name is None and "tree.siblings" in read_before(folder / CONFIG):  # begun when another preset was the default
        config = load_config(FORMER_DEFAULT, overrides)
    before = read_config(folder / CONFIG)
    was, now, given = flat(before), flat(config), {text.split("=", 1)[0] for text in overrides}
    as_begun = [key for key in BATCH_SIZE_SETTINGS if now[key] == "auto"]  # what was found, so that the run is the same
    as_begun += [key for key in read_before(folder / CONFIG) if key not in given]
    config = with_settings(config, {key: was[key] for key in as_begun})
    moved = {"run_name": config.run_name, "log.dir": config.log.dir}
    check_same(with_settings(before, moved), config)
    return StartPoint(config, folder, _is_finished(folder, config))


def _is_finished(folder: Path, config: Config) -> bool:
    summary = read_summary(folder)
    if summary is None:
        return False
    try:
        spent = 0 < config.train.max_seconds <= summary["train_seconds"]
        return summary["epochs"] >= config.train.epochs or spent
    except (KeyError, TypeError):
        raise summary_damaged(folder) from None


def check_same(before: Config, after: Config) -> None:
    """Refuse changes of settings that are fixed while a run goes on."""
    old, new = flat(before), flat(after)
    for key in {**old, **new}:
        if key.startswith(FIXED_ON_RESUME) and key not in FREE_ON_RESUME and old.get(key) != new.get(key):
            raise InputError(
                key, new.get(key), "cannot change when a run goes on", f"{old.get(key)}, as it was started"
            )


def config_of(run: Path | None, name: str | None, overrides: Sequence[str]) -> Config:
    """The configuration of a run, or of a preset, with overrides."""
    if run is None:
        return load_config(name or DEFAULT, overrides)
    run, _ = _run_and_checkpoint(run)
    check_is_run(run)
    if name is not None:
        raise InputError("--config-name", name, "a run has its own settings", cure="overrides of single keys")
    return read_config(run / CONFIG, overrides)


def checkpoint_of(run: Path) -> Path:
    """A run's newest checkpoint, or the one that is named."""
    folder, checkpoint = _run_and_checkpoint(run)
    if checkpoint is not None:
        if problem := problem_with(checkpoint):
            raise InputError("checkpoint", checkpoint, problem)
        return checkpoint
    checkpoint, damaged = latest_valid(folder)
    for path, problem in damaged.items():
        Console(stderr=True, highlight=False).print(f"warning: {path.name} {problem}; it is left out", soft_wrap=True)
    if checkpoint is None:
        raise InputError("run", run, "has no checkpoint yet")
    return checkpoint


def weights_of(run: Path, which: Callable[[Path], Path] = weights_file) -> Weights:
    """The weights of a run's newest checkpoint, or of the one that is named: of its file that is asked for.

    A run that is going on removes what it has newer ones of, also while somebody reads it, and puts others in the place
    of its best: only where nothing has changed meanwhile is an error an error.
    """
    while True:
        before = _present(run)
        try:
            return read_weights(which(checkpoint_of(run)))
        except InputError:
            time.sleep(0.05)  # the best are gone for a moment before others take their place
            if _present(run) == before:
                raise


def _present(run: Path) -> list[tuple[str, int, int]]:
    """The folders that a reader of a run, or of one of its checkpoints, looks into; another has other numbers."""
    folder, checkpoint = _run_and_checkpoint(run)
    found: list[tuple[str, int, int]] = []
    for path in [checkpoint] if checkpoint else sorted((folder / CHECKPOINTS).glob("*")):
        with suppress(OSError):
            status = path.stat()
            found.append((path.name, status.st_ino, status.st_mtime_ns))
    return found


def load_for_inference(config: Config, run: Path | None, prompts: Prompts) -> Policy:
    """A policy for looking at: the configured one, with a run's averaged or newest weights where one is named."""
    accelerator = start_accelerator(config, together=False)
    precompute_embeddings(config, prompts, accelerator)
    policy = Policy(load_model(config, accelerator.device), config, accelerator)
    if run is not None:
        load_weights(trainable(policy.module), weights_of(run))
    policy.prepare()
    policy.encode(prompts.take([0]))  # from which on a model knows its latents
    policy.batch_sizes, _ = find_batch_sizes(config, policy, None, prompts.take([0]))
    return policy


def _run_and_checkpoint(path: Path) -> tuple[Path, Path | None]:
    """A run's folder, or one of the checkpoints in it."""
    whole = path if path.parent.name == CHECKPOINTS else Path(os.path.abspath(path))  # as in `--run best`, from within
    is_checkpoint = whole.parent.name == CHECKPOINTS and not (path / CONFIG).is_file()
    return (whole.parent.parent, whole) if is_checkpoint else (path, None)
