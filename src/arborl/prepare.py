"""A run set up: everything a user can get wrong is checked, then loaded, and only then is its folder made."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    parse_flag_from_env,
)

from . import log
from .checkpoint import Ema, State, drop_best_from, latest, trainable
from .config import read_config
from .config.schema import Config
from .core.errors import InputError
from .embed import embed, texts_of_a_run
from .inputs import load_inputs, probe
from .job import Job
from .models import load_model
from .plan import check_plan, warnings_about


def prepare(config: Config, resume: Path | None = None) -> Job:
    """Check everything a user can get wrong, load it, and only then make the run's folder."""
    check_plan(config)
    checkpoint = latest(resume) if resume else log.check_folder(config)
    trackers = log.trackers(config)
    rewards, prompts, held_out = load_inputs(config)
    accelerator = start_accelerator(
        config,
        log_with=[*trackers] or None,
        project_config=ProjectConfiguration(logging_dir=config.log.dir),  # the run's own folder, once it is made
        # Accumulation is ours; a launcher's setting would only scale the gradient.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        # Buffers never change here, and a rank may be ahead of another inside a rollout.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    # Before the model: a large text encoder and what is trained need not fit into memory together.
    encoded = embed(config, texts_of_a_run(config, prompts, held_out, accelerator.num_processes), accelerator)
    model = load_model(config, accelerator.device)
    probe(model, rewards, prompts)
    parameters = trainable(model.module)
    train = config.train
    optimizer = torch.optim.AdamW(
        list(parameters.values()),
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        weight_decay=train.weight_decay,
        fused=accelerator.device.type == "cuda",
    )
    with warnings.catch_warnings():
        # torch renames broadcast_buffers; accelerate knows the old name only.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        model.module, optimizer = accelerator.prepare(model.module, optimizer)
    if model.frozen is not None:  # the reference must compute in the policy's own precision
        model.frozen = accelerator.prepare_model(model.frozen, evaluation_mode=True)
    state = State(parameters, optimizer, Ema(parameters, train.ema_decay, train.ema_every))
    if checkpoint:
        state.load(checkpoint)
    if resume and train.epochs <= state.epoch and (train.epochs < state.epoch or (resume / "summary.json").exists()):
        raise InputError("train.epochs", train.epochs, f"the run has {state.epoch} epochs already", "more, to go on")
    used = (
        sum(log.training_seconds(row) for row in log.read_rows(resume) if row["epoch"] < state.epoch) if resume else 0
    )
    if resume and 0 < train.max_seconds <= used and (resume / "summary.json").exists():
        problem = f"the run has trained for {used:.0f} s already"
        raise InputError("train.max_seconds", train.max_seconds, problem, "more, to go on")
    changed = log.changes(read_config(resume / "config.yaml"), config) if resume else []
    run = log.Run(config, accelerator, resume, state.epoch)
    if resume and accelerator.is_main_process:
        drop_best_from(resume / "checkpoints", state.epoch)
    if encoded:
        run.say(str(encoded))
    for text in changed:
        run.say(f"changed from epoch {state.epoch} on: {text}")
    for text in warnings_about(config):
        run.warn_once(text)
    return Job(config, accelerator, model, rewards, prompts, held_out, state, run)


def start_accelerator(config: Config, **options: Any) -> Accelerator:
    """This process's device and precision, whatever ran in it before."""
    # accelerate remembers the first precision of a process; a notebook may well train twice with different ones.
    AcceleratorState._reset_state()
    return Accelerator(mixed_precision=precision(config), **options)


def precision(config: Config) -> str:
    """The arithmetic that `train.mixed_precision` means here; a launcher that was told bf16 is heeded."""
    if config.train.mixed_precision != "auto":
        return config.train.mixed_precision
    told = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    on_gpu = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
    return "bf16" if told or on_gpu else "no"
