"""From settings to the method: an epoch's plan, kernel, advantage and pruning; and whether they fit together."""

import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..config.schema import Config
from ..core import plans
from ..core.advantage import ADVANTAGES, advantages
from ..core.errors import ArgumentError, InputError
from ..core.kernels import DEFAULT_ETA, DEFAULT_KAPPA, sde_able
from ..core.losses import EdgeLoss, LeafLoss
from ..core.plans import Group, Noise, Shape, Splits, Window
from ..core.prune import Pruning, prune, slide_depths
from ..core.schedule import Schedule, window_start
from ..core.tensors import ints
from ..core.tree import Plan, Tail
from ..data.prompts import split_prompts
from ..distributed.accelerator import Accelerator
from ..distributed.gather import gather
from ..models import model_class
from .contracts import advantage_arguments, advantage_of, loss_of, try_advantage
from .rates import warm_up_without_end
from .rollout import Epoch, Rollout
from .score import LeafScores

MOST_EDGES, MOST_CALLS, MOST_STAGES = 2**21, 2**24, 2**14
"""Limits: edges over all places of a window, edges of a process in an epoch, plan variants of a run. More is a slip of
the pen, refused before it can fill the memory.
"""

SETTING_OF_ARGUMENT = {
    "plan": "tree.plan",
    "kernel": "kernel.name",
    "eta": "kernel.eta",
    "steps": "sample.num_steps",
    "shift": "sample.shift",
    "window.size": "tree.w",
    "splits.points": "tree.split_points",
    "splits.rounds": "tree.split_rounds",
    "splits.scale": "tree.split_noise_scale",
    "kappa": "tree.split_noise_scale",
    "group.shared_noise": "sample.shared_noise",
    "max_leaves": "tree.max_leaves",
}
"""The settings behind the arguments of the core's functions, and behind the fields of a plan's shape."""


@contextmanager
def naming_settings(plan: str = "tree") -> Generator[None]:
    """Inside, what the core says of its arguments is said of the settings they came from: those of that plan."""
    names = SETTING_OF_ARGUMENT | ({"window.size": "tree.mix_sde_window"} if plan == "branch" else {})
    try:
        yield
    except ArgumentError as error:
        if error.argument == "kernel" and error.allowed:
            error.allowed = f"auto, {error.allowed}"  # a setting's value, and no kernel
        raise error.renamed(names) from None


def usual_kernel(config: Config) -> str:
    """The stochastic kernel of the model's family."""
    return "ddim" if model_class(config).diffusion else config.kernel.flow


def kernel_of(config: Config) -> str:
    return usual_kernel(config) if config.kernel.name == "auto" else config.kernel.name


def eta_of(config: Config) -> float:
    """The noise level of stochastic steps; the ODE has none, whatever is set."""
    kernel = kernel_of(config)
    if kernel == "ode":
        return 0.0
    return DEFAULT_ETA[kernel] if config.kernel.eta is None else config.kernel.eta


def noise_of(config: Config) -> Noise:
    return Noise(kernel_of(config), eta_of(config), config.kernel.excess_noise)


def moving_window(config: Config) -> Window | None:
    """The window of the configured plan; None where none moves."""
    tree = config.tree
    if tree.plan in ("tree", "mix"):
        return Window(tree.w, tree.s, tree.tou)
    if tree.plan == "branch" and tree.mix_ode_sde:
        return Window(tree.mix_sde_window, tree.s, tree.tou)
    return None


def shape_of(config: Config) -> Shape:
    """What the settings say to a plan."""
    tree, sample, noise = config.tree, config.sample, noise_of(config)
    scale = DEFAULT_KAPPA.get(noise.kernel, 1.0) if tree.split_noise_scale is None else tree.split_noise_scale
    return Shape(
        noise=noise,
        k=tree.k,
        window=moving_window(config),
        splits=Splits(tuple(tree.split_points), tree.split_rounds, scale),
        group=Group(sample.group_size, sample.shared_noise),
        trees=sample.num_trees,
        max_leaves=tree.max_leaves,
        tail=Tail(sample.tail_solver, sample.tail_steps),
    )


def schedule_of(config: Config, steps: int, key: str = "sample.num_steps") -> Schedule:
    """The model's table of denoising steps."""
    try:
        # Of divisions that the check of the levels will find.
        with naming_settings(), warnings.catch_warnings(action="ignore"):
            return model_class(config).schedule_for(config, steps)
    except InputError:
        raise
    except ValueError:
        sample = config.sample
        problem = f"gives no falling noise levels with sample.sigmas={sample.sigmas} and sample.shift={sample.shift}"
        raise InputError(key, steps, problem, cure="other steps, or another sample.shift") from None


def make_plan(config: Config, schedule: Schedule, epoch: int) -> Plan:
    """The trees of one prompt at an epoch."""
    with naming_settings(config.tree.plan):
        plan = plans.PLANS[config.tree.plan](schedule, epoch, shape_of(config))
    return replace(plan, balanced=config.tree.siblings == "balanced")


