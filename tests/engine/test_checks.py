"""What a first ratio may be off by."""

from arborl.engine.checks import RATIO_BOUND_COMPILED, ratio_bound

from conftest import make


def test_how_far_from_one_a_first_ratio_may_be(sd3_overrides):
    from accelerate import Accelerator

    _, model = make(sd3_overrides)
    accelerator = Accelerator(cpu=True)
    assert ratio_bound(model, accelerator) == 1e-6
    next(model.module.parameters()).data = next(model.module.parameters()).bfloat16()
    assert ratio_bound(model, accelerator) == 1e-4
    model.compiled = True  # then rollout and update run the same code
    assert ratio_bound(model, accelerator) == RATIO_BOUND_COMPILED == 1e-5
