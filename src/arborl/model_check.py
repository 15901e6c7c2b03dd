"""`arborl models check`: does a pipeline work, and are its pictures, gradients and ratios what they should be?"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .config.schema import Config
from .core.errors import InputError
from .data.prompts import Prompts
from .doctor import Subject
from .engine import checks
from .engine.autotune import available_memory, peak_memory
from .engine.checks import Finding, format_bytes
from .engine.generate import generate, noise_of_seeds
from .engine.method import check_plan
from .models.any_pipeline import AnyPipelineModel
from .models.pipeline import DiffusersModel
from .run.setup import start_accelerator
from .tools.quiet import quiet_libraries

SAME, SAME_ROUNDED, LEVELS = 1e-4, 0.05, 1e-6
"""Differences from the pipeline's own: of any pixel in float32; of pixels on average, where rounding grows over the
steps; of noise levels.
"""
LIGHT = (
    "compile=off",
    "sample.sigmas=pipeline",
    "sample.num_prompts=1",
    "sample.batch_size=2",
    "sample.decode_batch_size=1",
)
LIGHT += ("train.batch_size=2", "train.epochs=1", "eval.num_prompts=1", "log.trackers=[]")
"""Settings that a check begins with: as little as shows whether it works."""


def check_model(config: Config) -> Iterator[Finding]:
    """Every check, one after the other; nothing is written but embeddings."""
    try:
        check_plan(config)
        subject = Subject(config, start_accelerator(config, together=False), None)
    except InputError as error:
        yield Finding("set-up", str(error), False, "nothing can be measured before that is mended")
        return
    for line in subject.messages:
        yield Finding("set-up", line, None)
    if isinstance(model := subject.policy.model, DiffusersModel):
        yield from own_call(subject, model)
    rollout = subject.rollout(0)
    steps = checks.recheck_steps(subject.policy, rollout)
    yield from checks.check_transitions(steps, checks.ratio_bound(subject.policy))
    yield from subject.training(rollout)
    peak, total = peak_memory(subject.device), available_memory(subject.device)
    measured = (
        f"{format_bytes(peak)} at the worst, of {format_bytes(total)}, at {subject.policy.batch_sizes.train} rows"
    )
    yield Finding("memory", measured, peak < 0.95 * total, "smaller pictures or batches, or LoRA")


def own_call(subject: Subject, model: DiffusersModel) -> Iterator[Finding]:
    """One picture by the engine's ODE, beside the pipeline's own call from the same noise; and the levels of both."""
    policy, config, name = subject.policy, subject.config, model.pipeline
    prompts, steps = subject.local.prompts.take([0]), config.sample.num_steps
    noise = noise_of_seeds(policy, [config.seed])
    with torch.no_grad(), quiet_libraries():
        theirs, levels = plain_call(model, prompts, noise, steps)
    sigma = torch.cat([subject.schedule.sigma, subject.schedule.sigma_next[-1:]])
    listed = ", ".join(f"{level:.3g}" for level in sigma.tolist())
    if levels is not None:
        off = float((levels.double().cpu() - sigma).abs().max())
        as_own = off <= LEVELS
        measured = f"{listed}: off by {off:.1e} at most from those of {name}'s own call"
        yield Finding("noise levels", measured, as_own or None, "sample.sigmas=pipeline takes the pipeline's own")
        if not as_own:
            yield Finding("picture", "not compared, as it would come by other noise levels", None)
            return
    with torch.no_grad():
        ours = policy.decode(generate(policy, prompts, torch.zeros(1, dtype=torch.long), noise)[:, 0], prompts)
    off = (ours.float().cpu() - theirs.float().cpu()).abs()
    rounded = model.dtype != torch.float32 or policy.accelerator.mixed_precision != "no"
    ok = float(off.mean()) <= SAME_ROUNDED if rounded else float(off.max()) <= SAME
    measured = f"{'×'.join(map(str, ours.shape[1:]))}, pixels off by {float(off.max()):.1e} at most and "
    measured += f"{float(off.mean()):.1e} on average from those of {name}'s own call"
    measured += " (in half precision)" if rounded else " (in float32)"
    advice = "the engine drives this pipeline wrongly: its step may depend on more than latents, level and prompt"
    yield Finding("picture", measured, ok, advice)


def plain_call(model: DiffusersModel, prompts: Prompts, noise: Tensor, steps: int) -> tuple[Tensor, Tensor | None]:
    """What the pipeline makes of noise by its own call, and the levels it goes through, if its scheduler says."""
    if isinstance(model, AnyPipelineModel):
        return model.own_call(noise[:, 0].to(model.device), prompts, steps)
    pipe = model.source.load({"default": model.dtype}, lambda part: part not in model.unused_components)
    pipe.to(model.device)
    model.adjust(pipe, model.config)
    call = model.plain_call(prompts, model.config.seed, steps)
    call["latents"] = call["latents"].to(model.device, model.dtype)
    pictures = pipe(**call, output_type="pt", return_dict=False)[0]
    return pictures, getattr(pipe.scheduler, "sigmas", None)
