"""Shell completion: settings with their values, presets, run folders, rewards."""

from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from ..config import groups, knobs, options, presets
from ..core.errors import InputError
from ..run.paths import CONFIG

NO_BLANK = "    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace"


def script(app: click.Command, shell: str) -> str:
    """The script that a shell evaluates once to switch completion on."""
    kind = get_completion_class(shell)
    if kind is None:
        raise InputError("SHELL", shell, "has no completion", "bash, zsh, fish")
    source = kind(app, {}, "arborl", "_ARBORL_COMPLETE").source()
    # After a key comes its value, so no blank belongs there.
    return source.replace("    return 0\n", f"{NO_BLANK}\n    return 0\n", 1) if shell == "bash" else source


def settings(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """`key=`, and behind it the values it takes where these can be named."""
    words = [str(word) for word in context.params.get(parameter.name or "") or ()]
    # Bash takes a setting apart at its =, and click takes a last = for nothing.
    if words and words[-1] == "=":
        return _starting(incomplete, _values(words[-2] if len(words) > 1 else ""))
    if words and not incomplete and "=" not in words[-1]:
        return _starting("", _values(words[-1]))
    key, equals, _ = incomplete.partition("=")
    if equals:
        return _starting(incomplete, (f"{key}={value}" for value in _values(key)))
    sentences = {f"{key}=": item.metadata["help"] for key, item in knobs() if "<" not in key}
    sentences |= {f"{group}=": f"{', '.join(options(group))}" for group in groups()}
    return [CompletionItem(key, help=text) for key, text in sentences.items() if key.startswith(incomplete)]


def _values(key: str) -> Iterator[str]:
    if key in groups():
        yield from options(key)
    for name, item in knobs():
        if name == key:
            yield from map(str, item.metadata["choices"] or ())
            yield from ("true", "false") if item.type is bool else ()


def _starting(text: str, words: Iterator[str]) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(text)]


def preset_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _starting(incomplete, iter(presets()))


def reward_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """By their yaml files: the catalogue itself would import torch, and a key press must not wait for that."""
    return _starting(incomplete, (name for name in options("rewards") if name not in ("none", "hps_clip")))


def run_folders(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Folders of runs below what is typed, else any folder."""
    base = Path(incomplete) if incomplete.endswith("/") else Path(incomplete or "runs").parent
    found = (str(path.parent) for path in sorted((base if incomplete else Path("runs")).glob(f"*/{CONFIG}")))
    return _starting(incomplete, found) or [CompletionItem(incomplete, type="dir")]
