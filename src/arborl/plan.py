"""From configuration to plans, and what a run will cost before it starts."""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from .config.schema import Config
from .core import plans
from .core.errors import InputError
from .core.kernels import USUAL_ETA, USUAL_KAPPA, sde_able
from .core.noise import fold
from .core.prune import Pruning, prune, slid
from .core.schedule import Schedule, window_start
from .core.tree import Plan, Tail
from .models import model_class

BACKWARD_COST = 3
"""A forward + backward in units of a forward."""


def kernel_of(config: Config) -> str:
    if config.kernel.name != "auto":
        return config.kernel.name
    return "ddim" if model_class(config).diffusion else config.kernel.flow


def eta_of(config: Config) -> float:
    return USUAL_ETA[kernel_of(config)] if config.kernel.eta is None else config.kernel.eta


def make_plan(config: Config, schedule: Schedule, epoch: int) -> Plan:
    """The trees of one prompt at an epoch."""
    kernel = kernel_of(config)
    knobs = asdict(config.tree) | asdict(config.kernel) | asdict(config.sample)  # a plan takes those it knows
    knobs |= {"eta": eta_of(config), "tail": Tail(config.sample.tail_solver, config.sample.tail_steps)}
    if config.tree.split_noise_scale is None:
        knobs["split_noise_scale"] = USUAL_KAPPA.get(kernel, 1.0)
    return plans.PLANS[config.tree.plan](schedule, kernel, epoch, **knobs)


def window_of(config: Config, plan: Plan, epoch: int) -> int:
    """Where the moving window stands: the first stochastic step, or where splits are always stochastic, the first step
    of what moves beside them.
    """
    tree = config.tree
    if not (tree.plan == "branch" and tree.mix_ode_sde):
        return int(plan.step[plan.stochastic].min())
    schedule = model_class(config).grid(config, config.sample.num_steps)
    positions = plans.window_positions(schedule, plan.kernel, eta_of(config), tree.mix_sde_window)
    return window_start(epoch, tree.s, tree.tou, positions)


def pruning(config: Config, plan: Plan, epoch: int) -> Pruning:
    """What of the plan is not trained at an epoch."""
    settings = config.prune
    if settings.until < 1 and epoch >= settings.until * config.train.epochs:
        return Pruning(step_fraction=settings.step_fraction)
    last_split = int(plan.depth[plan.splits].max()) if len(plan.splits) else 0
    stop = last_split if settings.stop_depth is None else settings.stop_depth
    depths = slid(settings.depth, epoch if settings.depth_slide else 0, settings.slide_interval, stop)
    return Pruning(depths, settings.width_mode, settings.width_ratio, settings.step_fraction)


class Work(NamedTuple):
    """Model calls of an epoch, on one latent each."""

    forwards: int
    forward_backwards: int

    @property
    def cost(self) -> int:
        return self.forwards + BACKWARD_COST * self.forward_backwards


def work(config: Config, plan: Plan, epoch: int) -> Work:
    """What an epoch takes per process, rollout and update (a KL's forwards of the reference apart).

    Exact but for `prune.width_mode` 2, whose best and worst chains may share a parent: there it is the most.
    """
    prompts = config.sample.num_prompts
    rising = torch.arange(plan.edges, dtype=torch.float64).expand(prompts, -1)
    keep = prune(plan, rising, pruning(config, plan, epoch), fold(config.seed, epoch), torch.arange(prompts))
    parents = torch.zeros(prompts, plan.nodes).index_add(1, plan.parent, keep.float())
    return Work(plan.forwards * prompts, int((parents > 0).sum()))


def places(config: Config) -> list[tuple[int, Plan]]:
    """(epoch of its first visit, plan) for every place of the window; an epoch's is number (epoch // tou) modulo
    their count.
    """
    schedule = model_class(config).grid(config, config.sample.num_steps)
    found: list[tuple[int, Plan]] = []
    # A window has fewer places than there are steps, and comes back to its first one within as many moves.
    for move in range(len(schedule)):
        epoch = move * config.tree.tou
        plan = make_plan(config, schedule, epoch)
        if found and torch.equal(plan.step, found[0][1].step) and torch.equal(plan.eta, found[0][1].eta):
            break
        found.append((epoch, plan))
    return found


def plans_of_a_run(config: Config) -> list[tuple[int, Plan]]:
    """(where the window stands, plan) for each of its places, in order of the first visit."""
    return [(window_of(config, plan, epoch), plan) for epoch, plan in places(config)]


