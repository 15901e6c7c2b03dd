"""What docs/results.md says is what the record of its runs says, and the record is of the search that it describes."""

import re
import statistics
from collections import Counter

import pytest
from click.testing import CliRunner
from PIL import Image

from arborl.compare.results import compute_to_reach
from arborl.compare.runs import cost_of
from arborl.config import load_config
from bench.family import (
    BUDGETS_IN_ORDER,
    COMMON,
    FAMILY,
    JUDGED_AT,
    NFT_GENTLY,
    RECORD,
    SEARCH_SEED,
    SEEDS,
    Job,
    chosen,
    known_runs,
    main,
    mean_at,
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


@pytest.mark.parametrize("name", [entry.name for entry in FAMILY if entry.name != "tree_fast"])
def test_the_compute_for_another_presets_score_is_read_off_tree_fasts_row(name):
    """`nft`'s score is that of its gentler cell."""
    row = [(budget, mean_at(ROWS, chosen(ROWS, budget)["tree_fast"], budget)) for budget in BUDGETS_IN_ORDER[:5]]
    gently = scores_at(ROWS, NFT_GENTLY[1], JUDGED_AT, "further")
    target = statistics.mean(gently) if name == "nft" else mean_at(ROWS, chosen(ROWS, JUDGED_AT)[name], JUDGED_AT)
    compute = compute_to_reach(row, target)
    found = re.search(r"(\d+) k \((\d\.\d\d)×\)", TABLE[name][-1])
    assert found
    assert int(found[1]) == round(compute / 1000)
    assert float(found[2]) == pytest.approx(compute / JUDGED_AT, abs=0.005)


def test_other_figures_of_the_page():
    """What stands outside the table: runs that no search chose, and the default run."""
    for cell, budget in {(row["cell"], row["budget"]) for row in ROWS if row["stage"] == "further"}:
        scores = scores_at(ROWS, cell, budget, "further")
        shown = plus_minus(scores).partition(" (")[0] if len(scores) > 2 or "awm" in cell else None
        assert shown is None or shown in TEXT, (cell, budget)
    default = [row for row in ROWS if row["stage"] == "default"]
    assert {row["compute"] for row in default} == {74_304} == {cost_of(load_config())}
    assert plus_minus([row["score"] for row in default]) in TEXT
    assert min(row["score"] for row in default) > 0.84


def test_the_record_makes_tables_and_a_picture(tmp_path):
    told = CliRunner().invoke(main, ["tables", "--record", str(ROOT / RECORD)], catch_exceptions=False).output
    assert f"| `tree_fast` | {plus_minus(scores_at(ROWS, chosen(ROWS, 25_000)['tree_fast'], 25_000))} |" in told
    assert told.count("*") == 26
    CliRunner().invoke(main, ["chart", "--record", str(ROOT / RECORD), "--to", str(tmp_path / "chart.png")])
    assert Image.open(tmp_path / "chart.png").size == Image.open(ROOT / "docs" / "results.png").size


def test_what_is_done_is_not_run_again(tmp_path):
    """Of a search whose record is whole nothing is left."""
    common = (*COMMON, "eval.num_prompts=2")
    job = Job("search", 33_000, (SEARCH_SEED,), FAMILY[0].cells[:2], common)
    known = {("search", 33_000, FAMILY[0].cells[0], SEARCH_SEED)}
    assert [one.cell.text for one in job.planned(tmp_path, known)] == [FAMILY[0].cells[1]]
    assert job.planned(tmp_path, known_runs(ROWS)) == []
