"""A run on disk: its metrics, its settings by key, and how its folder is claimed."""

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..config import check_run_name, save_config
from ..config.schema import Config, RewardConfig
from ..core.errors import InputError
from ..tools.files import fsync, kind_of, remove_abandoned, scratch, write_atomically
from ..tools.finite_json import finite_json
from .paths import (
    BEFORE_AFTER,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    EVALUATIONS,
    LOCK,
    METRICS,
    REPORT,
    SAMPLES,
    SUMMARY,
    TREES,
    epoch_of,
)

STAGES = ("encode", "rollout", "decode", "reward", "advantage", "update", "record", "evaluate", "checkpoint")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Every line of a run's metrics.jsonl; a last one that a kill cut short is left out."""
    return _read_lines(folder, METRICS)


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """Every evaluation that a run made, in their order; those whose epoch was undone by a resume have `undone`.

    Of a run of version 0.1.0, those that its metrics hold.
    """
    if (folder / EVALUATIONS).is_file():
        return _read_lines(folder, EVALUATIONS)
    return [found for row in read_metrics(folder) if (found := evaluation_in(row))]


def keep_evaluations(folder: Path, epoch: int, unmarked: str) -> dict[str, Any]:
    """Mark the evaluations of epochs after this one as undone, and those of version 0.1.0 with their protocol
    (`unmarked`); returns the one of this epoch's weights, if there is.
    """
    rows = [{"protocol": unmarked} | row for row in read_evaluations(folder)]
    rows = [row | ({"undone": True} if row["epoch"] > epoch else {}) for row in rows]
    write_rows(folder / EVALUATIONS, rows)
    return next((row for row in reversed(rows) if row["epoch"] == epoch and "undone" not in row), {})


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def _read_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / name
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else [""]
    return [_row(folder, name, number, line) for number, line in enumerate(lines[:-1], 1)]


def _row(folder: Path, name: str, number: int, line: str) -> dict[str, Any]:
    try:
        row = finite_json(line)
        if not isinstance(row, dict) or not is_row(row):
            raise ValueError
        return row
    except ValueError:
        problem = f"line {number} of its {name} is damaged"
        raise InputError("run", folder, problem, cure="the run without that line") from None


def is_row(row: Mapping[str, Any]) -> bool:
    """Whether this is an epoch and numbers, some of which may be missing; of an evaluation also what it asked."""
    has_epoch = type(row.get("epoch")) is int and row["epoch"] >= 0
    numbers = (value for name, value in row.items() if not (name == "protocol" and isinstance(value, str)))
    return has_epoch and all(value is None or isinstance(value, int | float) for value in numbers)


def read_summary(folder: Path) -> dict[str, Any] | None:
    """What a finished run came to; None while it is not finished."""
    path = folder / SUMMARY
    if not path.is_file():
        return None
    try:
        found = finite_json(path.read_bytes())
    except ValueError:
        raise summary_damaged(folder) from None
    if not isinstance(found, dict):
        raise summary_damaged(folder)
    return found


def summary_damaged(folder: Path) -> InputError:
    return InputError("run", folder, f"its {SUMMARY} is damaged", cure="the run without that file")


