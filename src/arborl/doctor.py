"""`arborl doctor`: is a flat curve a bug or a small batch?

Each check is a line: what was measured, whether it is right, what to do. The measurements are in `engine/checks.py`; a
run makes the cheap ones too, and warns only if one fails.
"""

import gc
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from .config import with_settings
from .config.schema import Config, EvalConfig, LogConfig, RewardConfig
from .core.errors import InputError
from .core.noise import fold, normal
from .data.prompts import LocalPrompts, Prompts, PromptSplit, local_prompts, split_prompts
from .distributed.coordination import OtherRankFailed
from .distributed.fsdp import local
from .distributed.gather import max_rank, unequal_weights
from .engine import checks
from .engine.autotune import (
    Trial,
    available_memory,
    choose,
    describe,
    max_rows,
    peak_memory,
    reset_peak_memory,
    stage_call,
    trials,
)
from .engine.checks import Finding, format_bytes
from .engine.cost import count_model_calls
from .engine.method import check_plan, make_plan, window_of, window_plans
from .engine.rate_advice import describe_advice, describe_sum
from .engine.rates import describe_rates, rate_settings
from .engine.rollout import Epoch, Rollout, kept_latents, sample_trees
from .engine.score import score
from .engine.update import update
from .run.checkpoint import load_weights
from .run.resume import weights_of
from .run.setup import Assembled, assemble, prepare, start_accelerator
from .trainer import run_epochs

PROMPTS_PER_PROCESS = 2
"""Prompts that each process looks at."""
FROZEN_ADVICE = "these weights stay as they are: are they frozen, switched off, or not in the forward pass?"
MIN_CANARY_STEPS = 5
"""Optimizer steps that a canary needs to tell anything."""
MAX_WINDOWS = 5
"""Places of the window that are tried, at most."""


def examine(config: Config, run: Path | None = None, canary_seconds: float = 120) -> Iterator[Finding]:
    """Every check, one after the other, on all processes; each yields what the first process shows.

    Nothing is written but the canary's run, which goes to a temporary folder.
    """
    check_plan(config)
    accelerator = start_accelerator(config)
    try:
        subject = Subject(config, accelerator, run)
    except InputError as error:
        yield Finding("set-up", str(error), False, "nothing can be measured before that is mended")
        return
    texts, sizes = subject.parts.prompts.training.texts[:8], subject.policy.batch_sizes.by_setting()
    for finding in subject.findings():
        yield _agreed(finding, accelerator)
    subject.release()
    if canary_seconds:
        config = with_settings(config, sizes)  # no need to look for them again
        yield _agreed(canary(config, texts, accelerator.num_processes, canary_seconds), accelerator)


def _agreed(finding: Finding, accelerator: Accelerator) -> Finding:
    """The finding of the first process that is not well, else that of the first."""
    if accelerator.num_processes == 1:
        return finding
    found: list[Finding] = gather_object([finding])
    rank, worst = next(((rank, one) for rank, one in enumerate(found) if one.ok is False), (0, found[0]))
    return worst._replace(measured=f"on rank {rank}: {worst.measured}") if rank else worst


