"""A run's weights for others to use: a diffusers LoRA or pipeline, loaded again with plain diffusers and checked."""

import errno
import gc
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .config.schema import Config
from .core.errors import InputError
from .engine.autotune import find_batch_sizes
from .engine.generate import generate, noise_of_seeds
from .engine.policy import Policy
from .engine.precompute import precompute_embeddings
from .engine.state import trainable
from .models import load_model, lora, model_class
from .models.base import parts_of
from .models.pipeline import DiffusersModel
from .models.source import Source
from .run.checkpoint import Weights, load_weights, weights_file
from .run.resume import weights_of
from .run.setup import start_accelerator
from .tools.files import as_text, kind_of, remove_abandoned, scratch
from .tools.quiet import quiet_libraries

Layers = dict[str, tuple[Tensor, Tensor]]
"""A LoRA's two matrices, by the layer they are added to."""
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
    import diffusers

    family = model_class(config)
    if not issubclass(family, DiffusersModel):
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
    layers, weights_written = (sum(map(len, found.values())) for found in (trained.layers, trained.digests))
    what = f"all {layers} layers are" if layers else f"all {weights_written} weights are"
    checked = (
        f"checked with plain diffusers: {what} there, and seed {check.seed} gives the trainer's own picture of "
        f"“{check.prompt}” (pixels off by {check.mean:.1e} on average and {check.largest:.1e} at most; from the "
        f"untrained model's by {check.from_base:.1e} on average)"
    )
    if not trained.layers:
        return [f"{to}: {which}, in a {family.pipeline} for from_pretrained", checked]
    comfyui = f"{to / COMFYUI}: the same under the names ComfyUI reads"
    loader = f"{family.pipeline}.load_lora_weights"
    if not hasattr(getattr(diffusers, family.pipeline), "load_lora_weights"):
        loader = f"{family.pipeline}'s {next(iter(trained.layers))}.load_lora_adapter"
    numbered = [part for part in trained.layers if part.endswith("_2")]
    found = [] if len(numbered) == len(trained.layers) else [f"{to}: {which}, a LoRA for {loader}", comfyui]
    for part in numbered:
        plain, _ = lora_files(part, first=False)
        found.append(f"{to / plain}: that of {part}, for load_lora_weights(…, load_into_{part}=True)")
    return [*found, checked]


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

    layers: dict[str, Layers]  # of each part's LoRA that was written; none where a pipeline was
    digests: dict[str, dict[str, str]]  # of the pipeline's trained parts
    prompt: str
    seed: int
    picture: Tensor
    base_picture: Tensor
    call: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    rounded: bool  # to bfloat16, in memory, in arithmetic or in what was written

    def missing(self, pipe: Any) -> list[str]:
        """Names of weights that a plain pipeline does not have as they were written.

        A picture alone could not tell, where little was learnt or much is rounded.
        """
        lost: list[str] = []
        for part, digests in self.digests.items():
            found = _digests(getattr(pipe, part))
            lost += [f"{part}.{name}" for name, digest in digests.items() if found.get(name) != digest]
        for part, layers in self.layers.items():
            there = lora.matrices(getattr(pipe, part))

            def arrived(layer: str, pair: tuple[Tensor, Tensor], there: Layers = there) -> bool:
                own = there.get(layer)
                return own is not None and all(torch.equal(a, b.to(a.dtype)) for a, b in zip(own, pair, strict=True))

            lost += [f"{part}.{layer}" for layer, pair in layers.items() if not arrived(layer, pair)]
        return lost

    def compare(self, found: Tensor) -> Check:
        off = (found.float().cpu() - self.picture).abs()
        from_base = float((self.picture - self.base_picture).abs().mean())
        return Check(self.prompt, self.seed, float(off.max()), float(off.mean()), from_base, self.rounded)


