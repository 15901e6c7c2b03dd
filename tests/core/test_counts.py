"""The counts of the TreeGRPO README, against a tree that is really grown node by node."""

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.config import load_config
from arborl.core import plans
from arborl.core import tree as trees
from arborl.core.errors import InputError
from arborl.core.kernels import sde_able
from arborl.core.schedule import Schedule, shifted, window_start
from arborl.engine.cost import forecast
from arborl.engine.method import make_plan, plans_of_a_run


def slow_tree(steps: int, start: int, w: int, k: int) -> tuple[int, int, int]:
    """(leaves, model forwards, parents with stochastic children), by recursion over nodes."""

    def visit(step: int) -> tuple[int, int, int]:
        if step == steps:
            return 1, 0, 0
        inside = start <= step < start + w
        below = [visit(step + 1) for _ in range(k if inside else 1)]
        leaves, forwards, parents = (sum(column) for column in zip(*below, strict=True))
        return leaves, forwards + 1, parents + inside

    return visit(0)


@pytest.mark.parametrize("w", range(1, 6))
@pytest.mark.parametrize("k", range(1, 5))
def test_counts_are_those_of_a_tree_grown_node_by_node(w: int, k: int):
    num_trees, num_prompts = 2, 3
    overrides = [f"tree.w={w}", f"tree.k={k}", f"sample.num_trees={num_trees}", f"sample.num_prompts={num_prompts}"]
    config = load_config("mixture", [*overrides, "tree.max_leaves=4096"])
    found = forecast(config)
    per_tree = (k**w - 1) // (k - 1) if k > 1 else w
    assert found["images"] == k**w * num_trees * num_prompts
    assert found["training_samples"] == per_tree * num_trees * num_prompts
    assert [p["window"] for p in found["positions"]] == list(range(8 - w + 1))
    for position in found["positions"]:
        leaves, forwards, parents = slow_tree(10, position["window"], w, k)
        assert leaves * num_trees * num_prompts == found["images"]
        assert position["forwards"] == forwards * num_trees * num_prompts
        assert position["forward_backwards"] == parents * num_trees * num_prompts
    assert found["flat"]["forwards"] == found["images"] * 10
    assert found["flat"]["forward_backwards"] == found["images"] * 9


def test_plan_json_of_the_readme_case():
    overrides = ["tree.w=4", "tree.k=2", "sample.num_prompts=2", "sample.num_trees=1", "sample.num_steps=10"]
    command = [sys.executable, "-m", "arborl", "plan", *overrides, "--json"]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert answer["images"] == 32
    assert answer["training_samples"] == 30
    assert answer["positions"][0] == {"window": 0, "forwards": 222, "forward_backwards": 30}
    assert answer["flat"] == {"forwards": 320, "forward_backwards": 288}
    costs = [p["forwards"] + 3 * p["forward_backwards"] for p in answer["positions"]]
    assert answer["ratio"] == pytest.approx((320 + 3 * 288) / (sum(costs) / len(costs)), abs=1e-3)


def random_plan(draw: st.DrawFn) -> trees.Plan:
    """Arities and noise drawn step by step: shapes no preset has."""
    steps = draw(st.integers(1, 5))
    arity = draw(st.lists(st.integers(1, 3), min_size=steps, max_size=steps))
    eta = draw(st.lists(st.sampled_from([0.0, 0.5]), min_size=steps, max_size=steps))
    return trees.grow(shifted(steps, 3.0), "flow_sde", draw(st.integers(1, 3)), arity, eta)


@given(st.data())
def test_a_plan_is_consistent(data: st.DataObject):
    plan = random_plan(data.draw)
    assert (plan.parent < plan.child).all()
    assert (plan.depth[plan.child] == plan.depth[plan.parent] + 1).all()
    assert (plan.tree[plan.child] == plan.tree[plan.parent]).all()
    assert sum(len(level.parents) for level in plan.levels) == plan.forwards
    covered = torch.cat([torch.arange(plan.edges)[level.edges] for level in plan.levels])
    assert covered.tolist() == list(range(plan.edges))
    for level in plan.levels:
        assert (level.parents[level.slot] == plan.parent[level.edges]).all()
    for tree in range(plan.roots):
        numbers = plan.index_in_tree[plan.tree == tree]
        assert numbers.tolist() == list(range(len(numbers)))
    assert (plan.depth[plan.leaves] == len(plan.schedule)).all()


