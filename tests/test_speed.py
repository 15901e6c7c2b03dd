"""Speed without another result: compiled code, adapters merged for sampling, micro-batches, overlap, and the clock."""

import itertools
import json
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from arborl.config import load_config
from arborl.config.schema import Config
from arborl.core.errors import InputError
from arborl.core.noise import fold
from arborl.data.prompts import Prompts
from arborl.engine.autotune import compiles, find_bitwise_batch_sizes, forward_flops
from arborl.engine.batches import batches, to_device
from arborl.engine.checks import RATIO_BOUND_COMPILED, ratio_bound, watching_for_overflow
from arborl.engine.method import make_plan
from arborl.engine.rollout import sample_trees, trained_batch
from arborl.engine.score import decode_and_score
from arborl.models import compile, load_model, lora
from arborl.rewards import Rewards
from arborl.run.folder import STAGES
from arborl.run.logger import BLOCKS, Logger, time_split
from arborl.trainer import train

from conftest import CPU, make, tiny_overrides

TEXTS = ["a red house", "a dog"]


@given(st.integers(0, 200), st.integers(1, 40), st.booleans(), st.sets(st.integers(1, 50)).map(sorted))
def test_micro_batches_walk_through_everything_once_in_calls_of_known_sizes(count, size, pad, sizes):
    found = list(batches(count, size, pad, sizes))
    walked = [int(row) for batch in found for row in batch.rows[: batch.valid]]
    assert walked == list(range(count))
    for batch in found:
        length = len(batch.rows)
        assert batch.valid <= length <= size
        assert length == size or not pad
        assert length in (size, batch.valid, *sizes)
        assert not [some for some in sizes if batch.valid <= some < length] or pad
        assert not batch.rows[batch.valid :].any()


def rows_of(model, count: int):
    x = model.noise(fold(0, 0), torch.tensor([[i, 0, 0] for i in range(count)]))
    t = torch.linspace(100.0, 900.0, count)
    return x, t, model.encode([TEXTS[i % 2] for i in range(count)])


def moved(model):
    """Adapters that do something: fresh ones are a no-op."""
    draw = torch.Generator().manual_seed(3)
    for name, parameter in model.module.named_parameters():
        if ".lora_B." in name:
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.05
    return model


def gradients_of(model, given) -> torch.Tensor:
    model.module.zero_grad()
    model.predict(*given).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.module.parameters() if p.grad is not None])


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("flux", "wan", "sd", "sdxl")]


