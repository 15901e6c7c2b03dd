"""What a loss is: which model calls train, at which points, who is asked there, and what the answers cost."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import ArgumentError
from ..kernels import Coefficients, Gaussian, transition
from ..noise import Key, normal
from ..prune import LEAF_NOISE, LEVEL_DRAW
from ..tree import Plan

SHARE_TOLERANCE = 1e-9
"""What a share of a number may lack of a whole number by rounding: far more than a float's, far less than a share's."""

Who = Literal["policy", "old", "reference"]
"""A policy that can be asked: the one that is trained; one that follows it (`Loss.old_decay`); the untrained one."""


class Calls(NamedTuple):
    """The model calls that a loss can train with, of one prompt, and whose edges each of them trains: pairs of both."""

    node: Int[Tensor, " calls"]  # the node whose latent a call looks at
    edge: Int[Tensor, " pairs"]
    call: Int[Tensor, " pairs"]

    def trained(self, keep: Bool[Tensor, "prompts edges"]) -> Bool[Tensor, "prompts calls"]:
        """The calls that have an edge to train."""
        found = torch.zeros(len(keep), len(self.node), dtype=torch.long)
        return found.index_add(1, self.call, keep.cpu()[:, self.edge].long()) > 0


class Loss(ABC):
    """How a model learns from a rollout. Subclass `EdgeLoss`, for a policy gradient over the transitions of a plan's
    edges, or `LeafLoss`, for a regression on finished samples that are noised again; give it `metrics` and `__call__`.

    `__call__(answers, batch)` gets what the policies answer at the points of some model calls, by their names
    (`answers["policy"]` with gradients, those of `asks` without), and an `EdgeBatch` or `LeafBatch` that says what is
    known there. It returns the loss *summed* over the batch's edges, a scalar, and every one of `metrics` as a tensor
    of one value an edge. The update divides by the number of edges in an optimizer step, over all micro-batches and
    ranks, so a loss may not look from one row at another: where it does, the size of micro-batches changes the result.
    Metrics are averaged over an epoch's edges; one that is called `ratio` is what the first step's check looks at, and
    a loss without one has no such check.

    Keyword arguments of the constructor are settings: `clip`, `kl` and `edge_weight` are those of `loss`, others come
    from `loss.options`. A step none of whose edges has an advantage is left out, unless `has_regularizer`. Where there
    is `old`, it begins as the policy and follows it at the end of each epoch that had an optimizer step.
    """

    needs_densities: ClassVar[bool]
    """Whether it takes the densities of transitions, so that edges without noise cannot be trained."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """The names of what it measures: the same on every rank, also on one that has nothing to train."""

    @property
    def asks(self) -> tuple[Who, ...]:
        """The further policies whose answers it wants: `old`, `reference`. Each costs a forward a model call."""
        return ()

    @property
    def sampler(self) -> Literal["policy", "old"]:
        """Who rolls out: the policy, or the old one."""
        return "policy"

    @property
    def has_regularizer(self) -> bool:
        """Whether there is something to learn where all advantages are 0."""
        return False

    def old_decay(self, steps: int) -> float:
        """How much of itself the old policy keeps at the end of an epoch, after so many optimizer steps of the run: 0
        makes it the policy that the next epoch starts from, 1 leaves it as it is.
        """
        return 0.0

    @abstractmethod
    def edges(self, plan: Plan) -> Bool[Tensor, " edges"]:
        """The edges that can be trained, if they have an advantage."""

    @abstractmethod
    def calls(self, plan: Plan) -> Calls:
        """The model calls that can train them."""


@dataclass(frozen=True)
class EdgeBatch:
    """Some model calls at parents, and their edges: what each transition drew, and what came of it."""

    x: Float[Tensor, "calls *latent"]  # the latents that the policies were asked at
    row: Int[Tensor, " edges"]  # the call of each edge
    child: Float[Tensor, "edges *latent"]  # what was drawn
    log_density: Float[Tensor, " edges"]  # of that, under the policy that drew it
    advantage: Float[Tensor, " edges"]
    noise_weight: Float[Tensor, " edges"]  # the noise that an edge adds, in units of the mean over stochastic edges
    coefficients: Coefficients  # of the edges' kernel
    step_size: Float[Tensor, " edges"]  # by how much an edge lowers the noise level
    old_answer: Float[Tensor, "calls *latent"] | None = None  # the rollout's, where the loss needs it

    @property
    def drawn_from(self) -> Gaussian:
        """Every edge's transition under the policy that drew it."""
        if self.old_answer is None:
            raise RuntimeError("the rollout keeps its answers only for a loss with needs_old_answers")
        return self.transition(self.old_answer)

    def transition(self, answer: Float[Tensor, "calls *latent"]) -> Gaussian:
        """Every edge's transition by a policy's answers."""
        return transition(self.x[self.row], answer[self.row], self.coefficients)


