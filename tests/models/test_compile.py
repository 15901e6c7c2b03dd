"""Compiled code, and adapters merged for sampling: faster, with no other result."""

import json
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.utils import counters

from arborl.config import load_config
from arborl.core.errors import InputError
from arborl.core.noise import fold
from arborl.engine.checks import watching_for_overflow
from arborl.models import compile, lora
from arborl.trainer import train

from conftest import make, make_policy, moved, tiny_overrides

TEXTS = ["a red house", "a dog"]


def rows_of(model, count: int):
    x = model.noise(fold(0, 0), torch.tensor([[i, 0, 0] for i in range(count)]))
    t = torch.linspace(100.0, 900.0, count)
    return x, t, model.encode([TEXTS[i % 2] for i in range(count)])


def gradients_of(model, given) -> torch.Tensor:
    model.module.zero_grad()
    model.predict(*given).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.module.parameters() if p.grad is not None])


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("flux", "wan", "sd", "sdxl")]


@pytest.mark.parametrize("family", ["sd3", *SLOW])
def test_compiled_blocks_answer_alike_in_one_graph_for_every_batch_size(family, tiny_folder, monkeypatch):
    policy = make_policy(tiny_overrides(family, tiny_folder(family)))
    model = moved(policy.model)
    some = [rows_of(model, count) for count in (2, 3, 5)]
    with torch.no_grad():
        expected = [model.predict(*given) for given in some]
        pictures = model.decode(some[1][0])
    slope = gradients_of(model, some[1])
    monkeypatch.setattr(compile, "BACKEND", "eager")
    torch._dynamo.reset()
    counters.clear()
    names = [*model.module.state_dict()]
    assert policy.compile() == []
    assert policy.compiled
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
        own = [f"log.dir={tmp_path}", f"run_name={how}", "train.epochs=2", f"compile={how}", "loss.kl=0.01"]
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


def test_what_cannot_be_compiled_is_one_line(monkeypatch):
    def broken(graph, inputs):
        raise OSError("no compiler here")

    monkeypatch.setattr(compile, "BACKEND", broken)
    module = torch.nn.Linear(2, 2)
    compile.compile_forward(module)
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
    compile.compile_forward(module)
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
        return made if model.decode_dtype == torch.float32 else made * torch.nan

    monkeypatch.setattr(model, "pixels", overflows)
    model.decode_dtype = torch.bfloat16
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    (told,) = model.check_decoder(latents)
    assert told.startswith("pictures are decoded in float32 from now on")
    torch.testing.assert_close(model.decode(latents), exact)
    model.decode_dtype = torch.bfloat16
    monkeypatch.setattr(model, "pixels", pixels)
    assert model.check_decoder(latents) == []
    assert model.decode_dtype == torch.bfloat16


@pytest.mark.gpu
def test_on_a_gpu_the_compiled_ratio_is_one(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "0")
    own = [f"log.dir={tmp_path}", "train.epochs=2", "compile=on", "tree.s=0"]
    run = train(load_config("mixture", [*tiny_overrides("sd3", tiny_folder("sd3")), *own]))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["ratio_error"] for row in rows[:2]) == 0
