"""Advantages against a naive recursion, flat GRPO, hand-worked numbers, and the rules for leaves without a score."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arborl.core.advantage import (
    ADVANTAGES,
    advantages,
    backup_values,
    combine,
    depth,
    flat,
    mean_below,
    tree,
    zscore,
    zscore_within,
)
from arborl.core.prune import prune
from arborl.core.schedule import shifted
from arborl.core.tree import Plan, grow

from conftest import ROOT
from test_tree import random_plan

DEFAULTS = {"temperature": 1.0, "backup": "softmax", "fusion": "mean", "group": "tree"}
GOLDEN = json.loads((ROOT / "tests" / "golden" / "kernels_and_trees.json").read_text())["branch_depthwise"]
SCORES = st.floats(-50, 50, allow_nan=False, width=32)


def naive_backup(plan: Plan, leaf_values: list[float], logits: list[float]) -> list[float]:
    """Depth-first recursion over Python objects, straight from the definition."""
    children: dict[int, list[int]] = {}
    for edge, parent in enumerate(plan.parent.tolist()):
        children.setdefault(parent, []).append(plan.roots + edge)
    leaf_value = dict(zip(plan.leaves.tolist(), leaf_values, strict=True))

    def value(node: int) -> float:
        if node in leaf_value:
            return leaf_value[node]
        below = [(value(child), logits[child - plan.roots]) for child in children[node]]
        below = [(v, logit) for v, logit in below if not math.isnan(v)]
        if not below:
            return math.nan
        weights = [math.exp(logit) for _, logit in below]
        return sum(w * v for w, (v, _) in zip(weights, below, strict=True)) / sum(weights)

    return [value(child) for child in plan.child.tolist()]


@given(st.data(), st.sampled_from([0.5, 1.0, 3.0]), st.booleans())
def test_backup_is_the_naive_recursion(data: st.DataObject, temperature: float, holes: bool):
    plan = random_plan(data.draw)
    values = st.one_of(SCORES, st.just(math.nan)) if holes else SCORES
    leaves, edges = len(plan.leaves), plan.edges
    scores = torch.tensor(data.draw(st.lists(values, min_size=2 * leaves, max_size=2 * leaves))).view(2, leaves)
    density = torch.tensor(data.draw(st.lists(st.floats(-5, 5), min_size=2 * edges, max_size=2 * edges))).view(2, edges)
    found = advantages(tree, plan, scores, density, 1e9, temperature=temperature, backup="softmax")
    even = advantages(tree, plan, scores, density, 1e9, temperature=temperature, backup="mean")
    for row in range(2):
        z = zscore(scores[row]).tolist()
        expected = torch.tensor(naive_backup(plan, z, (density[row].double() / temperature).tolist())).double()
        torch.testing.assert_close(found[row], expected, equal_nan=True, rtol=1e-6, atol=1e-6)
        expected = torch.tensor(naive_backup(plan, z, [0.0] * edges)).double()
        torch.testing.assert_close(even[row], expected, equal_nan=True, rtol=1e-6, atol=1e-6)


def test_a_tree_worked_by_hand():
    plan = grow(shifted(3, 3.0), "flow_sde", 1, [2, 2, 1], [0.5, 0.5, 0.0])
    scores = torch.tensor([[1.0, 2.0, 3.0, 6.0]])  # mean 3, population std √3.5
    log3 = math.log(3.0)
    density = torch.tensor([[0.0, 0.0, 0.0, log3, log3, 0.0, 0, 0, 0, 0]])  # weights 1:3 and 3:1 at the second split
    z = [(s - 3) / math.sqrt(3.5) for s in (1.0, 2.0, 3.0, 6.0)]
    expected = [(z[0] + 3 * z[1]) / 4, (3 * z[2] + z[3]) / 4, *z, *z]
    found = advantages(tree, plan, scores, density, 5.0, temperature=1.0, backup="softmax")
    torch.testing.assert_close(found[0], torch.tensor(expected).double())


@given(st.data(), st.integers(2, 6))
def test_branching_at_the_root_alone_is_flat_grpo(data: st.DataObject, k: int):
    scores = torch.tensor([data.draw(st.lists(SCORES, min_size=k, max_size=k))]).double()
    rooted = grow(shifted(3, 3.0), "flow_sde", 1, [k, 1, 1], [0.5, 0.0, 0.0])
    apart = grow(shifted(3, 3.0), "flow_sde", k, [1, 1, 1], [0.5, 0.5, 0.0])
    by_tree = advantages(tree, rooted, scores, torch.randn(1, rooted.edges), 5.0, **DEFAULTS)
    by_flat = advantages(flat, apart, scores, torch.randn(1, apart.edges), 5.0, **DEFAULTS)
    grpo = (scores - scores.mean()) / scores.std(correction=0) if scores.std(correction=0) > 1e-6 else scores * 0
    torch.testing.assert_close(by_tree[:, :k], grpo)
    torch.testing.assert_close(by_tree, by_flat)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e6, 24.7])
@pytest.mark.parametrize("name", ["tree", "flat", "depth"])
def test_equal_scores_give_zero_also_where_float32_sums_are_not_exact(name: str, value: float):
    plan = grow(shifted(4, 3.0), "flow_sde", 2, [3, 3, 1, 1], [0.5, 0.5, 0.0, 0.0])
    found = advantages(ADVANTAGES[name], plan, torch.full((2, 18), value), torch.randn(2, plan.edges), 5.0, **DEFAULTS)
    assert (found == 0).all()


@given(st.lists(SCORES, min_size=2, max_size=20), st.floats(0.1, 10), st.floats(-10, 10))
def test_zscore_laws(values: list[float], scale: float, shift: float):
    scores = torch.tensor(values).double()
    z = zscore(scores)
    if float(scores.std(correction=0)) > 1e-3:
        assert float(z.mean()) == pytest.approx(0, abs=1e-8)
        assert float(z.std(correction=0)) == pytest.approx(1, abs=1e-8)
        torch.testing.assert_close(zscore(scores * scale + shift), z, rtol=1e-5, atol=1e-5)


class TestDepth:
    @pytest.mark.parametrize("row", range(len(GOLDEN)))
    def test_golden_node_rewards_and_advantages(self, row: int):
        case = GOLDEN[row]
        steps = case["steps"]
        arity = [2 if step in case["split_points"] else 1 for step in range(steps)]
        plan = grow(shifted(steps, 3.0), "dance_sde", 1, arity, [0.3] * (steps - 1) + [0.0])
        first = [0, *(int(level.parents[0]) for level in plan.levels)]
        parents = [p - f for p, f in zip(plan.parent.tolist(), _per_edge(plan, first[1:]), strict=True)]
        assert parents == [p for level in case["parent_of_each_node_by_depth"] for p in level]
        density = torch.tensor([[d for level in case["edge_log_prob_by_depth"] for d in level]]).double()
        scores = torch.tensor([case["leaf_rewards"]]).double()
        fused = mean_below(plan, scores) if case["fusion"] == "mean" else backup_values(plan, scores, density)
        expected = torch.tensor([r for level in case["node_reward_by_depth"][1:] for r in level]).double()
        torch.testing.assert_close(fused[0], expected, rtol=1e-5, atol=1e-5)
        found = advantages(depth, plan, scores, density, 1e9, fusion=case["fusion"], group="tree")
        expected = torch.tensor([a for level in case["advantage_by_depth"][1:] for a in level]).double()
        torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)

    plan = grow(shifted(4, 3.0), "flow_sde", 2, [2, 1, 2, 1], [0.5, 0.5, 0.5, 0.0])

    def advantage(self, scores: list[float], group: str) -> torch.Tensor:
        density = torch.zeros(1, self.plan.edges)
        return advantages(depth, self.plan, torch.tensor([scores]), density, 5.0, fusion="mean", group=group)[0]

    def test_two_nodes_of_a_tree_are_always_as_far_apart_and_of_a_prompt_are_not(self):
        scores = [1.0, 1.1, 2.0, 2.1, 5.0, 5.1, 9.0, 9.1]
        assert self.advantage(scores, "tree")[:2].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
        wide = self.advantage(scores, "prompt")[:4]
        assert wide.tolist() == pytest.approx(zscore(torch.tensor([1.05, 2.05, 5.05, 9.05]), ddof=1).tolist(), abs=1e-5)

    def test_siblings_are_compared_with_one_another_alone(self):
        found = self.advantage([1.0, 3.0, 2.0, 2.0, 5.0, 6.0, 9.0, 1.0], "siblings")
        last = found[self.plan.depth[self.plan.child] == 3]
        half = 0.5**0.5
        assert last.tolist() == pytest.approx([-half, half, 0, 0, -half, half, half, -half])
        chains = found[self.plan.depth[self.plan.child] == 2]
        assert chains.abs().max() == 0  # an only child has nobody to be compared with


def _per_edge(plan: Plan, values: list[int]) -> list[int]:
    return [v for level, v in zip(plan.levels, values, strict=True) for _ in range(len(level.slot))]


@given(st.lists(st.tuples(SCORES, st.integers(0, 2)), min_size=1, max_size=12), st.integers(0, 1))
def test_groups_are_z_scored_one_by_one(pairs: list[tuple[float, int]], ddof: int):
    scores, group = torch.tensor([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs])
    found = zscore_within(scores, group, ddof)
    for name in group.unique():
        torch.testing.assert_close(found[group == name], zscore(scores[group == name], ddof))


def test_a_common_spread_takes_the_place_of_each_groups_own():
    scores = torch.tensor([[1.0, 1.1], [1.0, 3.0], [2.0, 2.0]]).double()
    torch.testing.assert_close(zscore(scores, spread=0.5), (scores - scores.mean(1, keepdim=True)) / 0.5)
    assert zscore(scores, spread=0.0)[2].abs().max() == 0


class TestMaskedLeaves:
    plan = grow(shifted(3, 3.0), "flow_sde", 1, [2, 2, 1], [0.5, 0.5, 0.0])
    density = torch.zeros(1, 10)

    def advantage(self, scores: list[float]) -> torch.Tensor:
        return advantages(tree, self.plan, torch.tensor([scores]), self.density, 5.0, **DEFAULTS)[0]

    def test_they_take_no_part_in_the_statistics(self):
        found = self.advantage([1.0, math.nan, 3.0, 5.0])
        z = zscore(torch.tensor([1.0, 3.0, 5.0]))
        torch.testing.assert_close(found[[2, 4, 5]], z)

    def test_weights_are_renormalised_over_the_scored_siblings(self):
        found = self.advantage([1.0, math.nan, 3.0, 5.0])
        assert found[0] == found[2]

    def test_an_edge_without_a_scored_leaf_below_it_is_not_trained(self):
        found = self.advantage([math.nan, math.nan, 3.0, 5.0])
        keep = prune(self.plan, found[None])[0]
        assert keep.tolist() == [False, True, False, False, True, True, False, False, False, False]

    def test_no_score_at_all_trains_nothing(self):
        found = self.advantage([math.nan] * 4)
        assert found.isnan().all()
        assert not prune(self.plan, found[None]).any()

    def test_an_advantage_that_does_not_heed_them_is_still_not_trained_there(self):
        scores = torch.tensor([[math.nan, math.nan, 3.0, 5.0]])
        found = advantages(lambda plan, *_: torch.ones(1, plan.edges), self.plan, scores, self.density, 5.0)[0]
        assert torch.equal(found.isnan(), self.advantage(scores[0].tolist()).isnan())

    def test_a_single_score_has_nothing_to_compare_with(self):
        assert self.advantage([math.nan, math.nan, math.nan, 5.0]).nan_to_num().abs().sum() == 0


class TestSeveralRewards:
    scores = {"a": torch.tensor([[1.0, 2.0, 3.0]]), "b": torch.tensor([[900.0, 100.0, 500.0]])}  # noqa: RUF012

    def test_each_is_z_scored_before_they_are_weighted(self):
        found = combine(self.scores, {"a": 1.0, "b": 2.0})
        expected = zscore(self.scores["a"]) + 2 * zscore(self.scores["b"])
        torch.testing.assert_close(found, expected)

    def test_or_summed_raw(self):
        found = combine(self.scores, {"a": 1.0, "b": 0.01}, "sum")
        torch.testing.assert_close(found, torch.tensor([[10.0, 3.0, 8.0]]).double())

    def test_one_reward_keeps_its_scale_and_a_weight_of_zero_only_watches(self):
        found = combine(self.scores | {"c": torch.full((1, 3), torch.nan)}, {"a": 2.0, "b": 0.0, "c": 0.0})
        torch.testing.assert_close(found, 2 * self.scores["a"].double())

    def test_a_leaf_that_one_of_them_could_not_score_has_no_score(self):
        broken = self.scores | {"b": torch.tensor([[1.0, math.nan, 2.0]])}
        assert combine(broken, {"a": 1.0, "b": 1.0}).isnan().tolist() == [[False, True, False]]


def test_advantages_are_clamped():
    plan = grow(shifted(2, 3.0), "flow_sde", 40, [1, 1], [0.5, 0.0])
    scores = torch.zeros(1, 40)
    scores[0, 0] = 1.0
    found = advantages(flat, plan, scores, torch.zeros(1, plan.edges), 5.0)
    assert float(found.max()) == 5.0


def test_backup_keeps_the_range_of_the_leaves():
    plan = grow(shifted(4, 3.0), "flow_sde", 1, [3, 2, 2, 1], [0.5] * 3 + [0.0])
    values = torch.randn(5, len(plan.leaves))
    found = backup_values(plan, values, torch.randn(5, plan.edges))
    assert (found.amax(1) <= values.amax(1) + 1e-6).all()
    assert (found.amin(1) >= values.amin(1) - 1e-6).all()
