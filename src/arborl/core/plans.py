"""The shapes a rollout can have. A plan is a function (schedule, epoch, shape) and a line in `PLANS`.

What a plan may ask for stands in `Shape`; each takes of it what it needs. Every plan is checked as it is made: a bad
one is an `ArgumentError` that names the field and what is allowed or what to try.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .errors import ArgumentError
from .kernels import sde_able, stochastic_kernels, transition_std
from .schedule import Schedule, window_start
from .tensors import bools
from .tree import EULER, Plan, Tail, check_leaves, deterministic, grow


class Noise(NamedTuple):
    """What a stochastic step is drawn from. The kernel "ode" draws nothing: only `flat` can do without."""

    kernel: str
    eta: float
    excess: bool = False  # flat: also where a step adds more noise than the level it reaches


class Window(NamedTuple):
    """The steps that are stochastic: `size` of them, moved by `stride` steps every `interval` epochs."""

    size: int
    stride: int
    interval: int


class Splits(NamedTuple):
    """Steps where every node gets k children: `points`, or if there are none `rounds` of them, spread evenly."""

    points: tuple[int, ...]
    rounds: int
    scale: float = 1.0  # branch: κ, which the noise at a split is scaled by


class Group(NamedTuple):
    """Trajectories that are compared without a tree, each from a noise of its own or (flat) all from one."""

    size: int
    shared_noise: bool = False


class Shape(NamedTuple):
    """All that a plan may ask for."""

    noise: Noise
    k: int  # children of a node where it branches
    window: Window | None  # None: stochastic wherever a step may be
    splits: Splits
    group: Group
    trees: int
    max_leaves: int
    tail: Tail = EULER


def leading_steps(schedule: Schedule, noise: Noise) -> int:
    """L: how many steps from the start may be stochastic without a gap."""
    able = bools(sde_able(schedule, noise.kernel, noise.eta))
    return able.index(False) if False in able else len(able)


def window_positions(schedule: Schedule, noise: Noise, window: Window) -> int:
    """The number of places the window has; an error when it has none."""
    length = leading_steps(schedule, noise)
    if length == 0:
        raise _no_stochastic_step(schedule, noise)
    if not 1 <= window.size <= length:
        problem = (
            f"the window must lie in the first {length} of {len(schedule)} steps, "
            "whose noise stays below the level they reach"
        )
        cure = "a smaller {eta} or a larger {steps}, which may give more"
        raise ArgumentError("window.size", window.size, problem, f"1..{length}", cure=cure)
    return length - window.size + 1


def _no_stochastic_step(schedule: Schedule, noise: Noise) -> ArgumentError:
    kernel, eta = noise.kernel, noise.eta
    if kernel == "ode":
        problem = "adds no noise, so that branches of one trajectory would be the same picture"
        cure = "{plan}=flat with {group.shared_noise}=false"
        return ArgumentError("kernel", kernel, problem, stochastic_kernels(schedule), cure=cure)
    if len(schedule) < 2:
        return ArgumentError("steps", len(schedule), "the step into σ = 0 is never stochastic", "2 or more")
    # The noise of the reverse SDEs is proportional to η, so the largest that fits the first step is known.
    most = eta * float(schedule.sigma_next[0] / transition_std(schedule, kernel, eta)[0])
    problem = f"{kernel} adds more noise at the first step than the level it reaches"
    return ArgumentError("eta", eta, problem, f"above 0, at most {most:.3g}")


def _stochastic_steps(schedule: Schedule, epoch: int, noise: Noise, window: Window | None) -> list[bool]:
    """Which steps are stochastic at an epoch: those in the window, or without one wherever a step may be."""
    if window is None:
        able = bools(sde_able(schedule, noise.kernel, noise.eta))
        if not any(able):
            raise _no_stochastic_step(schedule, noise)
        return able
    start = window_start(epoch, window.stride, window.interval, window_positions(schedule, noise, window))
    return [start <= step < start + window.size for step in range(len(schedule))]


def tree(schedule: Schedule, epoch: int, shape: Shape) -> Plan:
    """TreeGRPO (arXiv 2512.08153, Algorithm 1): k stochastic children at the steps of a moving window, else ODE."""
    noise = shape.noise
    noisy = _stochastic_steps(schedule, epoch, noise, shape.window)
    arity = [shape.k if n else 1 for n in noisy]
    eta = [noise.eta if n else 0.0 for n in noisy]
    return grow(schedule, noise.kernel, shape.trees, arity, eta, max_leaves=shape.max_leaves, tail=shape.tail)


def branch(schedule: Schedule, epoch: int, shape: Shape) -> Plan:
    """BranchGRPO (arXiv 2509.06040): stochastic wherever a step may be, k children at the split points.

    At a split the noise is scaled by κ, the drift keeps η. With a window only it and the splits are stochastic, and the
    rest is ODE.
    """
    noise, splits = shape.noise, shape.splits
    points = _split_points(schedule, noise, splits)
    noisy = _stochastic_steps(schedule, epoch, noise, shape.window)
    split = [step in points for step in range(len(schedule))]
    arity = [shape.k if i else 1 for i in split]
    eta = [noise.eta if i or n else 0.0 for i, n in zip(split, noisy, strict=True)]
    kappa = [splits.scale if i else 1.0 for i in split]
    return grow(schedule, noise.kernel, shape.trees, arity, eta, kappa, shape.max_leaves, shape.tail)


def _split_points(schedule: Schedule, noise: Noise, splits: Splits) -> Sequence[int]:
    """The named steps, or as many as `rounds` spread evenly; each must bear its noise, κ included."""
    able = bools(sde_able(schedule, noise.kernel, noise.eta, kappa=splits.scale))
    allowed = [step for step in range(len(schedule)) if able[step]]
    if not allowed and sde_able(schedule, noise.kernel, noise.eta).any():
        raise ArgumentError("splits.scale", splits.scale, "no step can bear that much noise", cure="less of it")
    if not allowed:
        raise _no_stochastic_step(schedule, noise)
    points, rounds = splits.points, splits.rounds
    if points:
        wrong = [step for step in points if step not in allowed]
        if wrong or len(set(points)) < len(points):
            problem = f"step {wrong[0]} cannot bear its noise" if wrong else "names a step twice"
            raise ArgumentError("splits.points", list(points), problem, f"of {allowed}")
        return points
    if not 1 <= rounds <= len(allowed):
        problem = f"only {len(allowed)} steps can bear the noise of a split"
        raise ArgumentError("splits.rounds", rounds, problem, f"1..{len(allowed)}", cure="{splits.points}")
    return [allowed[i * len(allowed) // rounds] for i in range(rounds)]


def flat(schedule: Schedule, epoch: int, shape: Shape) -> Plan:
    """Flow-GRPO (arXiv 2505.05470), DanceGRPO (2505.07818), DDPO (2305.13301): a group of separate trajectories.

    Stochastic wherever a step may be, or with the kernel "ode" nowhere. With shared noise the group starts from one
    noise, and the first forward serves all of it.
    """
    noise, group = shape.noise, shape.group
    if noise.kernel == "ode" and not group.shared_noise:
        return deterministic(schedule, group.size, shape.max_leaves, shape.tail)
    able = bools(sde_able(schedule, noise.kernel, noise.eta, noise.excess))
    if not any(able):
        raise _no_stochastic_step(schedule, noise)
    arity = [1] * len(schedule)
    trees = 1 if group.shared_noise else group.size
    if group.shared_noise:
        arity[able.index(True)] = group.size
    eta = [noise.eta if a else 0.0 for a in able]
    return grow(schedule, noise.kernel, trees, arity, eta, max_leaves=shape.max_leaves, tail=shape.tail)


def mix(schedule: Schedule, epoch: int, shape: Shape) -> Plan:
    """MixGRPO (arXiv 2507.21802): a group of trajectories from one noise, stochastic in a moving window, else ODE.

    Before the window they are all the same, so that part is computed once and the group parts at its first step.
    """
    noise = shape.noise
    noisy = _stochastic_steps(schedule, epoch, noise, shape.window)
    arity = [1] * len(schedule)
    arity[noisy.index(True)] = shape.group.size
    eta = [noise.eta if n else 0.0 for n in noisy]
    return grow(schedule, noise.kernel, shape.trees, arity, eta, max_leaves=shape.max_leaves, tail=shape.tail)


def comb(schedule: Schedule, epoch: int, shape: Shape) -> Plan:
    """TempFlow-GRPO (arXiv 2508.04324): an ODE spine, k stochastic children at each split point, each finished by ODE.

    A child differs from its siblings by one draw, so its score belongs to that step alone. The spine ends at the last
    split. No noise is scaled.
    """
    noise, k, trees, tail = shape.noise, shape.k, shape.trees, shape.tail
    points = _split_points(schedule, noise, shape.splits._replace(scale=1.0))
    check_leaves(trees * k * len(points), shape.max_leaves)
    table, rests = schedule, dict[int, list[tuple[int, bool]]]()
    for point in points:
        table, rows, second = tail.rows_from(schedule, point + 1, table)
        rests[point] = list(zip(rows, second, strict=True))
    # A node waits with the (row, of second order) of each step still before it; the spine's are worked out as it goes.
    spine = None
    frontier: list[list[tuple[int, bool]] | None] = [spine] * trees
    edges: list[tuple[int, int, float, bool]] = []  # parent, row, η, of second order
    node, depth = 0, 0
    while frontier:
        following: list[list[tuple[int, bool]] | None] = []
        for rest in frontier:
            if rest is spine:
                if depth in points:
                    edges += [(node, depth, noise.eta, False)] * k
                    following += [rests[depth]] * k
                if depth < max(points):
                    edges.append((node, depth, 0.0, False))
                    following.append(spine)
            elif rest:
                edges.append((node, rest[0][0], 0.0, rest[0][1]))
                following.append(rest[1:])
            node += 1
        frontier, depth = following, depth + 1
    parents, steps, eta, multistep = zip(*edges, strict=True)
    return Plan(
        table,
        noise.kernel,
        trees,
        torch.tensor(parents),
        torch.tensor(steps),
        torch.tensor(eta, dtype=torch.float64),
        torch.ones(len(edges), dtype=torch.float64),
        torch.tensor(multistep),
    )


PLANS: dict[str, Callable[[Schedule, int, Shape], Plan]] = {
    "tree": tree,
    "branch": branch,
    "flat": flat,
    "mix": mix,
    "comb": comb,
}
"""A plan is a function and a line here."""
