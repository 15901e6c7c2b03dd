"""Encoded prompts, kept on disk: text encoders are needed once, and never in memory beside the model."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import PIL.Image
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..core.errors import InputError
from ..tools.cache import cache_home, file_digest
from ..tools.files import check_is_file, remove_abandoned, scratch
from .prompts import Picture

FORMAT = 1


class Request(NamedTuple):
    """A text, with pictures and other things that are encoded beside it, by their names."""

    text: str
    given: tuple[tuple[str, Any], ...] = ()

    def identity(self) -> dict[str, Any]:
        """What tells it from others: pictures by their contents, wherever they lie."""
        return {"text": self.text} | (
            {"given": {name: _digest(value) for name, value in self.given}} if self.given else {}
        )


Encode = Callable[[Sequence[Request]], Sequence[Mapping[str, Tensor]]]
"""Texts to named tensors, for each its own."""


def _digest(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_digest(each) for each in value]
    if isinstance(value, Picture):
        return file_digest(Path(value))
    return hashlib.sha256(value.tobytes()).hexdigest() if isinstance(value, PIL.Image.Image) else value


class Embeddings:
    """One file a text, named by the hash of the text and of all that decides what becomes of it.

    `settings` is that: which encoders, how many tokens, which precision. `encoder` lends the encoders, and takes them
    out of memory again. `always` are texts that every prompt needs beside it, such as the negative one.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, str | int],
        encoder: Callable[[], AbstractContextManager[Encode]],
        always: Sequence[str] = (),
    ) -> None:
        self.settings = {"format": FORMAT, **settings}
        self.folder = folder / _hash(self.settings)[:16]
        self.encoder, self.always = encoder, list(always)

    def path(self, request: str | Request) -> Path:
        name = _hash(self.settings | _request(request).identity())
        return self.folder / name[:2] / f"{name}.safetensors"

    def missing(self, requests: Sequence[str | Request], verify: bool = True) -> list[Request]:
        """Those without a file that holds what it says, each once.

        Without `verify` a file of the right length will do until it is read: a hundred thousand take long to read.
        """
        there = (lambda request: self._load(request) is not None) if verify else self._looks_whole
        return [each for each in _distinct([*self.always, *requests]) if not there(each)]

    def fill(
        self, missing: Sequence[str | Request], batch_size: int, done: Callable[[int], None] = lambda count: None
    ) -> None:
        """Encode and keep these texts; each is on disk as soon as its batch is through."""
        if not missing:
            return
        with ExitStack() as stack:
            with self._writing():
                self.folder.mkdir(parents=True, exist_ok=True)
                remove_abandoned(self.folder)
                aside = stack.enter_context(scratch(self.folder))  # one for all: these are many small files
            encode = stack.enter_context(self.encoder())
            for start in range(0, len(missing), batch_size):
                batch = [_request(each) for each in missing[start : start + batch_size]]
                for request, tensors in zip(batch, encode(batch), strict=True):
                    own = {name: values.cpu().contiguous() for name, values in tensors.items()}
                    with self._writing():
                        self._save(request, own, aside)
                done(len(batch))

    def get(self, texts: Sequence[str], batch_size: int = 1) -> dict[str, Tensor]:
        """The texts' tensors, stacked. What is missing or damaged is encoded first."""
        rows = self.rows(texts, batch_size)
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def rows(self, requests: Sequence[str | Request], batch_size: int = 1) -> list[dict[str, Tensor]]:
        """The tensors of each, whatever their shapes."""
        asked = {self.path(each): _request(each) for each in requests}
        found = {path: self._load(each) for path, each in asked.items()}
        missing = [asked[path] for path, tensors in found.items() if tensors is None]
        self.fill(missing, batch_size)
        found |= {self.path(each): self._load(each) for each in missing}
        whole = [tensors for each in requests if (tensors := found[self.path(each)]) is not None]
        if len(whole) < len(requests):
            raise RuntimeError(f"{self.folder}: an embedding that was just written cannot be read back")
        return whole

    def _looks_whole(self, request: Request) -> bool:
        path = self.path(request)
        try:
            with safe_open(path, "pt"):  # compares the file's length with what its head promises
                return True
        except (OSError, SafetensorError):
            return False

    def _load(self, text: str | Request) -> dict[str, Tensor] | None:
        """The tensors of a text, or None where there are none that could be trusted."""
        request = _request(text)
        try:
            with safe_open(self.path(request), "pt") as file:
                head = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError):
            return None
        whole = head.get("text") == request.text and head.get("digest") == tensors_digest(tensors)
        return tensors if whole else None

    def _save(self, request: Request, tensors: dict[str, Tensor], aside: Path) -> None:
        path = self.path(request)
        head = {"text": request.text, "digest": tensors_digest(tensors)}
        path.parent.mkdir(exist_ok=True)
        written = aside / path.name
        written.write_bytes(save(tensors, head | {"settings": json.dumps(self.settings, sort_keys=True)}))
        check_is_file(path)
        written.replace(path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError("prompts.cache", self.folder.parent, f"cannot be written ({error.strerror})") from None


def _request(text: str | Request) -> Request:
    return text if isinstance(text, Request) else Request(text)


def _distinct(requests: Sequence[str | Request]) -> list[Request]:
    return list({_hash(each.identity()): each for each in map(_request, requests)}.values())


def cache_folder(setting: str) -> Path:
    """The folder that `prompts.cache` means."""
    return cache_home() / "embeddings" if setting == "auto" else Path(setting).expanduser()


def fingerprint(files: Sequence[Path], root: Path) -> str:
    """A hash of files' names and contents, to the last byte."""
    named = [(str(path.relative_to(root)), file_digest(path)) for path in sorted(files)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def _hash(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of tensors by name, to the last bit."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()
