"""docs/config.md, written from the schema: `python -m arborl.config.reference > docs/config.md`."""

import dataclasses
from types import NoneType
from typing import Any, get_args, get_origin

from . import RENAMED, groups, knobs, load_config, options, presets
from .interpolation import ENVIRONMENT
from .schema import MISSING


def reference() -> str:
    """Every knob with its default, what it takes and its sentence; presets and groups."""
    lines = [
        "# Every setting",
        "",
        "Written from the schema by `python -m arborl.config.reference > docs/config.md`; a test keeps them the same.",
        "Give settings as `key=value`; a list as `key=a,b` (in a yaml file as `[a, b]`).",
        "A setting may name another, as `${train.epochs}`, or the time, as `${now:%Y-%m-%d}`; of the environment only "
        f"{', '.join(f'`${{oc.env:{name}}}`' for name in ENVIRONMENT)}, as settings are written into the run and onto "
        "its page.",
        "The defaults are the schema's; presets and groups put others in their place.",
        "",
        f"- Presets (`--config-name`): {', '.join(f'`{name}`' for name in presets())}, or a yaml file of your own.",
    ]
    lines += [f"- `{group}=`: {', '.join(f'`{name}`' for name in options(group))}." for group in groups()]
    section = None
    for key, item in knobs():
        name = key.removesuffix(".<name>").rsplit(".", 1)[0] if "." in key else "general"
        if name != section:
            section = name
            lines += ["", f"## {section}", "", "| key | default | takes | |", "|---|---|---|---|"]
        lines.append(f"| `{key}` | {_default(item)} | {_takes(item)} | {item.metadata['help']} |")
    lines += ["", "## Renamed", "", "| was | is |", "|---|---|"]
    lines += [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    return "\n".join(lines) + "\n"


def _default(item: dataclasses.Field[Any]) -> str:
    value = item.default if item.default is not dataclasses.MISSING else item.default_factory()  # pyright: ignore
    if value == MISSING:
        return "required"
    if value in ("", {}):
        return "–"
    if value is None:
        return "`null`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`".replace("'", "")


def _takes(item: dataclasses.Field[Any]) -> str:
    meta = item.metadata
    if meta["choices"]:
        own = [f"or package.module:{meta['own']}"] if meta["own"] else []
        return ", ".join([*(f"`{choice}`" for choice in meta["choices"]), *own])
    if get_origin(item.type) is dict:
        return "number, text, true, false" + (", list" if meta["lists"] else "")
    kinds = {int: "whole number", float: "number", bool: "true, false", str: "text"}
    options = (
        [kind for kind in get_args(item.type) if kind is not NoneType] if get_origin(item.type) is not list else []
    )
    words = ["text or list" if item.type is Any else kinds.get(options[0] if options else item.type, "list")]  # pyright: ignore[reportArgumentType]
    words += [f"above {meta['above']}"] if meta["above"] is not None else []
    words += [f"{meta['low']} or more"] if meta["low"] is not None else []
    words += [f"below {meta['below']}"] if meta["below"] is not None else []
    words += [f"at most {meta['high']}"] if meta["high"] is not None else []
    words += [f"or {word}" for word in meta["words"]]
    words += ["or null"] if NoneType in get_args(item.type) else []
    return ", ".join(words)


if __name__ == "__main__":
    load_config()  # a schema that does not compose is not worth a page
    print(reference(), end="")
