"""The shapes a rollout can have. A plan is a function (schedule, kernel, epoch, the knobs it wants by name).

Every plan is checked as it is made: a bad one is an `ArgumentError` that names the argument and what is allowed or
what to try.
"""

from collections.abc import Callable, Sequence

import torch

from .errors import ArgumentError
from .kernels import sde_able, transition_std
from .schedule import Schedule, window_start
from .tensors import bools
from .tree import EULER, Plan, Tail, check_leaves, grow


def leading_steps(schedule: Schedule, kernel: str, eta: float) -> int:
    """L: how many steps from the start may be stochastic without a gap."""
    able = bools(sde_able(schedule, kernel, eta))
    return able.index(False) if False in able else len(able)


def window_positions(schedule: Schedule, kernel: str, eta: float, w: int, argument: str = "w") -> int:
    """The number of places a window of w steps has; an error when it has none."""
    length = leading_steps(schedule, kernel, eta)
    if length == 0:
        raise _no_stochastic_step(schedule, kernel, eta)
    if not 1 <= w <= length:
        problem = (
            f"the window must lie in the first {length} of {len(schedule)} steps, "
            "whose noise stays below the level they reach"
        )
        cure = "a smaller {eta} or a larger {steps}, which may give more"
        raise ArgumentError(argument, w, problem, f"1..{length}", cure=cure)
    return length - w + 1


def _no_stochastic_step(schedule: Schedule, kernel: str, eta: float) -> ArgumentError:
    if len(schedule) < 2:
        return ArgumentError("steps", len(schedule), "the step into σ = 0 is never stochastic", "2 or more")
    # The noise of the reverse SDEs is proportional to η, so the largest that fits the first step is known.
    most = eta * float(schedule.sigma_next[0] / transition_std(schedule, kernel, eta)[0])
    problem = f"{kernel} adds more noise at the first step than the level it reaches"
    return ArgumentError("eta", eta, problem, f"above 0, at most {most:.3g}")


def tree(
    schedule: Schedule,
    kernel: str,
    epoch: int,
    *,
    eta: float,
    k: int,
    w: int,
    s: int,
    tou: int,
    num_trees: int,
    max_leaves: int,
    tail: Tail = EULER,
    **_: object,
) -> Plan:
    """TreeGRPO (arXiv 2512.08153, Algorithm 1): k stochastic children at the w steps of a moving window, else ODE."""
    start = window_start(epoch, s, tou, window_positions(schedule, kernel, eta, w))
    inside = [start <= step < start + w for step in range(len(schedule))]
    arity = [k if i else 1 for i in inside]
    noise = [eta if i else 0.0 for i in inside]
    return grow(schedule, kernel, num_trees, arity, noise, max_leaves=max_leaves, tail=tail)


def branch(
    schedule: Schedule,
    kernel: str,
    epoch: int,
    *,
    eta: float,
    k: int,
    split_points: Sequence[int],
    split_rounds: int,
    split_noise_scale: float,
    mix_ode_sde: bool,
    mix_sde_window: int,
    s: int,
    tou: int,
    num_trees: int,
    max_leaves: int,
    tail: Tail = EULER,
    **_: object,
) -> Plan:
    """BranchGRPO (arXiv 2509.06040): stochastic wherever a step may be, k children at the split points.

    At a split the noise is scaled by κ, the drift keeps η. With `mix_ode_sde` only the splits and a moving window are
    stochastic, and the rest is ODE.
    """
    points = _split_points(schedule, kernel, eta, split_noise_scale, split_points, split_rounds)
    noisy = bools(sde_able(schedule, kernel, eta))
    if mix_ode_sde:
        positions = window_positions(schedule, kernel, eta, mix_sde_window, "mix_sde_window")
        start = window_start(epoch, s, tou, positions)
        noisy = [start <= step < start + mix_sde_window for step in range(len(schedule))]
    split = [step in points for step in range(len(schedule))]
    return grow(
        schedule,
        kernel,
        num_trees,
        [k if i else 1 for i in split],
        [eta if i or n else 0.0 for i, n in zip(split, noisy, strict=True)],
        [split_noise_scale if i else 1.0 for i in split],
        max_leaves,
        tail,
    )


