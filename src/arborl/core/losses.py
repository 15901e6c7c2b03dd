"""How a rollout trains the model. A loss is a class and a line in `LOSSES`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .errors import ArgumentError
from .kernels import Coefficients, Gaussian, transition
from .noise import Key, normal
from .prune import LEAF_NOISE, LEVEL_DRAW
from .tree import Plan

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
    sampler: ClassVar[Literal["policy", "old"]] = "policy"
    """Who rolls out: the policy, or the old one."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """The names of what it measures: the same on every rank, also on one that has nothing to train."""

    @property
    def asks(self) -> tuple[Who, ...]:
        """The further policies whose answers it wants: `old`, `reference`. Each costs a forward a model call."""
        return ()

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

    @abstractmethod
    def levels(self, plan: Plan, key: Key, prompt_ids: Int[Tensor, " prompts"]) -> Int[Tensor, "prompts calls"]:
        """The noise level of each call, as a row of the plan's schedule."""


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

    def transition(self, answer: Float[Tensor, "calls *latent"]) -> Gaussian:
        """Every edge's transition by a policy's answers."""
        return transition(self.x[self.row], answer[self.row], self.coefficients)


class EdgeLoss(Loss):
    """A loss of transitions: one model call at a parent serves all its kept edges."""

    needs_densities = True

    def edges(self, plan: Plan) -> Bool[Tensor, " edges"]:
        return plan.stochastic

    def calls(self, plan: Plan) -> Calls:
        parents, edge = plan.trained_parents, plan.stochastic.nonzero().squeeze(1)
        return Calls(parents, edge, torch.searchsorted(parents, plan.parent[edge]))

    def levels(self, plan: Plan, key: Key, prompt_ids: Int[Tensor, " prompts"]) -> Int[Tensor, "prompts calls"]:
        step = torch.zeros(plan.nodes, dtype=torch.long)
        step[plan.parent] = plan.step
        return step[plan.trained_parents].expand(len(prompt_ids), -1)

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
    advantage: Float[Tensor, " n"]  # of the edge into the leaf, which is the leaf's own
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
    """A loss of finished samples: each leaf is noised again at some of the sampler's own levels, drawn without
    replacement, and every one of them is a model call. An edge here is a leaf at one level.
    """

    needs_densities = False
    levels_per_leaf: int = 1
    """The number of those levels."""

    def rows(self, plan: Plan) -> Int[Tensor, " rows"]:
        """The rows of the schedule that levels are drawn from: those on the way to the first leaf."""
        node, found = int(plan.leaves[0]), list[int]()
        while node >= plan.roots:
            found.append(int(plan.step[node - plan.roots]))
            node = int(plan.parent[node - plan.roots])
        return torch.tensor(found[::-1])

    def edges(self, plan: Plan) -> Bool[Tensor, " edges"]:
        return torch.isin(plan.child, plan.leaves)

    def calls(self, plan: Plan) -> Calls:
        rows, levels = len(self.rows(plan)), cast(object, self.levels_per_leaf)
        if type(levels) is not int or not 1 <= levels <= rows:
            raise ArgumentError("levels_per_leaf", levels, f"{rows} noise levels can be drawn", f"1..{rows}")
        leaf = plan.leaves.repeat_interleave(self.levels_per_leaf)
        return Calls(leaf, leaf - plan.roots, torch.arange(len(leaf)))

    def levels(self, plan: Plan, key: Key, prompt_ids: Int[Tensor, " prompts"]) -> Int[Tensor, "prompts calls"]:
        rows, leaves = self.rows(plan), len(plan.leaves)
        number = torch.arange(leaves * len(rows))
        order = normal(key, _address(prompt_ids, LEVEL_DRAW, number), (1,)).view(len(prompt_ids), leaves, -1).argsort(2)
        return rows[order[:, :, : self.levels_per_leaf]].flatten(1)

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


@dataclass(frozen=True)
class Surrogate(EdgeLoss):
    """PPO's clipped surrogate, max(-A·r, -A·clip(r, 1±c)) (arXiv 1707.06347, eq. 7), plus a KL to the untrained model
    (Flow-GRPO, arXiv 2505.05470).

    `edge_weight="noise"` weighs edges by the noise that they add (TempFlow-GRPO, arXiv 2508.04324).
    """

    clip: float
    kl: float = 0.0
    edge_weight: str = "equal"

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "ratio", "clip_ratio", "approx_kl", *(["kl"] if self.kl else []))

    @property
    def asks(self) -> tuple[Who, ...]:
        return ("reference",) if self.kl else ()

    @property
    def has_regularizer(self) -> bool:
        return self.kl > 0

    def __call__(
        self, answers: Mapping[Who, Float[Tensor, "calls *latent"]], batch: EdgeBatch
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, " edges"]]]:
        policy = batch.transition(answers["policy"])
        new, old = policy.log_density(batch.child), batch.log_density
        weight = batch.noise_weight if self.edge_weight == "noise" else None
        edges, ratio, clipped = clipped_surrogate(new, old, batch.advantage, self.clip, weight)
        loss = edges.sum()
        # Of the divergence the estimate r - 1 - log r, which is never below 0.
        seen = {"loss": edges, "ratio": ratio, "clip_ratio": clipped, "approx_kl": ratio - 1 - (new.detach() - old)}
        if self.kl:
            seen["kl"] = policy.kl(batch.transition(answers["reference"]))
            loss = loss + self.kl * seen["kl"].sum()
        return loss, seen


def clipped_surrogate(
    log_density: Float[Tensor, " n"],
    old_log_density: Float[Tensor, " n"],
    advantage: Float[Tensor, " n"],
    clip: float,
    weight: Float[Tensor, " n"] | None = None,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Each edge's surrogate, weighted; its ratio; and whether the clip is what held it (its gradient is then 0)."""
    ratio = torch.exp(log_density - old_log_density)
    free, held = -advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)
    loss = torch.maximum(free, held)
    if weight is not None:
        loss = loss * weight
    return loss, ratio.detach(), (held > free).detach().float()


LOSSES: dict[str, type[EdgeLoss] | type[LeafLoss]] = {"surrogate": Surrogate}
"""A loss is a class and a line here."""
