"""Pruning against sorted lists and by its counts; and every plan with every advantage and every way of pruning."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.config import load_config
from arborl.core.advantage import ADVANTAGES, advantages, depth
from arborl.core.errors import ArgumentError
from arborl.core.noise import fold
from arborl.core.plans import PLANS
from arborl.core.prune import Pruning, prune, slide_depths
from arborl.core.schedule import shifted
from arborl.core.tree import Plan, grow
from arborl.engine.method import make_plan

from test_plans import shapes


def naive_width(plan: Plan, values: list[float], mode: int, ratio: float) -> set[int]:
    """The leaves that stay, by sorting lists."""
    groups: dict[int, list[int]] = {}
    for place, leaf in enumerate(plan.leaves.tolist()):
        node = leaf
        while node >= plan.roots:
            parent = int(plan.parent[node - plan.roots])
            node = parent
            if (plan.parent == parent).sum() > 1:
                break
        tree = int(plan.tree[leaf])
        groups.setdefault(0 if not len(plan.splits) else node if mode == "best" else tree, []).append(place)
    stays: set[int] = set()
    for places in groups.values():
        order = sorted(places, key=lambda place: -values[place])
        count = max(1, int(ratio * len(places)))
        if mode == "best":
            stays |= set(order[:count])
        else:
            low = max(1, count // 2)
            stays |= set(order[: max(1, count - low)]) | set(order[-low:])
    return stays


class TestPruning:
    branch = grow(shifted(8, 3.0), "dance_sde", 1, [2, 1, 2, 1, 1, 1, 1, 1], [0.3] * 7 + [0.0])

    @given(
        depths=st.lists(st.integers(1, 8), max_size=4, unique=True),
        epoch=st.integers(0, 500),
        interval=st.integers(1, 40),
        stop=st.integers(1, 8),
    )
    def test_depths_slide_towards_the_root_and_stop(self, depths, epoch, interval, stop):
        found = slide_depths(depths, epoch, interval, stop)
        if not depths:
            assert found == ()
            return
        shift = depths[0] - found[0]
        assert [d - shift for d in depths] == list(found)
        assert 0 <= shift <= epoch // interval
        assert min(found) >= min(min(depths), stop)
        if epoch // interval > 8:
            assert min(found) == min(min(depths), stop)

    @given(depths=st.lists(st.integers(1, 8), max_size=5, unique=True))
    def test_depth_drops_exactly_the_edges_into_those_depths(self, depths):
        whole = prune(self.branch, torch.ones(3, self.branch.edges))
        kept = prune(self.branch, torch.ones(3, self.branch.edges), Pruning(tuple(depths)))
        gone = whole & ~kept
        at = torch.isin(self.branch.depth[self.branch.child], torch.tensor(depths, dtype=torch.long))
        assert torch.equal(gone, whole & at)

    @pytest.mark.parametrize("mode", ["best", "best_and_worst"])
    @pytest.mark.parametrize("name", PLANS)
    @given(st.data(), st.sampled_from([0.1, 0.34, 0.5, 0.75, 1.0]))
    @settings(max_examples=30)
    def test_width_keeps_whole_chains_as_a_sorted_list_would(self, name, mode, data, ratio):
        plan = shapes(data.draw, name)
        order = torch.tensor(data.draw(st.permutations(range(len(plan.leaves))))).double()
        advantage = torch.where(plan.only_leaf >= 0, order[plan.only_leaf.clamp_min(0)], 0.0)[None]
        kept = prune(plan, advantage, Pruning(width_mode=mode, width_ratio=ratio))[0]
        stays = naive_width(plan, order.tolist(), mode, ratio)
        for edge in range(plan.edges):
            chain = int(plan.only_leaf[edge])
            assert bool(kept[edge]) == bool(plan.stochastic[edge] and (chain < 0 or chain in stays))

    def test_mode_1_compares_siblings_not_the_edges_of_one_chain(self):
        advantage = torch.tensor([0.1, 0.9, -2.0, -3.0])[self.branch.only_leaf.clamp_min(0)][None]
        kept = prune(self.branch, advantage, Pruning(width_mode="best"))[0]
        chains = [set(self.branch.only_leaf[kept].tolist()) - {-1}]
        assert chains == [
            {1, 2}
        ]  # the better of each pair, although both of the second are worse than all of the first

    def test_chains_are_judged_where_they_were_born(self):
        """Among siblings only a chain's first edge has an advantage: the rest of it is an only child's."""
        config = load_config("tempflow", ["model=mixture", "tree.k=4"])
        plan = make_plan(config, shifted(10, 3.0), 0)
        scores = torch.arange(len(plan.leaves)).double()[None]
        found = advantages(depth, plan, scores, torch.zeros(1, plan.edges), 5.0, fusion="mean", group="siblings")
        kept = prune(plan, found, Pruning(width_mode="best", width_ratio=0.5))
        assert kept.sum() == 8
        assert (found[kept] > 0).all()

    def test_a_leaf_without_a_score_is_not_kept_in_place_of_one_that_has_one(self):
        values = torch.tensor([torch.nan, -1.0, 0.5, torch.nan])[self.branch.only_leaf.clamp_min(0)]
        advantage = torch.where(self.branch.only_leaf >= 0, values, 0.0)[None]
        for mode in ("best", "best_and_worst"):
            kept = prune(self.branch, advantage, Pruning(width_mode=mode))[0]
            assert set(self.branch.only_leaf[kept].tolist()) == {-1, 1, 2}

    def test_some_steps_are_drawn_for_each_prompt_and_epoch(self):
        plan = grow(shifted(11, 3.0), "dance_sde", 4, [1] * 11, [0.3] * 10 + [0.0])
        draws = [
            prune(plan, torch.ones(50, plan.edges), Pruning(step_fraction=0.6), fold(0, epoch), torch.arange(50))
            for epoch in range(2)
        ]
        by_step = draws[0].view(50, 11, 4)
        assert (by_step.any(2) == by_step.all(2)).all()
        assert (by_step.all(2).sum(1) == 6).all()
        assert by_step.all(2)[:, :10].float().mean(0).min() > 0.4
        assert not torch.equal(draws[0], draws[1])
        part = prune(plan, torch.ones(20, plan.edges), Pruning(step_fraction=0.6), fold(0, 0), torch.arange(30, 50))
        assert torch.equal(part, draws[0][30:])


@pytest.mark.parametrize("mode", [0, 1, "bets"])
def test_a_mode_that_is_none_is_refused(mode: object):
    """The setting takes 0, 1 and 2 too; the core's own are words."""
    plan = grow(shifted(3, 3.0), "flow_sde", 1, [2, 2, 1], [0.5, 0.5, 0.0])
    with pytest.raises(ArgumentError, match=r"width_mode=.*off, best, best_and_worst"):
        prune(plan, torch.zeros(1, plan.edges), Pruning(width_mode=mode))  # type: ignore[arg-type]


