"""Trees as text and as pictures, and sheets of samples."""

from pathlib import Path

import torch
from PIL import Image

from arborl.core.schedule import shifted
from arborl.core.tree import grow
from arborl.run.drawings import leaf_order, sheet, sketch

from conftest import recorded_tree


def test_leaves_are_laid_out_without_crossings():
    plan = recorded_tree().plan
    place = leaf_order(plan)
    assert sorted(place[leaf] for leaf in plan.leaves.tolist()) == list(range(len(plan.leaves)))
    for depth in range(1, 5):
        edges = [
            (place[int(plan.parent[e])], place[plan.roots + e])
            for e in range(plan.edges)
            if plan.depth[plan.roots + e] == depth
        ]
        edges.sort()
        assert [child for _, child in edges] == sorted(child for _, child in edges)


def test_a_sheet_of_pictures(tmp_path: Path):
    sheet(torch.zeros(5, 3, 16, 16, dtype=torch.uint8), ["a very long caption " * 5] * 5, tmp_path / "s.png", columns=3)
    assert Image.open(tmp_path / "s.png").size == (3 * 134 + 6, 2 * 190 + 6)


def test_the_sketch_has_a_row_for_each_leaf():
    plan = grow(shifted(5, 3.0), "flow_sde", 1, [1, 2, 2, 1, 1], [0.0, 0.5, 0.5, 0.0, 0.0])
    rows = sketch(plan)
    assert rows == [
        "   ┌══┬══──────●",
        "●──┤  └══──────●",
        "   └══┬══──────●",
        "      └══──────●",
    ]
