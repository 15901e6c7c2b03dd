"""One line for whoever can mend it: what the key may be stands after `allowed:`, what else to do after `try:`."""

import ast
import re
from collections.abc import Iterator

import pytest

from arborl.core.errors import ArgumentError, InputError

from conftest import ROOT

SOURCE = ROOT / "src" / "arborl"

ADVICE = re.compile(
    r"(an?|the) (lower|higher|smaller|larger|earlier|copy)\b|the run without\b|(an)?other\b|either\b|no\b|not\b|only\b"
    r"|(less|more|fewer|smaller|larger|lower|higher)\b|(to|see|set|try|wait|use|give|rename|remove|pip|hf)\b"
    r"|arborl [a-z]|overrides\b|quotes\b|--"
    r"|.*(,|;) (or )?(another|no|wait|an? smaller|a copy|an? new run|first pip|see|set)\b"
)
"""How what is to be tried begins, or goes on after a comma, and what a key may be does not."""
RANGE = re.compile(r"-?\d|(above|below|up to|at most|at least|between|one of|of \[|multiples)\b|an? (whole )?number\b")
"""How what a key may be begins, and what is to be tried does not."""


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "a.b=3: is wrong"),
        ({"allowed": "1..2"}, "a.b=3: is wrong; allowed: 1..2"),
        ({"cure": "no a.c"}, "a.b=3: is wrong; try: no a.c"),
        ({"allowed": "1..2", "cure": "no a.c"}, "a.b=3: is wrong; allowed: 1..2; try: no a.c"),
        ({"allowed": "", "cure": ""}, "a.b=3: is wrong"),
    ],
)
def test_what_is_allowed_and_what_to_try_have_a_label_each(more, text):
    assert str(InputError("a.b", 3, "is wrong", **more)) == text
    assert str(ArgumentError("a.b", 3, "is wrong", **more)) == text


def test_no_text_breaks_the_line():
    error = InputError("a\n", "b\r", "is\x1b[2J wrong", "c\nd", cure="e\x00f")
    assert str(error) == "a\\n=b\\r: is\\x1b[2J wrong; allowed: c\\nd; try: e\\x00f"


def test_an_argument_has_the_names_of_settings_in_all_of_its_texts():
    error = ArgumentError("w", 9, "is more than {steps}", "1..{steps}", cure="more {steps}, or less {eta}")
    assert str(error) == "w=9: is more than steps; allowed: 1..steps; try: more steps, or less eta"
    named = error.renamed({"w": "tree.w", "steps": "sample.num_steps", "eta": "kernel.eta"})
    text = "tree.w=9: is more than sample.num_steps; allowed: 1..sample.num_steps; "
    assert str(named) == f"{text}try: more sample.num_steps, or less kernel.eta"
    assert type(named) is InputError


@pytest.mark.parametrize("more", [{"allowed": "1..{steps}"}, {"cure": "more {steps}"}, {}])
def test_what_is_not_said_is_not_said_by_other_names_either(more):
    named = str(ArgumentError("w", 9, "is wrong", **more).renamed({"steps": "sample.num_steps"}))
    assert ("; allowed: 1..sample.num_steps" in named) == ("allowed" in more)
    assert ("; try: more sample.num_steps" in named) == ("cure" in more)


def literals(node: ast.expr) -> Iterator[str]:
    """The plain texts that an expression may be; of an f-string with … for what is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    elif isinstance(node, ast.IfExp):
        yield from (text for branch in (node.body, node.orelse) for text in literals(branch))


def said(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, "allowed" or "cure", text) of every text that errors are made with, or that a variable so called has."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("InputError", "ArgumentError"):
            given = [("allowed", node.args[3])] if len(node.args) > 3 else []
            given += [(word.arg, word.value) for word in node.keywords if word.arg in ("allowed", "cure")]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("allowed", "cure"):
            given = [(ast.unparse(node.targets[0]), node.value)]
        else:
            continue
        yield from ((node.lineno, what, text) for what, value in given for text in literals(value))


def test_advice_is_said_as_advice_and_what_is_allowed_as_that():
    found = [(path, *one) for path in sorted(SOURCE.rglob("*.py")) for one in said(path.read_text("utf-8"))]
    count = {what: sum(one[2] == what for one in found) for what in ("allowed", "cure")}
    assert min(count.values()) > 30, f"the law looks at too little: {count}"
    for path, line, what, text in found:
        other = ADVICE if what == "allowed" else RANGE
        assert not other.match(text), f"{path.relative_to(SOURCE)}:{line} is no {what}: {text}"


@pytest.mark.parametrize(
    "text",
    [
        "a lower train.learning_rate or another precision",
        "fewer steps, fewer leaves, or tree.s=0",
        "more, to go on",
        "another name, or --resume runs/x",
        "1, or no train.max_seconds",
        "an earlier one",
        "the run without that file",
        "a copy of one of them, or a new run",
        "64 or more, or a smaller tree",
        "--no-ema",
        "pip install 'arborl[ocr]'",
    ],
)
def test_the_law_sees_advice(text):
    source = f"allowed = {text!r}\nInputError('a', 1, 'is wrong', {text!r})\nInputError('a', 1, 'b', allowed={text!r})"
    assert [ADVICE.match(said_text) is not None for _, _, said_text in said(source)] == [True] * 3


@pytest.mark.parametrize("text", ["1..3", "above 0", "at most 5", "a number above 0"])
def test_the_law_sees_ranges(text):
    source = f"cure = {text!r}\nInputError('a', 1, 'is wrong', cure={text!r})"
    assert [RANGE.match(said_text) is not None for _, _, said_text in said(source)] == [True] * 2
