"""Every model family, held to one contract: diffusers pipelines on tiny random weights, and the mixture."""

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import diffusers
import huggingface_hub
import pytest
import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file

from arborl.cli import main
from arborl.config import load_config, with_settings
from arborl.core.errors import InputError
from arborl.core.noise import fold
from arborl.data.prompts import Prompts
from arborl.engine.checks import gradient_sizes, reached_groups
from arborl.engine.generate import EVALUATION, generate
from arborl.engine.policy import Policy
from arborl.models import check_overrides, load_model, model_class
from arborl.run.checkpoint import _seal, latest_valid
from arborl.trainer import train
from arborl.worlds.mixture import MixtureModel
from bench.pipelines import build

from conftest import CPU, TINY, make, make_policy, tiny_overrides
from launching import Fork

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


SD3_ALONE = [pytest.param(name, marks=[] if name == "sd3" else [pytest.mark.slow]) for name in TINY]


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
        before, policy = any_model.predict(x, t, cond), Policy(any_model, any_model.config, Accelerator(cpu=True))
        with policy.acting("reference"):
            assert torch.equal(any_model.predict(x, t, cond), before)
        for parameter in any_model.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3)
        with policy.acting("reference"):
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
        policy = make_policy([*overrides, "sample.sigmas=pipeline", f"sample.guidance_scale={guidance}"], "tree")
        config, model = policy.config, policy.model
        pictures = model.decode(generate(policy, Prompts(TEXTS, {}), torch.arange(3))[:, 0])
        expected = called(plain(tiny_folder(family), family), family, config, noise_of(model))
        assert pictures.shape == expected.shape
        assert float(expected.std()) > 0.01  # a picture of something
        assert float((expected[0] - expected[1]).abs().max()) > 0.01
        torch.testing.assert_close(pictures, expected, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("family", [name for name in TINY if name != "flux"], indirect=True)
    def test_a_negative_prompt_too(self, family, overrides, tiny_folder):
        policy = make_policy(
            [*overrides, "sample.sigmas=pipeline", "sample.guidance_scale=3", "sample.negative_prompt=blue"], "tree"
        )
        config, model = policy.config, policy.model
        pictures = model.decode(generate(policy, Prompts(TEXTS, {}), torch.arange(3))[:, 0])
        pipe = plain(tiny_folder(family), family)
        expected = called(pipe, family, config, noise_of(model), negative_prompt=["blue"] * 3)
        torch.testing.assert_close(pictures, expected, rtol=0, atol=1e-4)
        without = called(pipe, family, config, noise_of(model))
        assert float((without - expected).abs().max()) > 1e-3

    def test_batch_equals_single(self, overrides):
        policy = make_policy(overrides, "tree")
        model = policy.model
        together = generate(policy, Prompts(TEXTS, {}), torch.arange(3))
        for i in range(3):
            alone = generate(policy, Prompts(TEXTS[i : i + 1], {}), torch.tensor([i]))
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
        run_ok("train", *arguments, "log.record_every=2", "sample.pad_batches=true", "train.batch_size=16")
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

    @pytest.mark.parametrize("family", SD3_ALONE, indirect=True)
    def test_a_training_step_changes_lora_weights_only(self, overrides, tmp_path: Path, monkeypatch):
        held: list[Any] = []
        monkeypatch.setattr("arborl.run.setup.load_model", lambda *given: held.append(load_model(*given)) or held[0])
        config = load_config("tree", [*overrides, f"log.dir={tmp_path}", "train.epochs=1", "train.learning_rate=0.1"])
        fresh = {name: p.detach().clone() for name, p in load_model(config, CPU).module.named_parameters()}
        train(config)
        (model,) = held
        changed = {name for name, p in model.module.named_parameters() if not torch.equal(p, fresh[name])}
        assert changed
        assert all(".lora_" in name for name in changed)
        assert all(not p.requires_grad for part in (model.pipe.vae,) for p in part.parameters())

    @pytest.mark.parametrize("kind", ["lora", "full"])
    def test_exported_weights_are_the_trainers_picture_in_plain_diffusers(
        self, family, overrides, tiny_folder, tmp_path: Path, kind: str, capsys
    ):
        config = load_config(
            "tree",
            [*overrides, f"log.dir={tmp_path}", "train.epochs=1", "train.learning_rate=0.02", f"model.train={kind}"],
        )
        run = train(config)
        config = with_settings(config, {"sample.sigmas": "pipeline"})
        model = trained_model(config, run)
        policy = Policy(model, config, Accelerator(cpu=True))
        expected = model.decode(generate(policy, Prompts(TEXTS, {}), torch.arange(3))[:, 0])
        for how in ("lora", "merged") if kind == "lora" else ("full",):
            out = tmp_path / how
            run_ok("export", str(run), str(out), *(["--merge"] if how == "merged" else []))
            told = " ".join(capsys.readouterr().out.split())
            assert "gives the trainer's own picture" in told
            assert ("layers are there" if how == "lora" else "weights are there") in told
            facts = json.loads((out / "export.json").read_text())["check"]
            assert facts["largest"] <= 1e-4
            assert facts["from_base"] > 1e-4  # training did something
            # And once more by hand, another picture.
            for file in ("pytorch_lora_weights", "comfyui") if how == "lora" else ("",):
                pipe = plain(tiny_folder(family) if how == "lora" else out, family)
                if file:
                    pipe.load_lora_weights(out, weight_name=f"{file}.safetensors")
                torch.testing.assert_close(called(pipe, family, config, noise_of(model)), expected, rtol=0, atol=1e-4)

    def test_in_half_precision_too(self, overrides, tmp_path: Path):
        """As on a GPU: frozen weights in bfloat16, the adapter in float32, autocast; trained, exported, checked."""
        half = ["model.dtype=bfloat16", "train.mixed_precision=bf16", "train.learning_rate=0.02", "train.epochs=1"]
        run = train(load_config("tree", [*overrides, *half, f"log.dir={tmp_path}"]))
        run_ok("export", str(run), str(tmp_path / "out"))
        facts = json.loads((tmp_path / "out" / "export.json").read_text())["check"]
        assert facts["rounded"]
        assert facts["mean"] < 0.01


def trained_model(config: Any, run: Path) -> Any:
    from arborl.engine.state import trainable
    from arborl.run.checkpoint import load_weights, read_weights, weights_file

    model = load_model(config, CPU)
    load_weights(trainable(model.module), read_weights(weights_file(latest(run))))
    return model


def digests(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def run_ok(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 0


def latest(run: Path) -> Path:
    found, damaged = latest_valid(run)
    assert found
    assert not damaged
    return found


def reached(parameters: dict[str, torch.nn.Parameter]) -> dict[str, bool]:
    return reached_groups({name: max(sizes) for name, sizes in gradient_sizes(parameters).items()})


class TestGradients:
    """The check at the first update."""

    def test_groups_are_kinds_of_layers(self):
        module = torch.nn.ModuleDict()
        for block in range(3):
            for half in "AB":
                module[f"{block}_{half}"] = torch.nn.Linear(1, 1, bias=False)
        named = {f"blocks.{b}.attn.to_q.lora_{half}.default.weight": module[f"{b}_{half}"].weight
                 for b in range(3) for half in "AB"}  # fmt: skip
        assert reached(named) == {"blocks.*.attn.to_q": False}
        for name, parameter in named.items():
            parameter.grad = torch.full_like(parameter, 1.0 if "0.attn.to_q.lora_B" in name else 0.0)
        assert reached(named) == {"blocks.*.attn.to_q": True}
        stray = torch.nn.Parameter(torch.zeros(2))
        assert reached(named | {"blocks.0.norm.weight": stray})["blocks.*.norm.weight"] is False
        stray.grad = torch.full((2,), torch.nan)
        assert reached(named | {"blocks.0.norm.weight": stray})["blocks.*.norm.weight"] is True

    def test_weights_that_no_gradient_reaches_are_named(self, tiny_folder, tmp_path: Path, capsys, monkeypatch):
        """A LoRA cut off from the loss, as peers have shipped it."""
        from arborl.models.sd3 import SD3Model

        whole = SD3Model.velocity
        monkeypatch.setattr(
            SD3Model, "velocity", lambda self, x, t, text, pooled: whole(self, x, t, text.detach() * 0, pooled * 0)
        )
        overrides = [*tiny_overrides("sd3", tiny_folder("sd3")), "model.train=full", f"log.dir={tmp_path}"]
        train(load_config("tree", [*overrides, "train.epochs=2"]))
        told = capsys.readouterr().err
        assert told.count("no gradient reached") == 1
        assert "context_embedder.weight" in told


class TestOwnWays:
    """What is a family's own."""

    def test_flux_shift_grows_with_the_picture(self, tiny_folder):
        def shift(*size: str) -> float:
            config = load_config("tree", [*tiny_overrides("flux", tiny_folder("flux")), *size])
            return model_class(config).default_shift(config)

        # 256 picture tokens and fewer: e^0.5; 4096: e^1.15. A tiny VAE halves, and patches halve again.
        assert shift("sample.resolution=64", "sample.width=64") == pytest.approx(math.exp(0.5))
        assert shift("sample.resolution=256", "sample.width=256") == pytest.approx(math.exp(1.15))
        assert shift("sample.resolution=64") < shift("sample.resolution=128") < shift("sample.resolution=256")

    def test_a_shift_of_ones_own_is_taken(self, tiny_folder):
        config = load_config("tree", [*tiny_overrides("flux", tiny_folder("flux")), "sample.shift=3"])
        own = model_class(config).schedule_for(config, 4)
        assert own.sigma.tolist() == pytest.approx([1.0, 0.9, 0.75, 0.5])

    def test_wan_takes_the_shift_its_own_scheduler_calls_another_name(self, tiny_folder):
        config = load_config("tree", tiny_overrides("wan", tiny_folder("wan")))
        assert model_class(config).default_shift(config) == 3.0

    def test_flux_without_guidance_is_its_pipelines_own_call_too(self, tiny_folder):
        folder = tiny_folder("flux", guidance=False)
        overrides = [*tiny_overrides("flux", folder), "sample.guidance_scale=1", "sample.sigmas=pipeline"]
        policy = make_policy(overrides, "tree")
        config, model = policy.config, policy.model
        pictures = model.decode(generate(policy, Prompts(TEXTS, {}), torch.arange(3))[:, 0])
        expected = called(plain(folder, "flux"), "flux", config, noise_of(model))
        torch.testing.assert_close(pictures, expected, rtol=0, atol=1e-4)

    def test_a_unet_that_predicts_v_is_its_pipelines_own_call_too(self, tiny_folder):
        folder = tiny_folder("sd", prediction="v_prediction")
        policy = make_policy(tiny_overrides("sd", folder), "tree")
        config, model = policy.config, policy.model
        pictures = model.decode(generate(policy, Prompts(TEXTS, {}), torch.arange(3))[:, 0])
        expected = called(plain(folder, "sd"), "sd", config, noise_of(model))
        torch.testing.assert_close(pictures, expected, rtol=0, atol=1e-4)

    def test_flux_packing_is_diffusers_own(self):
        from arborl.models.flux import pack, unpack

        x = torch.randn(2, 4, 6, 8)
        packed = diffusers.FluxPipeline._pack_latents(x, *x.shape)
        assert torch.equal(pack(x), packed)
        assert torch.equal(unpack(packed, 6, 8), x)

    def test_flux_attention_gets_its_gradient_whole(self, tiny_folder):
        """cuDNN's attention must be handed one layout of gradients, whichever block it is in."""
        from arborl.models.flux import _WholeGradient

        _, model = make(tiny_overrides("flux", tiny_folder("flux")), "tree")
        blocks = model.pipe.transformer.single_transformer_blocks
        assert all(len(block.attn._forward_hooks) == 1 for block in blocks)
        gradients = []
        whole = _WholeGradient.backward
        _WholeGradient.backward = staticmethod(
            lambda ctx, *g: gradients.append((g[0], whole(ctx, *g))) or gradients[-1][1]
        )
        try:
            x, t = torch.ones(1, *model.latent_shape), torch.tensor([700.0])
            model.predict(x, t, model.encode(["a dog"])).sum().backward()
        finally:
            _WholeGradient.backward = staticmethod(whole)
        assert len(gradients) == len(blocks)
        assert all(not sliced.is_contiguous() and given.is_contiguous() for sliced, given in gradients)

    def test_a_video_is_sampled_to_a_file_that_plays(self, tiny_folder, tmp_path: Path):
        from PIL import Image

        run_ok("sample", *tiny_overrides("wan", tiny_folder("wan")), "-n", "2", "-o", str(tmp_path))
        with Image.open(tmp_path / "00001.webp") as video:
            assert (video.n_frames, video.size) == (5, (32, 16))
        assert (tmp_path / "sheet.png").is_file()
        rows = [json.loads(line) for line in (tmp_path / "index.jsonl").read_text().splitlines()]
        assert [row["file"] for row in rows] == ["00000.webp", "00001.webp"]

    def test_rewards_see_videos_whole(self):
        from arborl.rewards.simple import brightness, jpeg

        video = torch.rand(2, 5, 3, 16, 16)
        assert brightness(video, ["a", "b"], {}).shape == (2,)
        frames = jpeg(video.flatten(0, 1), ["a"] * 10, {}).view(2, 5)
        torch.testing.assert_close(jpeg(video, ["a", "b"], {}), frames.mean(1))


class TestExport:
    """The rest of `arborl export`."""

    @pytest.fixture
    def run(self, tiny_folder, tmp_path: Path) -> Path:
        overrides = [*tiny_overrides("sd3", tiny_folder("sd3")), f"log.dir={tmp_path}", "train.epochs=2"]
        return train(load_config("tree", [*overrides, "train.learning_rate=0.02", "train.ema_decay=0.5"]))

    def test_the_average_or_the_last(self, run: Path, tmp_path: Path):
        tensors = {}
        for name, flags in {"default": [], "average": ["--ema"], "last": ["--no-ema"]}.items():
            run_ok("export", str(run), str(tmp_path / name), *flags)
            tensors[name] = load_file(tmp_path / name / "pytorch_lora_weights.safetensors")
        key = next(key for key in tensors["last"] if key.endswith("lora_B.weight"))
        assert torch.equal(tensors["default"][key], tensors["average"][key])
        assert not torch.equal(tensors["last"][key], tensors["average"][key])

    def test_alpha_is_in_the_weights(self, run: Path, tmp_path: Path):
        """So that a loader that knows of no alpha gives the whole strength."""
        run_ok("export", str(run), str(tmp_path / "out"), "--no-ema")
        ours = load_file(latest(run) / "weights.safetensors")
        theirs = load_file(tmp_path / "out" / "pytorch_lora_weights.safetensors")
        name = "transformer_blocks.0.attn.to_q"
        b = ours[f"{name}.lora_B.default.weight"]
        assert torch.equal(theirs[f"transformer.{name}.lora_B.weight"], b * 64 / 4)
        assert torch.equal(theirs[f"transformer.{name}.lora_A.weight"], ours[f"{name}.lora_A.default.weight"])

    def test_a_pipeline_in_half_precision(self, run: Path, tmp_path: Path):
        run_ok("export", str(run), str(tmp_path / "out"), "--merge", "--dtype", "bfloat16")
        with safe_open(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors", "pt") as file:
            assert file.get_tensor("proj_out.weight").dtype == torch.bfloat16
        assert not list((tmp_path / "out").glob("*.safetensors"))

    def test_a_pipeline_that_is_not_what_was_trained_does_not_pass_for_rounding(
        self, run, tmp_path, capsys, monkeypatch
    ):
        """In half precision a picture may be a little off; weights may not."""
        whole = diffusers.SD3Transformer2DModel.save_pretrained

        def without(self: Any, *given: Any, **options: Any) -> None:
            with torch.no_grad():
                self.proj_out.weight.add_(1e-3)
            whole(self, *given, **options)
            with torch.no_grad():
                self.proj_out.weight.sub_(1e-3)

        monkeypatch.setattr(diffusers.SD3Transformer2DModel, "save_pretrained", without)
        words = ["does not load all of it", "proj_out.weight"]
        refused(["export", str(run), str(tmp_path / "out"), "--merge", "--dtype", "bfloat16"], words, capsys)

    def test_a_lora_in_half_precision(self, run: Path, tmp_path: Path):
        run_ok("export", str(run), str(tmp_path / "out"), "--dtype", "bfloat16")
        tensors = load_file(tmp_path / "out" / "pytorch_lora_weights.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}

    def test_what_diffusers_keeps_in_float32_stays_so(self, tiny_folder, tmp_path: Path):
        overrides = [*tiny_overrides("wan", tiny_folder("wan")), f"log.dir={tmp_path}", "train.epochs=1"]
        run = train(load_config("tree", overrides))
        run_ok("export", str(run), str(tmp_path / "out"), "--merge", "--dtype", "bfloat16")
        with safe_open(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors", "pt") as file:
            assert file.get_tensor("blocks.0.attn1.to_q.weight").dtype == torch.bfloat16
            assert file.get_tensor("blocks.0.scale_shift_table").dtype == torch.float32

    def test_from_another_folder(self, tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """A run remembers where its model lay, and needs its prompts no more; and goes on from there too."""
        (tmp_path / "here").mkdir()
        (tmp_path / "there").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        shutil.copytree(tiny_folder("sd"), "pipe")
        Path("p.txt").write_text("a cat\na dog")
        own = [word for word in tiny_overrides("sd", Path("x")) if not word.startswith("model.path")]
        run_ok("train", "model.path=pipe", *own, "prompts.path=p.txt", "train.epochs=1", "run_name=x")
        monkeypatch.chdir(tmp_path / "there")
        run_ok("train", "--resume", "../here/runs/x", "train.epochs=2", "prompts.batch_size=4")
        (tmp_path / "here" / "p.txt").unlink()
        run_ok("export", "../here/runs/x", "out")
        shutil.move(tmp_path / "here" / "pipe", tmp_path / "moved")
        run_ok("export", "../here/runs/x", "again", "model.path=../moved")
        first, second = (load_file(Path(name) / "pytorch_lora_weights.safetensors") for name in ("out", "again"))
        assert all(torch.equal(first[key], second[key]) for key in first | second)

    def test_a_named_checkpoint(self, run: Path, tmp_path: Path):
        run_ok("export", str(latest(run)), str(tmp_path / "out"))
        assert json.loads((tmp_path / "out" / "export.json").read_text())["checkpoint"] == latest(run).name

    def test_two_at_once_into_one_place(self, run: Path, tmp_path: Path):
        """One of them makes it, whole, and the other says that it was not first; a folder beside it is nobody's."""
        foreign = tmp_path / ".out.tmp"
        foreign.mkdir()
        (foreign / "keep.txt").write_text("theirs")
        with Fork("export", str(run), "out", cwd=tmp_path) as one, Fork("export", str(run), "out", cwd=tmp_path) as two:
            both = [one.ended(), two.ended()]
        first, second = sorted(both, key=lambda end: end.code)
        assert first.code == 0, first.said
        assert second.stopped_with("is there already; allowed: a new folder")
        made = {path.name for path in (tmp_path / "out").iterdir()}
        assert made == {"pytorch_lora_weights.safetensors", "comfyui.safetensors", "export.json"}
        assert json.loads((tmp_path / "out" / "export.json").read_text())["check"]["mean"] < 1e-4
        assert [path.read_text() for path in foreign.iterdir()] == ["theirs"]
        assert not list(tmp_path.glob(".arborl-*"))

    def test_of_a_run_that_goes_on_meanwhile(self, run: Path, tmp_path: Path, monkeypatch):
        """Its checkpoint may be gone before the model is loaded."""

        def later(*given: Any) -> Any:
            shutil.rmtree(run / "checkpoints")
            return load_model(*given)

        monkeypatch.setattr("arborl.export.load_model", later)
        run_ok("export", str(run), str(tmp_path / "out"))
        assert (tmp_path / "out" / "export.json").is_file()

    def test_the_scenes(self, tmp_path: Path):
        small = [
            "train.epochs=1",
            "sample.num_prompts=2",
            "eval.num_prompts=2",
            "log.trackers=[]",
            f"log.dir={tmp_path}",
        ]
        run_ok("export", str(train(load_config("tree", small))), str(tmp_path / "out"))
        pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(
            tmp_path / "out", text_encoder_3=None, tokenizer_3=None
        )
        assert pipe.transformer.config.num_layers == 5

    def test_what_does_not_load_back_is_not_exported(self, run: Path, tmp_path: Path, capsys, monkeypatch):
        """A loader that drops the LoRA; and one that loads it into a pipeline that draws something else."""
        monkeypatch.setattr(diffusers.StableDiffusion3Pipeline, "load_lora_weights", lambda *_, **__: None)
        refused(["export", str(run), str(tmp_path / "out")], ["does not load all of it", "out.failed-1"], capsys)
        assert not (tmp_path / "out").exists()
        assert (tmp_path / "out.failed-1" / "pytorch_lora_weights.safetensors").is_file()
        monkeypatch.undo()
        whole = diffusers.StableDiffusion3Pipeline.__call__
        monkeypatch.setattr(
            diffusers.StableDiffusion3Pipeline, "__call__", lambda *a, **k: (whole(*a, **k)[0].flip(-1),)
        )
        refused(["export", str(run), str(tmp_path / "out")], ["another picture", "out.failed-2"], capsys)

    def test_bad_input(self, run: Path, tmp_path: Path, capsys):
        full = tmp_path / "full"
        full.mkdir()
        (full / "mine.txt").write_text("keep me")
        refused(["export", str(run), str(full)], ["out=", "is there already"], capsys)
        assert (full / "mine.txt").read_text() == "keep me"
        refused(["export", str(tmp_path), str(tmp_path / "o")], ["is not a run folder"], capsys)
        checkpoint = latest(run)
        (checkpoint / "ema.safetensors").unlink()
        (checkpoint / "SHA256SUMS").unlink()
        _seal(checkpoint)
        refused(["export", str(run), str(tmp_path / "o"), "--ema"], ["--ema", "no average", "--no-ema"], capsys)
        small = ["train.epochs=1", "eval.num_prompts=2", f"log.dir={tmp_path}", "log.record_every=0", "log.trackers=[]"]
        mixture = train(load_config("mixture", small))
        refused(["export", str(mixture), str(tmp_path / "o")], ["no diffusers pipeline"], capsys)
        assert not (tmp_path / "o").exists()


def refused(arguments: list[str], words: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    lines = [line for line in capsys.readouterr().err.strip().splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert all(word in lines[0] for word in words), lines[0]


def edited(folder: Path, to: Path, file: str, **values: Any) -> Path:
    """A copy of a pipeline with some values of one of its JSON files changed."""
    shutil.copytree(folder, to)
    path = to / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return to


T5 = ["sd3", "flux", "wan"]
BAD = {
    "resolution": (TINY, ["sample.resolution=17"], ["sample.resolution=17", "multiples of"]),
    "too large": (["sd3"], ["sample.resolution=512"], ["sample.resolution=512", "multiples of 4 up to 32"]),
    "no tokens": (T5, ["model.max_sequence_length=0"], ["model.max_sequence_length=0", "T5", "1..512"]),
    "too many tokens": (T5, ["model.max_sequence_length=600"], ["model.max_sequence_length=600", "at most 512"]),
    "negative, told guidance": (["flux"], ["sample.negative_prompt=x"], ["sample.negative_prompt=x", "guidance"]),
    "negative, no guidance": (
        ["sd"],
        ["sample.negative_prompt=x", "sample.guidance_scale=1"],
        ["sample.negative_prompt=x", "guidance"],
    ),
    "width": (TINY, ["sample.width=27"], ["sample.width=27", "multiples of"]),
    "lora": (TINY, ["model.lora.targets=[nose]"], ["model.lora.targets=['nose']", "to_q"]),
    "frames": (["sd3", "flux", "sd", "sdxl"], ["sample.num_frames=5"], ["sample.num_frames=5", "no videos"]),
    "odd frames": (["wan"], ["sample.num_frames=6"], ["sample.num_frames=6", "4·n + 1", "5 or 9"]),
    "cache": (["sd"], ["prompts.cache=/proc/nowhere"], ["prompts.cache=/proc/nowhere", "cannot be written"]),
}


@pytest.mark.parametrize(("name", "which"), [(name, which) for name, (some, *_) in BAD.items() for which in some])
def test_bad_input_is_one_line_and_nothing_is_written(name: str, which: str, tiny_folder, tmp_path: Path, capsys):
    _, own, words = BAD[name]
    overrides = [*tiny_overrides(which, tiny_folder(which)), f"log.dir={tmp_path / 'runs'}", *own]
    refused(["train", *overrides], words, capsys)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["sample", "eval", "embed"])
def test_other_commands_look_before_they_do_anything(command: str, tiny_folder, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("a cat")
    arguments = [command, *(["p.txt"] if command == "embed" else []), *tiny_overrides("flux", tiny_folder("flux"))]
    refused([*arguments, "sample.num_frames=5", "prompts.cache=kept"], ["sample.num_frames=5", "no videos"], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["p.txt"]


class TestBadPipelines:
    def test_guidance_for_a_model_that_has_none(self, tiny_folder, capsys):
        overrides = tiny_overrides("flux", tiny_folder("flux", guidance=False))
        refused(["train", *overrides], ["sample.guidance_scale=3.5", "no guidance", "allowed: 1"], capsys)

    def test_another_family_than_the_one_named(self, tiny_folder, capsys):
        refused(
            ["train", "model=flux_dev", f"model.path={tiny_folder('sd')}", "rewards=brightness"],
            ["StableDiffusionPipeline", "allowed: FluxPipeline"],
            capsys,
        )

    def test_wan_with_two_experts(self, tiny_folder, tmp_path: Path, capsys):
        folder = edited(tiny_folder("wan"), tmp_path / "wan", "model_index.json", expand_timesteps=True)
        named = ["train", "model.family=wan", *tiny_overrides("wan", folder)]
        refused(named, ["model.path=", "Wan2.2", "model.family=pipeline"], capsys)

    def test_a_consistency_model(self, tiny_folder, tmp_path: Path, capsys):
        folder = edited(tiny_folder("sd"), tmp_path / "lcm", "unet/config.json", time_cond_proj_dim=8)
        refused(["train", *tiny_overrides("sd", folder)], ["model.path=", "consistency"], capsys)

    def test_a_schedule_from_pure_noise(self, tiny_folder, tmp_path: Path, capsys):
        scheduler = "scheduler/scheduler_config.json"
        values = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        folder = edited(tiny_folder("sd"), tmp_path / "zero", scheduler, **values)
        refused(["train", *tiny_overrides("sd", folder)], ["pure noise"], capsys)

    @pytest.mark.parametrize(
        "missing", ["transformer/config.json", "transformer/diffusion_pytorch_model.safetensors", "tokenizer", "vae"]
    )
    def test_an_incomplete_folder(self, tiny_folder, tmp_path: Path, capsys, missing: str):
        folder = edited(tiny_folder("sd3"), tmp_path / "part", "model_index.json")
        shutil.rmtree(folder / missing) if (folder / missing).is_dir() else (folder / missing).unlink()
        refused(["train", *tiny_overrides("sd3", folder)], ["model.path=", "is incomplete"], capsys)

    def test_weights_that_are_only_pointers(self, tiny_folder, tmp_path: Path, capsys):
        """What a clone without git-lfs leaves."""
        folder = edited(tiny_folder("sd"), tmp_path / "lfs", "model_index.json")
        (folder / "text_encoder" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
        overrides = [*tiny_overrides("sd", folder), f"prompts.cache={tmp_path / 'cache'}"]
        refused(["train", *overrides], ["model.path=", "is incomplete"], capsys)

    def test_a_configuration_without_what_is_needed(self, tiny_folder, tmp_path: Path, capsys):
        folder = edited(tiny_folder("sd3"), tmp_path / "part", "model_index.json")
        (folder / "vae" / "config.json").write_text("{}")
        words = ["model.path=", "its vae names no block_out_channels"]
        refused(["train", *tiny_overrides("sd3", folder)], words, capsys)
        (folder / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
        refused(["train", *tiny_overrides("sd3", folder)], ["model.path=", "its index names no scheduler"], capsys)

    def test_a_scheduler_whose_noise_levels_are_not_known(self, tiny_folder, tmp_path: Path, capsys):
        index = {"scheduler": ["diffusers", "EDMDPMSolverMultistepScheduler"]}
        folder = edited(tiny_folder("sdxl"), tmp_path / "edm", "model_index.json", **index)
        refused(["train", *tiny_overrides("sdxl", folder)], ["EDMDPMSolver", "EulerDiscreteScheduler"], capsys)

    def test_latents_with_a_mean_of_their_own(self, tiny_folder, tmp_path: Path, capsys):
        folder = edited(tiny_folder("sdxl"), tmp_path / "mean", "vae/config.json", latents_mean=[0.0] * 4)
        refused(["train", *tiny_overrides("sdxl", folder)], ["model.path=", "latents with a mean"], capsys)

    def test_a_pipeline_without_support_names_those_with(self, tmp_path: Path, capsys):
        index = {"_class_name": "CogVideoXPipeline", "scheduler": ["diffusers", "CogVideoXDDIMScheduler"]}
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        words = ["CogVideoXDDIMScheduler", "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"]
        refused(["train", f"model.path={tmp_path}"], words, capsys)

    def test_a_missing_hub_model_says_what_to_download_and_where(self, capsys):
        for arguments in (["model.path=some/model"], ["model=flux_dev", "rewards=brightness", "sample.shift=3"]):
            refused(["train", *arguments], ["hf download", "--local-dir"], capsys)


def test_nothing_is_fetched_when_offline(tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import socket

    tried: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: tried.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: tried.append(address) or [])
    run_ok("train", *tiny_overrides("sdxl", tiny_folder("sdxl")), f"log.dir={tmp_path}", "train.epochs=1", "run_name=x")
    run_ok("export", str(tmp_path / "x"), str(tmp_path / "out"))
    with pytest.raises(InputError, match="hf download"):
        make(["model=sd35_medium", "rewards=brightness"], "tree")
    assert not tried


def test_a_hub_model_is_taken_from_the_cache(tmp_path: Path, monkeypatch, capsys):
    """By its id, offline, from a snapshot as the hub's own client makes it: links to blobs, weights in shards."""
    repository, commit = tmp_path / "hub" / "models--some--model", "0" * 40
    snapshot = repository / "snapshots" / commit
    pipe = build("flux")
    pipe.save_pretrained(tmp_path / "plain", max_shard_size="200KB")
    assert list((tmp_path / "plain" / "transformer").glob("*-of-*.safetensors"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "blobs").mkdir()
    for file in sorted(path for path in (tmp_path / "plain").rglob("*") if path.is_file()):
        name = file.relative_to(tmp_path / "plain")
        blob = repository / "blobs" / hashlib.sha256(str(name).encode()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blob)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    own = [word for word in tiny_overrides("flux", Path("x")) if not word.startswith("model.path")]
    command = ["train", "model.path=some/model", *own, "train.epochs=1", f"prompts.cache={tmp_path / 'cache'}"]
    run_ok(*command, "run_name=x")
    run_ok("export", "runs/x", "out", "--merge")
    assert (tmp_path / "out" / "text_encoder_2" / "model.safetensors").is_file()
    assert not (tmp_path / "out" / "text_encoder_2" / "model.safetensors").is_symlink()
    (snapshot / "vae" / "config.json").unlink()
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    assert "not whole in the hub's cache" in capsys.readouterr().err


class Mixin(torch.nn.Module):
    """Of somebody else, with words of its own."""

    def compile(self) -> None: ...

    def reference(self) -> None: ...


def overriding(name: str) -> type:
    return type("Own", (MixtureModel,), {name: lambda self: None})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("as_trained", "which is not the model's any more: arborl.engine.policy.Policy has it"),
        ("keep_reference", "which is not the model's any more"),
        ("compile", "which has another name now; try: compile_decoder"),
        ("own_shift", "which has another name now; try: default_shift"),
    ],
)
def test_what_a_model_of_ones_own_overrides_is_still_there(name: str, text: str) -> None:
    """Else it would be ignored without a word. What others call so in a class beside it is theirs."""
    with pytest.raises(InputError, match=f"^model.family=own: overrides {name}, {text}"):
        check_overrides("own", overriding(name))
    check_overrides("own", type("Both", (MixtureModel, Mixin), {}))
