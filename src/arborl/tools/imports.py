"""Objects that a user names on the command line as `package.module:name`."""

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from ..core.errors import InputError


def import_object(key: str, spec: str, known: Iterable[str]) -> Callable[..., Any]:
    """Import `package.module:name`; the current folder is importable, as it is for a script."""
    if spec.count(":") != 1:
        raise InputError(key, spec, "is not known", f"{', '.join(known)}, or package.module:name")
    module_name, name = spec.split(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise InputError(key, spec, "does not name a function", "package.module:name")
    if os.getcwd() not in sys.path and module_name.split(".")[0] != "arborl":
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(key, spec, f"cannot import {module_name} ({error})") from None
    found = getattr(module, name, None)
    if not callable(found):
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise InputError(key, spec, f"{module_name} has no {name!r}", ", ".join(public) or None)
    return found
