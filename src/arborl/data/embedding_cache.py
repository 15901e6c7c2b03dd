"""Encoded prompts, kept on disk: text encoders are needed once, and never in memory beside the model."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..core.errors import InputError
from ..tools.cache import cache_home, file_digest
from ..tools.files import check_is_file, remove_abandoned, scratch

FORMAT = 1
Encode = Callable[[Sequence[str]], dict[str, Tensor]]
"""Texts to named tensors whose first axis is the text."""


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

    def path(self, text: str) -> Path:
        name = _hash(self.settings | {"text": text})
        return self.folder / name[:2] / f"{name}.safetensors"

    def missing(self, texts: Sequence[str], verify: bool = True) -> list[str]:
        """Those without a file that holds what it says, each once.

        Without `verify` a file of the right length will do until it is read: a hundred thousand take long to read.
        """
        there = (lambda text: self._load(text) is not None) if verify else self._looks_whole
        return [text for text in dict.fromkeys([*self.always, *texts]) if not there(text)]

    def fill(self, missing: Sequence[str], batch_size: int, done: Callable[[int], None] = lambda count: None) -> None:
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
                batch = missing[start : start + batch_size]
                tensors = encode(batch)
                for row, text in enumerate(batch):
                    own = {name: values[row].cpu().contiguous() for name, values in tensors.items()}
                    with self._writing():
                        self._save(text, own, aside)
                done(len(batch))

    def get(self, texts: Sequence[str], batch_size: int = 1) -> dict[str, Tensor]:
        """The texts' tensors, stacked. What is missing or damaged is encoded first."""
        found = {text: self._load(text) for text in dict.fromkeys(texts)}
        self.fill([text for text, tensors in found.items() if tensors is None], batch_size)
        rows = [tensors if (tensors := found[text]) is not None else self._load(text) for text in texts]
        whole = [row for row in rows if row is not None]
        if len(whole) < len(rows):
            raise RuntimeError(f"{self.folder}: an embedding that was just written cannot be read back")
        return {name: torch.stack([row[name] for row in whole]) for name in whole[0]}

    def _looks_whole(self, text: str) -> bool:
        path = self.path(text)
        try:
            with safe_open(path, "pt"):  # compares the file's length with what its head promises
                return True
        except (OSError, SafetensorError):
            return False

    def _load(self, text: str) -> dict[str, Tensor] | None:
        """The tensors of a text, or None where there are none that could be trusted."""
        try:
            with safe_open(self.path(text), "pt") as file:
                head = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError):
            return None
        whole = head.get("text") == text and head.get("digest") == tensors_digest(tensors)
        return tensors if whole else None

    def _save(self, text: str, tensors: dict[str, Tensor], aside: Path) -> None:
        path, settings = self.path(text), json.dumps(self.settings, sort_keys=True)
        path.parent.mkdir(exist_ok=True)
        written = aside / path.name
        written.write_bytes(save(tensors, {"text": text, "digest": tensors_digest(tensors), "settings": settings}))
        check_is_file(path)
        written.replace(path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError("prompts.cache", self.folder.parent, f"cannot be written ({error.strerror})") from None


def cache_folder(setting: str) -> Path:
    """The folder that `prompts.cache` means."""
    return cache_home() / "embeddings" if setting == "auto" else Path(setting).expanduser()


def fingerprint(files: Sequence[Path], root: Path) -> str:
    """A hash of files' names and contents, to the last byte."""
    named = [(str(path.relative_to(root)), file_digest(path)) for path in sorted(files)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def _hash(values: Mapping[str, str | int]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of tensors by name, to the last bit."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()