def _split_points(
    schedule: Schedule, kernel: str, eta: float, kappa: float, points: Sequence[int], rounds: int
) -> Sequence[int]:
    """The named steps, or as many as `rounds` spread evenly; each must bear its noise, κ included."""
    able = bools(sde_able(schedule, kernel, eta, kappa=kappa))
    allowed = [step for step in range(len(schedule)) if able[step]]
    if not allowed and sde_able(schedule, kernel, eta).any():
        raise ArgumentError("split_noise_scale", kappa, "no step can bear that much noise", cure="less of it")
    if not allowed:
        raise _no_stochastic_step(schedule, kernel, eta)
    if points:
        wrong = [step for step in points if step not in allowed]
        if wrong or len(set(points)) < len(points):
            problem = f"step {wrong[0]} cannot bear its noise" if wrong else "names a step twice"
            raise ArgumentError("split_points", list(points), problem, f"of {allowed}")
        return points
    if not 1 <= rounds <= len(allowed):
        problem = f"only {len(allowed)} steps can bear the noise of a split"
        raise ArgumentError("split_rounds", rounds, problem, f"1..{len(allowed)}", cure="{split_points}")
    return [allowed[i * len(allowed) // rounds] for i in range(rounds)]


def flat(
    schedule: Schedule,
    kernel: str,
    epoch: int,
    *,
    eta: float,
    group_size: int,
    shared_noise: bool,
    excess_noise: bool,
    max_leaves: int,
    tail: Tail = EULER,
    **_: object,
) -> Plan:
    """Flow-GRPO (arXiv 2505.05470), DanceGRPO (2505.07818), DDPO (2305.13301): `group_size` separate trajectories.

    Stochastic wherever a step may be. With `shared_noise` the group starts from one noise, and the first forward serves
    all of it.
    """
    able = bools(sde_able(schedule, kernel, eta, excess_noise))
    if not any(able):
        raise _no_stochastic_step(schedule, kernel, eta)
    arity = [1] * len(schedule)
    trees = 1 if shared_noise else group_size
    if shared_noise:
        arity[able.index(True)] = group_size
    noise = [eta if a else 0.0 for a in able]
    return grow(schedule, kernel, trees, arity, noise, max_leaves=max_leaves, tail=tail)


def mix(
    schedule: Schedule,
    kernel: str,
    epoch: int,
    *,
    eta: float,
    group_size: int,
    w: int,
    s: int,
    tou: int,
    num_trees: int,
    max_leaves: int,
    tail: Tail = EULER,
    **_: object,
) -> Plan:
    """MixGRPO (arXiv 2507.21802): `group_size` trajectories from one noise, stochastic in a moving window, else ODE.

    Before the window they are all the same, so that part is computed once and the group parts at its first step.
    """
    start = window_start(epoch, s, tou, window_positions(schedule, kernel, eta, w))
    arity = [group_size if step == start else 1 for step in range(len(schedule))]
    noise = [eta if start <= step < start + w else 0.0 for step in range(len(schedule))]
    return grow(schedule, kernel, num_trees, arity, noise, max_leaves=max_leaves, tail=tail)


def comb(
    schedule: Schedule,
    kernel: str,
    epoch: int,
    *,
    eta: float,
    k: int,
    split_points: Sequence[int],
    split_rounds: int,
    num_trees: int,
    max_leaves: int,
    tail: Tail = EULER,
    **_: object,
) -> Plan:
    """TempFlow-GRPO (arXiv 2508.04324): an ODE spine, k stochastic children at each split point, each finished by ODE.

    A child differs from its siblings by one draw, so its score belongs to that step alone. The spine ends at the last
    split.
    """
    points = _split_points(schedule, kernel, eta, 1.0, split_points, split_rounds)
    check_leaves(num_trees * k * len(points), max_leaves)
    table, rests = schedule, dict[int, list[tuple[int, bool]]]()
    for point in points:
        table, rows, second = tail.rows_from(schedule, point + 1, table)
        rests[point] = list(zip(rows, second, strict=True))
    # A node waits with the (row, of second order) of each step still before it; the spine's are worked out as it goes.
    spine = None
    frontier: list[list[tuple[int, bool]] | None] = [spine] * num_trees
    edges: list[tuple[int, int, float, bool]] = []  # parent, row, η, of second order
    node, depth = 0, 0
    while frontier:
        following: list[list[tuple[int, bool]] | None] = []
        for rest in frontier:
            if rest is spine:
                if depth in points:
                    edges += [(node, depth, eta, False)] * k
                    following += [rests[depth]] * k
                if depth < max(points):
                    edges.append((node, depth, 0.0, False))
                    following.append(spine)
            elif rest:
                edges.append((node, rest[0][0], 0.0, rest[0][1]))
                following.append(rest[1:])
            node += 1
        frontier, depth = following, depth + 1
    parents, steps, noise, multistep = zip(*edges, strict=True)
    return Plan(
        table,
        kernel,
        num_trees,
        torch.tensor(parents),
        torch.tensor(steps),
        torch.tensor(noise, dtype=torch.float64),
        torch.ones(len(edges), dtype=torch.float64),
        torch.tensor(multistep),
    )


PLANS: dict[str, Callable[..., Plan]] = {"tree": tree, "branch": branch, "flat": flat, "mix": mix, "comb": comb}
"""A plan is a function and a line here."""
