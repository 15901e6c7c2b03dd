"""Runs come to the numbers that were recorded: bit for bit on the same kind of processor, else to rounding."""

from pathlib import Path

import pytest

from arborl.cli import main
from arborl.config import presets

from launching import ranks
from recorded.runs import PRESETS, Case, cases, differences, machine, numbers, recorded

EVERY_TIME = {"mixture-full", "tree-full", "branch_mix-lora", "mixture-full-two", "mixture-full-resumed"}
"""Of most kinds one; the others, a hundred, under slow."""


def test_every_preset_is_recorded():
    assert sorted(PRESETS) == presets()
    assert {case.recorded_as() for case in cases()} == recorded()["runs"].keys()
    assert {case.name for case in cases()} > EVERY_TIME


def here(arguments: list[str], processes: int, cwd: Path) -> None:
    """Without waiting for imports: in this process, or in several that are forked."""
    if processes > 1:
        for ended in ranks(processes, "train", *arguments, cwd=cwd):
            assert ended.code == 0, ended.said
        return
    with pytest.raises(SystemExit) as end:
        main(["train", *arguments])
    assert not end.value.code


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.name in EVERY_TIME else pytest.mark.slow, id=case.name) for case in cases()],
)
def test_the_numbers_are_as_recorded(case: Case, tmp_path: Path):
    known = recorded()
    found = numbers(case, tmp_path, here)
    assert not differences(known["runs"][case.recorded_as()], found, known["machine"] == machine())
