"""Weights and other files that a reward needs: found, read without running code in them, converted once."""

import pickle
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..core.errors import InputError
from ..data.embedding_cache import fingerprint, tensors_digest
from ..tools.cache import cache_home
from ..tools.files import atomic, remove_abandoned
from ..tools.quiet import quiet_libraries

DAMAGED = (RuntimeError, LookupError, AssertionError, TypeError, AttributeError)
"""Errors that torch and transformers raise, among others, over a damaged file."""
FORMAT = 2
"""Of converted weights; to be raised when a conversion changes."""


@dataclass(frozen=True)
class Weights:
    """A file, or a folder of several, that the user brings."""

    hub: str  # repository on the hub that has it
    file: str = ""  # its name there; empty is a transformers folder, which is the repository itself
    place: str = ""  # where it is looked for first, from the current folder
    also: str = ""  # what else to fetch with it
    size: str = ""
    licence: str = ""  # as the hub's page or the project states it

    def find(self, key: str, given: str = "") -> Path:
        """The file: at the path or hub id that is given, else in its usual place, else in the hub's cache.

        Only what is named by its hub id is fetched: gigabytes should not come unasked.
        """
        path = Path(given or self.place).expanduser()
        if given or self.place:
            inside = [path / self.file, path / Path(self.file).name] if self.file else [path / "config.json"]
            for file in inside if path.is_dir() else ():
                if file.is_file():
                    return file if self.file else path
            if self.file and path.is_file():
                return path
            if path.is_dir():
                raise InputError(key, path, f"the folder has no {inside[0].name}", cure=self.advice)
            if path.exists():
                raise InputError(key, path, "is a file", f"a folder, or a hub id such as {self.hub}")
        if given and not _is_hub_id(given):
            raise InputError(key, given, "there is no such file or folder", cure=self.advice)
        return self._from_hub(key, given)

    @property
    def advice(self) -> str:
        """Instructions: the command that fetches it, and the place to put it."""
        target = str(Path(self.place).parent if self.file else self.place) if self.place else "FOLDER"
        if self.file.count("/"):  # comes with its folders
            target = self.place.removesuffix(self.file).rstrip("/")
        what = " ".join(filter(None, [self.hub, self.file, self.also]))
        return f"a path of your own, or `hf download {what} --local-dir {target}`"

    def missing(self, key: str, given: str, why: str = "") -> InputError:
        looked = f"not at {self.place}, " if self.place and not given else ""
        problem = f"{self.file or self.hub} is not here ({looked}not in the hub's cache)"
        problem += f" ({why.splitlines()[0]})" if why else ""
        return InputError(key, given or None, problem, cure=self.advice)

    def _from_hub(self, key: str, given: str) -> Path:
        # Pictures, other frameworks' weights and the same ones twice stay where they are.
        wanted = [self.file] if self.file else ["*.json", "*.txt", "*.safetensors", "*.model"]
        folder = from_hub(given or self.hub, wanted, fetch=bool(given))
        if isinstance(folder, Path) and (folder / (self.file or "config.json")).is_file():
            return folder / self.file if self.file else folder
        raise self.missing(key, given, "" if isinstance(folder, Path) else folder)


@contextmanager
def collect_missing() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Inside, `attempt(find)` collects what is missing and then gives None; at the end one error names all of it."""
    problems: list[str] = []

    def attempt(find: Callable[[], Any]) -> Any:
        try:
            return find()
        except InputError as error:
            problems.append(str(error))
            return None

    yield attempt
    if problems:
        raise InputError.joined(problems)


def from_hub(name: str, wanted: list[str], fetch: bool) -> Path | str:
    """The folder of a repository in the hub's cache, with what is wanted of it; or why it is not there."""
    from huggingface_hub import constants, snapshot_download

    local = not fetch or constants.HF_HUB_OFFLINE
    try:
        with quiet_libraries():
            return Path(snapshot_download(name, allow_patterns=wanted, local_files_only=local))
    except (OSError, ValueError) as error:
        return "" if local else str(error)


def _is_hub_id(text: str) -> bool:
    files = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".json")
    return text.count("/") == 1 and not text.startswith((".", "/", "~")) and not text.endswith(files)


def read_tensors(key: str, path: Path) -> dict[str, Any]:
    """A checkpoint as it is in its file. Only tensors and plain containers are read: code in a pickle is not run."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error):
            problem = "is refused: it holds more than weights, and that would run as code when it is read"
        else:
            problem = "is not a checkpoint, or is damaged"
        raise InputError(key, path, problem, "a file of tensors, as its authors publish it") from None
    except (OSError, EOFError, ValueError, SafetensorError, struct.error, *DAMAGED) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        problem = f"is not a checkpoint, or is cut short or damaged ({reason})"
        raise InputError(key, path, problem, "the whole file, as its authors publish it") from None
    if not isinstance(found, dict):
        raise InputError(key, path, f"holds a {type(found).__name__}", "a file of named tensors")
    return found


def _is_zip(path: Path) -> bool:
    """torch's files of today; older ones are plain pickles, which cannot be mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def tensors_of(key: str, path: Path, found: Mapping[str, Any]) -> dict[str, Tensor]:
    """The same, if tensors are all it holds."""
    other = [name for name, value in found.items() if not isinstance(value, Tensor) or not isinstance(name, str)]
    if other or not found:
        problem = f"holds no tensor under {other[0]!r}" if other else "holds nothing"
        raise InputError(key, path, problem, "a file of named tensors")
    return dict(found)


def converted(key: str, path: Path, name: str, convert: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The weights under the names our networks know, kept as safetensors in the user's cache.

    A file that has changed is converted anew: the copy's name holds a fingerprint of it. So is one whose copy is not
    what was written: it holds a digest of its tensors. `convert` raises for what is not what it should be, so that no
    copy of that is kept.
    """
    copy = cache_home() / "rewards" / f"{name}-{FORMAT}-{fingerprint([path], path.parent)[:16]}.safetensors"
    if (kept := _kept(copy)) is not None:
        return kept
    tensors = {name: tensor.contiguous() for name, tensor in convert().items()}
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(copy.parent)
        with atomic(copy, cache=True) as aside:
            save_file(tensors, aside, {"digest": tensors_digest(tensors)})
    except (OSError, SafetensorError) as error:
        warnings.warn(f"{copy}: converted weights could not be kept there ({error}); next time anew", stacklevel=2)
    return tensors


def _kept(copy: Path) -> dict[str, Tensor] | None:
    """A converted copy; None where there is none, or one that is not what was written, to the last bit."""
    try:
        with safe_open(copy, "pt") as file:
            head = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError):
        return None
    return tensors if head.get("digest") == tensors_digest(tensors) else None


def check_names(key: str, path: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    """Nothing missing, nothing unexpected, every shape right; one line says what is not."""
    missing, other = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    common = wanted.keys() & tensors.keys()
    shapes = [name for name in common if wanted[name].shape != tensors[name].shape]
    kinds = [name for name in common if wanted[name].is_floating_point() != tensors[name].is_floating_point()]
    if not (missing or other or shapes or kinds):
        return
    wrong = {"missing": missing, "unexpected": other, "of another shape": shapes, "of another kind": kinds}
    problems = [f"{len(names)} {kind}, such as {min(names)}" for kind, names in wrong.items() if names]
    raise InputError(key, path, f"does not hold {what}: of its tensors {'; '.join(problems)}", f"the weights of {what}")
