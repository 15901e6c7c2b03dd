"""Objects that a user names on the command line as `package.module:name`."""

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from ..core.errors import InputError


def import_object(key: str, spec: str, known: Iterable[str]) -> Callable[..., Any]:
    """Import `package.module:name`. What is not the package's own is looked for in the current folder first, as a
    script's imports are.
    """
    if spec.count(":") != 1:
        raise InputError(key, spec, "is not known", f"{', '.join(known)}, or package.module:name")
    module_name, name = spec.split(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise InputError(key, spec, "does not name a function", "package.module:name")
    try:
        package = module_name.partition(".")[0]
        with nullcontext() if package == "arborl" else _folder(os.getcwd()).opened_for(package):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(key, spec, f"cannot import {module_name} ({error})") from None
    except SystemExit as error:  # of a script that has no `if __name__ == "__main__"`
        raise InputError(key, spec, f"{module_name} ends Python when it is imported (SystemExit: {error})") from None
    found = getattr(module, name, None)
    if not callable(found):
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise InputError(key, spec, f"{module_name} has no {name!r}", ", ".join(public) or None)
    return found


class UserFolder:
    """Finds modules in a folder, for the user's own code alone: the module that is named, and whatever the modules
    found here import, then or later. Nobody else's imports look here, so that a folder one merely stands in, such as a
    downloaded model's, cannot put its `peft.py` in the place of the installed one.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.named = ""  # top-level module that is being imported by name
        self.found: set[str] = set()  # top-level modules that lie here

    @contextmanager
    def opened_for(self, module: str) -> Iterator[None]:
        self.named = module
        try:
            yield
        finally:
            self.named = ""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A meta path finder's one method (PEP 451)."""
        if path is not None:  # it is in a package, which knows its place
            return None
        if name != self.named and _importer() not in self.found:
            return None
        spec = PathFinder.find_spec(name, [self.folder, *sys.path])  # a script's order: packages win over bare folders
        places = (spec.submodule_search_locations or [spec.origin or ""]) if spec else []
        if not any(os.path.dirname(place) == self.folder for place in places):
            return None
        self.found.add(name)
        return spec


def _importer() -> str:
    """The top-level module whose code is importing something just now."""
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in ("importlib", "_frozen_importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").partition(".")[0] if frame else ""


_folders: dict[str, UserFolder] = {}


def _folder(path: str) -> UserFolder:
    if path not in _folders:
        _folders[path] = UserFolder(path)
        sys.meta_path.insert(0, _folders[path])
    return _folders[path]
