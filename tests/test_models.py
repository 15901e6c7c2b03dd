"""Every model family, held to one contract: diffusers pipelines on tiny random weights, and the mixture."""

import hashlib
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from arborl.checkpoint import latest
from arborl.cli import main
from arborl.config import load_config
from arborl.core.noise import fold
from arborl.evaluate import EVALUATION, generate
from arborl.models import load_model, model_class
from arborl.prompts import Prompts
from arborl.train import train

from conftest import CPU, TINY, make, tiny_overrides

TEXTS = ["a photo of a cat", "red house", "a dog"]


def plain(folder: Path, family: str, **options: Any) -> Any:
    """The pipeline as diffusers loads it, with the scheduler that the engine integrates in the place of its own."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    if family == "wan":
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=pipe.scheduler.config.flow_shift)
    if family in ("sd", "sdxl"):
        pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
    return pipe


def called(pipe: Any, family: str, config: Any, noise: torch.Tensor, **options: Any) -> torch.Tensor:
    """What the pipeline's own `__call__` makes of these latents."""
    sample = config.sample
    options |= {"height": sample.resolution, "width": sample.width or sample.resolution}
    options |= {"guidance_scale": sample.guidance_scale, "num_inference_steps": sample.num_steps}
    if family in ("sd3", "flux", "wan"):
        options["max_sequence_length"] = config.model.max_sequence_length
    if family == "flux":
        noise = pipe._pack_latents(noise, *noise.shape)
    if family == "wan":
        options["num_frames"] = sample.num_frames
    found = pipe(TEXTS, latents=noise, output_type="pt", **options)
    return found.frames if family == "wan" else found.images


def noise_of(model: Any, count: int = 3) -> torch.Tensor:
    """What `generate` starts from."""
    return model.noise(fold(0, EVALUATION), torch.tensor([[i, 0, 0] for i in range(count)]))


@pytest.fixture(params=TINY)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def overrides(family, tiny_folder) -> list[str]:
    return tiny_overrides(family, tiny_folder(family))


@pytest.fixture(params=["mixture", *TINY])
def any_model(request: pytest.FixtureRequest, tiny_folder):
    if request.param == "mixture":
        return make(["model.train=lora", "model.lora.rank=4"])[1]
    return make(tiny_overrides(request.param, tiny_folder(request.param)), "tree")[1]


class TestEveryFamily:
    """The contract of `Model`."""

    def test_latents_and_pictures(self, any_model):
        x = any_model.noise(fold(0, 0), torch.tensor([[0, 0, 0], [1, 0, 0]]))
        assert x.shape == (2, *any_model.latent_shape)
        assert x.dtype == torch.float32
        pictures = any_model.decode(x)
        assert pictures.ndim == (5 if any_model.video else 4)
        assert len(pictures) == 2
        assert pictures.shape[-3] == 3
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


