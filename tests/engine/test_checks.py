"""What a first ratio may be off by."""

from arborl.engine.checks import RATIO_BOUND_COMPILED, ratio_bound

from conftest import make_policy


def test_how_far_from_one_a_first_ratio_may_be(sd3_overrides):
    policy = make_policy(sd3_overrides)
    assert ratio_bound(policy) == 1e-6
    next(policy.module.parameters()).data = next(policy.module.parameters()).bfloat16()
    assert ratio_bound(policy) == 1e-4
    policy.compiled = True  # then rollout and update run the same code
    assert ratio_bound(policy) == RATIO_BOUND_COMPILED == 1e-5
