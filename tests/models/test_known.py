"""Named models: their settings fit what is published, and what is said of them is true of it."""

from pathlib import Path

import diffusers
import pytest
from torch import nn

from arborl.config import load_config, options
from arborl.config.schema import Config
from arborl.engine.method import check_plan
from arborl.models import lora, model_class
from arborl.models.any_pipeline import AnyPipelineModel
from arborl.models.call import shape_problem
from arborl.models.known import KNOWN, Known, memory_forecast
from bench import published

from conftest import ROOT

every_model = pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.preset)


def config_of(known: Known, *more: str) -> Config:
    return load_config("tree", [f"model={known.preset}", "rewards=brightness", *more])


def test_every_named_model_of_the_family_is_in_the_table():
    configs = {name: load_config("tree", [f"model={name}", "rewards=brightness"]) for name in options("model")}
    named = {name for name, config in configs.items() if config.model.family == "pipeline" and config.model.path}
    assert named == {known.preset for known in KNOWN} == set(published.PUBLISHED)
    assert len(named) == len(KNOWN)
    for known in KNOWN:
        assert configs[known.preset].model.path == known.hub
        assert shape_problem(getattr(diffusers, known.pipeline)) == ""


@every_model
def test_what_is_published_can_be_trained_so(tmp_path: Path, known: Known):
    """Sizes, guidance, further arguments, the layers of LoRA and the plan: all that can be checked without weights."""
    config = config_of(known, f"model.path={published.write(known.preset, tmp_path / 'model')}")
    family = model_class(config)
    assert issubclass(family, AnyPipelineModel)
    assert family.pipeline == known.pipeline
    family.check(config, may_fetch=False)
    check_plan(config)

    source = family.open(config)
    trained = nn.ModuleDict({part: source.skeleton_of(part) for part in family.components(config)})
    assert all(hasattr(part, "enable_gradient_checkpointing") for part in trained.values())
    ends = tuple(f".{name}" for name in family.lora_layers(trained))
    adapted = [trained.get_submodule(name) for name in lora.linear_layers(trained) if name.endswith(ends)]
    assert known.parameters == pytest.approx(parameters(trained), rel=1e-3)
    assert known.adapter == pytest.approx(config.model.lora.rank * sum(map(sides, adapted)) / 1e9, abs=5e-4)
    assert known.vae == pytest.approx(parameters(source.skeleton_of("vae")), rel=5e-3)


def parameters(module: nn.Module) -> float:
    return sum(p.numel() for p in module.parameters()) / 1e9


def sides(layer: nn.Module) -> int:
    assert isinstance(layer, nn.Linear)
    return layer.in_features + layer.out_features


def test_memory_by_hand():
    known = Known("tiny", "", "", parameters=2.0, adapter=0.5, text_encoder=9.0, vae=0.25)
    gib = 1e9 / 2**30
    assert memory_forecast(known, "lora") == pytest.approx((2 * 2 + 0.5 * 16 + 0.25 * 4) * gib)
    assert memory_forecast(known, "full") == pytest.approx((2 * 16 + 0.25 * 4) * gib)
    assert memory_forecast(known, "full", share=0.5) == pytest.approx((1 * 16 + 1 * 2 + 0.25 * 4) * gib)
    assert memory_forecast(known, "full", processes=4) == pytest.approx((8 + 0.25 * 4) * gib)
    with pytest.raises(ValueError, match="neither"):
        memory_forecast(known, "half")


@every_model
def test_the_page_shows_it(known: Known):
    """The row of docs/models.md, all but its last column."""
    sample = config_of(known).sample
    size = f"{sample.resolution} px" if sample.width is None else f"{sample.resolution}×{sample.width}"
    frames = f", {sample.num_frames} frames" if sample.num_frames > 1 else ""
    gib = " / ".join(f"{memory_forecast(known, train):.0f}" for train in ("lora", "full"))
    cells = [
        f"`{known.preset}`",
        f"`{known.hub}`",
        f"`{known.pipeline}`",
        f"{known.parameters:.3g} B",
        f"{known.text_encoder:.2g} B",
        gib,
        f"{size}{frames}, {sample.num_steps} steps, guidance {sample.guidance_scale:g}",
    ]
    assert f"\n| {' | '.join(cells)} | " in (ROOT / "docs" / "models.md").read_text()
