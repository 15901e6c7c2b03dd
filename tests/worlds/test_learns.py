"""It learns: the reward rises on every seed, and the tree needs fewer model evaluations than flat GRPO."""

import json
from pathlib import Path

import pytest

from arborl.config import load_config
from arborl.trainer import train

QUIET = ["log.record_every=0", "log.trackers=[]", "log.save_every=1000", "eval.num_between=0"]


def curve(folder: Path) -> list[tuple[int, float]]:
    """(model evaluations so far, held-out reward) at every evaluation; forwards and forward+backwards count 1."""
    spent, points = 0, []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "eval/place" in row:
            points.append((spent, row["eval/place"]))
        if "forwards" in row:
            spent = row["forwards"] + row["forward_backwards"]
    return points


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 4))])
def test_tree_learns_and_reaches_flats_final_reward_with_fewer_evaluations(tmp_path: Path, seed: int):
    common = [*QUIET, f"log.dir={tmp_path}", f"seed={seed}"]
    tree = curve(train(load_config("mixture", [*common, "train.epochs=75", "eval.every=5", "run_name=tree"])))
    flat = curve(
        train(load_config("flat", [*common, "model=mixture", "rewards=place", "train.epochs=50", "run_name=flat"]))
    )
    assert tree[-1][1] - tree[0][1] > 0.5
    assert flat[-1][1] - flat[0][1] > 0.3
    reached = next(spent for spent, reward in tree if reward >= flat[-1][1])
    assert reached < 0.5 * flat[-1][0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 4))])
def test_nft_learns(tmp_path: Path, seed: int):
    few = [
        *QUIET,
        f"log.dir={tmp_path}",
        f"seed={seed}",
        "model=mixture",
        "rewards=place",
        "loss.options.levels_per_leaf=4",
    ]
    (_, before), *_, (_, after) = curve(train(load_config("nft", [*few, "train.epochs=30", "eval.every=30"])))
    assert after - before > 0.2
