"""Balanced siblings: what is drawn, by every plan and on every way, and what a gradient gains by it."""

from pathlib import Path

import pytest
import torch

from arborl.config import load_config
from arborl.core.kernels import Coefficients, transition
from arborl.core.noise import fold, normal
from arborl.core.tree import Plan
from arborl.engine.method import make_plan
from arborl.engine.rollout import Rollout
from arborl.models import Model
from arborl.run.trees import TreeFile
from arborl.trainer import train
from bench.siblings import World

from conftest import make_policy, trees_of
from test_update import Bench, first_ratio_error, gradient

PLANS = {
    "tree": ["algo=tree", "tree.k=3", "sample.num_trees=2"],
    "branch": ["algo=branch", "sample.num_steps=8", "tree.split_points=[0,2]", "tree.split_noise_scale=2"],
    "mix": ["algo=mix", "sample.group_size=5", "sample.num_steps=8", "tree.w=2"],
    "dance": ["algo=dance", "sample.group_size=6", "sample.num_steps=8"],
    "comb": ["algo=tempflow", "tree.k=3", "tree.split_points=[0,2]", "sample.num_trees=2"],
    "comb with a short tail": ["algo=tempflow", "tree.k=2", "tree.split_points=[0,1,3]", "sample.tail_steps=2"],
    "flat": ["algo=flat", "sample.group_size=4"],
}
SMALL = ["sample.num_steps=6", "tree.w=2", "kernel.eta=0.4", "sample.num_prompts=3", "tree.siblings=balanced"]
TEXTS = ["a dot at the top left", "a dot at the bottom right", "a dog"]
every_plan = pytest.mark.parametrize("name", PLANS)


def grown(name: str, *more: str) -> tuple[Rollout, torch.Tensor]:
    """A rollout, and the noise that each of its edges was drawn with."""
    policy = make_policy([*SMALL, *PLANS[name], *more])
    plan = make_plan(policy.config, policy.schedule(), 0)
    rollout = trees_of(policy, plan, TEXTS, fold(0, 0))
    return rollout, noise_of(rollout, policy.model)


@torch.no_grad()
def noise_of(rollout: Rollout, model: Model) -> torch.Tensor:
    plan, prompts = rollout.plan, len(rollout.latents)
    x = rollout.latents[:, plan.parent].flatten(0, 1)
    rows = torch.arange(prompts).repeat_interleave(plan.edges)
    velocity = model.predict(x, plan.timestep[plan.parent].float().repeat(prompts), rollout.cond[rows])
    kernel = Coefficients(*(c.float().repeat(prompts) for c in plan.coefficients))
    off = rollout.latents[:, plan.child].flatten(0, 1) - transition(x, velocity, kernel).mean
    return (off / kernel.std.clamp_min(1e-9)[:, None]).view(prompts, plan.edges, -1)


def siblings(plan: Plan) -> list[list[int]]:
    """The stochastic edges of each node that has some, found one at a time."""
    found: dict[int, list[int]] = {}
    for edge in range(plan.edges):
        if bool(plan.stochastic[edge]):
            found.setdefault(int(plan.parent[edge]), []).append(edge)
    return list(found.values())


@every_plan
def test_siblings_sum_to_zero_and_one_alone_is_as_before(name: str) -> None:
    """Each from its own draw and its siblings': an ODE edge beside them, or another node's children, have no part."""
    rollout, noise = grown(name)
    plan, shape = rollout.plan, tuple(rollout.latents.shape[2:])
    address = torch.stack([plan.tree[plan.child], plan.index_in_tree[plan.child]], 1)
    for prompt in range(3):
        where = torch.cat([torch.full((plan.edges, 1), prompt), address], 1)
        plain = normal(fold(0, 0), where, shape)
        for family in siblings(plan):
            z, k = plain[family].double(), len(family)
            expected = (z - z.mean(0)) * (k / (k - 1)) ** 0.5 if k > 1 else z
            torch.testing.assert_close(noise[prompt, family].double(), expected, rtol=1e-3, atol=2e-4)


@every_plan
def test_independent_draws_are_those_of_their_own_addresses(name: str) -> None:
    rollout, noise = grown(name, "tree.siblings=independent")
    plan = rollout.plan
    address = torch.stack([torch.zeros(plan.edges), plan.tree[plan.child], plan.index_in_tree[plan.child]], 1).long()
    plain = normal(fold(0, 0), address, tuple(rollout.latents.shape[2:]))
    drawn = plan.stochastic
    torch.testing.assert_close(noise[0][drawn], plain[drawn], rtol=1e-3, atol=2e-4)


def test_where_no_node_has_two_nothing_changes() -> None:
    for name, more in (("flat", []), ("tree", ["tree.k=1"]), ("mix", ["sample.group_size=1", "sample.num_trees=3"])):
        balanced, independent = (grown(name, *more, f"tree.siblings={how}")[0] for how in ("balanced", "independent"))
        assert torch.equal(balanced.latents, independent.latents)
        assert torch.equal(balanced.log_density, independent.log_density)


