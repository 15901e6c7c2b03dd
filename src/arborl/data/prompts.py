"""Prompt files, and the prompts of an epoch: a function of the seed and of the number used before."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import PIL.Image
import torch
from jaxtyping import Int
from torch import Tensor

from ..config.schema import SampleConfig
from ..core.errors import InputError, first_line, shortened


def _shipped(name: str) -> tuple[str, ...]:
    """A list that comes with the package."""
    return tuple((Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8").splitlines())


PICTURES, HELDOUT_PICTURES = _shipped("pictures"), _shipped("pictures_heldout")
VIDEOS, HELDOUT_VIDEOS = _shipped("videos"), _shipped("videos_heldout")
"""Lists for models that bring no prompts of their own, where no file is named."""


class Picture(str):
    """A picture that a prompt file names: the path to it, wherever the program runs."""

    written: str
    """As it stands in the file."""

    @classmethod
    def beside(cls, file: Path, written: str) -> "Picture":
        """A path in a prompt file is relative to the file."""
        found = cls((file.parent / Path(written).expanduser()).resolve())
        found.written = written
        return found

    def open(self) -> PIL.Image.Image:
        """The picture, in RGB."""
        with PIL.Image.open(self) as image:
            return image.convert("RGB")


@dataclass(frozen=True)
class Prompts:
    """Texts and the further columns of their file, index by index."""

    texts: list[str]
    columns: dict[str, list[object]]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def digest(self) -> str:
        """Tells one list from another, wherever it lies."""
        columns = {name: [_as_written(value) for value in values] for name, values in self.columns.items()}
        return hashlib.sha256(json.dumps([self.texts, columns], sort_keys=True).encode()).hexdigest()

    def take(self, index: Sequence[int]) -> "Prompts":
        return Prompts([self.texts[i] for i in index], {k: [v[i] for i in index] for k, v in self.columns.items()})

    def followed_by(self, other: "Prompts") -> "Prompts":
        """Both lists, with the columns that both have."""
        shared = [name for name in self.columns if name in other.columns]
        columns = {name: [*self.columns[name], *other.columns[name]] for name in shared}
        return Prompts([*self.texts, *other.texts], columns)

    def repeat(self, times: int) -> "Prompts":
        """Each prompt `times` times in a row: one for each of its leaves."""
        return self.take([i for i in range(len(self)) for _ in range(times)])


def _as_written(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_written(each) for each in value]
    return value.written if isinstance(value, Picture) else value


def with_pictures(prompts: Prompts, path: str, names: Mapping[str, bool], key: str) -> Prompts:
    """The columns of those names, each with a value in every line; where that `is_picture`, a path or several, each of
    which is opened once: what is missing or broken is known before a run.
    """
    columns = dict(prompts.columns)
    for name, is_picture in names.items():
        values = columns.get(name)
        if values is None:
            known = ", ".join(prompts.columns) or None
            raise InputError(key, path or None, f"has no column {name!r}, which model.call names", known)
        if None in values:
            raise InputError(key, path, f"prompt {values.index(None) + 1} has nothing in column {name!r}")
        if is_picture:
            columns[name] = [_pictures(key, path, name, number, value) for number, value in enumerate(values, 1)]
    pictures = [name for name, is_picture in names.items() if is_picture]
    opened = {each for name in pictures for value in columns[name] for each in _each(value)}
    with ThreadPoolExecutor() as several:
        for problem in several.map(_problem_with, sorted(opened)):
            if problem:
                raise InputError(key, path, problem)
    return Prompts(prompts.texts, columns)


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _pictures(key: str, path: str, column: str, number: int, value: Any) -> Any:
    if not all(isinstance(each, str) and each for each in _each(value)) or value == []:
        problem = f"prompt {number} has {shortened(repr(value), 60)} in column {column!r}"
        raise InputError(key, path, problem, "the path of a picture, or a list of them")
    found = [Picture.beside(Path(path), each) for each in _each(value)]
    return found if isinstance(value, list) else found[0]


def _problem_with(picture: Picture) -> str:
    try:
        picture.open()
    except FileNotFoundError:
        return f"there is no picture {picture.written} (at {picture})"
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:  # PIL's words for broken ones
        return f"picture {picture.written} cannot be read ({first_line(error)})"
    return ""


def load_prompts(path: str, default: Sequence[str] = (), key: str = "prompts.path") -> Prompts:
    """A file with one prompt a line, or JSONL (`.jsonl`) with a `prompt` and further columns; else the default list."""
    if not path:
        if not default:
            raise InputError(
                key, None, "this model has no prompt list of its own", "a text file, or .jsonl with `prompt`"
            )
        return Prompts(list(default), {})
    lines = _lines(key, path)
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise InputError(key, path, "the file holds no prompt", "one prompt a line")
    if Path(path).suffix != ".jsonl":
        return Prompts([line for _, line in numbered], {})
    rows = [_row(key, path, number, line) for number, line in numbered]
    names = {name: None for row in rows for name in row if name != "prompt"}  # a dict keeps their order
    return Prompts([row["prompt"] for row in rows], {name: [row.get(name) for row in rows] for name in names})


def _lines(key: str, path: str) -> list[str]:
    file = Path(path)
    try:
        if not file.is_file():
            problem = "is no file with text in it" if file.exists() else "there is no such file"
            raise InputError(key, path, problem, "a text file, or .jsonl with `prompt`" if file.exists() else None)
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(key, path, f"is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise InputError(key, path, f"cannot be read ({error.strerror})") from None
    if "\0" in text:
        raise InputError(key, path, f"is not text (byte {len(text.partition(chr(0))[0].encode())} is NUL)")
    return text.split("\n")  # a prompt may hold other characters that end a line


MOST_LEVELS = 32
"""Lists within lists in a column: code that walks them goes no deeper than Python does."""


def _row(key: str, path: str, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError(key, path, f"line {number} holds half of a surrogate pair", "text in UTF-8") from None
    except (ValueError, RecursionError) as error:  # also numbers of more digits than Python reads
        problem = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)
        raise InputError(key, path, f"line {number} is not JSON ({problem})") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
        raise InputError(key, path, f'line {number} has no "prompt" text')
    if _is_deeper(row, MOST_LEVELS):
        raise InputError(key, path, f"line {number} is nested too deeply", f"{MOST_LEVELS} levels at most")
    return row


LEAST_HELD_OUT = 16
"""Prompts that must be held out of a file, or it stays whole."""


class PromptLists(NamedTuple):
    """Prompts to train on, and those of evaluations."""

    training: Prompts
    evaluation: Prompts

    @property
    def trained_on(self) -> int:
        """The number of evaluation prompts that are trained on too."""
        known = set(self.training.texts)
        return sum(text in known for text in self.evaluation.texts)

    @property
    def evaluated_on(self) -> str:
        """What evaluations may be said to be of."""
        kinds = {0: "held-out prompts", len(self.evaluation): "training prompts"}
        return kinds.get(self.trained_on, "prompts of which some are trained on")


def hold_out(prompts: Prompts, share: float) -> PromptLists:
    """A file's prompts in two, by a hash of their text: whichever others there are, and wherever it stands in the file,
    a prompt stays on its side. Where too few would be held out all of them are trained on and evaluated.
    """
    held = [_place(text) < share for text in prompts.texts]
    if len({text for text, out in zip(prompts.texts, held, strict=True) if out}) < LEAST_HELD_OUT or all(held):
        return PromptLists(prompts, prompts)
    training, evaluation = ([i for i, out in enumerate(held) if out == which] for which in (False, True))
    return PromptLists(prompts.take(training), prompts.take(evaluation))


def _place(text: str) -> float:
    """A number in [0, 1) that a text alone decides."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8]) / 2**64


