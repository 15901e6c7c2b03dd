"""Trees and sheets as pictures."""

import math
from pathlib import Path

import torch
from PIL import Image

from arborl.core.schedule import shifted
from arborl.core.tree import grow
from arborl.run.drawings import leaf_order, sheet
from arborl.run.trees import TreeFile


def recorded(leaves_without_score: bool = False) -> TreeFile:
    plan = grow(shifted(4, 3.0), "flow_sde", 2, [2, 3, 1, 1], [0.5, 0.5, 0.0, 0.0])
    scores = torch.rand(len(plan.leaves))
    if leaves_without_score:
        scores[0] = math.nan
    return TreeFile(
        epoch=3,
        prompt="a <b>dot</b> & „quotes“ at the top left",
        plan=plan,
        log_density=torch.randn(plan.edges),
        advantage=torch.randn(plan.edges).double(),
        kept=plan.stochastic,
        ratio=torch.where(plan.stochastic, 1.0, torch.nan),
        shown=plan.preview_nodes,
        scores={"place": scores, "total": scores.double()},
        pictures=torch.randint(0, 255, (len(plan.preview_nodes), 3, 8, 8), dtype=torch.uint8),
        latents=torch.randn(plan.nodes, 4, 2, 2),
    )


def test_leaves_are_laid_out_without_crossings():
    plan = recorded().plan
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