class Subject:
    """A policy with its rewards and prompts, and one small epoch of it."""

    def __init__(self, config: Config, accelerator: Accelerator, run: Path | None) -> None:
        self.config, self.accelerator = config, accelerator
        self.parts: Assembled = assemble(config, accelerator, {"epoch": 0, "prompts": 0})
        self.policy, self.method, self.state = self.parts.policy, self.parts.method, self.parts.state
        self.messages = [*self.parts.messages, *self.parts.tune_and_warm_up()]
        if run is not None:
            load_weights(self.state.parameters, weights_of(run))
            if self.state.old:
                self.state.old.follow(0.0)
        self.device = accelerator.device
        reset_peak_memory(self.device)
        how = PromptSplit(PROMPTS_PER_PROCESS * accelerator.num_processes, PROMPTS_PER_PROCESS)
        self.local: LocalPrompts = local_prompts(
            self.parts.prompts.training, how, accelerator.process_index, 0, config.seed
        )
        self.cond = self.policy.encode(self.local.prompts)
        self.schedule = self.policy.schedule()
        self.seconds: dict[str, float] = {}  # a row of each stage takes
        self.peak = 0  # bytes at the worst

    def release(self) -> None:
        """Give the memory back, for the run that follows."""
        del self.parts, self.policy, self.method, self.state, self.cond
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def findings(self) -> Iterator[Finding]:
        for line in self.messages:
            yield Finding("set-up", line, None)
        yield rates_of_the_run(self.config)
        yield checks.free_disk(self.config, self.state.parameters, self.state.old is not None)
        rollout = self.rollout(0)
        if self.policy.compares_densities:
            steps = checks.recheck_steps(self.policy, rollout)
            yield from checks.check_transitions(steps, checks.ratio_bound(self.policy))
        yield from self.training(rollout)
        made, finding = self.pictures(rollout)
        yield finding
        yield from checks.check_rewards(self.parts.rewards, *made)
        yield self.spread(rollout)
        yield from self.speed()

    def rollout(self, number: int) -> Rollout:
        """The trees of an epoch, from the first one's noise, wherever its window stands."""
        plan = make_plan(self.config, self.schedule, number)
        epoch = Epoch(number, plan, fold(self.config.seed, 0), self.local)
        return sample_trees(self.policy, epoch, self.cond)

    def training(self, rollout: Rollout) -> Iterator[Finding]:
        """Two optimizer steps with advantages drawn by chance, looked at and taken back."""
        state, accelerator, loss = self.state, self.accelerator, self.method.loss
        plan, rate = rollout.plan, self.config.train.learning_rate
        address = torch.tensor([[int(i), 0, 0] for i in self.local.ids])
        advantage = normal(fold(self.config.seed, 1), address, (plan.edges,)).to("cpu")
        before = {name: local(p).detach().cpu().clone() for name, p in state.parameters.items()}
        apart = unequal_weights(state.every_weight(), accelerator)
        keep = loss.edges(plan).expand(len(advantage), -1)
        try:
            stats = update(self.policy, state, loss, rollout, advantage, keep, rates=[rate, rate])
        except InputError as error:
            yield Finding("gradients", str(error), False, FROZEN_ADVICE)
            return
        moved = [name for name, p in state.parameters.items() if not torch.equal(local(p).detach().cpu(), before[name])]
        drifted = [] if apart else unequal_weights(state.every_weight(), accelerator)
        with torch.no_grad():
            for name, parameter in state.parameters.items():
                local(parameter).copy_(before[name])
        state.optimizer.state.clear()
        if state.old:
            state.old.follow(0.0)
        unasked = checks.unasked_parts(stats.reached, [*self.policy.parts])
        missed = [name for name, found in stats.reached.items() if not found and name.split(".")[0] not in unasked]
        reached = sum(stats.reached.values())
        moved_anywhere = int(max_rank(len(moved), accelerator))
        yield Finding(
            "gradients",
            f"reached {reached} of {len(stats.reached)} groups of trained weights, norm "
            f"{stats.grad_norm:.2g}; two steps moved {moved_anywhere} of {len(before)} tensors"
            + (f"; not reached: {', '.join(missed[:4])}" if missed else "")
            + (f"; not asked at these noise levels: {', '.join(unasked)}" if unasked else "")
            + (f"; {stats.nonfinite} steps were not finite" if stats.nonfinite else ""),
            not missed and moved_anywhere > 0 and not stats.nonfinite and math.isfinite(stats.grad_norm),
            FROZEN_ADVICE if not stats.nonfinite else "a gradient is not finite: try train.mixed_precision=no",
        )
        if accelerator.num_processes == 1:
            yield Finding("processes", "one: there are no others to agree with", None)
            return
        split = state.sharded
        synchronised = "split between them" if split else f"{len(apart)} unequal before, {len(drifted)} after two steps"
        yield Finding(
            "processes",
            f"{accelerator.num_processes}; weights {synchronised}; {len(stats.unequal)} gradients unequal",
            not (apart or drifted or stats.unequal),
            "gradients are not synchronised, so every process trains a model of its own: is the model wrapped (DDP)?"
            if not apart
            else "the processes begin with different weights: do all load the same files?",
        )

    def pictures(self, rollout: Rollout) -> tuple[tuple[Tensor, Prompts], Finding]:
        """A few leaves of every prompt, decoded, with their prompts."""
        leaves = rollout.leaves[:, : max(2, 8 // PROMPTS_PER_PROCESS)]
        prompts = self.local.prompts.repeat(leaves.shape[1])
        made, finding = checks.check_pictures(self.policy, leaves.flatten(0, 1), prompts)
        return (made, prompts), finding

    def spread(self, rollout: Rollout) -> Finding:
        """The spread of the leaves' scores, with the window at some of its places."""
        around = window_plans(self.config)
        chosen = [
            around[round(i * (len(around) - 1) / max(1, MAX_WINDOWS - 1))] for i in range(min(MAX_WINDOWS, len(around)))
        ]
        found: dict[int, checks.Spread] = {}
        now = window_of(self.config, rollout.plan, 0)
        for epoch, plan in [(0, rollout.plan), *chosen]:
            window = window_of(self.config, plan, epoch)
            if window in found:
                continue
            grown = rollout if window == now else self.rollout(epoch)
            start = time.perf_counter()
            scored = score(self.policy, self.parts.rewards.trained, grown)
            self.seconds["score"] = (time.perf_counter() - start) / grown.leaves.shape[:2].numel()
            found[window] = checks.spread_of(scored.scores.total, checks.groups_of_leaves(grown.plan))
        return checks.check_spread(found, now)

    def speed(self) -> Iterator[Finding]:
        """Micro-batches that fit, and what an epoch will take."""
        config, accelerator = self.config, self.accelerator
        self.peak = peak_memory(self.device)  # of all that was done so far, in the configured micro-batches
        most = max_rows(config, accelerator.num_processes)
        prompt = self.local.prompts.take([0])
        total = available_memory(self.device)
        for key in ("sample.batch_size", "train.batch_size"):
            size = self.policy.batch_sizes.by_setting()[key]
            stage = stage_call(key, self.policy, self.state, prompt)
            tried = trials(key, stage, most[key], self.device, accelerator, size)
            best, own = choose(tried), _at(tried, size)
            self.seconds[key] = own.seconds
            self.peak = max(self.peak, own.memory)
            gain, fits = own.seconds / best.seconds, size < min((t.size for t in tried if not t.fits), default=math.inf)
            yield Finding(
                key,
                f"{size}; a row takes with {describe(tried)} (an epoch has {most[key]} at the most)",
                (None if gain > 1.25 else True) if fits else False,
                f"{key}={best.size} is {gain:.1f} times as fast a row" if fits else f"{key}={best.size} is what fits",
            )
        share = split_prompts(config.sample, accelerator.num_processes).per_process
        mine = split_prompts(config.sample).per_process
        counts = [count_model_calls(config, plan, epoch) for epoch, plan in window_plans(config)]
        forwards = sum(c.forwards for c in counts) / len(counts) * share / mine
        parents = sum(c.forward_backwards for c in counts) / len(counts) * share / mine
        leaves = most["sample.decode_batch_size"]
        split = {
            "rollout": forwards * self.seconds["sample.batch_size"],
            "decode and score": leaves * self.seconds["score"],
            "update": parents * self.seconds["train.batch_size"],
        }
        seconds = sum(split.values())
        parts = ", ".join(f"{name} {value:.2g}" for name, value in split.items())
        hours = seconds * config.train.epochs / 3600
        yield Finding(
            "forecast",
            f"{seconds:.3g} s an epoch ({parts}); {hours:.2g} h for {config.train.epochs} epochs",
            None,
        )
        _, plan = window_plans(config)[0]
        kept = 0 if config.sample.offload else kept_latents(self.policy, plan)
        latents = 4 * math.prod(self.policy.latent_shape) * kept
        peak = self.peak + max(0, share - PROMPTS_PER_PROCESS) * latents
        yield Finding(
            "memory",
            f"{format_bytes(peak)} at the worst, of {format_bytes(total)}",
            peak < 0.95 * total,
            "smaller micro-batches (auto finds them), train.gradient_checkpointing=selective or true, "
            "sample.offload=true, or LoRA",
        )


def rates_of_the_run(config: Config) -> Finding:
    """What the settings come to; nothing is measured, so nothing is wrong."""
    said = "; ".join(filter(None, (describe_rates(config), describe_sum(config))))
    return Finding("learning rates", said, None, describe_advice(config))


def _at(tried: list[Trial], size: int) -> Trial:
    """The trial nearest to a size from below."""
    return max((trial for trial in tried if trial.size <= size and trial.fits), key=lambda trial: trial.size)


def canary(config: Config, texts: Sequence[str], processes: int, seconds: float) -> Finding:
    """A short run on a reward that anything can learn: pictures must get brighter, from the same noise as before.

    In the first half of the time at the configured learning rate; if that shows nothing, at ten times as much.
    """
    said: list[str] = []
    rose, steps = False, 0
    for factor in (1.0, 10.0):
        with tempfile.TemporaryDirectory(prefix="arborl-canary-") as folder:
            short = _canary_config(config, texts, processes, Path(folder), factor, seconds / 2)
            run = prepare(short, quiet=True)
            run.saver.enabled = False
            try:
                run_epochs(run)
            except (InputError, OtherRankFailed) as error:
                return _broken_canary(said, str(error), factor, config.train.learning_rate)
        assert run.evaluations.first
        assert run.evaluations.newest
        change = run.evaluations.newest.values["brightness"] - run.evaluations.first.values["brightness"]
        rise, error = float(change.mean()), float(change.std()) / math.sqrt(len(change))
        rate, steps = config.train.learning_rate * factor, run.state.epoch * config.train.updates
        said.append(f"{run.state.epoch} epochs at learning rate {rate:.0e}: brightness {rise:+.2g} ± {error:.1g}")
        rose = rise > 3 * error
        if rose:
            break
    never = "nothing is learnt: look at the lines above, and at advantage_abs and grad_norm of a run"
    early = "too few steps to tell: give it longer, with --canary"
    if rose:
        return Finding("canary", "; ".join(said), True if len(said) == 1 else None, _little_shows(config))
    few = steps < MIN_CANARY_STEPS
    return Finding("canary", "; ".join(said), None if few else False, early if few else never)


def _little_shows(config: Config) -> str:
    """What to do where only ten times the rate has shown anything."""
    advice = "nothing is broken, but at your train.learning_rate little shows in this time: raise it, or train longer"
    less = " and ".join(rate_settings(config))
    return f"{advice} (this run kept to that rate; with {less} yours has less of it)" if less else advice


def _broken_canary(said: list[str], problem: str, factor: float, rate: float) -> Finding:
    """A short run that came to no end. Where it is the larger rate that breaks the model, the configured one may do."""
    said = [*said, f"at learning rate {rate * factor:.0e}: {problem}"]
    advice = "a lower train.learning_rate" if factor == 1 else "train longer: ten times your rate is too much"
    return Finding("canary", "; ".join(said), False if factor == 1 else None, advice)


def _canary_config(
    config: Config, texts: Sequence[str], processes: int, folder: Path, factor: float, seconds: float
) -> Config:
    """The same model and trees, few prompts, and brightness alone to learn."""
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(" ".join(text.split()) for text in texts), encoding="utf-8")
    return with_settings(
        config,
        {
            "rewards": {"brightness": RewardConfig()},
            "prompts.path": str(prompts),
            "eval": EvalConfig(every=0, num_prompts=16, watch="off", num_steps=config.eval.num_steps),
            "log": LogConfig(dir=str(folder / "runs"), trackers=[], record_every=0, save_every=10**9),
            "run_name": "canary",
            "train.epochs": 100,
            "train.max_seconds": seconds,
            "train.learning_rate": config.train.learning_rate * factor,
            "train.schedule": "constant",
            "train.warmup": 0,
            "prune.until": 1.0,
            "sample.prompts_per_epoch": None,
            "sample.num_prompts": min(split_prompts(config.sample, processes).per_process, 8),
        },
    )
