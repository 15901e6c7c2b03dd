"""Classifier-free guidance (arXiv 2207.12598, eq. 6), both halves in one batched call."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .base import Cond


def guided(
    velocity: Callable[..., Tensor],
    x: Tensor,
    t: Tensor,
    cond: Cond,
    names: Sequence[str],
    scale: float,
    grad: str = "both",
) -> Tensor:
    """`velocity(x, t, *cond)`, extrapolated from `negative_*` by `scale`; at scale 1 a single plain call.

    `grad="cond"` takes no gradient through the unconditional half: cheaper, and an approximation of the policy's own
    gradient, which flows through both.
    """
    positive = [cond.tensors[name] for name in names]
    if scale <= 1:
        return velocity(x, t, *positive)
    negative = [cond.tensors[f"negative_{name}"] for name in names]
    if grad == "cond" and torch.is_grad_enabled():
        with torch.no_grad():
            without = velocity(x, t, *negative)
        return without + scale * (velocity(x, t, *positive) - without)
    # The order (negative, positive) is diffusers' own, so that pictures match its pipelines to rounding.
    both = velocity(torch.cat([x, x]), torch.cat([t, t]), *map(torch.cat, zip(negative, positive, strict=True)))
    without, with_prompt = both.chunk(2)
    return without + scale * (with_prompt - without)