class EdgeLoss(Loss):
    """A loss of transitions: one model call at a parent serves all its kept edges, at the level where they start."""

    needs_densities = True
    needs_old_answers: ClassVar[bool] = False
    """Whether it takes the transitions that children were drawn from: the rollout keeps its answers at trained parents,
    one more latent for each.
    """

    def edges(self, plan: Plan) -> Bool[Tensor, " edges"]:
        return plan.stochastic

    def calls(self, plan: Plan) -> Calls:
        parents, edge = plan.trained_parents, plan.stochastic.nonzero().squeeze(1)
        return Calls(parents, edge, torch.searchsorted(parents, plan.parent[edge]))

    @abstractmethod
    def __call__(
        self, answers: Mapping[Who, Float[Tensor, "calls *latent"]], batch: EdgeBatch
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, " edges"]]]: ...


@dataclass(frozen=True)
class LeafBatch:
    """Some leaves at noise levels of their own: x = α·x0 + σ·noise is what the policies were asked at."""

    x: Float[Tensor, "n *latent"]
    x0: Float[Tensor, "n *latent"]  # the leaf
    noise: Float[Tensor, "n *latent"]
    sigma: Float[Tensor, " n"]
    alpha: Float[Tensor, " n"]
    advantage: Float[Tensor, " n"]  # of the edge on the leaf's way that starts at its level
    prediction: str  # what the model predicts: flow, epsilon, v_prediction

    @property
    def target(self) -> Float[Tensor, "n *latent"]:
        """The answer whose x̂0 is the leaf: a flow's velocity noise - x0, a diffusion model's noise or v."""
        if self.prediction == "flow":
            return self.noise - self.x0
        if self.prediction == "epsilon":
            return self.noise
        return self._each(self.alpha) * self.noise - self._each(self.sigma) * self.x0

    def predict_x0(self, answer: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
        """x̂0, what an answer takes the clean sample to be."""
        if self.prediction == "flow":
            return self.x - self._each(self.sigma) * answer
        if self.prediction == "epsilon":
            return (self.x - self._each(self.sigma) * answer) / self._each(self.alpha)
        return self._each(self.alpha) * self.x - self._each(self.sigma) * answer

    def _each(self, values: Float[Tensor, " n"]) -> Tensor:
        return values.view(-1, *[1] * (self.x.ndim - 1))


class LeafLoss(Loss):
    """A loss of finished samples: each leaf is noised again at some of the levels on its own way, drawn without
    replacement, and every one of them is a model call. An edge here is a leaf at one level.

    At a level its advantage is that of its ancestor, the edge on its way that starts there: in a tree the leaves below
    a node share what is known of the node's edge, as they do in an `EdgeLoss`. On separate trajectories every edge of a
    way has the leaf's own. Which leaves are trained is said by the edges into them; of their calls those are left out
    whose ancestor has no advantage.
    """

    needs_densities = False
    levels_per_leaf: int = 1
    """The number of those levels."""
    level_share: float = 1.0
    """The share of the levels on a way that they are drawn from, its first and noisiest: above 0 and at most 1. Their
    number is rounded down, at least 1, as in decimal arithmetic: 0.58 of 50 are 29, where int(0.58 * 50) is 28.
    """

    def edges(self, plan: Plan) -> Bool[Tensor, " edges"]:
        return torch.isin(plan.child, plan.leaves)

    def calls(self, plan: Plan) -> Calls:
        check_number("level_share", self.level_share, above=0.0, most=1.0)
        most, levels = int(self._drawn_from(plan).sum(1).min()), cast(object, self.levels_per_leaf)
        if type(levels) is not int or not 1 <= levels <= most:
            raise ArgumentError("levels_per_leaf", levels, f"{most} noise levels can be drawn", f"1..{most}")
        leaf = plan.leaves.repeat_interleave(self.levels_per_leaf)
        return Calls(leaf, leaf - plan.roots, torch.arange(len(leaf)))

    def ancestors(self, plan: Plan, key: Key, prompt_ids: Int[Tensor, " prompts"]) -> Int[Tensor, "prompts calls"]:
        """An edge on the leaf's own way for each call: where it starts is the call's level, and its advantage the
        call's.
        """
        prompts, number = len(prompt_ids), torch.arange(plan.paths.numel())
        order = normal(key, _address(prompt_ids, LEVEL_DRAW, number), (1,)).view(prompts, *plan.paths.shape)
        place = order.masked_fill(~self._drawn_from(plan), torch.inf).argsort(2)[:, :, : self.levels_per_leaf]
        return plan.paths.expand(prompts, -1, -1).gather(2, place).flatten(1)

    def _drawn_from(self, plan: Plan) -> Bool[Tensor, "leaves most"]:
        """The places on the ways to the leaves whose levels can be drawn."""
        length = (plan.paths >= 0).sum(1, keepdim=True).double()
        count = (self.level_share * length + SHARE_TOLERANCE).floor().clamp_min(1)
        return torch.arange(plan.paths.shape[1]) < count

    def noise(
        self, key: Key, prompt_ids: Int[Tensor, " n"], call: Int[Tensor, " n"], shape: tuple[int, ...]
    ) -> Float[Tensor, "n *shape"]:
        """The noise of some calls, whatever batch or rank they are in."""
        tree = torch.full_like(call, LEAF_NOISE)
        return normal(key, torch.stack([prompt_ids.to(call.device), tree, call], 1), shape)

    @abstractmethod
    def __call__(
        self, answers: Mapping[Who, Float[Tensor, "n *latent"]], batch: LeafBatch
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, " n"]]]: ...


