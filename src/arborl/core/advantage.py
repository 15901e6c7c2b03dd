"""Leaf scores -> one advantage per edge. NaN marks what has no score; it never enters a statistic."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .tensors import unique
from .tree import Plan

STD_FLOOR = 1e-6
"""A group whose standard deviation is below this has advantages of 0: dividing by it would amplify noise."""


def zscore(scores: Float[Tensor, "*batch n"], ddof: int = 0, spread: float | None = None) -> Float[Tensor, "*batch n"]:
    """(r - mean) / std over the last axis in float64, ignoring NaN; 0 for a whole group whose std is below 1e-6.

    `spread`, where it is given, is divided by in the std's place.
    """
    return zscore_within(scores, torch.zeros(scores.shape[-1], dtype=torch.long), ddof, spread)


def zscore_within(
    scores: Float[Tensor, "*batch n"], group: Int[Tensor, " n"], ddof: int = 0, spread: float | None = None
) -> Float[Tensor, "*batch n"]:
    """The same, each group of the last axis by itself."""
    scores = scores.double()
    valid = ~scores.isnan()
    group = group.to(scores.device)
    empty = scores.new_zeros(*scores.shape[:-1], int(group.max()) + 1)

    def per_group(values: Tensor) -> Tensor:
        return empty.index_add(-1, group, values)

    count = per_group(valid.double())
    mean = per_group(torch.where(valid, scores, 0)) / count.clamp_min(1)
    centred = torch.where(valid, scores - mean[..., group], 0)
    std = (per_group(centred**2) / (count - ddof).clamp_min(1)).sqrt()[..., group]
    unit = std.clamp_min(STD_FLOOR) if spread is None else max(spread, STD_FLOOR)
    z = torch.where(std < STD_FLOOR, torch.zeros_like(centred), centred / unit)
    return torch.where(valid, z, torch.nan)


def combine(
    scores: Mapping[str, Float[Tensor, "prompts leaves"]], weights: Mapping[str, float], how: str = "zscore"
) -> Float[Tensor, "prompts leaves"]:
    """Several rewards as one leaf score: Σ w·z-score over the prompt's leaves, or Σ w·score (`sum`).

    A single reward keeps its own scale. A leaf that any weighted reward could not score has no score.
    """
    terms = {name: values.double() for name, values in scores.items() if weights[name] != 0}
    if not terms:
        raise ValueError("no reward has a weight other than 0")
    if how == "zscore" and len(terms) > 1:
        terms = {name: zscore(values) for name, values in terms.items()}
    return torch.stack([weights[name] * values for name, values in terms.items()]).sum(0)


def backup_values(
    plan: Plan,
    leaf_values: Float[Tensor, "prompts leaves"],
    logits: Float[Tensor, "prompts edges"] | None = None,
) -> Float[Tensor, "prompts edges"]:
    """Carry leaf values to the root: an edge's value is the mean of the edges below it, weighted by softmax(logits).

    Without logits the weights are equal. Edges without a value drop out and the weights of their siblings are
    renormalised; an edge with no valued leaf below it is NaN.
    """
    value = torch.full((len(leaf_values), plan.nodes), torch.nan, dtype=torch.float64)
    value[:, plan.leaves] = leaf_values.double().cpu()
    for level in reversed(plan.levels):
        below = value[:, plan.child[level.edges]]
        logit = torch.zeros_like(below) if logits is None else logits[:, level.edges].double().cpu()
        logit = torch.where(below.isnan(), -torch.inf, logit)
        slot = level.slot.expand_as(below)
        parents = (len(below), len(level.parents))
        highest = torch.full(parents, -torch.inf, dtype=torch.float64).scatter_reduce(1, slot, logit, "amax")
        weight = torch.where(below.isnan(), 0, torch.exp(logit - highest.gather(1, slot)))
        total = torch.zeros(parents, dtype=torch.float64)
        mass = total.scatter_add(1, slot, weight)
        value[:, level.parents] = total.scatter_add(1, slot, weight * below.nan_to_num()) / mass
    return value[:, plan.child]


def tree(
    plan: Plan,
    scores: Float[Tensor, "prompts leaves"],
    log_density: Float[Tensor, "prompts edges"],
    *,
    temperature: float,
    backup: str,
    spread: float | None = None,
    **_: object,
) -> Float[Tensor, "prompts edges"]:
    """TreeGRPO (arXiv 2512.08153, Algorithm 1): z-score over all leaves of the prompt, carried up by
    softmax(log π_old / temperature) or evenly.
    """
    z = zscore(scores, spread=spread)
    return backup_values(plan, z, log_density / temperature if backup == "softmax" else None)


def flat(
    plan: Plan,
    scores: Float[Tensor, "prompts leaves"],
    log_density: Float[Tensor, "prompts edges"],
    *,
    spread: float | None = None,
    **_: object,
) -> Float[Tensor, "prompts edges"]:
    """GRPO (arXiv 2402.03300, section 4.1.2): the leaf's z-score on every edge of its path; where paths are shared, the
    mean of theirs.
    """
    return backup_values(plan, zscore(scores, spread=spread))


def depth(
    plan: Plan,
    scores: Float[Tensor, "prompts leaves"],
    log_density: Float[Tensor, "prompts edges"],
    *,
    fusion: str,
    group: str,
    spread: float | None = None,
    **_: object,
) -> Float[Tensor, "prompts edges"]:
    """BranchGRPO (arXiv 2509.06040): fuse leaf scores into a reward for every node, then z-score the nodes of a group.

    A node's reward is the mean of the leaves below it, or its children's weighted by softmax(log π_old) of the edges to
    them (`path_prob`). It is compared with the nodes of its depth in its tree, or in all trees of the prompt, or with
    its siblings alone. The standard deviation divides by n - 1; where a group has one node the advantage is 0.
    """
    fused = backup_values(plan, scores, log_density) if fusion == "path_prob" else mean_below(plan, scores)
    level = plan.depth[plan.child]
    # A deterministic edge is no decision, so it is nobody's sibling.
    parts = {
        "tree": (plan.tree[plan.child], level),
        "prompt": (level,),
        "siblings": (plan.parent, plan.stochastic.long()),
    }[group]
    return zscore_within(fused, unique(torch.stack(parts, 1))[1], ddof=1, spread=spread)


def mean_below(plan: Plan, scores: Float[Tensor, "prompts leaves"]) -> Float[Tensor, "prompts edges"]:
    """The mean score of the leaves below each edge that have one."""
    total = torch.zeros(2, len(scores), plan.nodes, dtype=torch.float64)
    scores = scores.double().cpu()
    total[0, :, plan.leaves], total[1, :, plan.leaves] = scores.nan_to_num(), (~scores.isnan()).double()
    for level in reversed(plan.levels):
        total.index_add_(2, plan.parent[level.edges], total[:, :, plan.child[level.edges]])
    return (total[0] / total[1])[:, plan.child]


ADVANTAGES: dict[str, Callable[..., Tensor]] = {"tree": tree, "depth": depth, "flat": flat}
"""An advantage is a function (plan, scores, log_density, the knobs it wants by name) and a line here."""


def advantages(
    how: Callable[..., Tensor],
    plan: Plan,
    scores: Float[Tensor, "prompts leaves"],
    log_density: Float[Tensor, "prompts edges"],
    clip: float,
    **knobs: object,
) -> Float[Tensor, "prompts edges"]:
    """An advantage, clamped to ±clip; NaN on edges without a scored leaf below them, whatever it says of those."""
    found = how(plan, scores, log_density, **knobs).clamp(-clip, clip)
    return torch.where(mean_below(plan, scores).isnan(), torch.nan, found)
