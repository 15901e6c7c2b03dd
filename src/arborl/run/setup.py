"""A run set up: everything a user can get wrong is checked, then loaded, and only then is its folder made."""

import os
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    broadcast_object_list,
    parse_flag_from_env,
)

from ..config import read_config, with_settings
from ..config.schema import Config
from ..core.errors import InputError
from ..core.noise import fold
from ..data.prompts import PromptLists, Prompts, split_prompts
from ..distributed.coordination import Coordinator, fail_together
from ..distributed.fsdp import launcher_requests_fsdp, sharding_mode
from ..engine.autotune import (
    describe_batches,
    find_batch_sizes,
    find_bitwise_batch_sizes,
    forward_flops,
    should_compile,
    warm_up,
)
from ..engine.checks import format_bytes, free_disk
from ..engine.contracts import try_loss
from ..engine.method import Method, check_plan, warnings_about
from ..engine.policy import Policy
from ..engine.precompute import precompute_embeddings, prompts_of_a_run
from ..engine.rates import describe_rates, rate_settings
from ..engine.state import Ema, State, trainable
from ..models import load_model
from ..models.compile import CACHE_DIR_VARIABLE
from ..rewards import Rewards
from ..tools.files import lock
from .checkpoint import (
    check_not_foreign,
    latest_valid,
    load_checkpoint,
    problem_with,
    quarantine,
    read_header,
    remove_partial,
)
from .environment import add_start, described, environment, launched_alone, too_slow
from .evaluations import protocol_before, protocol_of
from .folder import changes, check_folder, read_metrics, training_seconds, with_absolute_paths, writing
from .inputs import load_inputs, probe
from .logger import Logger
from .paths import BEST, CHECKPOINTS, CONFIG, LOCK, SUMMARY
from .run import Run
from .trackers import check_login, trackers


def prepare(config: Config, resume: Path | None = None, quiet: bool = False) -> Run:
    """Check everything a user can get wrong, load it, and only then make the run's folder. `quiet` shows nothing.

    A run that goes on is locked before anything of it is read: whoever else writes to it would change what was read.
    """
    check_plan(config)
    accelerator = start_accelerator(
        config,
        log_with=[*trackers(config)] or None,
        project_config=ProjectConfiguration(logging_dir=config.log.dir),  # the run's own folder, once it is made
    )
    with ExitStack() as held_on_error:
        with fail_together(accelerator):
            check_folder(config, resume)
            if accelerator.is_main_process:
                check_login(trackers(config))
            held = _locked(resume) if resume and accelerator.is_main_process else None
            if held:
                held_on_error.enter_context(held)
        run = _prepare(config, accelerator, resume, quiet, held)
        held_on_error.pop_all()
    return run


def _locked(run: Path) -> IO[bytes]:
    with writing(run):
        return lock(run / LOCK)


def _prepare(config: Config, accelerator: Accelerator, resume: Path | None, quiet: bool, held: IO[bytes] | None) -> Run:
    with fail_together(accelerator):
        found = [_checkpoint_of(resume) if resume and accelerator.is_main_process else (None, {})]  # it reads all of it
    checkpoint, damaged = broadcast_object_list(found)[0]
    with fail_together(accelerator):
        head = read_header(checkpoint) if checkpoint else {"epoch": 0, "prompts": 0}
        if resume:
            check_can_resume(config, resume, int(head["epoch"]))
    parts = assemble(config, accelerator, head)
    with fail_together(accelerator):
        problems = probe(parts.policy.model, parts.rewards, parts.prompts.training, goes_on=resume is not None)
        noise = parts.policy.model.noise(fold(0, 0), torch.zeros(3, 3, dtype=torch.long, device=accelerator.device))
        try_loss(config, parts.method.loss, noise, parts.policy.schedule().prediction)
    messages = [*parts.messages, *parts.tune_and_warm_up()]  # now that rewards have taken what they need
    state, policy = parts.state, parts.policy
    # With what was found, so that a run which goes on does the same.
    config = with_settings(config, policy.batch_sizes.by_setting())
    before = read_config(resume / CONFIG) if resume else config
    with fail_together(accelerator):
        if checkpoint:
            if head["prompt_list"] != state.prompt_list:
                raise _other_prompts(before, config)
            load_checkpoint(state, checkpoint)
    changed = changes(with_absolute_paths(before), with_absolute_paths(config))
    unmarked = protocol_before(before, config, parts.prompts.evaluation)
    logger = Logger(config, accelerator, resume, state.epoch, quiet, held, unmarked)
    protocol = protocol_of(config, parts.prompts.evaluation)
    averaged = logger.evaluated.get("averaged", before.train.ema_decay > 0)
    if averaged != (config.train.ema_decay > 0) or logger.evaluated.get("protocol") != protocol:
        logger.evaluated = {}  # an evaluation of other weights, or by other settings, says nothing here
    with fail_together(accelerator), logger.writing():
        if resume and accelerator.is_main_process:
            remove_partial(resume / CHECKPOINTS)
            best = resume / CHECKPOINTS / BEST
            if best.is_dir() and (problem := problem_with(best)):
                damaged[best] = problem
            for path, problem in damaged.items():
                kept = quarantine(path)
                logger.warn_once(f"checkpoint {path.name} {problem}; it is left out, and kept as {kept.name}")
        if accelerator.is_main_process:
            start = environment(accelerator) | {"epoch": state.epoch, "prompts": _facts(parts.prompts)}
            for text in add_start(logger.folder, start):
                logger.warn_once(text)
            logger.say(described(start))
    for text in messages:
        logger.say(text)
    for text in changed:
        logger.say(f"changed from epoch {state.epoch} on: {text}")
    slow = too_slow(accelerator, sum(p.numel() for p in policy.module.parameters()))
    for text in [*warnings_about(config), *launched_alone(), *slow, *_not_held_out(config, parts.prompts), *problems]:
        logger.warn_once(text)
    logger.warn_if_wrong(free_disk(config, state.parameters, state.old is not None, logger.folder))
    made = policy, parts.method, parts.rewards, parts.prompts.training, parts.prompts.evaluation
    return Run(config, accelerator, *made, state, logger, Coordinator(accelerator, state.sharded), parts.flops)


