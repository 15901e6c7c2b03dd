"""The cost of a plan: the counts of the papers, against trees that are really grown node by node."""

import itertools
import json
from collections.abc import Callable

import pytest

from arborl.cli import main
from arborl.config import load_config, options, with_settings
from arborl.core.schedule import shifted
from arborl.engine.cost import costs, count_model_calls, epochs_within, forecast
from arborl.engine.method import make_plan


@pytest.fixture
def plan_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict]:
    """What `arborl plan --json` prints, of TreeGRPO where no preset is named."""

    def printed(*arguments: str) -> dict:
        with pytest.raises(SystemExit) as stopped:
            main(["plan", *([] if "-c" in arguments else ["-c", "tree"]), *arguments, "--json"])
        assert stopped.value.code == 0
        return json.loads(capsys.readouterr().out)

    return printed


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


def test_plan_json_of_the_readme_case(plan_json):
    overrides = ["tree.w=4", "tree.k=2", "sample.num_prompts=2", "sample.num_trees=1", "sample.num_steps=10"]
    answer = plan_json(*overrides)
    assert answer["images"] == 32
    assert answer["training_samples"] == 30
    assert answer["positions"][0] == {"window": 0, "forwards": 222, "forward_backwards": 30}
    assert answer["flat"] == {"forwards": 320, "forward_backwards": 288}
    costs = [p["forwards"] + 3 * p["forward_backwards"] for p in answer["positions"]]
    assert answer["ratio"] == pytest.approx((320 + 3 * 288) / (sum(costs) / len(costs)), abs=1e-3)


def test_tree_of_the_readme(plan_json):
    found = plan_json("sample.num_prompts=1", "model=mixture", "tree.w=4", "tree.k=2", "sample.num_steps=10")
    assert found["positions"][0] == {"window": 0, "forwards": 111, "forward_backwards": 15}


def test_branch_with_20_steps_and_four_splits(plan_json):
    found = plan_json(
        "algo=branch", "sample.num_steps=20", "tree.split_points=[0,3,6,9]", "sample.num_prompts=1", "model=mixture"
    )
    assert found["images"] == 16
    assert found["positions"] == [{"window": 0, "forwards": 203, "forward_backwards": 203 - 16}]


def test_mix_computes_the_shared_prefix_once(plan_json):
    found = plan_json(
        "algo=mix",
        "sample.num_steps=25",
        "sample.group_size=12",
        "tree.w=4",
        "sample.num_prompts=1",
        "model=mixture",
    )
    assert found["images"] == 12
    assert len(found["positions"]) > 15
    for row in found["positions"]:
        start = row["window"]
        assert row["forwards"] == start + 1 + 12 * (24 - start)
        assert row["forward_backwards"] == 1 + 12 * 3


@pytest.mark.parametrize("family", [[], ["model.family=tiny_ddim:TinyDDIM"]], ids=["flow", "diffusion"])
@pytest.mark.parametrize("steps", [1, 10])
def test_a_group_by_ode_stands_beside_flat_grpo_with_its_noise(family: list[str], steps: int):
    setting = [*family, f"sample.num_steps={steps}", "sample.group_size=6", "sample.num_prompts=2", "kernel.eta=9"]
    found = forecast(load_config("flat", ["model=mixture", "kernel.name=ode", *setting]))
    assert found["images"] == 12
    assert [(place["window"], place["forwards"]) for place in found["positions"]] == [(0, 12 * steps)]
    assert found["flat"]["forwards"] == 12 * steps
    # This diffusion model's last level is above 0, so that its last step may be stochastic too; a lone one is none's.
    trained = 0 if steps == 1 else steps if family else steps - 1
    assert found["flat"]["forward_backwards"] == 12 * trained


@pytest.mark.parametrize("name", options("algo"))
def test_costs_add_up_to_the_epochs_a_budget_allows(name: str):
    config = load_config(name)
    epochs = epochs_within(config, 3e5)
    spent = list(itertools.islice(costs(config), epochs + 1))
    assert sum(spent[:-1]) <= 3e5 < sum(spent)


def test_a_budget_where_pruning_ends_early():
    config = load_config("branch_width", ["prune.until=0.5"])
    config = with_settings(config, {"train.epochs": epochs_within(config, 3e5)})
    assert sum(itertools.islice(costs(config), config.train.epochs)) == pytest.approx(3e5, rel=0.1)
    whole = load_config("branch_width", ["prune.until=1"])
    assert config.train.epochs < epochs_within(whole, 3e5)


def test_what_pruning_saves_is_what_the_forecast_says():
    whole, width, depth = (
        load_config(name, ["model=mixture", "sample.num_prompts=1"])
        for name in ("branch", "branch_width", "branch_depth")
    )
    plan = make_plan(whole, shifted(20, 3.0), 0)
    assert count_model_calls(whole, plan, 0).forward_backwards == 187
    # Half of the 16 chains, 9 trained edges each of which the first leaves a parent that stays.
    assert count_model_calls(width, plan, 0).forward_backwards == 187 - 8 * 9
    assert count_model_calls(depth, plan, 0).forward_backwards == 187 - 4 * 16
