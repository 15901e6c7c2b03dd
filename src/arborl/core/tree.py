"""Plans: the shape of a prompt's trees, and which of their edges are stochastic. Arrays, no node objects.

Nodes are numbered breadth first, the roots first, so the edge e leads into node `roots + e`: what is known per edge
(log-density, advantage) and what is known per node (latents) line up without a table.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .errors import ArgumentError
from .kernels import TAKES_KAPPA, Coefficients, coefficients, x0_coefficients
from .schedule import Schedule
from .tensors import ints, unique


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
    multistep: Bool[Tensor, " edges"]  # an ODE edge of second order, which looks back at the step before it
    balanced: bool = False  # the draws of stochastic siblings sum to zero

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
    def family(self) -> Int[Tensor, " edges"] | None:
        """A number that edges share whose draws are balanced, the stochastic ones of one parent; None where no two do.

        By what leaves a parent, never by k: an ODE edge may stand among them, and a node may have more or fewer.
        """
        number = torch.where(self.stochastic, self.parent, self.child + self.nodes)
        return number if self.balanced and len(unique(number)[0]) < self.edges else None

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
    def index_in_tree(self) -> Int[Tensor, " nodes"]:
        """Each node's number within its own tree, breadth first: its address for the noise."""
        order = torch.argsort(self.tree, stable=True)
        sizes = torch.bincount(self.tree, minlength=self.roots)
        number = torch.empty_like(order)
        number[order] = torch.arange(self.nodes) - (sizes.cumsum(0) - sizes)[self.tree[order]]
        return number

    @cached_property
    def leaves(self) -> Int[Tensor, " leaves"]:
        """Nodes without children, of any depth, in node order: what is decoded and scored."""
        childless = torch.ones(self.nodes, dtype=torch.bool)
        childless[self.parent] = False
        return childless.nonzero().squeeze(1)

    @cached_property
    def paths(self) -> Int[Tensor, "leaves most"]:
        """The edges on the way to each leaf, the root's first; -1 where a way is shorter than the longest."""
        paths = torch.full((len(self.leaves), int(self.depth.max())), -1)
        node, leaf = self.leaves, torch.arange(len(self.leaves))
        while len(node):
            edge = node - self.roots
            paths[leaf, self.depth[node] - 1] = edge
            inner = self.parent[edge] >= self.roots
            node, leaf = self.parent[edge][inner], leaf[inner]
        return paths

    @cached_property
    def preview_nodes(self) -> Int[Tensor, " shown"]:
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
    def splits(self) -> Int[Tensor, " splits"]:
        """Nodes with several children."""
        return (torch.bincount(self.parent, minlength=self.nodes) > 1).nonzero().squeeze(1)

    @cached_property
    def only_leaf(self) -> Int[Tensor, " edges"]:
        """The leaf (its place in `leaves`) an edge leads to without a further split; -1 where one is still to come."""
        chain = torch.full((self.nodes,), -1)
        chain[self.leaves] = torch.arange(len(self.leaves))
        splits = set(ints(self.splits))
        for edge in reversed(range(self.edges)):
            if (parent := int(self.parent[edge])) not in splits:
                chain[parent] = chain[self.roots + edge]
        return chain[self.child]

    @cached_property
    def coefficients(self) -> Coefficients:
        """The transition of every edge; an ODE edge is its kernel at η = 0."""
        return coefficients(self.schedule, self.kernel, self.step, self.eta, self.kappa)

    @cached_property
    def noise_weight(self) -> Float[Tensor, " edges"]:
        """The noise an edge adds, in units of the mean over stochastic edges."""
        std = self.coefficients.std
        return std / std[self.stochastic].mean()

    @cached_property
    def x0_coefficients(self) -> tuple[Float[Tensor, " nodes"], Float[Tensor, " nodes"]]:
        """(a, b) at each node such that x̂0 = a·x + b·v."""
        return x0_coefficients(self.schedule, self.sigma)

    @cached_property
    def multistep_coefficient(self) -> Float[Tensor, " edges"]:
        """The second-order term that is added to Euler's step, in units of x̂0 here minus x̂0 at the parent's parent.

        DPM-Solver++(2M) (arXiv 2211.01095, Algorithm 2) is Euler's step in λ = log(α/σ) with x̂0 extrapolated from the
        step before: c = (α' - α·σ'/σ) · h / (2·h_before), h the step in λ.
        """
        coefficient = torch.zeros(self.edges, dtype=torch.float64)
        edges = self.multistep.nonzero().squeeze(1)
        row, before = self.step[edges], self.step[self.parent[edges] - self.roots]
        levels = self.schedule.sigma[before], self.schedule.sigma[row], self.schedule.sigma_next[row]
        signals = [self.schedule.alpha(level) for level in levels]
        earlier, here, there = (torch.log(a / s) for a, s in zip(signals, levels, strict=True))
        gain = signals[2] - signals[1] * levels[2] / levels[1]
        coefficient[edges] = gain * (there - here) / (2 * (here - earlier))
        return coefficient

    @cached_property
    def sigma(self) -> Float[Tensor, " nodes"]:
        """The noise level at each node; 0 at leaves."""
        sigma = torch.zeros(self.nodes, dtype=torch.float64)
        sigma[self.parent] = self.schedule.sigma[self.step]
        return sigma

    @cached_property
    def timestep(self) -> Float[Tensor, " nodes"]:
        """The model's time input at each node; 0 at leaves, where no model call is made."""
        timestep = torch.zeros(self.nodes, dtype=torch.float64)
        timestep[self.parent] = self.schedule.timestep[self.step]
        return timestep


