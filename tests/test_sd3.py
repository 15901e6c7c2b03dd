"""The SD3 family against diffusers' own pipeline, and the model contract over every family."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from arborl.config import load_config
from arborl.core.errors import InputError
from arborl.core.noise import fold
from arborl.evaluate import EVALUATION, generate
from arborl.models import load_model, model_class
from arborl.models.sd3 import SD3Model
from arborl.prompts import Prompts

from conftest import CPU, make

TEXTS = ["a large red circle at the left on a blue background", "red house", "a dog"]


@pytest.fixture(scope="module")
def pipeline(sd3_folder):
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(sd3_folder, text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("sigmas", ["pipeline", "shift"])
def test_the_ode_rollout_is_the_pipelines_own_call(
    sd3_overrides, pipeline, guidance: float, sigmas: str, monkeypatch: pytest.MonkeyPatch
):
    config, model = make([*sd3_overrides, f"sample.guidance_scale={guidance}", f"sample.sigmas={sigmas}"])
    pictures = model.decode(generate(model, Prompts(TEXTS, {}), torch.arange(3), config)[:, 0])
    noise = model.noise(fold(0, EVALUATION), torch.tensor([[i, 0, 0] for i in range(3)]))
    options = {"num_inference_steps": 6, "guidance_scale": guidance, "height": 64, "width": 64}
    if sigmas == "shift":
        # The pipeline shifts what it is given, so it gets the even grid; and this one would stretch it to end at 0.1.
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config, shift_terminal=None)
        monkeypatch.setattr(pipeline, "scheduler", scheduler)
        options |= {"sigmas": torch.linspace(1, 0, 7)[:-1].tolist()}
    expected = pipeline(TEXTS, latents=noise, max_sequence_length=2, output_type="pt", **options).images
    torch.testing.assert_close(pictures, expected, rtol=0, atol=1e-4)


def test_the_pipelines_grid_needs_no_weights(sd3_overrides, pipeline):
    config = load_config("mixture", [*sd3_overrides, "sample.sigmas=pipeline"])
    schedule = model_class(config).grid(config, 10)
    pipeline.scheduler.set_timesteps(10)
    torch.testing.assert_close(schedule.sigma.float(), pipeline.scheduler.sigmas[:-1])
    assert model_class(config) is SD3Model


def test_the_family_is_read_from_the_folder(sd3_overrides):
    assert model_class(load_config("mixture", [*sd3_overrides, "model.family=auto"])) is SD3Model


def test_a_t5_needs_tokens(sd3_overrides, pipeline, monkeypatch: pytest.MonkeyPatch):
    t5 = torch.nn.Linear(1, 1)
    t5.dtype = torch.float32  # as every model of transformers has it
    monkeypatch.setattr(pipeline, "text_encoder_3", t5)
    monkeypatch.setattr("arborl.models.sd3.load_pipeline", lambda *_: pipeline)
    with pytest.raises(InputError, match=r"model.max_sequence_length=0: .*T5"):
        make([*sd3_overrides, "model.max_sequence_length=0"])


@pytest.mark.parametrize("resolution", [40, 4096])
def test_a_resolution_the_model_cannot_take(sd3_overrides, resolution: int):
    with pytest.raises(InputError, match=rf"sample.resolution={resolution}.*16\.\.64"):
        make([*sd3_overrides, f"sample.resolution={resolution}"])


FAMILIES = ["mixture", "sd3"]


@pytest.fixture(params=FAMILIES)
def any_model(request: pytest.FixtureRequest):
    overrides = request.getfixturevalue("sd3_overrides") if request.param == "sd3" else []
    return make([*overrides, "model.train=lora", "model.lora.rank=4"])[1]


class TestEveryFamily:
    """The contract of `Model`."""

    def test_latents_and_pictures(self, any_model):
        x = any_model.noise(fold(0, 0), torch.tensor([[0, 0, 0], [1, 0, 0]]))
        assert x.shape == (2, *any_model.latent_shape)
        assert x.dtype == torch.float32
        pictures = any_model.decode(x)
        assert pictures.ndim == 4
        assert pictures.shape[:2] == (2, 3)
        assert 0 <= float(pictures.min()) <= float(pictures.max()) <= 1

    def test_conditioning_is_gathered_by_index(self, any_model):
        cond = any_model.encode(["a dot at the top left", "red house", "a dog"])
        assert len(cond) == 3
        picked = cond[torch.tensor([2, 0, 2, 1])]
        for name, tensor in cond.tensors.items():
            assert torch.equal(picked.tensors[name], tensor[[2, 0, 2, 1]])

    @torch.no_grad()
    def test_every_sample_has_its_own_timestep_and_prompt(self, any_model):
        x = any_model.noise(fold(0, 0), torch.tensor([[i, 0, 0] for i in range(3)]))
        t, cond = torch.tensor([990.0, 500.0, 123.4]), any_model.encode(["a dot at the top left", "red house", "a dog"])
        together = any_model.predict(x, t, cond)
        assert together.dtype == torch.float32
        for i in range(3):
            one = slice(i, i + 1)
            torch.testing.assert_close(
                any_model.predict(x[one], t[one], cond[one]), together[one], rtol=1e-4, atol=1e-5
            )

    @torch.no_grad()
    def test_a_fresh_adapter_changes_nothing_and_off_is_the_base_bit_for_bit(self, any_model):
        x = any_model.noise(fold(0, 0), torch.tensor([[0, 0, 0]]))
        t, cond = torch.tensor([700.0]), any_model.encode(["a dog"])
        before = any_model.predict(x, t, cond)
        with any_model.reference():
            assert torch.equal(any_model.predict(x, t, cond), before)
        for parameter in any_model.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3)
        with any_model.reference():
            assert torch.equal(any_model.predict(x, t, cond), before)
        assert not torch.equal(any_model.predict(x, t, cond), before)

    def test_trained_weights_are_float32(self, any_model):
        trained = [p for p in any_model.module.parameters() if p.requires_grad]
        assert trained
        assert all(p.dtype == torch.float32 for p in trained)


def test_full_fine_tune_has_a_frozen_reference(sd3_overrides):
    _, model = make([*sd3_overrides, "model.train=full", "train.kl=0.1"])
    x, t, cond = torch.randn(1, *model.latent_shape), torch.tensor([700.0]), model.encode(["a dog"])
    with torch.no_grad():
        before = model.predict(x, t, cond)
        for parameter in model.module.parameters():
            parameter.mul_(1.1)
        assert not torch.equal(model.predict(x, t, cond), before)
        with model.reference():
            assert torch.equal(model.predict(x, t, cond), before)


def test_the_seed_decides_the_first_adapter(sd3_overrides):
    def adapter(seed: int) -> torch.Tensor:
        torch.manual_seed(torch.seed() % 1000)  # whatever ran before must not matter
        model = load_model(load_config("mixture", [*sd3_overrides, f"seed={seed}"]), CPU)
        return torch.cat([p.flatten() for p in model.module.parameters() if p.requires_grad])

    assert torch.equal(adapter(1), adapter(1))
    assert not torch.equal(adapter(1), adapter(2))


def test_gradient_checkpointing_changes_nothing_but_memory(sd3_overrides):
    gradients = []
    for flag in ("false", "true"):
        _, model = make([*sd3_overrides, "model.train=full", f"train.gradient_checkpointing={flag}"])
        x, t = torch.ones(2, *model.latent_shape), torch.tensor([700.0, 300.0])
        model.predict(x, t, model.encode(["a dog", "red house"])).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.module.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients)


def test_cond_grad_is_the_same_picture_and_another_gradient(sd3_overrides):
    found = {}
    for mode in ("both", "cond"):
        _, model = make([*sd3_overrides, "model.train=full", "sample.guidance_scale=3", f"train.cfg_grad={mode}"])
        x, t = torch.ones(1, *model.latent_shape), torch.tensor([700.0])
        v = model.predict(x, t, model.encode(["a dog"]))
        v.square().sum().backward()
        found[mode] = v.detach(), torch.cat([p.grad.flatten() for p in model.module.parameters() if p.grad is not None])
    torch.testing.assert_close(found["both"][0], found["cond"][0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found["both"][1], found["cond"][1], rtol=1e-2)
