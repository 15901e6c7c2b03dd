"""Micro-batch sizes that are left to `auto`: tried on the model itself, from small to large."""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple, cast

import psutil
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..config.schema import Config
from ..core.errors import InputError
from ..core.losses import EdgeLoss, Who
from ..core.noise import fold
from ..data.prompts import Prompts, split_prompts
from ..distributed.accelerator import Accelerator, backward
from ..distributed.gather import any_rank, max_rank
from ..models import lora, model_class
from .batches import BATCH_SIZE_SETTINGS, BatchSizes
from .contracts import loss_of
from .cost import count_model_calls
from .method import window_plans
from .policy import Policy
from .state import State

MEMORY_SHARE = 0.9
"""Share of the free memory that a trial may be expected to take."""

COMPILE_MIN_FLOPS, COMPILE_MIN_SECONDS = 5e16, 600.0
"""Operations of a run, and seconds it may take, from which on compiling is worth its minute or two."""

EVERY_SIZE_UP_TO, SIZE_STRIDE = 16, 8
"""Rows up to which every size of a call is tried for its rounding, and of the larger ones every so many."""

MAX_TIME_SHARE = 0.97
"""A larger size must take at most this share of the time a row takes in a smaller one."""


CGROUPS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the memory limit of a container or a batch system."""


class Trial(NamedTuple):
    size: int
    seconds: float  # for a row; infinite where it does not fit
    memory: int = 0  # bytes at the worst, of tensors on a GPU, else of the process

    @property
    def fits(self) -> bool:
        return math.isfinite(self.seconds)


def describe(tried: list[Trial]) -> str:
    """Trials as one line of text."""
    return ", ".join(f"{t.size}: {1000 * t.seconds:.3g} ms" if t.fits else f"{t.size}: no room" for t in tried)


def find_batch_sizes(
    config: Config, policy: Policy, state: State | None, prompts: Prompts
) -> tuple[BatchSizes, list[str]]:
    """The sizes of the settings, with numbers in the place of `auto`; a line for each says what was tried. Without a
    state nothing is updated.
    """
    found: list[int] = []
    lines: list[str] = []
    given = config.sample.batch_size, config.sample.decode_batch_size, config.train.batch_size
    for key, size in zip(BATCH_SIZE_SETTINGS, given, strict=True):
        if isinstance(size, int):
            found.append(size)
            continue
        if key == "train.batch_size" and state is None:
            found.append(1)  # nothing is trained, nothing is asked
            continue
        most = config.eval.num_prompts if state is None else max_rows(config, policy.accelerator.num_processes)[key]
        stage = stage_call(key, policy, state, prompts)
        # A single row would need compiled code of its own.
        tried = trials(key, stage, most, policy.device, policy.accelerator, first=2 if policy.compiled else 1)
        found.append(choose(tried).size)
        lines.append(f"{key}=auto: {found[-1]} (a row takes with {describe(tried)})")
    return BatchSizes(*found), lines


def forward_flops(policy: Policy, prompts: Prompts) -> int:
    """Floating-point operations of one `predict` of one row, guidance included and adapters left out."""
    cond, device = policy.encode(prompts), policy.device
    x = policy.model.noise(fold(0, 0), torch.zeros(1, 3, dtype=torch.long, device=device))
    # The counter knows a GPU's attention in all its forms, and a CPU's taken apart.
    apart = cast(AbstractContextManager[None], sdpa_kernel(SDPBackend.MATH)) if device.type == "cpu" else nullcontext()
    with torch.no_grad(), lora.disabled(policy.module), apart, FlopCounterMode(display=False) as counter:
        policy.predict(x, torch.full((1,), 500.0), cond)
    return counter.get_total_flops()


def should_compile(config: Config, flops: int, device: torch.device) -> tuple[bool, list[str]]:
    """Whether a run is compiled, and why where `auto` leaves it open. That depends on settings and not on timing, so a
    resumed run decides the same.
    """
    if config.compile != "auto" or device.type != "cuda":
        return config.compile == "on", []
    if not model_class(config).auto_compile:
        return False, ["compile=auto: off (this model has not been measured compiled; compile=on tries it)"]
    around = window_plans(config)
    epoch = sum(count_model_calls(config, plan, first).cost for first, plan in around) / len(around)
    total = epoch * flops * config.train.epochs
    short = 0 < config.train.max_seconds < COMPILE_MIN_SECONDS or total < COMPILE_MIN_FLOPS
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return False, ["compile=auto: off (there is no C compiler, which torch.compile needs)"]
    clock = f" in up to {config.train.max_seconds:.0f} s" if config.train.max_seconds else ""
    return not short, [f"compile=auto: {'off' if short else 'on'} (the run has {total:.1e} operations{clock})"]


def warm_up(config: Config, policy: Policy, state: State, prompts: Prompts) -> None:
    """Every kind of call once, so that compiling is over before the first epoch."""
    most = max_rows(config, policy.accelerator.num_processes)
    for key, size in policy.batch_sizes.by_setting().items():
        stage_call(key, policy, state, prompts)(min(size, max(most[key], policy.min_batch_size)))
    if policy.device.type == "cuda":
        torch.cuda.synchronize(policy.device)


def find_bitwise_batch_sizes(config: Config, policy: Policy, prompts: Prompts) -> list[str]:
    """Find the sizes of calls that the update's code rounds alike: trained rows are padded to them from now on.

    A library may add up a narrow product, such as an adapter's, in another order when it has few rows; then rollout and
    update would not be one policy.
    """
    if not policy.compares_densities:
        return []
    share = split_prompts(config.sample, policy.accelerator.num_processes).per_process
    trained = max(len(plan.trained_parents) for _, plan in window_plans(config)) * share
    least = policy.min_batch_size
    full = min(policy.batch_sizes.train, max(trained, least))
    sizes = [size for size in range(least, full) if size <= EVERY_SIZE_UP_TO or size % SIZE_STRIDE == 0]
    predict = _predict(policy, prompts)
    with policy.update_numerics(), lora.perturbed(policy.module):
        expected = predict(full).detach()
        # All of them, whatever comes of it: split weights need the same calls on every rank.
        same = {size: torch.equal(predict(size).detach(), expected[:size]) for size in sizes}
    policy.bitwise_batch_sizes = (*(size for size in sizes if same[size]), full)
    others = ", ".join(str(size) for size in sizes if not same[size])
    message = (
        f"calls of {others} rows would not be rounded like those of {full}: where they are trained, they are padded"
    )
    return [message] if others else []


def max_rows(config: Config, processes: int = 1) -> dict[str, int]:
    """The most rows that one stage has at a time, for each micro-batch size: a larger one would gain nothing."""
    plan, prompts = window_plans(config)[0][1], split_prompts(config.sample, processes).per_process
    frontier = max(len(level.parents) for level in plan.levels)
    trained = math.ceil(len(loss_of(config).calls(plan).node) * prompts / config.train.updates)
    return {
        "sample.batch_size": frontier * prompts,
        "sample.decode_batch_size": len(plan.leaves) * prompts,
        "train.batch_size": trained,
    }


def stage_call(key: str, policy: Policy, state: State | None, prompts: Prompts) -> Callable[[int], None]:
    """A function that runs one micro-batch of a stage, of any size, with the stage's use of memory."""
    predict = _predict(policy, prompts)

    def sampled(size: int) -> None:
        with policy.acting(policy.sampler), policy.fast_sampling():
            predict(size)

    @torch.no_grad()
    def decoded(size: int) -> None:
        policy.decode(_latents(policy, size), prompts.take([i % len(prompts) for i in range(size)]))

    def updated(size: int) -> None:
        assert state is not None
        # Ranks do not wait for each other, so that one that runs out of memory hangs nobody; split weights must.
        apart = nullcontext() if state.sharded else policy.no_sync()
        try:
            with apart:
                for who in policy.asks:
                    predict(size, who)
                loss = predict(size).square().mean()
                if loss.requires_grad:  # the update says so if it does not
                    backward(loss, policy.accelerator)
        finally:
            state.optimizer.zero_grad(set_to_none=True)

    return {"sample.batch_size": sampled, "sample.decode_batch_size": decoded, "train.batch_size": updated}[key]