@pytest.mark.parametrize("family", ["sd3", *SLOW])
def test_compiled_blocks_answer_alike_in_one_graph_for_every_batch_size(family, tiny_folder, monkeypatch):
    _, model = make(tiny_overrides(family, tiny_folder(family)))
    moved(model)
    some = [rows_of(model, count) for count in (2, 3, 5)]
    with torch.no_grad():
        expected = [model.predict(*given) for given in some]
        pictures = model.decode(some[1][0])
    slope = gradients_of(model, some[1])
    monkeypatch.setattr(compile, "BACKEND", "eager")
    torch._dynamo.reset()
    counters.clear()
    names = [*model.module.state_dict()]
    assert model.compile() == []
    assert model.compiled
    assert [*model.module.state_dict()] == names
    with torch.no_grad():
        found = [model.predict(*some[0])]
        first = counters["stats"]["unique_graphs"]
        found += [model.predict(*given) for given in some[1:]]
        assert counters["stats"]["unique_graphs"] == first  # nothing was compiled for other sizes
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients_of(model, some[1]), slope, rtol=1e-4, atol=1e-6)
    assert not counters["graph_break"]
    torch.testing.assert_close(model.decode(some[1][0]), pictures, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.decode(some[1][0][:1]), pictures[:1], rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_a_compiled_run_is_the_run(tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compile, "BACKEND", "eager")
    rows = {}
    for how in ("off", "on"):
        own = [f"log.dir={tmp_path}", f"run_name={how}", "train.epochs=2", f"compile={how}", "train.kl=0.01"]
        run = train(load_config("mixture", [*tiny_overrides("sd3", tiny_folder("sd3")), *own]))
        rows[how] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    said = capsys.readouterr().err
    assert said.count("compiled in") == 1
    for one, other in zip(rows["off"], rows["on"], strict=True):
        same = {name for name in one if not name.startswith(("time/", "tflops/", "step_time"))}
        assert {name: one[name] for name in same} == pytest.approx({n: other[n] for n in same}, rel=1e-3, abs=1e-5)
    assert all(row["ratio_error"] <= 1e-6 for row in rows["on"][:2])
    assert all(row["tflops/rollout"] > 0 and row["tflops/update"] > 0 for row in rows["on"][:2])
    torch._dynamo.reset()


def test_only_what_the_update_sees_again_is_computed_as_it_will(tiny_folder):
    config, model = make([*tiny_overrides("sd3", tiny_folder("sd3")), "tree.s=0", "train.batch_size=3"])
    moved(model)
    plan = make_plan(config, model.schedule(config.sample.num_steps), 0)
    cond, ids = model.encode(TEXTS), torch.arange(2)
    plain = sample_trees(model, plan, cond, fold(0, 0), ids, config.sample)
    seen, predict = [], model.predict

    def spy(x, t, cond):
        merged = any(layer.disable_adapters for layer in lora._layers(model.module))
        seen.append((len(x), torch.is_grad_enabled(), merged))
        return predict(x, t, cond)

    model.predict, model.compiled = spy, True
    record = sample_trees(model, plan, cond, fold(0, 0), ids, config.sample, trained_batch=trained_batch(model, config))
    # Two stochastic levels of 2 and 4 rows in the update's micro-batches of 3, no row alone; then three of 8 at once.
    assert seen == [(rows, True, False) for rows in (2, 3, 2)] + [(8, False, True)] * 3
    torch.testing.assert_close(record.latents, plain.latents, rtol=1e-4, atol=1e-4)
    assert not record.latents.requires_grad
    assert not record.log_density.requires_grad


@pytest.mark.parametrize("odd", [(), (2, 3), (6,), (3, 5, 6)])
def test_trained_rows_come_in_calls_that_are_rounded_alike(tiny_folder, odd):
    own = ["tree.s=0", "tree.w=2", "sample.num_prompts=3", "train.batch_size=8"]
    config, model = make([*tiny_overrides("sd3", tiny_folder("sd3")), *own])
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    adapters = [p for name, p in model.module.named_parameters() if ".lora_B." in name]
    seen, plain = [], model.predict

    def answers(x, t, cond):
        seen.append((len(x), all(bool(p.all()) for p in adapters)))
        return plain(x[:1], t[:1], cond[:1]).expand(x.shape) * (1.001 if len(x) in odd else 1)

    model.predict, model.compiled = answers, True
    told = find_bitwise_batch_sizes(config, model, 1, "a dog")
    assert seen == [(size, True) for size in (8, *range(2, 8))]
    assert model.bitwise_batch_sizes == tuple(size for size in range(2, 9) if size not in odd)
    assert [f"of {', '.join(map(str, odd))} rows would not be rounded like those of 8" in line for line in told] == (
        [True] if odd else []
    )
    assert all(torch.equal(p, before[name]) for name, p in model.module.named_parameters())
    seen.clear()
    plan = make_plan(config, model.schedule(config.sample.num_steps), 0)
    cond, ids = model.encode([*TEXTS, "a cat"]), torch.arange(3)
    sample_trees(model, plan, cond, fold(0, 0), ids, config.sample, trained_batch=trained_batch(model, config))
    sizes = [size for size, perturbed in seen if not perturbed]
    assert sizes[:2] == [min(size for size in model.bitwise_batch_sizes if size >= level) for level in (3, 6)]
    assert sizes[2:] == [12] * (len(plan.levels) - 2)  # where nothing is trained, as they come


def test_merged_adapters_are_the_policy_and_leave_nothing_behind(tiny_folder):
    _, model = make(tiny_overrides("sd3", tiny_folder("sd3")))
    given_rows = rows_of(moved(model), 3)
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    with torch.no_grad():
        apart = model.predict(*given_rows)
        with lora.merged(model.module):
            together = model.predict(*given_rows)
        with lora.disabled(model.module):
            base = model.predict(*given_rows)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
    assert float((base - apart).abs().max()) > 1e-3
    with pytest.raises(ZeroDivisionError), lora.merged(model.module):
        _ = 1 / 0
    layers, found = lora._layers(model.module), []

    def runs_out(adapter):  # in the middle of it
        found.append(adapter)
        raise MemoryError

    layers[2].get_delta_weight = runs_out
    with pytest.raises(MemoryError), lora.merged(model.module):
        pass
    assert found
    assert not any(layer.disable_adapters for layer in layers)
    assert all(torch.equal(p, before[name]) for name, p in model.module.named_parameters())
    assert {n for n, p in model.module.named_parameters() if p.requires_grad} == {n for n in before if ".lora_" in n}


def test_operations_are_the_models_own(sd3_overrides):
    """Guidance is two forwards, and an adapter is left out, whatever its rank."""
    counts = []
    for more in ([], ["model.lora.rank=64"], ["sample.guidance_scale=2"], ["model.train=full"]):
        _, model = make([*sd3_overrides, *more])
        counts.append(forward_flops(model, "a dog"))
    assert counts[0] == counts[1] == counts[3]
    assert counts[2] == 2 * counts[0]
    blocks = sum(p.numel() for name, p in model.module.named_parameters() if "transformer_blocks" in name)
    tokens = (64 // 4 // 4) ** 2  # pictures shrink by 4, and patches are 4 wide
    assert 0.5 * 2 * blocks * tokens < counts[0] < 8 * 2 * blocks * tokens


def test_compiling_is_for_long_runs_on_a_gpu():
    def asked(device: str, flops: float, *overrides: str) -> tuple[bool, list[str]]:
        return compiles(load_config("tree", list(overrides)), int(flops), torch.device(device))

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


def test_yaml_takes_on_for_true(tmp_path):
    for written, meant in (("on", "on"), ("off", "off"), ("auto", "auto"), ("true", "on")):
        (tmp_path / "own.yaml").write_text(f"defaults: [tree, _self_]\ncompile: {written}\n")
        assert load_config(str(tmp_path / "own.yaml"), []).compile == meant


def test_how_far_from_one_a_first_ratio_may_be(sd3_overrides):
    from accelerate import Accelerator

    _, model = make(sd3_overrides)
    accelerator = Accelerator(cpu=True)
    assert ratio_bound(model, accelerator) == 1e-6
    next(model.module.parameters()).data = next(model.module.parameters()).bfloat16()
    assert ratio_bound(model, accelerator) == 1e-4
    model.compiled = True  # then rollout and update run the same code
    assert ratio_bound(model, accelerator) == RATIO_BOUND_COMPILED == 1e-5


def test_what_cannot_be_compiled_is_one_line(monkeypatch):
    def broken(graph, inputs):
        raise OSError("no compiler here")

    monkeypatch.setattr(compile, "BACKEND", broken)
    module = torch.nn.Linear(2, 2)
    compile.compile_calls(module)
    with pytest.raises(InputError, match=r"^compile=on: the model cannot be compiled \(.*; allowed: off$") as error:
        module(torch.ones(3, 2))
    assert "\n" not in str(error.value)
    with compile.uncompiled():
        assert module(torch.ones(3, 2)).shape == (3, 2)
    torch._dynamo.reset()


def test_hooks_inside_compiled_code_are_heard_where_it_is_asked_for(monkeypatch):
    """The doctor looks for a layer that overflows, behind one that hides it."""

    class Overflows(torch.nn.Module):
        def forward(self, x):
            return x / 0

    monkeypatch.setattr(compile, "BACKEND", "eager")
    module = torch.nn.Sequential(Overflows(), torch.nn.Hardtanh())
    compile.compile_calls(module)
    module(torch.ones(2, 2))
    found: list[str] = []
    with watching_for_overflow(found), compile.uncompiled():
        module(torch.ones(2, 2))
    assert found[0].startswith("Overflows")
    torch._dynamo.reset()


def test_a_half_precision_that_draws_something_else_is_left(tiny_folder, monkeypatch):
    _, model = make(tiny_overrides("sd3", tiny_folder("sd3")))
    latents = rows_of(model, 2)[0]
    exact, pixels = model.decode(latents), model.pixels

    def overflows(latents):
        made = pixels(latents)
        return made if model.decoding == torch.float32 else made * torch.nan

    monkeypatch.setattr(model, "pixels", overflows)
    model.decoding = torch.bfloat16
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    (told,) = model.check_decoder(latents)
    assert told.startswith("pictures are decoded in float32 from now on")
    torch.testing.assert_close(model.decode(latents), exact)
    model.decoding = torch.bfloat16
    monkeypatch.setattr(model, "pixels", pixels)
    assert model.check_decoder(latents) == []
    assert model.decoding == torch.bfloat16


def test_stages_within_stages_are_counted_once(tmp_path):
    from arborl.run.setup import start_accelerator

    config = Config()
    config.log.dir, config.log.trackers = str(tmp_path), []
    run = Logger(config, start_accelerator(config), None, 0, quiet=True)
    start = time.perf_counter()
    with run.stage("reward"):
        time.sleep(0.02)
        for _ in range(2):
            with run.stage("decode"):
                time.sleep(0.03)
    whole = time.perf_counter() - start
    assert run.seconds["decode"] >= 0.06
    assert 0.02 <= run.seconds["reward"] < whole - 0.06 + 1e-3
    assert sum(run.seconds.values()) == pytest.approx(whole, abs=2e-3)
    run.close()


@given(st.lists(st.floats(0, 1e4), min_size=len(STAGES), max_size=len(STAGES)))
def test_the_bar_shows_what_counts_and_is_never_longer_than_it_may(seconds):
    row = {f"time/{name}": spent for name, spent in zip(STAGES, seconds, strict=True)}
    shown = time_split(row | {"tflops/rollout": 431.2, "tflops/update": 520.0})
    assert shown.count("▇") <= BLOCKS + len(STAGES)
    assert shown.endswith("TFLOP/s: rollout 431, update 520")
    longest = max(seconds)
    if longest > 1:
        assert f"{STAGES[seconds.index(longest)]} ▇" in shown


def test_pictures_are_decoded_while_servers_score_others():
    """The first answer comes only once the second pictures are decoded; one at a time it never would."""
    _, model = make(["model=mixture"])
    further, decoded = threading.Event(), itertools.count(1)
    decode = model.decode

    def counted(latents):
        if next(decoded) == 2:
            further.set()
        return decode(latents)

    class Server:
        elsewhere = True

        def __call__(self, images, prompts, columns):
            assert further.wait(20)
            assert not torch.is_grad_enabled()
            return torch.arange(float(len(images)))

    model.decode = counted
    rewards = Rewards({"x": Server()}, {"x": 1.0})
    leaves = torch.randn(3, 2, *model.latent_shape)
    scored = decode_and_score(model, rewards, leaves, Prompts(["a", "b", "c"], {}), 2)
    assert scored.scores.total.tolist() == [[0, 1]] * 3


def test_a_host_tensor_is_placed():
    values = torch.arange(3)
    assert torch.equal(to_device(values, CPU), values)


@pytest.mark.gpu
def test_on_a_gpu_the_compiled_ratio_is_one(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "0")
    own = [f"log.dir={tmp_path}", "train.epochs=2", "compile=on", "tree.s=0"]
    run = train(load_config("mixture", [*tiny_overrides("sd3", tiny_folder("sd3")), *own]))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["ratio_error"] for row in rows[:2]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["off", "on"])
def test_on_a_gpu_nothing_waits_in_a_rollout(tiny_folder, how):
    config = load_config("mixture", [*tiny_overrides("sd3", tiny_folder("sd3")), "train.batch_size=4"])
    model = load_model(config, torch.device("cuda"))
    if how == "on":
        model.compile()
    plan = make_plan(config, model.schedule(config.sample.num_steps), 0)
    given = model, plan, model.encode(TEXTS), fold(0, 0), torch.arange(2), config.sample
    twin = trained_batch(model, config)
    with torch.autocast("cuda", torch.bfloat16):
        sample_trees(*given, trained_batch=twin)
        torch.cuda.set_sync_debug_mode("error")
        try:
            sample_trees(*given, trained_batch=twin)
        finally:
            torch.cuda.set_sync_debug_mode("default")