def noised(
    x0: Float[Tensor, "n *latent"],
    noise: Float[Tensor, "n *latent"],
    alpha: Float[Tensor, " n"],
    sigma: Float[Tensor, " n"],
) -> Float[Tensor, "n *latent"]:
    """x = α·x0 + σ·noise: what a sample is at a noise level."""
    shape = (-1, *[1] * (x0.ndim - 1))
    return alpha.view(shape) * x0 + sigma.view(shape) * noise


def _address(prompt_ids: Int[Tensor, " prompts"], tree: int, number: Int[Tensor, " n"]) -> Int[Tensor, "prompts_n 3"]:
    prompt = prompt_ids.repeat_interleave(len(number))
    return torch.stack([prompt, torch.full_like(prompt, tree), number.repeat(len(prompt_ids))], 1)


def check_number(
    argument: str, value: object, *, least: float = 0.0, above: float | None = None, most: float | None = None
) -> None:
    """A number of a loss's constructor lies where it makes sense: from `least` on, or above `above`, up to `most`."""
    low = f"{least:g} or more" if above is None else f"above {above:g}"
    allowed = f"a number, {low}" + ("" if most is None else f", at most {most:g}")
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ArgumentError(argument, value, "is no number", allowed)
    if value < least or (above is not None and value <= above):
        raise ArgumentError(argument, value, "is too small", allowed)
    if most is not None and value > most:
        raise ArgumentError(argument, value, "is too large", allowed)


def check_flag(argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(argument, value, "is neither of the two", "true, false")
