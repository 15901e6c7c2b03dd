"""A run's weights for others to use: a diffusers LoRA or pipeline, loaded again with plain diffusers and checked."""

import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .checkpoint import load_weights, trainable, weights_of
from .config.schema import Config
from .core.errors import InputError
from .embed import embed
from .evaluate import generate, noise_of_seeds
from .inputs import heldout_prompts
from .job import start_accelerator
from .models import load_model, lora, model_class
from .models.pipeline import PipelineModel
from .models.quiet import quiet_libraries
from .models.source import Source

DIFFUSERS, COMFYUI = "pytorch_lora_weights.safetensors", "comfyui.safetensors"


@dataclass(frozen=True)
class Check:
    """How far pictures of one prompt and seed are apart, in pixels of 0 to 1."""

    prompt: str
    seed: int
    largest: float  # between the trainer's and the reloaded one's
    mean: float
    from_base: float  # the mean between the trainer's and that of the model before training
    rounded: bool  # to bfloat16, and the rounding of a step grows over those that follow

    @property
    def passed(self) -> bool:
        return self.mean <= 0.05 if self.rounded else self.largest <= 1e-4


def export(
    config: Config,
    checkpoint: Path,
    to: Path,
    average: bool | None,
    merge: bool,
    dtype: str,
    say: Callable[[str], None],
) -> Check:
    """Write a checkpoint's weights to the new folder `to` and check them; nothing is there unless they pass.

    A LoRA as diffusers and as ComfyUI name its layers, or with `merge`, or after a full fine-tune, the pipeline.
    """
    family = model_class(config)
    if not issubclass(family, PipelineModel):
        problem = "its model is no diffusers pipeline, so there is none to export"
        raise InputError("run", checkpoint.parent.parent, problem)
    to = to.resolve()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError("out", to, "is there already", "a new folder")
    weights = _weights(checkpoint, average)
    aside = to.with_name(f".{to.name}.tmp")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    except OSError as error:
        raise InputError("out", to, f"cannot be made ({error.strerror})") from None
    # The pipeline's own noise levels, so that a plain call can be compared; and whole precision, so that it can be told
    # apart from another, unless the settings say bfloat16.
    config = replace(config, sample=replace(config.sample, sigmas="pipeline"))
    if config.model.dtype != "bfloat16":
        model, train = replace(config.model, dtype="float32"), replace(config.train, mixed_precision="no")
        config = replace(config, model=model, train=train)
    try:
        trained = _write(family, config, weights, aside, getattr(torch, dtype), merge)
        gc.collect()  # the trainer's model has left, the plain one may come
        check = _check(family, config, aside, trained, to)
        facts = {"run": str(checkpoint.parent.parent), "checkpoint": checkpoint.name, "weights": weights.stem}
        facts |= {"base": family.path(config), "check": vars(check)}
        (aside / "export.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")
        for file in aside.rglob("*.safetensors"):
            shutil.copymode(aside / "export.json", file)  # safetensors makes files that nobody else may read
        if to.exists():
            to.rmdir()
        aside.rename(to)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    which = f"{'the average of the weights' if weights.stem == 'ema' else 'the weights'} of {checkpoint.name}"
    if trained.layers:
        say(f"{to}: {which}, a LoRA for {family.pipeline}.load_lora_weights")
        say(f"{to / COMFYUI}: the same under the names ComfyUI reads")
    else:
        say(f"{to}: {which}, in a {family.pipeline} for from_pretrained")
    layers = f"all {len(trained.layers)} layers are there, and " if trained.layers else ""
    say(
        f"checked with plain diffusers: {layers}seed {check.seed} gives the trainer's own picture of “{check.prompt}” "
        f"(pixels off by {check.largest:.1e} at most; from the untrained model's by {check.from_base:.1e} on average)"
    )
    return check


@dataclass(frozen=True)
class Trained:
    """What the trainer's own model made, before it left memory, and how to ask a plain pipeline for the same."""

    layers: dict[str, tuple[Tensor, Tensor]]  # of the LoRA that was written; none where a pipeline was
    prompt: str
    seed: int
    picture: Tensor
    base_picture: Tensor
    call: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    rounded: bool  # to bfloat16, in memory, in arithmetic or in what was written

    def lost(self, module: nn.Module) -> list[str]:
        """Layers whose LoRA a plain pipeline's module does not have as it was trained.

        A picture alone could not tell, where little was learnt.
        """
        found = lora.pairs(module)

        def arrived(layer: str, pair: tuple[Tensor, Tensor]) -> bool:
            return layer in found and all(
                torch.equal(there, t.to(there.dtype)) for there, t in zip(found[layer], pair, strict=True)
            )

        return [layer for layer, pair in self.layers.items() if not arrived(layer, pair)]

    def compare(self, found: Tensor) -> Check:
        off = (found.float().cpu() - self.picture).abs()
        from_base = float((self.picture - self.base_picture).abs().mean())
        return Check(self.prompt, self.seed, float(off.max()), float(off.mean()), from_base, self.rounded)