def _predict(policy: Policy, prompts: Prompts) -> Callable[..., torch.Tensor]:
    """A function from a size to a policy's prediction on that many rows of noise, the prompts in turn; a larger call
    has the same first.
    """
    cond = policy.encode(prompts)
    time_of_first = float(window_plans(policy.config)[0][1].timestep[0])

    def predict(size: int, who: Who = "policy") -> torch.Tensor:
        t = torch.full((size,), time_of_first)
        text = cond[torch.arange(size) % len(cond)]
        return policy.predict(_latents(policy, size), t, text, who)

    return predict


def _latents(policy: Policy, size: int) -> torch.Tensor:
    address = torch.tensor([[number, 0, 0] for number in range(size)], device=policy.device)
    return policy.model.noise(fold(policy.config.seed, 0), address)


def trials(
    key: str,
    run: Callable[[int], None],
    most: int,
    device: torch.device,
    accelerator: Accelerator | None = None,
    own: int = 0,
    first: int = 1,
) -> list[Trial]:
    """Sizes from `first` on, doubled up to `most`, until memory is short or two gained nothing; and one's own.

    All ranks try the same sizes; the slowest one's time counts.
    """
    done: list[Trial] = []
    size = min(first, most)
    while True:
        trial = Trial(size, math.inf)
        if not any_rank(not _has_room(done, size, device), accelerator):
            try:
                trial = _measure(run, size, device)
            except (MemoryError, RuntimeError) as error:  # a CPU's is nothing more than a RuntimeError
                known = isinstance(error, MemoryError | torch.OutOfMemoryError)
                if not known and not (type(error) is RuntimeError and "memory" in str(error)):
                    raise
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        done.append(trial._replace(seconds=max_rank(trial.seconds, accelerator)))
        if not done[0].fits and size > 1:
            size, done = 1, []
            continue
        if not done[0].fits:
            raise InputError(
                key, 1, "not even one row fits into memory", cure="a smaller picture, LoRA, or split weights"
            )
        if not done[-1].fits or size == most:
            break
        if choose(done).size * 4 <= size:
            if size >= min(own, most):
                break
            size = min(own, most)
        else:
            size = min(2 * size, most)
    return done


