"""What a first ratio may be off by, and how far the noise that is drawn may be from what a density assumes."""

import math

import pytest

from arborl.core.noise import fold
from arborl.engine.checks import RATIO_BOUND_COMPILED, ratio_bound, recheck_steps
from arborl.engine.method import make_plan

from conftest import make_policy, trees_of


def test_how_far_from_one_a_first_ratio_may_be(sd3_overrides):
    policy = make_policy(sd3_overrides)
    assert ratio_bound(policy) == 1e-6
    next(policy.module.parameters()).data = next(policy.module.parameters()).bfloat16()
    assert ratio_bound(policy) == 1e-4
    policy.compiled = True  # then rollout and update run the same code
    assert ratio_bound(policy) == RATIO_BOUND_COMPILED == 1e-5


DRAWS = {
    # Of two prompts, by step: what their stochastic edges draw, less one for each family of more than one.
    "a tree of threes": (["algo=tree", "tree.k=3", "tree.w=2", "tree.s=0"], [2 * (3 - 1), 2 * (9 - 3)]),
    "independent": (["algo=tree", "tree.k=3", "tree.w=2", "tree.s=0", "tree.siblings=independent"], [2 * 3, 2 * 9]),
    "chains": (["algo=tree", "tree.k=1", "tree.w=2", "tree.s=0"], [2, 2]),
    # The first split's two, then both nodes draw one each, which nobody balances.
    "one alone": (
        [
            *("algo=branch_mix", "tree.k=2", "tree.split_points=[0]", "tree.s=0"),
            *("tree.mix_sde_window=2", "tree.mix_ode_sde=true"),
        ],
        [2 * (2 - 1), 2 * 2],
    ),
}


@pytest.mark.parametrize(("settings", "draws"), DRAWS.values(), ids=DRAWS)
def test_the_last_draw_of_a_balanced_family_is_no_draw_of_its_own(settings: list[str], draws: list[int]) -> None:
    """So that chance may move the noise found by as much as fewer draws do."""
    policy = make_policy(["tree.siblings=balanced", *settings, "sample.num_steps=6", "train.batch_size=1000"])
    plan = make_plan(policy.config, policy.schedule(), 0)
    steps = recheck_steps(policy, trees_of(policy, plan, ["a dot at the top left", "a dog"], fold(0, 0)))
    expected = [5 / math.sqrt(2 * 2 * count) for count in draws]  # two elements each
    assert [step.chance for step in steps] == pytest.approx(expected)
