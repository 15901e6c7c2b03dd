"""The SD3 family on a trained pipeline without T5: guidance, grids, references, checkpointing."""

from collections import Counter

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch.utils._python_dispatch import TorchDispatchMode

from arborl.config import load_config
from arborl.core.errors import InputError
from arborl.core.noise import fold
from arborl.data.prompts import Prompts
from arborl.engine.generate import EVALUATION, generate
from arborl.models import load_model, model_class
from arborl.models.sd3 import SD3Model

from conftest import CPU, make, make_policy, tiny_overrides

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
    policy = make_policy([*sd3_overrides, f"sample.guidance_scale={guidance}", f"sample.sigmas={sigmas}"])
    model = policy.model
    pictures = model.decode(generate(policy, Prompts(TEXTS, {}), torch.arange(3))[:, 0])
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
    schedule = model_class(config).schedule_for(config, 10)
    pipeline.scheduler.set_timesteps(10)
    torch.testing.assert_close(schedule.sigma.float(), pipeline.scheduler.sigmas[:-1])
    assert model_class(config) is SD3Model


def test_the_family_is_read_from_the_folder(sd3_overrides):
    assert model_class(load_config("mixture", [*sd3_overrides, "model.family=auto"])) is SD3Model


def test_a_t5_needs_tokens(tiny_folder):
    with pytest.raises(InputError, match=r"model.max_sequence_length=0: .*T5"):
        make([*tiny_overrides("sd3", tiny_folder("sd3")), "model.max_sequence_length=0"], "tree")


@pytest.mark.parametrize("resolution", [40, 4096])
def test_a_resolution_the_model_cannot_take(sd3_overrides, resolution: int):
    with pytest.raises(InputError, match=rf"sample.resolution={resolution}.*multiples of 16 up to 64"):
        make([*sd3_overrides, f"sample.resolution={resolution}"])


def test_full_fine_tune_has_a_frozen_reference(sd3_overrides):
    policy = make_policy([*sd3_overrides, "model.train=full", "loss.kl=0.1"])
    model = policy.model
    x, t, cond = torch.randn(1, *model.latent_shape), torch.tensor([700.0]), model.encode(["a dog"])
    with torch.no_grad():
        before = model.predict(x, t, cond)
        for parameter in model.module.parameters():
            parameter.mul_(1.1)
        assert not torch.equal(model.predict(x, t, cond), before)
        assert torch.equal(policy.predict(x, t, cond, "reference"), before)


def test_the_seed_decides_the_first_adapter(sd3_overrides):
    def adapter(seed: int) -> torch.Tensor:
        torch.manual_seed(torch.seed() % 1000)  # whatever ran before must not matter
        model = load_model(load_config("mixture", [*sd3_overrides, f"seed={seed}"]), CPU)
        return torch.cat([p.flatten() for p in model.module.parameters() if p.requires_grad])

    assert torch.equal(adapter(1), adapter(1))
    assert not torch.equal(adapter(1), adapter(2))


class Counted(TorchDispatchMode):
    """Which operations ran, and how often."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_gradient_checkpointing_changes_nothing_but_memory(sd3_overrides):
    gradients, again = [], {}
    for flag in ("false", "selective", "true"):
        _, model = make([*sd3_overrides, "model.train=full", f"train.gradient_checkpointing={flag}"])
        x, t = torch.ones(2, *model.latent_shape), torch.tensor([700.0, 300.0])
        loss = model.predict(x, t, model.encode(["a dog", "red house"])).square().sum()
        with Counted() as counted:
            loss.backward()
        again[flag] = [counted.calls[name] for name in ("addmm", "native_layer_norm")]
        gradients.append(torch.cat([p.grad.flatten() for p in model.module.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2])
    products, norms = zip(*again.values(), strict=True)
    assert norms[0] == 0 < norms[1] == norms[2]  # cheap ones come again either way
    assert products[0] == products[1] == 0 < products[2]  # dear ones only where everything does


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
