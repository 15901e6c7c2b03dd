"""A run's weights for others to use: a diffusers LoRA or pipeline, loaded again with plain diffusers and checked."""

import errno
import gc
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .config.schema import Config
from .core.errors import InputError
from .data.prompts import Prompts
from .engine.autotune import find_batch_sizes
from .engine.generate import generate, noise_of_seeds
from .engine.policy import Policy
from .engine.precompute import precompute_embeddings
from .engine.state import trainable
from .models import load_model, lora, model_class
from .models.pipeline import PipelineModel
from .models.source import Source
from .run.checkpoint import Weights, load_weights, weights_file
from .run.resume import weights_of
from .run.setup import start_accelerator
from .tools.files import as_text, kind_of, remove_abandoned, scratch
from .tools.quiet import quiet_libraries

DIFFUSERS, COMFYUI = "pytorch_lora_weights.safetensors", "comfyui.safetensors"


@dataclass(frozen=True)
class Check:
    """Differences between pictures of one prompt and seed, in pixels of 0 to 1."""

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
    run: Path,
    to: Path,
    average: bool | None,
    merge: bool,
    dtype: str,
) -> list[str]:
    """Write the weights of a run, or of one of its checkpoints, to the new folder `to` and check them; nothing is there
    unless they pass.

    A LoRA as diffusers and as ComfyUI name its layers; with `merge`, or after a full fine-tune, the pipeline. Returns
    what to tell of it.
    """
    family = model_class(config)
    if not issubclass(family, PipelineModel):
        problem = "its model is no diffusers pipeline, so there is none to export"
        raise InputError("run", run, problem)
    to = to.resolve()
    if kind_of(to) and (not to.is_dir() or any(to.iterdir())):
        raise _taken(to)
    family.check(config, may_fetch=True)
    # Read now: a run that is going on may have removed the checkpoint by the time the model is loaded.
    weights = weights_of(run, lambda checkpoint: _weights(checkpoint, average))
    # The pipeline's own noise levels, so that a plain call can be compared; and whole precision, so that it can be told
    # apart from another, unless the settings say bfloat16.
    config = replace(config, sample=replace(config.sample, sigmas="pipeline"))
    if config.model.dtype != "bfloat16":
        model, train = replace(config.model, dtype="float32"), replace(config.train, mixed_precision="no")
        config = replace(config, model=model, train=train)
    checkpoint, stem = weights.path.parent, weights.path.stem
    with _beside(to) as aside:
        with _whole_float32():
            trained = _write(family, config, weights, aside, getattr(torch, dtype), merge)
            gc.collect()  # the trainer's model has left, the plain one may come
            check = _check(family, config, aside, trained, to)
        facts = {"run": as_text(checkpoint.parent.parent), "checkpoint": checkpoint.name, "weights": stem}
        facts |= {"base": family.path(config), "check": vars(check)}
        (aside / "export.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")
        for file in aside.rglob("*.safetensors"):
            shutil.copymode(aside / "export.json", file)  # safetensors makes files that nobody else may read
        _put(aside, to)
    which = f"{'the average of the weights' if stem == 'ema' else 'the weights'} of {checkpoint.name}"
    what = f"all {len(trained.layers)} layers are" if trained.layers else f"all {len(trained.digests)} weights are"
    checked = (
        f"checked with plain diffusers: {what} there, and seed {check.seed} gives the trainer's own picture of "
        f"“{check.prompt}” (pixels off by {check.mean:.1e} on average and {check.largest:.1e} at most; from the "
        f"untrained model's by {check.from_base:.1e} on average)"
    )
    if not trained.layers:
        return [f"{to}: {which}, in a {family.pipeline} for from_pretrained", checked]
    comfyui = f"{to / COMFYUI}: the same under the names ComfyUI reads"
    return [f"{to}: {which}, a LoRA for {family.pipeline}.load_lora_weights", comfyui, checked]


def _taken(to: Path) -> InputError:
    return InputError("out", to, "is there already", "a new folder")