def choose(tried: list[Trial]) -> Trial:
    """The smallest size whose time a row is within 3 % of the best."""
    fastest = min(trial.seconds for trial in tried)
    return next(trial for trial in tried if MAX_TIME_SHARE * trial.seconds <= fastest)


def peak_memory(device: torch.device) -> int:
    """Most bytes since `reset_peak_memory`: of tensors on a GPU; else of the whole process, since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def available_memory(device: torch.device) -> int:
    """Bytes that this process could have at the most."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    limits = [int(text) for file in CGROUPS if file.is_file() and (text := file.read_text().strip()).isdigit()]
    there = min([psutil.virtual_memory().available + psutil.Process().memory_info().rss, *limits])
    return there // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def _measure(run: Callable[[int], None], size: int, device: torch.device) -> Trial:
    run(size)  # the first of its shape pays for more than itself
    reset_peak_memory(device)
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        run(size)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return Trial(size, best / size, peak_memory(device))


def _has_room(done: list[Trial], size: int, device: torch.device) -> bool:
    """Whether a size is expected to fit, as memory grew so far."""
    if len(done) < 2:
        return True
    before, last = done[-2:]
    slope = (last.memory - before.memory) / (last.size - before.size)
    return last.memory + slope * (size - last.size) <= MEMORY_SHARE * available_memory(device)


def describe_batches(config: Config, size: int, processes: int = 1, split: bool = False) -> list[str]:
    """Prompts, leaves and updates in micro-batches, as lines of text: nothing has to divide anything."""
    epoch, plan = window_plans(config)[0]
    how, updates = split_prompts(config.sample, processes), config.train.updates
    calls = count_model_calls(config, plan, epoch)
    one = calls.forward_backwards / split_prompts(config.sample).per_process  # parents of a prompt
    pictures = how.total * len(plan.leaves)
    lines = [f"{how.total} prompts × {len(plan.leaves)} leaves = {pictures} pictures an epoch"]
    if processes > 1:
        empty = how.per_process * processes - how.total
        lines[0] += f", {how.per_process} prompts on each of {processes} processes"
        lines[0] += f" ({empty} places stay empty)" if empty else ""
        lines[0] += "; weights are split between them (FSDP2)" if split else "; each has the whole model (DDP)"
    parents = math.ceil(one * how.per_process / updates)
    batches = f"{math.ceil(parents / size)} micro-batches of up to {size}" if parents > size else "in one micro-batch"
    steps = f"{updates} optimizer steps" if updates > 1 else "one optimizer step"
    what = ("parents" if isinstance(loss_of(config), EdgeLoss) else "noised leaves") + " a process" * (processes > 1)
    return [*lines, f"{steps} an epoch, about {parents} {what} each: {batches}"]