class Tail(NamedTuple):
    """Solver of the steps after the last stochastic one, Euler or DPM-Solver++(2M), and their number (0 is all)."""

    solver: str = "euler"
    steps: int = 0

    def rows_from(
        self, schedule: Schedule, start: int, table: Schedule | None = None
    ) -> tuple[Schedule, list[int], list[bool]]:
        """From level `start` to the end: `table` with the rows this takes, these rows, which are of second order."""
        table = schedule if table is None else table
        rows = list(range(start, len(schedule)))
        if 0 < self.steps < len(rows):
            rows = list(range(len(table), len(table) + self.steps))
            table = table.followed_by(schedule.strided(start, self.steps))
        # The first has nothing to look back at, and the last must land on x̂0 itself.
        second = [self.solver == "dpmpp_2m" and 0 < i < len(rows) - 1 for i in range(len(rows))]
        return table, rows, second


EULER = Tail()


def grow(
    schedule: Schedule,
    kernel: str,
    trees: int,
    arity: Sequence[int],
    eta: Sequence[float],
    kappa: Sequence[float] | None = None,
    max_leaves: int = 1024,
    tail: Tail = EULER,
) -> Plan:
    """A plan that is the same on every path: step i gives each node `arity[i]` children with noise `eta[i]`.

    `tail` says how the deterministic steps after the last stochastic one go.
    """
    scale = list(kappa) if kappa is not None else [1.0] * len(arity)
    if kernel not in TAKES_KAPPA and any(k != 1 for k in scale):
        raise ArgumentError(
            "kappa",
            next(k for k in scale if k != 1),
            f"kernel {kernel} cannot scale its noise",
            "1",
            cure=f"another {{kernel}}: {', '.join(sorted(TAKES_KAPPA))}",
        )
    check_leaves(trees * math.prod(arity), max_leaves)
    # The first step after the last that branches or is stochastic.
    first = max((i for i in range(len(arity)) if arity[i] > 1 or eta[i] > 0), default=-1) + 1
    table, rows, second = tail.rows_from(schedule, first)
    steps = [*range(first), *rows]
    width, node = trees, 0
    parents: list[Tensor] = []
    for level in range(len(steps)):
        children = arity[level] if level < first else 1
        parents.append(torch.arange(node, node + width).repeat_interleave(children))
        node, width = node + width, width * children
    sizes = torch.tensor([len(p) for p in parents])

    def per_edge(values: Sequence[float], rest: float) -> Tensor:
        every = [*values[:first], *[rest] * len(rows)]
        return torch.tensor(every, dtype=torch.float64).repeat_interleave(sizes)

    multistep = torch.tensor([False] * first + second).repeat_interleave(sizes)
    step = torch.tensor(steps).repeat_interleave(sizes)
    return Plan(table, kernel, trees, torch.cat(parents), step, per_edge(eta, 0.0), per_edge(scale, 1.0), multistep)


def check_leaves(leaves: int, most: int) -> None:
    if leaves > most:
        problem = f"the plan has {leaves} leaves a prompt"
        raise ArgumentError("max_leaves", most, problem, f"{leaves} or more", cure="a smaller tree")


def deterministic(schedule: Schedule, trajectories: int = 1, max_leaves: int = 1024, tail: Tail = EULER) -> Plan:
    """Separate ODE trajectories, which are all tail; a single one is how pictures are made for evaluation."""
    kernel = "ode" if schedule.is_flow else "ddim"  # a diffusion model's ODE is ddim at η = 0
    steps = len(schedule)
    return grow(schedule, kernel, trajectories, [1] * steps, [0.0] * steps, max_leaves=max_leaves, tail=tail)