@contextmanager
def _beside(to: Path) -> Iterator[Path]:
    """A folder of this process alone to write into, on the same disk."""
    with ExitStack() as stack:
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(to.parent)
            aside = stack.enter_context(scratch(to.parent)) / to.name
            aside.mkdir()
        except OSError as error:
            raise InputError("out", to, f"cannot be made ({error.strerror})") from None
        yield aside


def _put(aside: Path, to: Path) -> None:
    """In the place of nothing, or of an empty folder: another export may have been there first."""
    try:
        aside.rename(to)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise _taken(to) from None


@dataclass(frozen=True)
class Trained:
    """The trainer's own picture and weights, kept before its model left memory; and the plain pipeline's call for the
    same picture.
    """

    layers: dict[str, tuple[Tensor, Tensor]]  # of the LoRA that was written; none where a pipeline was
    digests: dict[str, str]  # of the pipeline's trained part
    prompt: str
    seed: int
    picture: Tensor
    base_picture: Tensor
    call: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    rounded: bool  # to bfloat16, in memory, in arithmetic or in what was written

    def missing(self, module: nn.Module) -> list[str]:
        """Names of weights that a plain pipeline's module does not have as they were written.

        A picture alone could not tell, where little was learnt or much is rounded.
        """
        if self.digests:
            found = _digests(module)
            return [name for name, digest in self.digests.items() if found.get(name) != digest]
        there = lora.matrices(module)

        def arrived(layer: str, pair: tuple[Tensor, Tensor]) -> bool:
            return layer in there and all(
                torch.equal(a, b.to(a.dtype)) for a, b in zip(there[layer], pair, strict=True)
            )

        return [layer for layer, pair in self.layers.items() if not arrived(layer, pair)]

    def compare(self, found: Tensor) -> Check:
        off = (found.float().cpu() - self.picture).abs()
        from_base = float((self.picture - self.base_picture).abs().mean())
        return Check(self.prompt, self.seed, float(off.max()), float(off.mean()), from_base, self.rounded)


def _write(
    family: type[PipelineModel], config: Config, weights: Weights, folder: Path, dtype: torch.dtype, merge: bool
) -> Trained:
    """Load the trainer's model, draw its picture, and write its weights."""
    accelerator = start_accelerator(config, together=False)
    prompt = Prompts([family.heldout_prompts[0]], {})  # a run's own file may have stayed elsewhere
    precompute_embeddings(config, prompt.texts, accelerator)
    model = load_model(config, accelerator.device)
    assert isinstance(model, PipelineModel)
    policy, module = Policy(model, config, accelerator), model.module
    policy.prepare()
    policy.batch_sizes, _ = find_batch_sizes(config, policy, None, prompt.texts[0])
    noise = noise_of_seeds([config.seed], model.latent_shape)

    def picture() -> Tensor:
        leaves = generate(policy, prompt, torch.zeros(1, dtype=torch.long), noise)
        return model.decode(leaves[:, 0]).float().cpu()

    base_picture = picture()
    load_weights(trainable(module), weights)
    own_picture = picture()
    adapted = lora.is_injected(module)
    layers, digests = {}, {}
    if adapted:
        layers = {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in lora.matrices(module).items()}
    if adapted and not merge:
        _write_lora(family, layers, folder)
    else:
        whole = _merged(model.source, family.trained_component, layers) if adapted else module
        _round(whole, dtype)
        whole.save_pretrained(folder / family.trained_component)  # pyright: ignore[reportCallIssue]
        layers, digests = {}, _digests(whole)
        _copy_parts(model.source, folder, family.trained_component)
    accelerator.free_memory()
    steps = config.eval.num_steps or config.sample.num_steps
    call = {"prompt": prompt.texts, "latents": model.as_pipeline_latents(noise[0]), "num_inference_steps": steps}
    call |= model.call_options()
    rounded = torch.bfloat16 in (model.dtype, dtype) or accelerator.mixed_precision != "no"
    return Trained(
        layers,
        digests,
        prompt.texts[0],
        config.seed,
        own_picture,
        base_picture,
        call,
        model.device,
        model.dtype,
        rounded,
    )


