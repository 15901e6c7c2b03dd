"""The state after whole epochs, on disk. Noise and prompts are functions of the seed and of what is counted here.

A checkpoint is a folder of safetensors, whole tensors under the model's own names however many processes trained them,
with a `SHA256SUMS` that `sha256sum -c` reads too. It is written aside and renamed into place, and none is trusted whose
files are not what that list says.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..core.errors import InputError, first_line, shortened
from ..distributed.fsdp import gathered, gathered_on_host, to_sharding_of
from ..engine.state import State, copy_into
from ..tools.files import abandoned, free_place, fsync, kind_of, remove_abandoned, scratch, umask
from ..tools.finite_json import finite_json
from .folder import is_row, read_evaluations
from .paths import BEST, CHECKPOINTS, epoch_files, epoch_name, epoch_of

VERSION = 2
SUMS, HEADER = "SHA256SUMS", "state.json"
SLOTS = {"step", "exp_avg", "exp_avg_sq"}
"""What AdamW keeps of a weight."""
COUNTERS = {
    "epoch": "epoch",
    "prompts": "prompts",
    "nonfinite_steps": "broken",
    "forwards": "forwards",
    "forward_backwards": "forward_backwards",
}
"""The counters of a state, and their names in its file."""
OWN_NAMES = re.compile(rf"{SUMS}|{HEADER}|(weights|ema|old|optimizer\.[a-z_]+)\.safetensors")
"""The names of a checkpoint's files."""
SET_ASIDE = re.compile(rf"{BEST}_epoch_\d{{6,}}(-\d+)?")
"""The names of best weights that are not compared with today's."""
OLD = "old_"
"""The beginning of a replaced checkpoint's name until it is gone."""


def save_checkpoint(state: State, folder: Path, keep: int, writes: bool = True) -> Path | None:
    """Write aside, rename into place, then drop all but the newest `keep`. What is there already is not touched: one
    of this name with other files in it is put aside, and its new place returned.
    """
    if state.epoch == state.saved:
        return None
    aside = _write(state, folder / epoch_name(state.epoch), True, writes, keep=keep)
    state.saved = state.epoch
    return aside


def save_best(state: State, folder: Path, evaluation: Mapping[str, Any], by: str, writes: bool = True) -> Path | None:
    """The weights alone, apart from the others and in the place of those that were the best before; with their
    evaluation, which a run that goes on from an earlier epoch has no row of, and the measure they were chosen by.
    """
    return _write(state, folder / BEST, False, writes, {"evaluation": dict(evaluation), "by": by})


