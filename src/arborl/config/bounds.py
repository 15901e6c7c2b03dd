"""Values held to their knob: kind, bounds, choices, and texts that files and tokenizers take."""

import dataclasses
import difflib
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from ..core.errors import InputError

PATHS = ("path", "cache", "dir", "prompts", "backbone", "tokenizer")
"""Knobs of these names may name a place on disk."""
LIMITS = {
    "above": ("above {}", operator.gt),
    "low": ("{} or more", operator.ge),
    "below": ("below {}", operator.lt),
    "high": ("at most {}", operator.le),
}
"""The bounds of a number in words, and what holds within them; for nan, which is unlike everything, none does."""

LARGEST = 1e30
"""Of settings: float32, which they are computed with, ends at 3e38, and some are divided by small numbers before."""


def check_bounds(section: Any, prefix: str = "") -> None:
    for item in dataclasses.fields(section):
        value, key = getattr(section, item.name), prefix + item.name
        if not _fits(value, item.type):  # OmegaConf does not look at what a list or a section refers to
            raise InputError(key, value, "is of another kind", kind_of(item))
        if dataclasses.is_dataclass(value):
            check_bounds(value, key + ".")
        elif key == "rewards":
            for name, reward in value.items():
                check_text(key, name)
                check_bounds(reward, f"{key}.{name}.")
        elif isinstance(value, dict):
            for name, entry in value.items():
                check_text(key, name)
                for each in entry if isinstance(entry, list) and item.metadata.get("lists") else [entry]:
                    if not isinstance(each, str | int | float | None):
                        allowed = "a number, a text, true or false" + (", or a list" * bool(item.metadata.get("lists")))
                        raise InputError(f"{key}.{name}", entry, "is of another kind", allowed)
                    _check_value(f"{key}.{name}", each, item.metadata, None)
        else:
            for entry in value if isinstance(value, list) else [value]:
                _check_value(key, entry, item.metadata, kind_of(item))
            if item.name in PATHS:
                check_path(key, str(value))


def _fits(value: object, kind: Any) -> bool:
    inner = get_args(kind)
    if isinstance(value, list) and get_origin(kind) is list:
        return all(_fits(entry, inner[0]) for entry in value)
    if isinstance(value, dict) and get_origin(kind) is dict:
        return all(_fits(entry, inner[1]) for entry in value.values())
    return kind is Any or type(value) in (inner if isinstance(kind, UnionType) else (kind,))


def _check_value(key: str, value: object, meta: Mapping[str, Any], kind: str | None) -> None:
    bounds = {name: meta[name] for name in LIMITS if meta.get(name) is not None}
    words = meta.get("words") or ()
    allowed = ", or ".join([", ".join(LIMITS[name][0].format(bound) for name, bound in bounds.items()), *words])
    own = meta.get("own")  # what it names is looked for where it is used
    if meta.get("choices") and value not in meta["choices"] and not (own and ":" in str(value)):
        near, choices = nearest(str(value), meta["choices"]), ", ".join(meta["choices"])
        raise InputError(key, value, f"no such choice{near}", choices + (f", or package.module:{own}" if own else ""))
    if isinstance(value, str):
        if words and value not in words:
            raise InputError(key, value, "is not a known value", allowed if bounds else kind)
        check_text(key, value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, int) and abs(value) >= 2**63:
            raise InputError(key, None, "is a number of more than 64 bits", allowed or None)
        if isinstance(value, float) and LARGEST < abs(value) < math.inf:
            raise InputError(key, value, "is beyond the numbers that are computed with", f"up to {LARGEST:g}")
        if not all(LIMITS[name][1](value, bound) for name, bound in bounds.items()) or not math.isfinite(value):
            raise InputError(key, value, "is out of range", allowed or "a finite number")


def check_text(key: str, value: str) -> None:
    """Files, tokenizers and the system all take UTF-8 without NUL."""
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise InputError(key, value, "contains NUL or half of a surrogate pair", "a text in UTF-8, without NUL")


def check_path(key: str, value: str) -> None:
    """It need not be there, but it must be possible to ask."""
    try:
        Path(value).expanduser().stat()
    except RuntimeError:
        raise InputError(key, value, "begins with a home folder that is not known here", "a path without ~") from None
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise InputError(key, value, f"cannot be looked at ({error.strerror})") from None


def kind_of(item: dataclasses.Field[Any]) -> str | None:
    """The kind of value a knob takes, in words."""
    kinds: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
    kinds |= {list[str]: "a list, such as [a,b]", list[int]: "a list, such as [1,2]"}
    found = [kinds[kind] for kind in ([item.type] if item.type in kinds else get_args(item.type)) if kind in kinds]
    return " or ".join([*found, *(item.metadata.get("words") or ())]) or None


def nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not close:
        last = name.rsplit(".", 1)[-1]
        close = [key for key in known if key.rsplit(".", 1)[-1] == last][:1]
    return f" (nearest: {close[0]})" if close else ""