def plan_at(config: Config, epoch: int = 0) -> Plan:
    """The trees of one prompt at an epoch, on the model's own noise levels; loads no weights."""
    return make_plan(config, schedule_of(config, config.sample.num_steps), epoch)


def window_positions(config: Config, schedule: Schedule) -> int:
    """The number of places of the plan's moving window; 1 where none moves."""
    window = moving_window(config)
    if window is None:
        return 1
    with naming_settings(config.tree.plan):
        return plans.window_positions(schedule, noise_of(config), window)


def window_of(config: Config, plan: Plan, epoch: int) -> int:
    """The first step of the moving window; without one, the first stochastic step, or 0 where there is none either."""
    positions = window_positions(config, plan.schedule.head(config.sample.num_steps))
    if positions == 1:
        return int(plan.step[plan.stochastic].min()) if plan.stochastic.any() else 0
    return window_start(epoch, config.tree.s, config.tree.tou, positions)


def pruning(config: Config, plan: Plan, epoch: int) -> Pruning:
    """The pruning of an epoch's plan."""
    settings = config.prune
    if settings.until < 1 and epoch >= settings.until * config.train.epochs:
        return Pruning(step_fraction=settings.step_fraction)
    last_split = int(plan.depth[plan.splits].max()) if len(plan.splits) else 0
    stop = last_split if settings.stop_depth is None else settings.stop_depth
    depths = slide_depths(settings.depth, epoch if settings.depth_slide else 0, settings.slide_interval, stop)
    return Pruning(depths, settings.width_mode, settings.width_ratio, settings.step_fraction)


def window_plans(config: Config) -> list[tuple[int, Plan]]:
    """(epoch of its first visit, plan) for every place the window comes to; at an epoch it stands at number
    (epoch // tou) modulo their count.
    """
    schedule = schedule_of(config, config.sample.num_steps)
    positions = window_positions(config, schedule)
    visited = positions // math.gcd(positions, config.tree.s)
    first = make_plan(config, schedule, 0)
    edges = first.edges + first.roots * len(schedule)  # no place has more, whatever its tail
    if visited * max(edges, 8 * len(schedule)) > MOST_EDGES:  # a step without edges has its price too
        problem = f"the window has {visited} places, with trees of up to {edges} edges at each"
        raise InputError("sample.num_steps", len(schedule), problem, cure="fewer steps, fewer leaves, or tree.s=0")
    if edges * (prompts := split_prompts(config.sample).per_process) > MOST_CALLS:
        key = "num_prompts" if config.sample.prompts_per_epoch is None else "prompts_per_epoch"
        problem = f"{edges} edges for each are more than a process can take in an epoch"
        raise InputError(f"sample.{key}", prompts, problem, f"at most {MOST_CALLS // edges}")
    epochs = [move * config.tree.tou for move in range(visited)]
    return [(epoch, make_plan(config, schedule, epoch)) for epoch in epochs]


def plans_of_a_run(config: Config) -> list[tuple[int, Plan]]:
    """(where the window stands, plan) for each of its places, in order of the first visit."""
    return [(window_of(config, plan, epoch), plan) for epoch, plan in window_plans(config)]