def _check(family: type[PipelineModel], config: Config, folder: Path, trained: Trained, to: Path) -> Check:
    """Load what was written as a user will, with nothing of ours in it but the scheduler's settings, and compare."""
    source = Source(str(folder)) if not trained.layers else family.open(config)
    pipe = source.load({"default": trained.dtype}, lambda name: name not in family.unused_components)
    with quiet_libraries():  # they tell at length which parts a LoRA has nothing for
        if trained.layers:
            pipe.load_lora_weights(folder, weight_name=DIFFUSERS)
        lost = trained.missing(getattr(pipe, family.trained_component))
        pipe.scheduler = family.ode_scheduler(config)
        call = trained.call | {"latents": trained.call["latents"].to(trained.device, trained.dtype)}
        if trained.device.type == "cuda":
            pipe.enable_model_cpu_offload(device=trained.device)  # its parts in turn: T5 alone is 19 GB in float32
        check = trained.compare(pipe(**call, output_type="pt", return_dict=False)[0])
    if check.passed and not lost:
        return check
    numbers = itertools.count(1)
    failed = next(path for n in numbers if kind_of(path := to.with_name(f"{to.name}.failed-{n}")) is None)
    folder.rename(failed)
    problem = f"loaded with plain diffusers it gives another picture (pixels off by {check.largest:.1e} at most, "
    problem += f"{check.mean:.1e} on average)"
    if lost:
        problem = f"plain diffusers does not load all of it ({len(lost)} weights are not as written, such as {lost[0]})"
    raise InputError("out", to, f"{problem}; what was written is in {failed}")


@contextmanager
def _whole_float32() -> Iterator[None]:
    """Inside, a GPU's convolutions do not round their float32 inputs, as they do by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _weights(checkpoint: Path, average: bool | None) -> Path:
    """The file of the weights asked for; the average where there is one, if not said."""
    if average is None:
        return weights_file(checkpoint)
    file = checkpoint / ("ema.safetensors" if average else "weights.safetensors")
    if not file.is_file():
        raise InputError(
            "--ema", None, "the run keeps no average of its weights (train.ema_decay is 0)", cure="--no-ema"
        )
    return file


def _write_lora(family: type[PipelineModel], layers: dict[str, tuple[Tensor, Tensor]], folder: Path) -> None:
    """As diffusers names its layers, and as ComfyUI does.

    The scale is in the matrices, so alpha is the rank, which every loader takes where a file does not say otherwise.
    """
    import diffusers

    named = {
        f"{layer}.lora_{half}.weight": m for layer, pair in layers.items() for half, m in zip("AB", pair, strict=True)
    }
    getattr(diffusers, family.pipeline).save_lora_weights(folder, **{f"{family.trained_component}_lora_layers": named})
    save_file(
        {k: t for layer, (a, b) in layers.items() for k, t in family.comfyui(layer, a, b).items()}, folder / COMFYUI
    )


def _copy_parts(source: Source, folder: Path, but: str) -> None:
    """The pipeline as it is, but for the part that was trained."""
    for part in source.parts:
        if part != but and (source.folder / part).is_dir():
            shutil.copytree(source.folder / part, folder / part)
    shutil.copy(source.folder / "model_index.json", folder / "model_index.json")


def _merged(source: Source, part: str, layers: dict[str, tuple[Tensor, Tensor]]) -> nn.Module:
    """The trained part as it was before training, with a LoRA added to its weights."""
    module: nn.Module = getattr(source.load({"default": torch.float32}, lambda name: name in (part, "scheduler")), part)
    for layer, (a, b) in layers.items():
        module.get_submodule(layer).get_parameter("weight").data += b.float() @ a.float()
    return module


def _round(module: nn.Module, dtype: torch.dtype) -> None:
    """To the precision asked for, but for what diffusers keeps in float32 wherever it loads it."""
    keep = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, parameter in module.named_parameters():
        if not keep & set(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def _digests(module: nn.Module) -> dict[str, str]:
    """A hash of each weight's values, whatever precision it is held in."""
    return {
        name: hashlib.sha256(parameter.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()).hexdigest()
        for name, parameter in module.named_parameters()
    }