def _is_deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(each, levels - 1) for each in inner)


class PromptSplit(NamedTuple):
    """Split of an epoch's prompts over the ranks."""

    total: int  # over all processes
    per_process: int  # places a process has; those beyond the total stay empty


def split_prompts(sample: SampleConfig, processes: int = 1) -> PromptSplit:
    total = sample.prompts_per_epoch or sample.num_prompts * processes
    return PromptSplit(total, math.ceil(total / processes))


@dataclass(frozen=True)
class LocalPrompts:
    """A process's part of an epoch's prompts."""

    prompts: Prompts
    ids: Int[Tensor, " prompts"]  # their places among those of all processes: noise follows these
    total: int  # of all processes; a prompt in a place from here on only fills up, and is not learnt from

    @property
    def num_real(self) -> int:
        return int((self.ids < self.total).sum())


def local_prompts(prompts: Prompts, how: PromptSplit, rank: int, start: int, seed: int) -> LocalPrompts:
    """A rank's prompts of an epoch, after `start` prompts of earlier epochs."""
    chosen = prompt_order(len(prompts), start, how.total, seed)
    ids = torch.arange(rank * how.per_process, (rank + 1) * how.per_process)
    return LocalPrompts(prompts.take([chosen[min(i, how.total - 1)] for i in ids.tolist()]), ids, how.total)


def prompt_order(total: int, start: int, count: int, seed: int) -> list[int]:
    """`count` prompts from a place on: the file is dealt out pass by pass, each pass in its own order."""
    indices: list[int] = []
    while len(indices) < count:
        turn, place = divmod(start + len(indices), total)
        indices += _shuffled(total, seed, turn)[place:][: count - len(indices)].tolist()
    return indices


def _shuffled(total: int, seed: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + turn) % 2**63)
    return torch.randperm(total, generator=generator)