class TestPipelines:
    """What holds besides for every family of diffusers pipelines."""

    def test_the_family_is_read_from_the_folder_and_brings_its_settings(self, family, overrides):
        config = load_config("tree", overrides)
        assert config.model.family == family
        assert config.model.train == "lora"  # the preset's own model, the scenes, is trained whole
        assert model_class(load_config("tree", ["model.family=auto", overrides[0]])) is model_class(config)

    @pytest.mark.parametrize("guidance", [1.0, 4.5])
    def test_the_ode_rollout_is_the_pipelines_own_call(self, family, overrides, tiny_folder, guidance: float):
        config, model = make([*overrides, "sample.sigmas=pipeline", f"sample.guidance_scale={guidance}"], "tree")
        pictures = model.decode(generate(model, Prompts(TEXTS, {}), torch.arange(3), config)[:, 0])
        expected = called(plain(tiny_folder(family), family), family, config, noise_of(model))
        assert pictures.shape == expected.shape
        assert float(expected.std()) > 0.01  # a picture of something
        assert float((expected[0] - expected[1]).abs().max()) > 0.01
        torch.testing.assert_close(pictures, expected, rtol=0, atol=1e-4)

    def test_a_negative_prompt_too(self, family, overrides, tiny_folder):
        if family == "flux":
            pytest.skip("FLUX has no classifier-free guidance")
        config, model = make(
            [*overrides, "sample.sigmas=pipeline", "sample.guidance_scale=3", "sample.negative_prompt=blue"], "tree"
        )
        pictures = model.decode(generate(model, Prompts(TEXTS, {}), torch.arange(3), config)[:, 0])
        pipe = plain(tiny_folder(family), family)
        expected = called(pipe, family, config, noise_of(model), negative_prompt=["blue"] * 3)
        torch.testing.assert_close(pictures, expected, rtol=0, atol=1e-4)
        without = called(pipe, family, config, noise_of(model))
        assert float((without - expected).abs().max()) > 1e-3

    def test_batch_equals_single(self, overrides):
        config, model = make(overrides, "tree")
        together = generate(model, Prompts(TEXTS, {}), torch.arange(3), config)
        for i in range(3):
            alone = generate(model, Prompts(TEXTS[i : i + 1], {}), torch.tensor([i]), config)
            torch.testing.assert_close(alone[0], together[i], rtol=1e-4, atol=1e-4)
        pictures = model.decode(together[:, 0])
        torch.testing.assert_close(model.decode(together[1:2, 0]), pictures[1:2], rtol=0, atol=1e-5)

    def test_kept_embeddings_are_the_encoders_own(self, overrides, tmp_path: Path):
        cached = make([*overrides, f"prompts.cache={tmp_path}", "sample.guidance_scale=3"], "tree")[1]
        direct = make([*overrides, "prompts.cache=none", "sample.guidance_scale=3"], "tree")[1]
        first, again = cached.encode(TEXTS), cached.encode(TEXTS)
        assert any(name.startswith("text_encoder") and part for name, part in direct.pipe.components.items())
        assert not any(name.startswith("text_encoder") and part for name, part in cached.pipe.components.items())
        for name, tensor in direct.encode(TEXTS).tensors.items():
            torch.testing.assert_close(first.tensors[name], tensor, rtol=1e-4, atol=1e-5)  # another batch
            assert torch.equal(first.tensors[name], again.tensors[name])
            assert first.tensors[name].dtype == tensor.dtype

    @pytest.mark.parametrize("how", ["lora", "full"])
    def test_two_epochs_end_to_end(self, family, overrides, tmp_path: Path, how: str, capsys):
        """By the command line: the ratio is 1, only what is trained has moved, every group got a gradient."""
        folder = Path(overrides[0].removeprefix("model.path="))
        before = digests(folder)
        arguments = [*overrides, f"model.train={how}", f"log.dir={tmp_path}", "run_name=x", "train.epochs=2"]
        run_ok("train", *arguments, "log.record_every=1", "sample.pad_batches=true", "train.batch_size=16")
        rows = [json.loads(line) for line in (tmp_path / "x" / "metrics.jsonl").read_text().splitlines()]
        assert rows[0]["ratio_error"] == 0
        assert rows[0]["steps"] == 1
        assert all(row["reward"] == row["reward"] for row in rows[:2])
        told = capsys.readouterr().err
        assert "no gradient reached" not in told, told
        assert "ratio is off" not in told, told
        assert (tmp_path / "x" / "trees" / "epoch_000000.png").is_file()
        assert digests(folder) == before
        names = load_file(latest(tmp_path / "x") / "weights.safetensors").keys()
        assert all(".lora_" in name for name in names) == (how == "lora")

    def test_a_training_step_changes_lora_weights_only(self, overrides, tmp_path: Path, monkeypatch):
        held: list[Any] = []
        monkeypatch.setattr("arborl.job.load_model", lambda *given: held.append(load_model(*given)) or held[0])
        config = load_config("tree", [*overrides, f"log.dir={tmp_path}", "train.epochs=1", "train.learning_rate=0.1"])
        fresh = {name: p.detach().clone() for name, p in load_model(config, CPU).module.named_parameters()}
        train(config)
        (model,) = held
        changed = {name for name, p in model.module.named_parameters() if not torch.equal(p, fresh[name])}
        assert changed
        assert all(".lora_" in name for name in changed)
        assert all(not p.requires_grad for part in (model.pipe.vae,) for p in part.parameters())

    @pytest.mark.parametrize("how", ["lora", "merged", "full"])
    def test_exported_weights_are_the_trainers_picture_in_plain_diffusers(
        self, family, overrides, tiny_folder, tmp_path: Path, how: str, capsys
    ):
        kind = "full" if how == "full" else "lora"
        config = load_config(
            "tree",
            [*overrides, f"log.dir={tmp_path}", "train.epochs=1", "train.learning_rate=0.02", f"model.train={kind}"],
        )
        run, out = train(config), tmp_path / "out"
        run_ok("export", str(run), str(out), *(["--merge"] if how == "merged" else []))
        told = " ".join(capsys.readouterr().out.split())
        assert "gives the trainer's own picture" in told
        facts = json.loads((out / "export.json").read_text())["check"]
        assert facts["largest"] <= 1e-4
        assert facts["from_base"] > 1e-4  # training did something
        # And once more by hand, another picture.
        pipe = plain(tiny_folder(family) if how == "lora" else out, family)
        if how == "lora":
            pipe.load_lora_weights(out, weight_name="pytorch_lora_weights.safetensors")
        config.sample.sigmas = "pipeline"
        model = trained_model(config, run)
        expected = model.decode(generate(model, Prompts(TEXTS, {}), torch.arange(3), config)[:, 0])
        found = called(pipe, family, config, noise_of(model))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        if how == "lora":
            pipe = plain(tiny_folder(family), family)
            pipe.load_lora_weights(out, weight_name="comfyui.safetensors")
            torch.testing.assert_close(called(pipe, family, config, noise_of(model)), expected, rtol=0, atol=1e-4)


def trained_model(config: Any, run: Path) -> Any:
    from arborl.checkpoint import load_weights, trainable, weights_of

    model = load_model(config, CPU)
    load_weights(trainable(model.module), weights_of(latest(run)))
    return model


def digests(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def run_ok(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 0
