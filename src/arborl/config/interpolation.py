"""Interpolations in settings: which of them are resolved, and how a text that looks like one is kept."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from omegaconf import OmegaConf, grammar_parser
from omegaconf.grammar.gen.OmegaConfGrammarParser import OmegaConfGrammarParser
from omegaconf.resolvers import oc

from ..core.errors import InputError

ENVIRONMENT = (
    *("HOME", "USER", "TMPDIR", "SCRATCH", "WORK", "HF_HOME"),
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_TMPDIR"),
)
"""Variables of the environment that settings may name as ${oc.env:NAME}: folders and jobs. Settings are resolved into
config.yaml, onto the report's page and into addresses, and a yaml file may be anyone's: no other one is read for it.
"""
ALLOWED = f"${{some.setting}}, ${{now:…}}, or ${{oc.env:NAME}} of {', '.join(ENVIRONMENT)}"
MAY_RESOLVE = re.compile(rf"\$\{{\s*(oc\.env:\s*({'|'.join(ENVIRONMENT)})\s*(,.*)?|now:[^$]*)\}}", re.DOTALL)


def check_interpolations(key: str, value: Any) -> None:
    """Settings may name each other; of what is computed when they are read, only some of the environment and the time.

    `value` is as it was written: nothing in it has been resolved yet.
    """
    if isinstance(value, Mapping):
        for name, inner in cast(Mapping[Any, Any], value).items():
            check_interpolations(f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for inner in cast(Sequence[Any], value):
            check_interpolations(key, inner)
    elif isinstance(value, str):
        for called in _resolvers(value) if "${" in value else ():
            if not MAY_RESOLVE.fullmatch(called):
                raise InputError(key, value, f"{called} is nothing that settings may ask for", ALLOWED)


def _resolvers(text: str) -> Iterator[str]:
    """The interpolations in a text that call something, as they are written there."""
    nodes: list[Any] = [grammar_parser.parse(text)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, OmegaConfGrammarParser.InterpolationResolverContext):
            yield node.getText()
        nodes += getattr(node, "children", None) or []


@contextmanager
def only_named_variables(file: str) -> Iterator[None]:
    """What Hydra resolves inside, in the defaults lists of files, is held to the same before it stands in an error."""
    refused: list[InputError] = []

    def named(name: str, *default: Any) -> Any:
        if name not in ENVIRONMENT:
            problem = f"${{oc.env:{name}}} is nothing that settings may ask for"
            refused.append(InputError("--config-name", file, problem, ALLOWED))
            raise refused[0]
        return oc.env(name, *default)

    OmegaConf.register_new_resolver("oc.env", named, replace=True)
    try:
        yield
    except Exception:
        if refused:
            raise refused[0] from None
        raise
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def literal(value: Any) -> Any:
    """Settings in which every text is read back as it is: what looks like an interpolation was resolved already."""
    if isinstance(value, dict):
        return {name: literal(inner) for name, inner in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [literal(inner) for inner in cast(list[Any], value)]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