def _write(
    family: type[PipelineModel], config: Config, weights: Path, folder: Path, dtype: torch.dtype, merge: bool
) -> Trained:
    """Load the trainer's model, draw its picture, and write its weights."""
    accelerator = start_accelerator(config)
    prompt = heldout_prompts(config, family).take([0])
    embed(config, prompt.texts, accelerator)
    model = load_model(config, accelerator.device)
    assert isinstance(model, PipelineModel)
    module, model.module = model.module, accelerator.prepare(model.module)
    noise = noise_of_seeds([config.seed], model.latent_shape)

    def picture() -> Tensor:
        leaves = generate(model, prompt, torch.zeros(1, dtype=torch.long), config, noise)
        return model.decode(leaves[:, 0]).float().cpu()

    base_picture = picture()
    load_weights(trainable(module), weights)
    own_picture = picture()
    adapted = lora.is_injected(module)
    layers = lora.pairs(module) if adapted else {}
    if adapted:
        _write_lora(family, layers, folder)
    if adapted and merge:
        _merge(model.source, folder, family.part, dtype)
    if not adapted:
        module.to(dtype).save_pretrained(folder / family.part)  # pyright: ignore[reportCallIssue]
        _copy_parts(model.source, folder, family.part)
    accelerator.free_memory()
    steps = config.eval.num_steps or config.sample.num_steps
    call = {"prompt": prompt.texts, "latents": model.as_pipeline_latents(noise[0]), "num_inference_steps": steps}
    call |= model.call_options()
    rounded = model.dtype != torch.float32 or accelerator.mixed_precision != "no"
    rounded |= (merge or not adapted) and dtype != torch.float32
    layers = {} if merge else layers
    return Trained(
        layers, prompt.texts[0], config.seed, own_picture, base_picture, call, model.device, model.dtype, rounded
    )


def _check(family: type[PipelineModel], config: Config, folder: Path, trained: Trained, to: Path) -> Check:
    """Load what was written as a user will, with nothing of ours in it but the scheduler's settings, and compare."""
    source = Source(str(folder)) if not trained.layers else family.open(config)
    pipe = source.load({"default": trained.dtype}, lambda name: name not in family.left_out)
    with quiet_libraries():  # they tell at length which parts a LoRA has nothing for
        if trained.layers:
            pipe.load_lora_weights(folder, weight_name=DIFFUSERS)
        lost = trained.lost(getattr(pipe, family.part)) if trained.layers else []
        pipe.scheduler = family.integrator(config)
        call = trained.call | {"latents": trained.call["latents"].to(trained.device, trained.dtype)}
        if trained.device.type == "cuda":
            pipe.enable_model_cpu_offload(device=trained.device)  # its parts in turn: T5 alone is 19 GB in float32
        check = trained.compare(pipe(**call, output_type="pt", return_dict=False)[0])
    if check.passed and not lost:
        return check
    failed = to.with_name(f"{to.name}.failed")
    shutil.rmtree(failed, ignore_errors=True)
    folder.rename(failed)
    problem = f"loaded with plain diffusers it gives another picture (pixels off by {check.largest:.1e} at most, "
    problem += f"{check.mean:.1e} on average)"
    if lost:
        problem = f"plain diffusers does not load all of it ({len(lost)} layers are not as they were, as {lost[0]})"
    raise InputError("out", to, f"{problem}; what was written is in {failed}")


def _weights(checkpoint: Path, average: bool | None) -> Path:
    """The file of the weights asked for; the average where there is one, if not said."""
    if average is None:
        return weights_of(checkpoint)
    file = checkpoint / ("ema.safetensors" if average else "weights.safetensors")
    if not file.is_file():
        raise InputError("--ema", None, "the run keeps no average of its weights (train.ema_decay is 0)", "--no-ema")
    return file


def _write_lora(family: type[PipelineModel], layers: dict[str, tuple[Tensor, Tensor]], folder: Path) -> None:
    """As diffusers names its layers, and as ComfyUI does.

    The scale is in the matrices, so alpha is the rank, which every loader takes where a file does not say otherwise.
    """
    import diffusers

    named = {
        f"{layer}.lora_{half}.weight": m for layer, pair in layers.items() for half, m in zip("AB", pair, strict=True)
    }
    getattr(diffusers, family.pipeline).save_lora_weights(folder, **{f"{family.part}_lora_layers": named})
    save_file(
        {k: t for layer, (a, b) in layers.items() for k, t in family.comfyui(layer, a, b).items()}, folder / COMFYUI
    )


def _copy_parts(source: Source, folder: Path, but: str) -> None:
    """The pipeline as it is, but for the part that was trained."""
    for part in source.parts:
        if part != but and (source.folder / part).is_dir():
            shutil.copytree(source.folder / part, folder / part)
    shutil.copy(source.folder / "model_index.json", folder / "model_index.json")


def _merge(source: Source, folder: Path, part: str, dtype: torch.dtype) -> None:
    """From a LoRA to a pipeline that has it in its weights, by diffusers' own means."""
    pipe = source.load({"default": torch.float32}, lambda name: name in (part, "scheduler"))
    with quiet_libraries():
        pipe.load_lora_weights(folder, weight_name=DIFFUSERS)
        pipe.fuse_lora(components=[part])
        pipe.unload_lora_weights()
    getattr(pipe, part).to(dtype).save_pretrained(folder / part)
    _copy_parts(source, folder, part)
    for name in (DIFFUSERS, COMFYUI):
        (folder / name).unlink()
