"""What checks shapes and types while testing: beartype, which makes the check of a signature once.

A function within another is decorated at every call of the outer one, which costs more than all else of the check.
"""

import inspect
from collections.abc import Callable
from typing import Any

from beartype import beartype

KEPT: dict[object, Callable[..., Any]] = {}


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """jaxtyping has signatures checked by functions of its own that do nothing else: alike ones serve one another."""
    signature = inspect.signature(function)
    taken = tuple((name, p.kind, p.annotation, p.default) for name, p in signature.parameters.items())
    key = (function.__module__, function.__qualname__, taken, signature.return_annotation)
    try:
        if key not in KEPT:
            KEPT[key] = beartype(function)
        return KEPT[key]
    except TypeError:  # a default that has no hash
        return beartype(function)
