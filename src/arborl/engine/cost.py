"""The cost of a plan in forwards, counted before anything runs."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..config import with_settings
from ..config.schema import Config
from ..core import plans
from ..core.kernels import DEFAULT_ETA
from ..core.noise import fold
from ..core.plans import Group, Noise
from ..core.prune import Pruning, prune
from ..core.tree import EULER, Plan
from ..data.prompts import split_prompts
from .contracts import loss_of
from .method import naming_settings, noise_of, pruning, schedule_of, shape_of, usual_kernel, window_of, window_plans
from .rate_advice import advise
from .rates import course, rate_sum

BACKWARD_COST = 3
"""A forward + backward in units of a forward."""


class ModelCalls(NamedTuple):
    """Model calls of an epoch, on one latent each."""

    forwards: int
    forward_backwards: int

    @property
    def cost(self) -> int:
        return self.forwards + BACKWARD_COST * self.forward_backwards


def count_model_calls(config: Config, plan: Plan, epoch: int) -> ModelCalls:
    """The work of an epoch per process, rollout and update (the forwards of further policies that the loss asks apart).

    Exact where all leaves have scores, but for `prune.width_mode=best_and_worst`, whose chains may share a parent:
    there it is the most.
    """
    prompts, how = split_prompts(config.sample).per_process, pruning(config, plan, epoch)
    loss, rising = loss_of(config), torch.arange(plan.edges, dtype=torch.float64)[None]
    among = loss.edges(plan)
    keep = prune(plan, rising, how._replace(step_fraction=1.0), among=among)  # the same for every prompt
    if how.step_fraction < 1:
        key, ids = fold(config.seed, epoch), torch.arange(prompts)
        keep = keep & prune(plan, rising.expand(prompts, -1), how._replace(width_mode="off"), key, ids, among)
    calls = loss.calls(plan).trained(keep)
    return ModelCalls(plan.forwards * prompts, int(calls.sum()) * prompts // len(keep))


def costs(config: Config) -> Iterator[int]:
    """The cost of each epoch in forwards, without end; those of further policies that the loss asks included."""
    around, known, asks = window_plans(config), dict[tuple[int, Pruning], int](), len(loss_of(config).asks)
    for epoch in itertools.count():
        place = epoch // config.tree.tou % len(around)
        plan = around[place][1]
        stage = place, pruning(config, plan, epoch)
        if stage not in known or stage[1].step_fraction < 1:  # which steps are drawn changes the cost
            found = count_model_calls(config, plan, epoch)
            known[stage] = found.cost + asks * found.forward_backwards
        yield known[stage]


def epochs_within(config: Config, compute: float) -> int:
    """The number of epochs that cost at most `compute` forwards; at least 1."""
    epochs = 1
    for _ in range(10):  # where pruning ends after a share of the run, its length decides its cost
        total = itertools.accumulate(costs(config))
        epochs = max(1, sum(1 for _ in itertools.takewhile(lambda spent: spent <= compute, total)))
        if config.prune.until == 1 or epochs == config.train.epochs:
            break
        config = with_settings(config, {"train.epochs": epochs})
    return epochs


def flat_equivalent(config: Config, leaves: int) -> Plan:
    """Flat GRPO as published, with as many pictures a prompt: every step but the last is stochastic and trained.

    Beside a plan by ODE it has the noise that is usual for the model.
    """
    schedule, noise = schedule_of(config, config.sample.num_steps), noise_of(config)
    if noise.kernel == "ode" and len(schedule) > 1:  # a single step leaves none to add noise at
        kernel = usual_kernel(config)
        noise = Noise(kernel, DEFAULT_ETA[kernel])
    shape = shape_of(config)._replace(
        noise=noise._replace(excess=True), group=Group(leaves), max_leaves=leaves, tail=EULER
    )
    with naming_settings():
        return plans.flat(schedule, 0, shape)


def forecast(config: Config) -> dict[str, Any]:
    """Counts per process and epoch, for every place of the window, and for flat GRPO with as many pictures."""
    prompts, around = split_prompts(config.sample).per_process, window_plans(config)
    leaves, rates = len(around[0][1].leaves), course(config)
    flat = flat_equivalent(config, leaves)
    whole = ModelCalls(flat.forwards * prompts, len(flat.trained_parents) * prompts)
    found = [count_model_calls(config, plan, epoch) for epoch, plan in around]
    return {
        "plan": config.tree.plan,
        "kernel": around[0][1].kernel,
        "images": leaves * prompts,
        "training_samples": found[0].forward_backwards,
        "positions": [
            {"window": window_of(config, plan, epoch), **counts._asdict()}
            for (epoch, plan), counts in zip(around, found, strict=True)
        ],
        "flat": whole._asdict(),
        "learning_rate": rates and rates._asdict(),
        "rate_sum": rate_sum(config),
        "advice": [one._asdict() for one in advise(config)],
        "ratio": round(whole.cost / (sum(counts.cost for counts in found) / len(found)), 3),
    }