def _stages(config: Config) -> Iterator[tuple[tuple[int, Pruning], Plan]]:
    """Epoch by epoch without end: what tells it from others (the window's place, what is pruned), and its plan."""
    around = places(config)
    for epoch in itertools.count():
        place = epoch // config.tree.tou % len(around)
        yield (place, pruning(config, around[place][1], epoch)), around[place][1]


def costs(config: Config) -> Iterator[int]:
    """What each epoch costs in forwards, without end; a KL's forwards of the reference included."""
    known: dict[tuple[int, Pruning], int] = {}
    for epoch, (stage, plan) in enumerate(_stages(config)):
        if stage not in known:
            found = work(config, plan, epoch)
            known[stage] = found.cost + (found.forward_backwards if config.train.kl > 0 else 0)
        yield known[stage]


def epochs_within(config: Config, compute: float) -> int:
    """How many epochs of this run cost at most `compute` forwards; at least 1."""
    config, epochs = copy.deepcopy(config), 1
    for _ in range(10):  # where pruning ends after a share of the run, its length decides its cost
        total = itertools.accumulate(costs(config))
        epochs = max(1, sum(1 for _ in itertools.takewhile(lambda spent: spent <= compute, total)))
        if config.prune.until == 1 or epochs == config.train.epochs:
            break
        config.train.epochs = epochs
    return epochs


def check_plan(config: Config) -> None:
    """Everything about the plan that can be wrong is wrong before anything is loaded or written."""
    seen: set[tuple[int, Pruning]] = set()
    for epoch, (stage, plan) in enumerate(itertools.islice(_stages(config), config.train.epochs)):
        if stage in seen:
            continue
        seen.add(stage)
        how, advantage = stage[1], config.advantage
        if len(plan.leaves) < 2:
            keys = "tree.k and sample.num_trees" if config.tree.plan in ("tree", "branch") else "sample.group_size"
            raise InputError(keys, None, "a prompt has a single leaf, so no advantage can be told", "2 leaves or more")
        if advantage.name == "depth" and advantage.group != "prompt" and not len(plan.splits):
            problem = "no tree of this plan branches, so no node has another to be compared with"
            raise InputError("advantage.group", advantage.group, problem, "prompt")
        deepest = int(plan.depth.max())
        if any(not 1 <= depth <= deepest for depth in config.prune.depth):
            raise InputError("prune.depth", config.prune.depth, "the plan has no such depth", f"1..{deepest}")
        if not bool(prune(plan, torch.zeros(1, plan.edges), how).any()):
            trained = sorted({int(depth) for depth in plan.depth[plan.child][plan.stochastic]})
            problem = f"at epoch {epoch} that leaves no edge to train (those are at depths {trained})"
            raise InputError("prune.depth", list(how.depths), problem, "fewer depths")


def warnings_about(config: Config) -> list[str]:
    """What works but should be known: steps that leave more noise than the schedule can remove."""
    if config.tree.plan != "flat" or not config.kernel.excess_noise:
        return []
    schedule = model_class(config).grid(config, config.sample.num_steps)
    kernel, eta = kernel_of(config), eta_of(config)
    breaks = sde_able(schedule, kernel, eta, excess=True) & ~sde_able(schedule, kernel, eta)
    if not breaks.any():
        return []
    steps = breaks.nonzero().flatten().tolist()
    return [f"kernel.excess_noise: steps {steps} add more noise than the level they reach; some stays in the pictures"]


def flat_equivalent(config: Config, leaves: int) -> Plan:
    """Flat GRPO as published, with as many pictures a prompt: every step but the last is stochastic and trained."""
    schedule = model_class(config).grid(config, config.sample.num_steps)
    return plans.flat(
        schedule,
        kernel_of(config),
        0,
        eta=eta_of(config),
        group_size=leaves,
        shared_noise=False,
        excess_noise=True,
        max_leaves=leaves,
    )


def forecast(config: Config) -> dict[str, Any]:
    """Counts per process and epoch, for every place of the window, and for flat GRPO with as many pictures."""
    prompts, around = config.sample.num_prompts, places(config)
    leaves = len(around[0][1].leaves)
    flat = flat_equivalent(config, leaves)
    whole = Work(flat.forwards * prompts, len(flat.trained_parents) * prompts)
    found = [work(config, plan, epoch) for epoch, plan in around]
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
        "ratio": round(whole.cost / (sum(counts.cost for counts in found) / len(found)), 3),
    }