class TestContract:
    """Every plan with every advantage and every way of pruning."""

    @pytest.mark.parametrize("name", PLANS)
    @pytest.mark.parametrize("advantage", ADVANTAGES)
    @pytest.mark.parametrize("width", ["off", "best", "best_and_worst"])
    @given(st.data())
    @settings(max_examples=12)
    def test_every_combination_keeps_the_rules(self, name: str, advantage: str, width: int, data: st.DataObject):
        plan = shapes(data.draw, name)
        depths = tuple(data.draw(st.lists(st.integers(1, 5), max_size=2, unique=True)))
        how = Pruning(depths, width, 0.5, data.draw(st.sampled_from([0.5, 1.0])))
        knobs = {
            "temperature": 1.0,
            "backup": data.draw(st.sampled_from(["softmax", "mean"])),
            "fusion": data.draw(st.sampled_from(["mean", "path_prob"])),
            "group": data.draw(st.sampled_from(["tree", "prompt", "siblings"])),
            "spread": data.draw(st.sampled_from([None, 0.5])),
        }
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
        scores = torch.rand(3, len(plan.leaves), generator=generator)
        scores[1, 0] = torch.nan
        scores[2] = 0.25
        density = torch.randn(3, plan.edges, generator=generator)
        found = advantages(ADVANTAGES[advantage], plan, scores, density, 5.0, **knobs)
        kept = prune(plan, found, how, fold(0, 0), torch.arange(3))

        assert found.shape == kept.shape == (3, plan.edges)
        assert (found[~found.isnan()].abs() <= 5).all()
        # An edge has an advantage exactly where a leaf below it has a score.
        below = torch.zeros(plan.nodes, len(plan.leaves), dtype=torch.bool)
        below[plan.leaves, torch.arange(len(plan.leaves))] = True
        for edge in reversed(range(plan.edges)):
            below[plan.parent[edge]] |= below[plan.roots + edge]
        scored = (below[plan.child] & ~scores[:, None].isnan()).any(2)
        assert torch.equal(~found.isnan(), scored)
        assert (found[2].abs() < 1e-9).all(), "equal scores teach nothing"
        # What is kept is stochastic, scored, and at a depth that stays; without pruning that is all of it.
        assert not (kept & ~(plan.stochastic & scored)).any()
        assert not kept[:, torch.isin(plan.depth[plan.child], torch.tensor(depths, dtype=torch.long))].any()
        assert torch.equal(prune(plan, found), plan.stochastic & scored)
        # A prompt's rows depend on that prompt alone.
        torch.testing.assert_close(
            advantages(ADVANTAGES[advantage], plan, scores[:1], density[:1], 5.0, **knobs), found[:1], equal_nan=True
        )
        assert torch.equal(prune(plan, found[1:2], how, fold(0, 0), torch.tensor([1])), kept[1:2])
