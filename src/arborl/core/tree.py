"""Plans: the shape of a prompt's trees, and which of their edges are stochastic. Arrays, no node objects.

Nodes are numbered breadth first, the roots first, so the edge e leads into node `roots + e`: what is known per edge
(log-density, advantage) and what is known per node (latents) line up without a table.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .errors import InputError
from .kernels import KERNELS, TAKES_KAPPA, Coefficients, sde_able, transition_std
from .plain import bools, ints, unique
from .schedule import Schedule, window_start


class Level(NamedTuple):
    """The edges of one depth: advanced together, one model forward for each of `parents`."""

    edges: slice
    parents: Int[Tensor, " p"]  # the nodes these edges leave, each once
    slot: Int[Tensor, " e"]  # where in `parents` each edge's parent stands


@dataclass(frozen=True)
class Plan:
    """All trees of one prompt. Tree t grows from node t; every prompt of an epoch has the same plan."""

    schedule: Schedule
    kernel: str
    roots: int
    parent: Int[Tensor, " edges"]  # the node the edge leaves
    step: Int[Tensor, " edges"]  # its row in the schedule
    eta: Float[Tensor, " edges"]  # its noise level; 0 is an ODE edge
    kappa: Float[Tensor, " edges"]  # what its noise is scaled by

    @property
    def edges(self) -> int:
        return len(self.parent)

    @property
    def nodes(self) -> int:
        return self.roots + self.edges

    @cached_property
    def child(self) -> Int[Tensor, " edges"]:
        """The node each edge leads into."""
        return torch.arange(self.roots, self.nodes)

    @cached_property
    def stochastic(self) -> Bool[Tensor, " edges"]:
        return self.eta > 0

    @cached_property
    def depth(self) -> Int[Tensor, " nodes"]:
        """Steps taken on the node's own path."""
        depth = [0] * self.roots
        for parent in ints(self.parent):
            depth.append(depth[parent] + 1)
        return torch.tensor(depth)

    @cached_property
    def tree(self) -> Int[Tensor, " nodes"]:
        """Which tree each node stands in."""
        tree = list(range(self.roots))
        for parent in ints(self.parent):
            tree.append(tree[parent])
        return torch.tensor(tree)

    @cached_property
    def number(self) -> Int[Tensor, " nodes"]:
        """Each node's number within its own tree, breadth first: its address for the noise."""
        same = self.tree[:, None] == torch.arange(self.roots)
        return (same.cumsum(0) - 1).gather(1, self.tree[:, None]).squeeze(1)

    @cached_property
    def leaves(self) -> Int[Tensor, " leaves"]:
        """Nodes without children, of any depth, in node order: what is decoded and scored."""
        childless = torch.ones(self.nodes, dtype=torch.bool)
        childless[self.parent] = False
        return childless.nonzero().squeeze(1)

    @cached_property
    def shown(self) -> Int[Tensor, " shown"]:
        """Roots, splits and leaves: the nodes worth a picture. The others only pass on what came before."""
        children = torch.bincount(self.parent, minlength=self.nodes)
        return ((children != 1) | (torch.arange(self.nodes) < self.roots)).nonzero().squeeze(1)

    @cached_property
    def levels(self) -> list[Level]:
        depth = self.depth[self.child]
        levels: list[Level] = []
        start = 0
        for count in ints(torch.bincount(depth, minlength=1)[1:]):
            edges = slice(start, start + count)
            parents, slot = unique(self.parent[edges])
            levels.append(Level(edges, parents, slot))
            start += count
        return levels

    @cached_property
    def trained_parents(self) -> Int[Tensor, " samples"]:
        """Nodes with a stochastic edge below them: the training samples, one forward + backward each."""
        return unique(self.parent[self.stochastic])[0]

    @property
    def forwards(self) -> int:
        """Model forwards of a rollout: one for each node that has children, however many it has."""
        return self.nodes - len(self.leaves)

    @cached_property
    def coefficients(self) -> Coefficients:
        """The transition of every edge; an ODE edge is its kernel at η = 0."""
        sigma, sigma_next = self.schedule.sigma[self.step], self.schedule.sigma_next[self.step]
        return KERNELS[self.kernel](sigma, sigma_next, self.eta, self.kappa)

    @cached_property
    def sigma(self) -> Float[Tensor, " nodes"]:
        """The noise level at each node; 0 at leaves."""
        sigma = torch.zeros(self.nodes, dtype=torch.float64)
        sigma[self.parent] = self.schedule.sigma[self.step]
        return sigma

    @cached_property
    def timestep(self) -> Float[Tensor, " nodes"]:
        """What the model is told at each node; 0 at leaves, which are never asked."""
        timestep = torch.zeros(self.nodes, dtype=torch.float64)
        timestep[self.parent] = self.schedule.timestep[self.step]
        return timestep