def _write(
    family: type[DiffusersModel], config: Config, weights: Weights, folder: Path, dtype: torch.dtype, merge: bool
) -> Trained:
    """Load the trainer's model, draw its picture, and write its weights."""
    accelerator = start_accelerator(config, together=False)
    prompt = family.example_prompts(config)  # a run's own file may have stayed elsewhere
    precompute_embeddings(config, prompt, accelerator)
    model = load_model(config, accelerator.device)
    assert isinstance(model, DiffusersModel)
    policy, module = Policy(model, config, accelerator), model.module
    policy.prepare()
    policy.batch_sizes, _ = find_batch_sizes(config, policy, None, prompt)
    policy.encode(prompt)
    noise = noise_of_seeds(policy, [config.seed])

    def picture() -> Tensor:
        leaves = generate(policy, prompt, torch.zeros(1, dtype=torch.long), noise)
        return model.decode_for(leaves[:, 0], prompt).float().cpu()

    base_picture = picture()
    load_weights(trainable(module), weights)
    own_picture = picture()
    adapted = lora.is_injected(module)
    layers: dict[str, Layers] = {}
    digests: dict[str, dict[str, str]] = {}
    for part, own in zip(family.components(config), parts_of(module).values(), strict=True):
        if adapted:
            layers[part] = {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in lora.matrices(own).items()}
        if adapted and not merge:
            _write_lora(family, part, layers[part], folder, first=not part.endswith("_2"))
        else:
            whole = _merged(model.source, part, layers.pop(part)) if adapted else own
            _round(whole, dtype)
            whole.save_pretrained(folder / part)  # pyright: ignore[reportCallIssue]
            digests[part] = _digests(whole)
    if digests:
        _copy_parts(model.source, folder, list(digests))
    accelerator.free_memory()
    steps = config.eval.num_steps or config.sample.num_steps
    call = model.plain_call(prompt, config.seed, steps)
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


def _check(family: type[DiffusersModel], config: Config, folder: Path, trained: Trained, to: Path) -> Check:
    """Load what was written as a user will, with nothing of ours in it but the settings, and compare."""
    source = Source(str(folder)) if not trained.layers else family.open(config)
    pipe = source.load({"default": trained.dtype}, lambda name: name not in family.unused_components)
    with quiet_libraries():  # they tell at length which parts a LoRA has nothing for
        if trained.layers:
            for part in trained.layers:
                _load_lora(pipe, part, folder, first=not part.endswith("_2"))
        lost = trained.missing(pipe)
        family.adjust(pipe, config)
        call = trained.call
        if "latents" in call:
            call = call | {"latents": call["latents"].to(trained.device, trained.dtype)}
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


def lora_files(part: str, first: bool) -> tuple[str, str]:
    """Names of a part's files for diffusers and for ComfyUI."""
    return (DIFFUSERS, COMFYUI) if first else (f"{part}_{DIFFUSERS}", f"{part}_{COMFYUI}")


def _write_lora(family: type[DiffusersModel], part: str, layers: Layers, folder: Path, first: bool) -> None:
    """As diffusers names its layers, and as ComfyUI does.

    The scale is in the matrices, so alpha is the rank, which every loader takes where a file does not say otherwise.
    """
    import diffusers

    named = {
        f"{layer}.lora_{half}.weight": m for layer, pair in layers.items() for half, m in zip("AB", pair, strict=True)
    }
    cls, (plain, comfyui) = getattr(diffusers, family.pipeline), lora_files(part, first)
    prefix = re.sub(r"_\d+$", "", part)  # a second transformer's file is made like the first one's
    if hasattr(cls, "save_lora_weights"):
        cls.save_lora_weights(folder, weight_name=plain, **{f"{prefix}_lora_layers": named})
    else:
        save_file({f"{prefix}.{name}": matrix for name, matrix in named.items()}, folder / plain)
    save_file(
        {k: t for layer, (a, b) in layers.items() for k, t in family.comfyui(layer, a, b).items()}, folder / comfyui
    )


def _load_lora(pipe: Any, part: str, folder: Path, first: bool) -> None:
    """As the message says that it is loaded."""
    name, _ = lora_files(part, first)
    if not hasattr(pipe, "load_lora_weights"):
        getattr(pipe, part).load_lora_adapter(folder, weight_name=name, prefix=re.sub(r"_\d+$", "", part))
    elif part == "transformer_2":
        pipe.load_lora_weights(folder, weight_name=name, load_into_transformer_2=True)
    else:
        pipe.load_lora_weights(folder, weight_name=name)


def _copy_parts(source: Source, folder: Path, but: Sequence[str]) -> None:
    """The pipeline as it is, but for the parts that were trained."""
    for part in source.parts:
        if part not in but and (source.folder / part).is_dir():
            shutil.copytree(source.folder / part, folder / part)
    shutil.copy(source.folder / "model_index.json", folder / "model_index.json")


def _merged(source: Source, part: str, layers: Layers) -> nn.Module:
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
