"""From configuration to plans, and what a run will cost before it starts."""

from dataclasses import asdict
from typing import Any

from .config.schema import Config
from .core import tree as trees
from .core.errors import InputError
from .core.kernels import sde_able
from .core.schedule import Schedule
from .core.tree import PLANS, Plan
from .models import model_class

BACKWARD_COST = 3
"""A forward + backward in units of a forward."""


def kernel_of(config: Config) -> str:
    return model_class(config).kernel if config.kernel.name == "auto" else config.kernel.name


def make_plan(config: Config, schedule: Schedule, epoch: int) -> Plan:
    """The trees of one prompt at an epoch."""
    knobs = asdict(config.tree) | asdict(config.kernel) | asdict(config.sample)  # a plan takes those it knows
    return PLANS[config.tree.plan](schedule, kernel_of(config), epoch, **knobs)


def check_plan(config: Config) -> None:
    """Everything about the plan that can be wrong is wrong before anything is loaded or written."""
    if config.train.epochs > 0:
        plans = plans_of_a_run(config)
        leaves = len(plans[0][1].leaves)
        if leaves < 2:
            keys = "tree.k and sample.num_trees" if config.tree.plan == "tree" else "sample.group_size"
            raise InputError(keys, None, "a prompt has a single leaf, so no advantage can be told", "2 leaves or more")


def warnings_about(config: Config) -> list[str]:
    """What works but should be known: steps that leave more noise than the schedule can remove."""
    if config.tree.plan != "flat" or not config.kernel.excess_noise:
        return []
    schedule = model_class(config).grid(config, config.sample.num_steps)
    fits = sde_able(schedule, kernel_of(config), config.kernel.eta)
    breaks = (
        (sde_able(schedule, kernel_of(config), config.kernel.eta, excess=True) & ~fits).nonzero().flatten().tolist()
    )
    if not breaks:
        return []
    return [f"kernel.excess_noise: steps {breaks} add more noise than the level they reach; some stays in the pictures"]


def plans_of_a_run(config: Config) -> list[tuple[int, Plan]]:
    """(first stochastic step, plan) for every place a window takes, in order of its first visit."""
    schedule = model_class(config).grid(config, config.sample.num_steps)
    found: dict[int, Plan] = {}
    # A window has fewer places than there are steps, and comes back to its first one within as many moves.
    for move in range(len(schedule)):
        plan = make_plan(config, schedule, move * config.tree.tou)
        found.setdefault(int(plan.step[plan.stochastic].min()), plan)
    return list(found.items())


def flat_equivalent(config: Config, leaves: int) -> Plan:
    """Flat GRPO as published, with as many pictures a prompt: every step but the last is stochastic and trained."""
    schedule = model_class(config).grid(config, config.sample.num_steps)
    return trees.flat(
        schedule,
        kernel_of(config),
        0,
        eta=config.kernel.eta,
        group_size=leaves,
        shared_noise=False,
        excess_noise=True,
        max_leaves=leaves,
    )


def forecast(config: Config) -> dict[str, Any]:
    """Counts per process and epoch, for every place of the window, and for flat GRPO with as many pictures."""
    prompts = config.sample.num_prompts
    plans = plans_of_a_run(config)
    leaves = len(plans[0][1].leaves)

    def counts(plan: Plan) -> dict[str, int]:
        return {"forwards": plan.forwards * prompts, "forward_backwards": len(plan.trained_parents) * prompts}

    def cost(count: dict[str, int]) -> int:
        return count["forwards"] + BACKWARD_COST * count["forward_backwards"]

    flat = counts(flat_equivalent(config, leaves))
    positions = [{"window": start, **counts(plan)} for start, plan in plans]
    mean_cost = sum(cost(p) for p in positions) / len(positions)
    return {
        "plan": config.tree.plan,
        "kernel": plans[0][1].kernel,
        "images": leaves * prompts,
        "training_samples": len(plans[0][1].trained_parents) * prompts,
        "positions": positions,
        "flat": flat,
        "ratio": round(cost(flat) / mean_cost, 3),
    }
