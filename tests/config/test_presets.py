"""Every preset trains: on a tiny SD3 pipeline, a flow, and on a tiny diffusion model."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arborl.config import load_config, options, presets
from arborl.core.schedule import shifted
from arborl.engine.contracts import loss_of
from arborl.engine.cost import costs, count_model_calls
from arborl.engine.method import check_plan, kernel_of, make_plan, pruning
from arborl.engine.state import trainable
from arborl.models import load_model
from arborl.trainer import train

from conftest import CPU, TINY

PRESETS = (
    "tree",
    "tree_fast",
    "tree_flash",
    "tree_long",
    "branch",
    "branch_width",
    "branch_depth",
    "branch_mix",
    "mix",
    "mix_flash",
    "dance",
    "flow_grpo",
    "flow_grpo_fast",
    "ddpo",
    "tempflow",
    "flat",
    "nft",
    "awm",
)


DDIM, V = ["model.family=tiny_ddim:TinyDDIM"], ["model.family=tiny_ddim:TinyV"]
SMALL = [
    "rewards=brightness",
    "sample.num_prompts=1",
    "sample.group_size=4",
    "sample.batch_size=16",
    "train.batch_size=16",
    "sample.pad_batches=true",
    "train.epochs=2",
    "train.updates=1",
    "eval.num_prompts=2",
    "eval.num_steps=2",
    "log.trackers=[]",
    "log.record_every=0",
]


ALIKE = ("branch_depth", "flow_grpo")
"""What these have of their own, which edges are trained and a KL, is nothing to do with the kind of model."""
RUNS = [("sd3", preset) for preset in PRESETS]
RUNS += [pytest.param("ddim", preset, marks=[pytest.mark.slow] if preset in ALIKE else []) for preset in PRESETS]
RUNS += [("v", preset) for preset in ("tree", "ddpo", "mix_flash")]  # what is predicted only changes coefficients
DRAWN = ("tree", "branch", "branch_width", "branch_mix", "mix", "flat", "tempflow")
"""Presets whose trees have a shape of their own; one looks the same with every model."""


@pytest.mark.parametrize(("model", "preset"), RUNS)
def test_every_preset_trains(tmp_path: Path, tiny_folder, model: str, preset: str):
    """A few steps: the ratio is 1, the counts are those of the plan, and weights move."""
    family = {"sd3": [f"model.path={tiny_folder('sd3')}", *TINY["sd3"]], "ddim": DDIM, "v": V}[model]
    drawn = ["log.record_every=2"] if model == "sd3" and preset in DRAWN else []
    config = load_config(preset, [*family, *SMALL, *drawn, f"log.dir={tmp_path}"])
    loss = loss_of(config)
    usual = config.kernel.flow if model == "sd3" else "ddim"
    assert kernel_of(config) == (usual if loss.needs_densities else "ode")
    fresh = load_model(config, CPU)
    before = trainable(fresh.module)
    folder = train(config)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    schedule = fresh.schedule(config.sample.num_steps)
    for epoch in range(2):
        plan = make_plan(config, schedule, epoch)
        expected = count_model_calls(config, plan, epoch)
        assert rows[epoch]["parents"] == expected.forward_backwards
        assert rows[epoch]["steps"] == 1
        assert rows[epoch].get("ratio_error", 0.0) == 0.0
        assert ("ratio_error" in rows[epoch]) == loss.needs_densities
    spent = (rows[1]["forwards"], rows[1]["forward_backwards"])
    whole = [count_model_calls(config, make_plan(config, schedule, epoch), epoch) for epoch in range(2)]
    asked = len(loss.asks) * sum(w.forward_backwards for w in whole)
    assert spent == (sum(w.forwards for w in whole) + asked, sum(w.forward_backwards for w in whole))
    after = load_file(folder / "checkpoints" / "epoch_000002" / "weights.safetensors")
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    assert (folder / "trees" / "epoch_000000.png").is_file() == bool(drawn)


def test_every_preset_of_the_family_is_a_preset_and_an_algo():
    assert set(PRESETS) == set(options("algo"))
    for name in PRESETS:
        model = f"scenes_{name}" if f"scenes_{name}" in options("model") else "scenes"
        assert load_config("tree", [f"algo={name}", f"model={model}"]).tree == load_config(name).tree


@pytest.mark.parametrize("name", ["nft", "awm", "flow_grpo_fast"])
def test_what_is_published_without_guidance_has_none(name: str):
    """Also on a model that has some."""
    assert load_config("base").sample.guidance_scale == 4.5
    assert load_config("base", [f"algo={name}"]).sample.guidance_scale == 1
    assert load_config("sd35_nocfg").sample.guidance_scale == 1


def test_what_was_found_on_the_scenes_stays_there():
    """A model of one's own keeps its own prompts, steps and rates, and its scores their usual measure."""
    scenes, other = load_config(), load_config(overrides=["model=sd35_medium", "rewards=hps"])
    assert (other.tree.siblings, other.train.schedule, other.sample.tail_steps) == ("balanced", "linear", 3)
    usual = load_config("tree", ["model=sd35_medium", "rewards=hps"])
    assert other.train.schedule != usual.train.schedule
    for section in ("model", "loss", "advantage", "prompts", "eval"):
        assert getattr(other, section) == getattr(usual, section), section
    assert dataclasses.replace(other.train, schedule="constant") == usual.train
    assert (other.sample.num_prompts, other.tree.w) == (usual.sample.num_prompts, usual.tree.w)
    assert (scenes.sample.num_prompts, scenes.train.updates, scenes.advantage.std) == (16, 8, "none")


def test_the_two_ways_to_prune_by_depth(tmp_path: Path):
    check_plan(load_config("branch_depth"))
    config = load_config("tree", ["algo=branch", "prune.depth=[15,16,17]"])
    assert config.sample.num_steps == 20
    check_plan(config)
    assert pruning(config, make_plan(config, shifted(20, 3.0), 0), 7).depths == (15, 16, 17)


@pytest.mark.parametrize("name", presets())
def test_every_preset_draws_a_curve_that_costs_a_few_percent(name: str):
    """By counted forwards, on the processes it is made for; the first and the last, of all pictures, come on top."""
    config = load_config(name)
    pictures = min(config.eval.num_between or config.eval.num_prompts, config.eval.num_prompts)
    evaluation = pictures * (config.eval.num_steps or config.sample.num_steps) / config.eval.every
    epoch = sum(itertools.islice(costs(config), 40)) / 40
    assert evaluation <= 0.05 * epoch * {"base": 8, "sd35_nocfg": 8}.get(name, 1)
    assert config.train.epochs / config.eval.every >= 5