def grow(
    schedule: Schedule,
    kernel: str,
    trees: int,
    arity: Sequence[int],
    eta: Sequence[float],
    kappa: Sequence[float] | None = None,
    max_leaves: int = 1024,
) -> Plan:
    """A plan that is the same on every path: step i gives each node `arity[i]` children with noise `eta[i]`."""
    scale = list(kappa) if kappa is not None else [1.0] * len(arity)
    if kernel not in TAKES_KAPPA and any(k != 1 for k in scale):
        raise InputError(
            "tree.split_noise_scale",
            next(k for k in scale if k != 1),
            f"kernel {kernel} cannot scale its noise",
            f"1, or one of the kernels {', '.join(sorted(TAKES_KAPPA))}",
        )
    leaves = trees * math.prod(arity)
    if leaves > max_leaves:
        raise InputError("tree.max_leaves", max_leaves, f"the plan has {leaves} leaves a prompt", f"{leaves} or more")
    parents: list[Tensor] = []
    first, width = 0, trees
    for children in arity:
        parents.append(torch.arange(first, first + width).repeat_interleave(children))
        first, width = first + width, width * children
    sizes = torch.tensor([len(p) for p in parents])

    def per_edge(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(sizes)

    step = torch.arange(len(arity)).repeat_interleave(sizes)
    return Plan(schedule, kernel, trees, torch.cat(parents), step, per_edge(eta), per_edge(scale))


def leading_steps(schedule: Schedule, kernel: str, eta: float) -> int:
    """L: how many steps from the start may be stochastic without a gap."""
    able = bools(sde_able(schedule, kernel, eta))
    return able.index(False) if False in able else len(able)


def window_positions(schedule: Schedule, kernel: str, eta: float, w: int) -> int:
    """How many places a window of w steps has; an error when it has none."""
    length = leading_steps(schedule, kernel, eta)
    if length == 0:
        raise _no_stochastic_step(schedule, kernel, eta)
    if not 1 <= w <= length:
        problem = (
            f"the window must lie in the first {length} of {len(schedule)} steps, whose noise stays below the level "
            "they reach (a smaller kernel.eta or a larger sample.num_steps may give more)"
        )
        raise InputError("tree.w", w, problem, f"1..{length}")
    return length - w + 1


def _no_stochastic_step(schedule: Schedule, kernel: str, eta: float) -> InputError:
    if len(schedule) < 2:
        return InputError("sample.num_steps", len(schedule), "the step into σ = 0 is never stochastic", "2 or more")
    # The noise of the reverse SDEs is proportional to η, so the largest that fits the first step can be told.
    most = eta * float(schedule.sigma_next[0] / transition_std(schedule, kernel, eta)[0])
    problem = f"{kernel} adds more noise at the first step than the level it reaches"
    return InputError("kernel.eta", eta, problem, f"above 0, at most {most:.3g}")


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
    **_: object,
) -> Plan:
    """TreeGRPO (arXiv 2512.08153): k stochastic children at each of the w steps of a moving window, ODE elsewhere."""
    start = window_start(epoch, s, tou, window_positions(schedule, kernel, eta, w))
    inside = [start <= step < start + w for step in range(len(schedule))]
    arity = [k if i else 1 for i in inside]
    return grow(schedule, kernel, num_trees, arity, [eta if i else 0.0 for i in inside], max_leaves=max_leaves)


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
    **_: object,
) -> Plan:
    """Flow-GRPO, DanceGRPO, DDPO: `group_size` separate trajectories, stochastic wherever a step may be.

    With `shared_noise` the group starts from one noise, so the first forward serves all of it.
    """
    able = bools(sde_able(schedule, kernel, eta, excess_noise))
    if not any(able):
        raise _no_stochastic_step(schedule, kernel, eta)
    arity = [1] * len(schedule)
    trees = 1 if shared_noise else group_size
    if shared_noise:
        arity[able.index(True)] = group_size
    return grow(schedule, kernel, trees, arity, [eta if a else 0.0 for a in able], max_leaves=max_leaves)


def deterministic(schedule: Schedule, kernel: str = "ode") -> Plan:
    """One ODE trajectory: how pictures are made for evaluation."""
    return grow(schedule, kernel, 1, [1] * len(schedule), [0.0] * len(schedule))


PLANS: dict[str, Callable[..., Plan]] = {"tree": tree, "flat": flat}
"""A plan is a function (schedule, kernel, epoch, the knobs it wants by name) and a line here."""
