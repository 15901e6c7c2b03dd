"""Which edges the update trains. Rollout and rewards stay whole; pruning only drops edges from the loss."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .errors import ArgumentError
from .noise import Key, normal
from .tensors import unique
from .tree import Plan

STEP_DRAW, LEVEL_DRAW, LEAF_NOISE = 2**32 - 1, 2**32 - 2, 2**32 - 3
"""The tree numbers that other draws than those of trees are made under, as no prompt has as many trees: of steps that
are trained; and of losses on leaves, of their noise levels and of their noise.
"""


class Pruning(NamedTuple):
    """The pruning of an epoch (BranchGRPO, arXiv 2509.06040; `step_fraction` is DanceGRPO's, arXiv 2505.07818)."""

    depths: tuple[int, ...] = ()  # edges whose child stands at one of these
    width_mode: str = "off"  # of the chains after the last split: "best" siblings, or the tree's "best_and_worst"
    width_ratio: float = 0.5  # share of the chains that is kept
    step_fraction: float = 1.0  # share of the stochastic steps that is kept, drawn for each prompt


NO_PRUNING = Pruning()
WIDTH_MODES = ("off", "best", "best_and_worst")


def slide_depths(depths: Sequence[int], epoch: int, interval: int, stop: int) -> tuple[int, ...]:
    """Depths moved towards the root by one every `interval` epochs, until the first of them has reached `stop`."""
    shift = min(epoch // interval, max(0, min(depths) - stop)) if depths else 0
    return tuple(depth - shift for depth in depths)


def prune(
    plan: Plan,
    advantage: Float[Tensor, "prompts edges"],
    how: Pruning = NO_PRUNING,
    key: Key = (0, 0),
    prompt_ids: Int[Tensor, " prompts"] | None = None,
    among: Bool[Tensor, " edges"] | None = None,
) -> Bool[Tensor, "prompts edges"]:
    """The edges that stay in the loss: those `among` which it can train (where nothing is said, the stochastic ones),
    with a scored leaf somewhere below them, not pruned.
    """
    if how.width_mode not in WIDTH_MODES:
        raise ArgumentError("width_mode", how.width_mode, "is no way to prune", ", ".join(WIDTH_MODES))
    keep = (plan.stochastic if among is None else among).to(advantage.device) & ~advantage.isnan()
    if how.depths:
        keep &= ~_at(plan, how.depths).to(keep.device)
    if how.width_mode != "off":
        keep &= _width(plan, advantage.cpu(), how.width_mode, how.width_ratio).to(keep.device)
    if how.step_fraction < 1:
        ids = torch.arange(len(advantage)) if prompt_ids is None else prompt_ids
        keep &= _some_steps(plan, how, key, ids).to(keep.device)
    return keep


def _at(plan: Plan, depths: Sequence[int]) -> Bool[Tensor, " edges"]:
    return torch.isin(plan.depth[plan.child], torch.tensor(depths, dtype=torch.long))


def _width(
    plan: Plan, advantage: Float[Tensor, "prompts edges"], mode: str, ratio: float
) -> Bool[Tensor, "prompts edges"]:
    """Whole chains, from the last split above a leaf down to it, go or stay by the advantage of their first edge."""
    inside = plan.only_leaf >= 0
    first = inside & (torch.isin(plan.parent, plan.splits) | (plan.parent < plan.roots))
    order = plan.only_leaf[first].argsort()
    own, parent = advantage[:, first][:, order], plan.parent[first][order]
    # Chains compete with those born at the same split, or within their tree; trees that never split, within the prompt.
    rivals = torch.zeros_like(parent)
    if len(plan.splits):
        rivals = parent if mode == "best" else plan.tree[parent]
    same = rivals[:, None] == rivals
    size = same.sum(1)
    kept = (ratio * size).floor().clamp_min(1)
    # How many rivals are better (or as good, and earlier); a leaf without a score is never among them, and never kept.
    place = torch.arange(len(rivals))
    earlier = place[:, None] > place
    ahead = (own[:, None, :] > own[:, :, None]) | ((own[:, None, :] == own[:, :, None]) & earlier)
    best = (same & ahead).sum(2)
    if mode == "best":
        stays = best < kept
    else:
        worst = (same & ~own.isnan()[:, None, :]).sum(2) - 1 - best
        low = (kept / 2).floor().clamp_min(1)
        stays = (best < (kept - low).clamp_min(1)) | (worst < low)
    stays &= ~own.isnan()
    return ~inside | stays[:, plan.only_leaf.clamp_min(0)]


def _some_steps(
    plan: Plan, how: Pruning, key: Key, prompt_ids: Int[Tensor, " prompts"]
) -> Bool[Tensor, "prompts edges"]:
    """For each prompt some of the steps that are left, drawn anew each epoch: all its edges at those steps."""
    steps, _ = unique(plan.step[plan.stochastic & ~_at(plan, how.depths)])
    count, prompts = len(steps), len(prompt_ids)
    tree = torch.full((prompts * count,), STEP_DRAW)
    address = torch.stack([prompt_ids.repeat_interleave(count), tree, steps.repeat(prompts)], 1)
    rank = normal(key, address, (1,)).view(prompts, count).argsort(1).argsort(1)
    chosen = torch.zeros(prompts, len(plan.schedule), dtype=torch.bool)
    chosen[:, steps] = rank < max(1, round(how.step_fraction * count))
    return chosen[:, plan.step]