def finite(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """JSON has no NaN: a number that is none is null."""
    infinite = float("inf")
    return {n: None if value is None or not abs(value) < infinite else value for n, value in metrics.items()}


def training_seconds(row: dict[str, Any]) -> float:
    """Seconds of an epoch, evaluation apart."""
    return (row.get("step_time") or 0.0) - (row.get("time/evaluate") or 0.0)


def evaluation_in(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row of metrics holds of an evaluation, with its epoch; empty where it holds none."""
    found = {name: value for name, value in row.items() if name.startswith(("eval/", "eval_between/"))}
    return {"epoch": row["epoch"], **found} if found else {}


def without_evaluation(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics without what it holds of an evaluation."""
    return {name: value for name, value in row.items() if name == "epoch" or name not in evaluation_in(row)}


def seconds_by_stage(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each stage, over all logged epochs."""
    return {name: sum(row.get(f"time/{name}") or 0.0 for row in rows) for name in STAGES}


def flat(config: Config) -> dict[str, Any]:
    """Every setting of a configuration by its key."""
    return _flat(asdict(config))


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys with plain values, as trackers want them."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


def with_absolute_paths(config: Config) -> Config:
    """The same with paths that mean the same from any folder, so that a run can be looked at from anywhere."""
    from ..rewards.catalog import BUILT_IN  # imports torch, which whoever only reads metrics can do without

    def absolute(path: str) -> str:
        return str(Path(path).resolve()) if path and Path(path).exists() else path

    def place(name: str, reward: RewardConfig, which: int) -> str:
        """The usual place of a built-in reward's weights, if they lie there."""
        needs = BUILT_IN[reward.fn or name].needs if (reward.fn or name) in BUILT_IN and not reward.url else ()
        found = Path(needs[which].place) if which < len(needs) else None
        return str(found.resolve()) if found and found.exists() else ""

    watched = {name: config.rewards.get(name, RewardConfig()) for name in config.eval.rewards}
    # Said, so that a reward which is no longer watched is not trained on.
    watched = {n: r if r.weight is not None else replace(r, weight=0.0) for n, r in watched.items()}
    return replace(
        config,
        model=replace(config.model, path=absolute(config.model.path)),
        prompts=replace(config.prompts, path=absolute(config.prompts.path)),
        eval=replace(config.eval, prompts=absolute(config.eval.prompts)),
        rewards={
            name: replace(
                reward,
                path=absolute(reward.path) or place(name, reward, 0),
                backbone=absolute(reward.backbone) or place(name, reward, 1),
                tokenizer=absolute(reward.tokenizer),
            )
            for name, reward in {**config.rewards, **watched}.items()
        },
    )


def changes(before: Config, after: Config) -> list[str]:
    """The settings that differ, each as `key: old -> new`."""
    old, new = flat(before), flat(after)
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """For writing into a run's folder: a full disk, a missing permission and the like become one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        if not why or isinstance(error, ConnectionError):  # some tracker's server
            raise
        raise InputError("log.dir", folder, f"cannot be written to ({why})") from None


def check_is_run(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise InputError("run", folder, f"is not a run folder (it has no {CONFIG})")


def check_folder(config: Config, resume: Path | None) -> None:
    """A run is never overwritten: its name must be new, or it is the one that goes on."""
    if resume:
        check_is_run(resume)
        return
    check_run_name(config.run_name)
    folder = Path(config.log.dir) / config.run_name
    if config.run_name != "auto" and kind_of(folder):
        raise _taken(config, folder)


def _taken(config: Config, folder: Path) -> InputError:
    return InputError("run_name", config.run_name, f"{folder} exists", cure=f"another name, or --resume {folder}")


def claim_folder(config: Config) -> Path:
    """Make `<log.dir>/<run_name>` with the settings in it; `auto` takes the next free number.

    Made aside and renamed, so that no run folder is ever without its settings; whoever's rename comes first has it.
    """
    base, number = Path(config.log.dir), 0
    try:
        base.mkdir(parents=True, exist_ok=True)
        remove_abandoned(base)
        with scratch(base) as outer:
            aside = outer / "run"
            aside.mkdir()
            while True:
                number += 1
                name = f"{config.tree.plan}-{number}" if config.run_name == "auto" else config.run_name
                folder = base / name
                if kind_of(folder) and config.run_name == "auto":
                    continue
                save_config(replace(with_absolute_paths(config), run_name=name), aside / CONFIG)
                fsync(aside / CONFIG)
                try:
                    if kind_of(folder):
                        raise FileExistsError
                    return aside.rename(folder)
                except OSError as error:
                    if error.errno not in (None, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                        raise
                    if config.run_name != "auto":
                        raise _taken(config, folder) from None
    except OSError as error:
        raise InputError("log.dir", base, f"cannot be written to ({error.strerror})") from None


def check_own_files(folder: Path, epoch: int) -> list[Path]:
    """The trees and sheets in a run's folder that a run which goes on from an epoch makes again.

    An error if a link or a folder bears a name that the run writes to: it was not the run that made it.
    """
    for path in (folder / name for name in (TREES, SAMPLES, CHECKPOINTS)):
        if kind_of(path) not in (None, "folder"):
            problem = f"its {path.name} is a {kind_of(path)}, where the run has a folder"
            raise InputError(
                "run", folder, problem, "a folder", cure="a link in place of the run's own folder, or of log.dir"
            )
    own = [folder / name for name in (CONFIG, METRICS, EVALUATIONS, SUMMARY, REPORT, ENVIRONMENT, LOCK)]
    own.append(folder / SAMPLES / BEFORE_AFTER)
    # An evaluation is of the weights that its epoch starts from: this epoch's are these.
    repeated = [
        path
        for name, since in ((TREES, epoch), (SAMPLES, epoch + 1))
        for path in folder.glob(f"{name}/*")
        if (of := epoch_of(path.name)) is not None and of >= since and path.suffix in (".json", ".png", ".safetensors")
    ]
    for path in [*own, *repeated]:
        if kind_of(path) not in (None, "file"):
            problem = f"its {path.relative_to(folder)} is a {kind_of(path)}, where the run writes a file"
            raise InputError("run", folder, problem, cure="the run without it")
    return repeated


def is_report(path: Path) -> bool:
    """Whether a file is a page that `arborl report` wrote."""
    if kind_of(path) != "file":
        return False
    with path.open("rb") as file:
        head = file.read(4096)
    return head.startswith(b"<!doctype html>") and " · ArboRL</title>".encode() in head