def _write(
    state: State,
    target: Path,
    with_optimizer: bool,
    writes: bool,
    more: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path | None:
    state.restore()
    tensors = _contents(state, with_optimizer)
    if not writes:
        _take_part(state, tensors)
        return None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch(target.parent) as outer:
            aside = outer / target.name
            aside.mkdir()
            for file, group in itertools.groupby(tensors, key=lambda one: one[0]):
                save_file({name: gathered_on_host(tensor) for _, name, tensor in group}, aside / file)
            head = {"version": VERSION} | {kept: getattr(state, name) for name, kept in COUNTERS.items()}
            head |= {"ema_steps": state.steps, "prompt_list": state.prompt_list, **(more or {})}
            (aside / HEADER).write_text(json.dumps(head))
            _seal(aside)
            put_aside = _put(aside, target, outer)
            # Old ones leave with this scratch folder: a disk that is full by now has no room for another.
            own = [path for path in checkpoints(target.parent) if _is_removable(path) and _is_of(path)]
            for old in own[:-keep] if keep else []:
                old.rename(outer / f"old_{old.name}")
            return put_aside
    except Exception as error:
        _take_part(state, tensors)
        if isinstance(error, OSError | SafetensorError):
            raise InputError("log.dir", target.parent, f"could not write a checkpoint ({error})") from None
        raise


def _take_part(state: State, tensors: Iterator[tuple[str, str, Tensor]]) -> None:
    """Take part in gathering split weights: the rank that writes needs every rank's parts, to the last tensor."""
    for _, _, tensor in tensors if state.sharded else ():
        gathered(tensor)


def _contents(state: State, with_optimizer: bool) -> Iterator[tuple[str, str, Tensor]]:
    """The tensors of a checkpoint, as (file, name, tensor): a host never needs more than one copy of the weights."""
    files: dict[str, Mapping[str, Tensor]] = {"weights.safetensors": state.parameters}
    if state.ema.decay:
        files["ema.safetensors"] = state.ema.weights
    if with_optimizer:
        files |= {"old.safetensors": state.old.weights} if state.old else {}
        found = {name: state.optimizer.state.get(p, {}) for name, p in state.parameters.items()}
        for slot in sorted({slot for held in found.values() for slot in held}):
            kept = {name: held[slot] for name, held in found.items() if slot in held}
            files[f"optimizer.{slot}.safetensors"] = kept
    return ((file, name, tensor) for file, tensors in files.items() for name, tensor in tensors.items())


def load_checkpoint(state: State, path: Path) -> None:
    """Take over a checkpoint that was found sound."""
    head = read_header(path)
    weights = _fitting(state.parameters, read_weights(path / "weights.safetensors"))
    copy_into(state.parameters, weights)
    # An average or an old policy that is switched on later begins with the weights it finds.
    for name, shadow in {"ema": state.ema, "old": state.old}.items():
        file = path / f"{name}.safetensors"
        if shadow:
            shadow.load(_fitting(state.parameters, read_weights(file)) if file.is_file() else weights)
    slots = {file.name.split(".")[1]: _tensors(file) for file in path.glob("optimizer.*.safetensors")}
    _check_optimizer(state.parameters, slots, path)
    found: dict[int, dict[str, Tensor]] = {}
    for number, (name, parameter) in enumerate(state.parameters.items()):
        mine = {slot: tensors[name] for slot, tensors in slots.items() if name in tensors}
        whole = parameter.detach()
        placed = {s: to_sharding_of(whole, t) if t.shape == whole.shape else t for s, t in mine.items()}
        found |= {number: placed} if placed else {}
    # The groups hold learning rate and decay: those of this run's settings, not of before.
    state.optimizer.load_state_dict({"state": found, "param_groups": state.optimizer.state_dict()["param_groups"]})
    state.steps = head["ema_steps"]
    for name, kept in COUNTERS.items():
        setattr(state, name, head[kept])
    state.saved = state.epoch


def evaluation_of_best(run: Path) -> Mapping[str, Any] | None:
    """The evaluation of the weights that a run keeps as its best; None where it keeps none.

    Version 0.1.0 did not write it beside them: there it is the one of their epoch.
    """
    kept = run / CHECKPOINTS / BEST
    if not kept.is_dir():
        return None
    head = read_header(kept)
    if head.get("evaluation"):
        return head["evaluation"]
    return next((row for row in reversed(read_evaluations(run)) if row["epoch"] == head["epoch"]), None)


class Best(NamedTuple):
    """Weights that are a run's best, or were by another measure."""

    path: Path
    evaluation: Mapping[str, Any] | None  # that chose them, where it is known
    by: str | None  # the measure; version 0.1.0 did not write it down


def kept_best(run: Path) -> Best | None:
    path = run / CHECKPOINTS / BEST
    return Best(path, evaluation_of_best(run), read_header(path).get("by")) if path.is_dir() else None


def bests_set_aside(run: Path) -> list[Best]:
    """Those that made way for others by another measure, as far as they are sound."""
    found: list[Best] = []
    for path in sorted((run / CHECKPOINTS).iterdir()):
        if SET_ASIDE.fullmatch(path.name) and kind_of(path) == "folder" and problem_with(path) is None:
            head = read_header(path)
            found.append(Best(path, head.get("evaluation"), head.get("by")))
    return found


def set_aside(best: Best) -> Path:
    """Put the best weights where others do not replace them, by the epoch they are of."""
    name = f"{BEST}_{epoch_name(read_header(best.path)['epoch'])}"
    return best.path.rename(free_place(best.path.with_name(name)))


def bring_back(best: Best) -> Best:
    """Weights that were set aside in the place of the best, which is free."""
    return best._replace(path=best.path.rename(best.path.with_name(BEST)))


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return [path for path in epoch_files(folder, "") if path.name == epoch_name(epoch_of(path.name) or 0)]


def latest_valid(run: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint of a run that can be trusted, None if it ended before its first; and what is wrong with
    those that are newer still.
    """
    folder = run / CHECKPOINTS
    found = checkpoints(folder)
    while True:
        damaged: dict[Path, str] = {}
        for path in reversed(found):
            problem = problem_with(path)
            if problem is None:
                return path, damaged
            damaged[path] = problem
        before, found = found, checkpoints(folder)
        if found == before:  # else a running run has put others in their place meanwhile
            break
    if damaged:
        listed = "; ".join(f"{path.name} {problem}" for path, problem in damaged.items())
        problem = f"none of its checkpoints is whole ({listed})"
        raise InputError("run", run, problem, cure="a copy of one of them, or a new run")
    return None, damaged


def quarantine(path: Path, why: str = "damaged") -> Path:
    """Put a checkpoint where nobody takes it for one, as `<why>_<name>`, and in the place of an earlier one there."""
    check_not_foreign(path)
    target = path.with_name(f"{why}_{path.name}")
    with scratch(path.parent) as outer:
        if _is_removable(target):
            target.rename(outer / target.name)
        return path.rename(free_place(target))


def remove_partial(folder: Path) -> None:
    """Remove checkpoints that were left half written or half removed; but the best that was about to be replaced when
    the run was killed goes back to its place.
    """
    for left in abandoned(folder, alone=True):  # the run is locked
        old = left / f"{OLD}{BEST}"
        if kind_of(folder / BEST) is None and kind_of(old) == "folder" and problem_with(old) is None:
            old.rename(folder / BEST)
    remove_abandoned(folder, alone=True)


def problem_with(path: Path) -> str | None:
    """Why a checkpoint is not what was written, byte for byte; None for a valid one."""
    try:
        listed = dict(_line(line) for line in (path / SUMS).read_bytes().decode("ascii").splitlines(keepends=True))
        # What a file manager or a user put beside them is no damage.
        found = {file.name for file in path.iterdir() if OWN_NAMES.fullmatch(file.name)} - {SUMS}
        if listed.keys() != found or HEADER not in listed:
            differ = ", ".join(sorted(listed.keys() ^ found)) or HEADER
            return f"has other files than its {SUMS} says ({differ})"
        sums = _sums([path / name for name in listed])
    except FileNotFoundError as error:
        return f"is not complete (no {Path(error.filename).name})"
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"
    wrong = [name for name, digest in listed.items() if sums[name] != digest]
    return f"is damaged ({', '.join(wrong)} is not what was written)" if wrong else None


def weights_file(path: Path) -> Path:
    """The weights to look at in a checkpoint: the average where there is one."""
    average = path / "ema.safetensors"
    return average if average.is_file() else path / "weights.safetensors"


class Weights(NamedTuple):
    """Saved weights, mapped into memory: they stay whatever becomes of their file."""

    path: Path
    tensors: dict[str, Tensor]


def read_weights(path: Path) -> Weights:
    return Weights(path, _tensors(path))


def load_weights(parameters: dict[str, nn.Parameter], weights: Weights) -> None:
    """Put saved weights into a model; names and shapes must be exactly the model's."""
    copy_into(parameters, _fitting(parameters, weights))


def _fitting(parameters: Mapping[str, nn.Parameter], weights: Weights) -> dict[str, Tensor]:
    """Weights of a file, which may have been made by others: exactly the model's names and shapes, and numbers."""
    path, tensors = weights
    wrong = {n for n, t in tensors.items() if n not in parameters or parameters[n].shape != t.shape}
    wrong |= parameters.keys() - tensors.keys()
    if wrong:
        raise InputError("checkpoint", path, f"does not fit the model ({len(wrong)} tensors, such as {min(wrong)})")
    if broken := [name for name, tensor in tensors.items() if not _is_finite(tensor)]:
        problem = f"holds what is no finite number ({len(broken)} tensors, such as {min(broken)})"
        raise InputError("checkpoint", path, problem, cure="an earlier one")
    return tensors


def _check_optimizer(
    parameters: Mapping[str, nn.Parameter], slots: Mapping[str, Mapping[str, Tensor]], path: Path
) -> None:
    """What AdamW keeps of a weight is complete, of its shape, and what AdamW could have kept."""
    names = {name for tensors in slots.values() for name in tensors}
    problem = None if not slots or slots.keys() == SLOTS else f"has {', '.join(sorted(slots))}"
    for slot, tensors in slots.items():
        for name in names if problem is None else ():
            tensor = tensors.get(name)
            if name not in parameters or tensor is None:
                problem = f"{slot} does not have the weights of the others ({name})"
            elif tensor.shape != (() if slot == "step" else parameters[name].shape) or not _is_finite(tensor):
                problem = f"{slot} of {name} is not of the weight's shape, or not finite"
            elif slot != "exp_avg" and bool((tensor < 0).any()):
                problem = f"{slot} of {name} is below 0"
    if problem:
        raise InputError("checkpoint", path, f"its optimizer's state is broken: {problem}", cure="an earlier one")


def _is_finite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isfinite().all())


def read_header(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: the version, the counters, and of the best weights their evaluation."""
    try:
        head = finite_json((path / HEADER).read_bytes())
    except (OSError, ValueError) as error:
        raise InputError("checkpoint", path, f"cannot be read ({first_line(error)})") from None
    version = head.get("version") if isinstance(head, dict) else None
    if version != VERSION:
        raise InputError("checkpoint", path, f"has version {shortened(str(version), 60)}", str(VERSION))
    counted = [*COUNTERS.values(), "ema_steps"]
    wrong = [name for name in counted if type(head.get(name)) is not int or head[name] < 0]
    wrong += ["prompt_list"] if not isinstance(head.get("prompt_list"), str) else []
    evaluation, by = head.get("evaluation"), head.get("by", "")
    wrong += ["by"] if not isinstance(by, str) else []
    if evaluation is not None and not (isinstance(evaluation, dict) and is_row(evaluation)):
        wrong += ["evaluation"]
    if (epoch := epoch_of(path.name)) is not None and head.get("epoch") != epoch:
        wrong += ["epoch"]
    if wrong:
        problem = f"its {HEADER} is not what a run writes ({', '.join(dict.fromkeys(wrong))})"
        raise InputError("checkpoint", path, problem, cure="an earlier one")
    return head


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError("checkpoint", path, f"cannot be read ({first_line(error)})") from None


def _seal(folder: Path) -> None:
    """List what the folder holds, and have all of it on the disk: a machine may fail as well as a process."""
    files = sorted(folder.iterdir())
    for file in files:
        file.chmod(0o666 & ~umask())  # safetensors are written for the user alone
    sums = _sums(files)
    (folder / SUMS).write_text("".join(f"{sums[file.name]}  {file.name}\n" for file in files))
    for path in (*files, folder / SUMS, folder):
        fsync(path)


def _put(aside: Path, target: Path, outer: Path) -> Path | None:
    """A finished folder in the place of the checkpoint that was there before, which leaves with the scratch folder; or
    is put aside, if there is something in it that is not ours, to the place that is returned.
    """
    old, put_aside = outer / f"{OLD}{target.name}", None
    try:
        if _is_removable(target):
            target.rename(old)
        elif kind_of(target):
            put_aside = quarantine(target, "kept")  # an error where none of it is ours
        aside.rename(target)
    except BaseException:  # an interrupt too: what was there is not to go with the scratch folder
        if old.exists():
            old.rename(target)
        raise
    fsync(target.parent)
    return put_aside


def _is_removable(path: Path) -> bool:
    """Whether a folder is a checkpoint, whole or not, and holds nothing else."""
    if kind_of(path) != "folder":
        return False
    entries = list(path.iterdir())
    return bool(entries) and all(OWN_NAMES.fullmatch(entry.name) and kind_of(entry) == "file" for entry in entries)


def _is_of(path: Path) -> bool:
    """Whether a checkpoint says that it is of the epoch that its name says."""
    try:
        return read_header(path)["epoch"] == epoch_of(path.name)
    except InputError:
        return False


def check_not_foreign(path: Path) -> None:
    """An error if something else than a checkpoint bears the name of one; an empty folder may be what is left of it."""
    kind = kind_of(path)
    names = {entry.name for entry in path.iterdir()} if kind == "folder" else set()
    if kind not in (None, "folder") or (names and not names & {SUMS, HEADER}):
        raise InputError(
            "run", path.parent, f"{path.name} is there already, and no checkpoint", cure="the run without it"
        )


def _sums(files: list[Path]) -> dict[str, str]:
    def digest(file: Path) -> str:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        return dict(zip([file.name for file in files], pool.map(digest, files), strict=True))


def _line(text: str) -> tuple[str, str]:
    found = re.fullmatch(r"([0-9a-f]{64})  ([a-z_.]+)\n", text)
    if not found:
        raise ValueError(f"{SUMS} is damaged")
    return found[2], found[1]