@every_plan
def test_the_ratio_at_the_first_update_is_one(name: str) -> None:
    assert first_ratio_error(Bench([*SMALL, *PLANS[name], "advantage.name=tree", "train.updates=1"])) < 1e-6


def test_siblings_of_two_are_equally_dense_so_softmax_is_the_mean() -> None:
    """Of three they differ, so that there the softmax means something."""
    for k, alike in ((2, True), (3, False)):
        rollout, _ = grown("tree", f"tree.k={k}")
        spread = [rollout.log_density[:, family].std(1).max() for family in siblings(rollout.plan)]
        assert (float(max(spread)) < 1e-5) == alike


def test_micro_batches_and_other_prompts_change_no_draw() -> None:
    whole, split = grown("tree")[0], grown("tree", "sample.batch_size=3")[0]
    torch.testing.assert_close(split.latents, whole.latents, rtol=1e-5, atol=1e-6)
    policy = make_policy([*SMALL, *PLANS["tree"]])
    plan = make_plan(policy.config, policy.schedule(), 0)
    alone = trees_of(policy, plan, TEXTS[2:], fold(0, 0), [2])
    torch.testing.assert_close(alone.latents[0], whole.latents[2], rtol=1e-5, atol=1e-6)


def test_presets_of_papers_draw_as_published_and_the_others_balance() -> None:
    papers = (
        "tree",
        "branch",
        "branch_mix",
        "mix",
        "dance",
        "flow_grpo",
        "flow_grpo_fast",
        "ddpo",
        "nft",
        "awm",
        "base",
    )
    for name in (*papers, "tempflow", "tree_flash", "mix_flash", "flux_branch", "wan_branch"):
        assert load_config(name).tree.siblings == "independent", name
    for name in ("tree_fast", "tree_long", "flat", "sd35_nocfg"):
        assert load_config(name).tree.siblings == "balanced", name


def test_a_recorded_tree_says_how_its_siblings_were_drawn(tmp_path: Path) -> None:
    for how in ("balanced", "independent"):
        few = ["train.epochs=1", "log.record_every=1", "eval.num_prompts=2", "log.trackers=[]", f"log.dir={tmp_path}"]
        folder = train(load_config("mixture", [*few, f"run_name={how}", f"tree.siblings={how}", "tree.s=0"]))
        assert TreeFile.load(folder / "trees" / "epoch_000000").plan.balanced == (how == "balanced")


# what it is for


@pytest.mark.parametrize("k", [2, 3])
def test_each_depths_gradient_is_that_of_the_expected_reward_where_its_step_moves(k: int) -> None:
    """Without a factor that depends on depth, whatever baseline the advantage has; by the mean over its edges, which is
    what the engine hands its optimizer; and with less variance than independent siblings.
    """
    balanced, independent = (World.of(k, 2, how) for how in ("balanced", "independent"))
    found, other = (world.estimates(2000, 0) for world in (balanced, independent))
    relative = [(f.var(0) / f.mean(0) ** 2).tolist() for f in (found, other)]
    for depth in range(2):
        truth = balanced.differences(40_000, depth)
        error = float(found[:, depth].std()) / 2000**0.5
        assert float(found[:, depth].mean()) == pytest.approx(truth, abs=4 * error)
        assert abs(truth) > 10 * error, "the test tells a factor of one from others"
        # With independent siblings the prompt's mean is no baseline of theirs, and takes a part of the gradient away.
        share = 1 - (1 / k**2 if depth else 1 / k)
        spread = float(other[:, depth].std()) / 2000**0.5
        assert float(other[:, depth].mean()) == pytest.approx(share * truth, abs=4 * spread)
    assert relative[0][0] < 0.8 * relative[1][0]


def test_the_engines_gradient_is_that_estimate() -> None:
    """-∇ of the mean over one depth's edges, of log-densities that are means over two elements."""
    made = Bench(
        [
            "sample.num_steps=6",
            "tree.s=0",
            "kernel.eta=0.5",
            "tree.w=2",
            "tree.siblings=balanced",
            "loss.kl=0",
            "train.updates=1",
            "train.max_grad_norm=1e9",
        ]
    )
    world = World.of(2, 2, "balanced")
    made.model.module.load_state_dict(world.policy.module.state_dict())
    made.record = world.rollout(4, 0)
    advantage, plan = world.advantage(made.record), made.record.plan
    expected = world.estimates(4, 0).mean(0)
    direction = torch.cat([d.flatten() for d in world.direction.values()])
    for depth in range(2):
        only = plan.stochastic & (plan.step == depth)
        slope = gradient(made, torch.where(only, advantage, torch.nan)) @ direction
        assert float(-2 * slope) == pytest.approx(float(expected[depth]), rel=1e-3)