def _checkpoint_of(run: Path) -> tuple[Path | None, dict[Path, str]]:
    """The one to go on from, and what is wrong with newer ones; what is in the way is told while nothing is changed."""
    newest, damaged = latest_valid(run)
    for path in (*damaged, run / CHECKPOINTS / BEST):
        check_not_foreign(path)
    return newest, damaged


def _other_prompts(before: Config, now: Config) -> InputError:
    if bool(before.eval.prompts) != bool(now.eval.prompts) and now.prompts.held_out:
        problem = "changes which prompts of prompts.path are trained on (prompts.held_out), and a run keeps its own"
        return InputError("eval.prompts", now.eval.prompts or "''", problem, before.eval.prompts or "''")
    problem = "holds other prompts than when the run began"
    return InputError("prompts.path", now.prompts.path, problem, "the same, wherever they lie")


def _facts(prompts: PromptLists) -> dict[str, Any]:
    """How many there are, and what evaluations are of."""
    counts = {"training": len(prompts.training), "evaluation": len(prompts.evaluation)}
    return counts | {"evaluated_on": prompts.evaluated_on}


def _not_held_out(config: Config, prompts: PromptLists) -> list[str]:
    """A warning where evaluations draw what is trained on: that the score rises there says little of other prompts. A
    model that brings a list of its own, and no other, has none.
    """
    shared, total = prompts.trained_on, len(prompts.evaluation)
    if not shared or not (config.prompts.path or config.eval.prompts):
        return []
    if shared == total:
        return ["evaluations draw the training prompts, as nothing is held out: eval.prompts names others"]
    return [f"{shared} of the {total} evaluation prompts are trained on too: name others in eval.prompts"]


def check_can_resume(config: Config, run: Path, epoch: int) -> None:
    """An error if the epochs or the seconds are used up."""
    train, over = config.train, (run / SUMMARY).exists()
    if train.epochs < epoch or (train.epochs == epoch and over):
        raise InputError("train.epochs", train.epochs, f"the run has {epoch} epochs already", cure="more, to go on")
    used = sum(training_seconds(row) for row in read_metrics(run) if row["epoch"] < epoch)
    if 0 < train.max_seconds <= used and over:
        problem = f"the run has trained for {used:.0f} s already"
        raise InputError("train.max_seconds", train.max_seconds, problem, cure="more, to go on")


