"""What docs/results.md says is what the record of its runs says, and the record is of the search that it describes."""

import re
from collections import Counter

import pytest

from bench.family import (
    BUDGETS_IN_ORDER,
    FAMILY,
    JUDGED_AT,
    RECORD,
    SEARCH_SEED,
    SEEDS,
    chosen,
    plus_minus,
    recorded,
    scores_at,
)

from conftest import ROOT

ROWS = recorded(ROOT / RECORD)
TEXT = (ROOT / "docs" / "results.md").read_text()
TABLE = {row.split("`")[1]: row.split(" | ")[1:] for row in re.findall(r"^\| `\w+` \| .*$", TEXT, re.MULTILINE)}


@pytest.mark.parametrize("entry", FAMILY, ids=lambda entry: entry.name)
def test_every_preset_has_the_same_half_of_its_grid(entry):
    """Every value of every choice as often as the other, and every pair of them."""
    cells = [cell.removeprefix(f"{entry.name} {entry.shape}".strip()).split() for cell in entry.cells]
    assert len({tuple(cell) for cell in cells}) == 12
    told = Counter(setting for cell in cells for setting in cell[:3])
    assert sorted(told.values()) == [4, 4, 4, 6, 6, 6, 6]
    pairs = Counter((cell[1], cell[2]) for cell in cells)
    assert set(pairs.values()) == {3}


def test_every_search_is_whole_and_of_a_seed_that_does_not_count():
    """Thirteen presets, twelve cells, two budgets."""
    found = Counter((row["budget"], row["cell"]) for row in ROWS if row["stage"] == "search")
    assert found == Counter((budget, cell) for budget in (33_000, 100_000) for e in FAMILY for cell in e.cells)
    assert {row["seed"] for row in ROWS if row["stage"] == "search"} == {SEARCH_SEED}
    assert SEARCH_SEED not in SEEDS


@pytest.mark.parametrize("name", [entry.name for entry in FAMILY])
def test_the_page_has_the_records_numbers(name):
    for budget, shown in zip(BUDGETS_IN_ORDER, TABLE[name], strict=False):
        scores = scores_at(ROWS, chosen(ROWS, budget)[name], budget)
        assert plus_minus(scores) in shown.replace("*", ""), (name, budget)


def test_a_share_of_compute_is_that_share():
    for name, cells in TABLE.items():
        if found := re.search(r"(\d+) k \((\d\.\d\d)×\)", cells[-1]):
            assert float(found[2]) == pytest.approx(1000 * int(found[1]) / JUDGED_AT, abs=0.006), name