def plan_variants(config: Config) -> Iterator[tuple[int, Plan]]:
    """(epoch, plan) for every combination of a window's place and what is pruned that the run comes to."""
    around, prune, epochs = window_plans(config), config.prune, config.train.epochs
    # No depth is below the last step; one that is said to be is refused when the first stage is looked at.
    first = min(prune.depth, default=0) - (prune.stop_depth or 0)
    moves = max(0, min(first, config.sample.num_steps)) if prune.depth_slide else 0
    if moves * len(around) > MOST_STAGES:
        problem = f"moves {moves} times while the window has {len(around)} places, which are too many cases to check"
        raise InputError("prune.depth", prune.depth, problem, cure="smaller depths, fewer steps, or tree.s=0")
    slides = [n * prune.slide_interval for n in range(1, moves + 1)]
    changes = sorted({0, *slides, math.ceil(prune.until * epochs), epochs})
    for start, stop in itertools.pairwise(changes):
        # After one round of the window everything comes again, until what is pruned changes.
        tou = config.tree.tou
        until = min(stop, epochs, start + len(around) * tou)
        for epoch in [start, *range((start // tou + 1) * tou, until, tou)] if start < until else ():
            yield epoch, around[epoch // tou % len(around)][1]


def check_plan(config: Config) -> None:
    """Everything about the plan that can be wrong is wrong before anything is loaded or written."""
    advantage, settings, loss = config.advantage, config.prune, loss_of(config)
    if settings.until < 1 and config.train.max_seconds:
        problem = "the clock ends the run (train.max_seconds), so its length is not known beforehand"
        raise InputError("prune.until", settings.until, problem, "1", cure="no train.max_seconds")
    if advantage.name not in ADVANTAGES:
        try_advantage(config, plan_at(config))
    for epoch, plan in plan_variants(config):
        if len(plan.leaves) < 2:
            keys = "sample.group_size" if config.tree.plan in ("flat", "mix") else "tree.k and sample.num_trees"
            raise InputError(
                keys, None, "a prompt has a single leaf, so no advantage can be computed", "2 leaves or more"
            )
        if advantage.name == "depth" and advantage.group != "prompt":
            siblings = plan.parent[plan.stochastic] if advantage.group == "siblings" else plan.parent
            if not len(siblings) or int(torch.bincount(siblings).max()) < 2:
                problem = "no tree of this plan branches, so no node has another to be compared with"
                raise InputError("advantage.group", advantage.group, problem, "prompt")
        deepest = int(plan.depth.max())
        if any(not 1 <= depth <= deepest for depth in settings.depth):
            raise InputError("prune.depth", settings.depth, "the plan has no such depth", f"1..{deepest}")
        _check_loss(config, loss, plan)
        how, among = pruning(config, plan, epoch), loss.edges(plan)
        if not bool(prune(plan, torch.zeros(1, plan.edges), how, among=among).any()):
            trained = sorted({int(depth) for depth in plan.depth[plan.child][among]})
            problem = f"at epoch {epoch} that leaves no edge to train (those are at depths {trained})"
            raise InputError("prune.depth", list(how.depths), problem, cure="fewer depths")
    pictures, steps = config.eval.num_prompts, config.eval.num_steps or config.sample.num_steps
    if config.eval.num_steps:
        schedule_of(config, steps, "eval.num_steps")
    if pictures * steps > MOST_CALLS:
        problem = f"an evaluation cannot take {steps} steps for each"
        raise InputError("eval.num_prompts", pictures, problem, f"at most {MOST_CALLS // steps}")


def _check_loss(config: Config, loss: EdgeLoss | LeafLoss, plan: Plan) -> None:
    """The loss can train something of the plan, and pruning means something to it."""
    name, settings = config.loss.name, config.prune
    if loss.needs_densities and not plan.stochastic.any():
        problem = f"draws nothing, so that no edge has a density, which loss.name={name} needs"
        raise InputError("kernel.name", config.kernel.name, problem, "auto, flow_sde, dance_sde, cps, ddim")
    if isinstance(loss, LeafLoss):
        steps = f"loss.name={name} trains leaves at noise levels of its own, and no steps"
        if settings.depth:
            raise InputError("prune.depth", settings.depth, steps, "[]")
        if settings.step_fraction < 1:
            raise InputError("prune.step_fraction", settings.step_fraction, steps, "1")
        if config.advantage.name == "depth" and config.advantage.group == "siblings":
            problem = f"loss.name={name} trains leaves at the levels of steps without noise too, which have no siblings"
            raise InputError("advantage.group", "siblings", problem, "tree, prompt")
    try:
        loss.calls(plan)
    except ArgumentError as error:
        is_option = error.argument in inspect.signature(type(loss)).parameters
        key, value = ("loss.options." + error.argument, error.value) if is_option else ("loss.name", name)
        problem = error.problem if is_option else f"its {error.argument} is {error.value}: {error.problem}"
        raise InputError(key, value, problem, error.allowed) from None


def warnings_about(config: Config) -> list[str]:
    """Warnings about settings that work: a rate that is never come to; steps that leave more noise than the schedule
    can remove.
    """
    return [*warm_up_without_end(config), *_noise_that_stays(config)]


def _noise_that_stays(config: Config) -> list[str]:
    if config.tree.plan != "flat" or not config.kernel.excess_noise:
        return []
    schedule = schedule_of(config, config.sample.num_steps)
    kernel, eta, _ = noise_of(config)
    with naming_settings():
        breaks = sde_able(schedule, kernel, eta, excess=True) & ~sde_able(schedule, kernel, eta)
    if not breaks.any():
        return []
    steps = ints(breaks.nonzero().flatten())
    return [f"kernel.excess_noise: steps {steps} add more noise than the level they reach; some stays in the pictures"]


@dataclass(frozen=True)
class Method:
    """The choices of a configuration as a run makes them: plan and kernel, advantage, pruning, loss."""

    config: Config
    accelerator: Accelerator | None = None

    @cached_property
    def loss(self) -> EdgeLoss | LeafLoss:
        return loss_of(self.config)

    @cached_property
    def _advantage(self) -> Callable[..., Tensor]:
        return advantage_of(self.config)

    def credit(
        self, epoch: Epoch, scored: LeafScores, rollout: Rollout
    ) -> tuple[Float[Tensor, "prompts edges"], Bool[Tensor, "prompts edges"]]:
        """Leaf scores to an advantage for every edge, and the edges that the update trains."""
        config, plan, total = self.config, epoch.plan, scored.scores.total
        spread = None
        if config.advantage.std == "batch":  # of the epoch's leaves on all ranks
            every = gather(total.double(), self.accelerator).flatten()
            spread = float(((every - every.nanmean(-1, keepdim=True)) ** 2).nanmean(-1).sqrt().nan_to_num())
        density, knobs = rollout.log_density.cpu(), advantage_arguments(config, spread)
        advantage = advantages(self._advantage, plan, total, density, config.loss.adv_clip, **knobs)
        how, among = pruning(config, plan, epoch.number), self.loss.edges(plan)
        return advantage, prune(plan, advantage, how, epoch.key, epoch.prompts.ids, among)