@dataclass
class Assembled:
    """Policy, rewards, prompts and optimizer, before there is a run."""

    policy: Policy
    method: Method
    rewards: Rewards
    prompts: PromptLists
    examples: Prompts  # for tuning and warming up
    state: State
    config: Config
    flops: int  # of a forward
    messages: list[str]  # for the user, a line each
    compiling: float = 0.0  # seconds so far

    def tune_and_warm_up(self) -> list[str]:
        """Find the batch sizes that are `auto`, compile and warm up; returns messages."""
        config, policy, prompts = self.config, self.policy, self.examples
        accelerator, start = policy.accelerator, time.perf_counter()
        policy.batch_sizes, messages = find_batch_sizes(config, policy, self.state, prompts)
        if policy.compiled:
            # Split weights need all processes at every call, so there nobody can fail alone.
            with nullcontext() if self.state.sharded else fail_together(accelerator):
                warm_up(config, policy, self.state, prompts)
                messages += find_bitwise_batch_sizes(config, policy, prompts)
            seconds = self.compiling + time.perf_counter() - start
            messages.append(f"compiled in {seconds:.0f} s; kept for the next run in {os.environ[CACHE_DIR_VARIABLE]}")
        size, processes = policy.batch_sizes.train, accelerator.num_processes
        rates = [describe_rates(config)] if rate_settings(config) else []
        return [*messages, *describe_batches(config, size, processes, self.state.sharded), *rates]


def shortest_and_longest(prompts: Prompts) -> Prompts:
    """Two prompts that need all the code that others will: their texts may differ in length, and be filled up."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts.texts[i]))
    return prompts.take([order[0], order[-1]])


def assemble(config: Config, accelerator: Accelerator, head: Mapping[str, Any]) -> Assembled:
    """Inputs found, prompts encoded, the model loaded, wrapped or split, with an optimizer. `head` says how far a run
    has come.
    """
    with fail_together(accelerator):
        rewards, prompts = load_inputs(config)
    ahead = split_prompts(config.sample, accelerator.num_processes).total * (config.train.epochs - head["epoch"])
    # Before the model: a large text encoder and what is trained need not fit into memory together.
    encoded = prompts_of_a_run(config, *prompts, head["prompts"], ahead)
    embedded = precompute_embeddings(config, encoded, accelerator)
    method = Method(config, accelerator)
    with fail_together(accelerator):
        policy = Policy(load_model(config, accelerator.device), config, accelerator, method.loss)
        flops = forward_flops(policy, encoded.take([0]))
        messages = [*([str(embedded)] if embedded else []), *policy.model.messages]
        compiled, why = should_compile(config, flops, accelerator.device)
        start = time.perf_counter()
        messages += [*why, *(policy.compile() if compiled else [])]
        compiling = time.perf_counter() - start
    how = sharding_mode(config, accelerator)
    split = how != "no"
    if split:
        policy.shard(how)
    parameters = trainable(policy.module)
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
        policy.prepare(split)
    # From here on all processes have the first one's weights, whatever each of them has read.
    ema, old = Ema(parameters, train.ema_decay, train.ema_every), policy.keep_beside(parameters)
    if beside := policy.bytes_beside():
        listed = ", ".join(f"{who} {format_bytes(size)}" for who, size in beside.items())
        messages.append(f"weights of the further policies that loss.name={config.loss.name} asks for: {listed}")
    state = State(parameters, optimizer, ema, old, prompt_list=prompts.training.digest)
    examples = shortest_and_longest(encoded)
    return Assembled(policy, method, rewards, prompts, examples, state, config, flops, messages, compiling)


def start_accelerator(config: Config, together: bool = True, **options: Any) -> Accelerator:
    """This process's device and precision, whatever ran in it before. Processes that were launched work `together`, or
    it is an error.
    """
    # accelerate remembers the first precision of a process; a notebook may well train twice with different ones.
    AcceleratorState._reset_state()
    launcher_requests_fsdp()  # before anyone else does
    launched = int(os.environ.get("WORLD_SIZE") or 1) if together else 1
    accelerator = Accelerator(
        # Without a GPU each of several processes would begin a run of its own. On the CPU they work together.
        cpu=launched > 1 and not torch.accelerator.is_available(),
        mixed_precision=precision(config),
        # Accumulation is ours; a launcher's setting would only scale the gradient.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[
            # Buffers never change here, and a rank may be ahead of another inside a rollout.
            DistributedDataParallelKwargs(broadcast_buffers=False),
            # Others wait while one writes a large checkpoint or asks a slow server; a hang is the launcher's to end.
            InitProcessGroupKwargs(timeout=timedelta(hours=1)),
        ],
        **options,
    )
    if together and accelerator.num_processes != launched:
        problem = f"WORLD_SIZE says so, and this one found {accelerator.num_processes}"
        cure = "torchrun or accelerate launch, in processes that have not set up torch.distributed otherwise"
        raise InputError("processes", launched, problem, cure=f"{cure}; or no WORLD_SIZE in the environment")
    return accelerator


def precision(config: Config) -> str:
    """The arithmetic that `train.mixed_precision` means here; a launcher that says bf16 is heeded."""
    if config.train.mixed_precision != "auto":
        return config.train.mixed_precision
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    on_gpu = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
    return "bf16" if launched or on_gpu else "no"