@given(s=st.integers(0, 7), tou=st.integers(1, 50), w=st.integers(1, 8), epoch=st.integers(0, 10**6))
def test_the_window_is_never_empty_and_never_leaves_the_steps_that_may_be_stochastic(s, tou, w, epoch):
    schedule = shifted(10, 3.0)
    plan = plans.tree(
        schedule, "flow_sde", epoch, eta=0.7, k=1, w=w, s=s, tou=tou, num_trees=1, max_leaves=4
    )  # fmt: skip
    steps = plan.step[plan.stochastic].tolist()
    assert steps == list(range(steps[0], steps[0] + w))
    assert sde_able(schedule, "flow_sde", 0.7)[steps].all()
    assert steps[0] == (s * (epoch // tou)) % (8 - w + 1)


def test_the_window_moves():
    assert [window_start(e, 1, 2, 5) for e in range(12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 0]


def test_flat_is_stochastic_wherever_its_noise_fits_and_everywhere_but_last_if_told_so():
    fits = make_plan(load_config("flat", ["model=mixture"]), shifted(10, 3.0), 0)
    assert fits.step[fits.stochastic].unique().tolist() == list(range(8))
    config = load_config("flat", ["model=mixture", "kernel.excess_noise=true"])
    published = make_plan(config, shifted(10, 3.0), 0)
    assert published.step[published.stochastic].unique().tolist() == list(range(9))
    assert published.forwards == 160


def test_flat_with_one_noise_shares_the_first_forward():
    plan = make_plan(load_config("flat", ["model=mixture", "sample.shared_noise=true"]), shifted(10, 3.0), 0)
    assert (plan.roots, len(plan.leaves), plan.forwards) == (1, 16, 1 + 9 * 16)


@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde", "cps"])
@given(steps=st.integers(1, 50), shift=st.floats(0.5, 8), eta=st.floats(0.05, 1))
@settings(max_examples=30)
def test_a_step_that_may_be_stochastic_adds_no_more_noise_than_it_reaches(kernel, steps, shift, eta):
    schedule = shifted(steps, shift)
    able = sde_able(schedule, kernel, eta)
    assert not able[-1], "the step into σ = 0 must stay deterministic"
    plan = trees.grow(schedule, kernel, 1, [1] * steps, [eta if a else 0.0 for a in able.tolist()])
    assert (plan.coefficients.std <= schedule.sigma_next + 1e-12).all()


def test_the_scheduler_grid_of_the_design():
    grid = [1.0, 0.9601293, 0.9133490, 0.8576923, 0.7903683, 0.7072785, 0.6021506, 0.4648760, 0.2780488, 0.0089286, 0.0]
    schedule = Schedule.from_sigmas(grid)
    std = trees.grow(schedule, "flow_sde", 1, [1] * 10, [0.7] * 10).coefficients.std
    assert float(std[8]) == pytest.approx(0.225, abs=1e-3)
    assert sde_able(schedule, "flow_sde", 0.7).tolist() == [True] * 7 + [False] * 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tree.w=9"], ["tree.w=9", "1..8"]),
        (["tree.k=4", "tree.w=8"], ["tree.max_leaves=1024"]),
        (["kernel.eta=50.0"], ["kernel.eta=50.0", "at most 0.964"]),
        (["sample.num_steps=1"], ["sample.num_steps=1", "2 or more"]),
        (["kernel.name=cps", "kernel.eta=2.0"], ["kernel.eta=2.0"]),
    ],
)
def test_a_bad_plan_is_one_line_with_the_key_and_what_is_allowed(overrides, words):
    with pytest.raises(InputError) as error:
        plans_of_a_run(load_config("mixture", overrides))
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)


def test_scaled_noise_only_where_the_kernel_can():
    with pytest.raises(InputError, match=r"split_noise_scale=4.*dance_sde, flow_sde"):
        trees.grow(shifted(4, 3.0), "cps", 1, [2, 1, 1, 1], [0.3] * 4, [4.0, 1.0, 1.0, 1.0])
