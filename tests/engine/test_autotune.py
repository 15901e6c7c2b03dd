"""What is found by trying: operations, whether to compile, sizes of calls that are rounded alike."""

import pytest
import torch

from arborl.config import load_config
from arborl.core.noise import fold
from arborl.data.prompts import Prompts
from arborl.engine.autotune import find_bitwise_batch_sizes, forward_flops, should_compile
from arborl.engine.method import make_plan

from conftest import make_policy, tiny_overrides, trees_of

TEXTS = ["a red house", "a dog"]


@pytest.mark.parametrize("odd", [(), (2, 3), (6,), (3, 5, 6)])
def test_trained_rows_come_in_calls_that_are_rounded_alike(tiny_folder, odd):
    own = ["tree.s=0", "tree.w=2", "sample.num_prompts=3", "train.batch_size=8"]
    policy = make_policy([*tiny_overrides("sd3", tiny_folder("sd3")), *own])
    config, model = policy.config, policy.model
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    adapters = [p for name, p in model.module.named_parameters() if ".lora_B." in name]
    seen, plain = [], model.predict

    def answers(x, t, cond):
        seen.append((len(x), all(bool(p.all()) for p in adapters)))
        return plain(x[:1], t[:1], cond[:1]).expand(x.shape) * (1.001 if len(x) in odd else 1)

    model.predict, policy.compiled = answers, True
    told = find_bitwise_batch_sizes(config, policy, Prompts(["a dog"], {}))
    assert seen == [(size, True) for size in (8, *range(2, 8))]
    assert policy.bitwise_batch_sizes == tuple(size for size in range(2, 9) if size not in odd)
    assert [f"of {', '.join(map(str, odd))} rows would not be rounded like those of 8" in line for line in told] == (
        [True] if odd else []
    )
    assert all(torch.equal(p, before[name]) for name, p in model.module.named_parameters())
    seen.clear()
    plan = make_plan(config, model.schedule(config.sample.num_steps), 0)
    trees_of(policy, plan, [*TEXTS, "a cat"], fold(0, 0))
    sizes = [size for size, perturbed in seen if not perturbed]
    assert sizes[:2] == [min(size for size in policy.bitwise_batch_sizes if size >= level) for level in (3, 6)]
    assert sizes[2:] == [12] * (len(plan.levels) - 2)  # where nothing is trained, as they come


def test_operations_are_the_models_own(sd3_overrides):
    """Guidance is two forwards, and an adapter is left out, whatever its rank."""
    counts = []
    for more in ([], ["model.lora.rank=64"], ["sample.guidance_scale=2"], ["model.train=full"]):
        policy = make_policy([*sd3_overrides, *more])
        counts.append(forward_flops(policy, Prompts(["a dog"], {})))
    assert counts[0] == counts[1] == counts[3]
    assert counts[2] == 2 * counts[0]
    blocks = sum(p.numel() for name, p in policy.module.named_parameters() if "transformer_blocks" in name)
    tokens = (64 // 4 // 4) ** 2  # pictures shrink by 4, and patches are 4 wide
    assert 0.5 * 2 * blocks * tokens < counts[0] < 8 * 2 * blocks * tokens


def test_compiling_is_for_long_runs_on_a_gpu():
    def asked(device: str, flops: float, *overrides: str) -> tuple[bool, list[str]]:
        return should_compile(load_config("tree", list(overrides)), int(flops), torch.device(device))

    assert asked("cpu", 1e15) == (False, [])
    how, (told,) = asked("cuda", 1e13)
    assert how
    assert told.startswith("compile=auto: on (the run has ")
    assert not asked("cuda", 1e9)[0]
    how, (told,) = asked("cuda", 1e13, "model=mixture", "rewards=place")  # nobody has seen that on a GPU
    assert not how
    assert "compile=on tries it" in told
    assert not asked("cuda", 1e12, "train.epochs=1")[0]
    assert not asked("cuda", 1e13, "train.max_seconds=60")[0]
    assert asked("cpu", 1e9, "compile=on") == (True, [])
    assert asked("cuda", 1e15, "compile=off") == (False, [])
