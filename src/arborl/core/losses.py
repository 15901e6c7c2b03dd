"""Losses of an edge."""

import torch
from jaxtyping import Float
from torch import Tensor


def clipped_surrogate(
    log_density: Float[Tensor, " n"],
    old_log_density: Float[Tensor, " n"],
    advantage: Float[Tensor, " n"],
    clip: float,
    weight: Float[Tensor, " n"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, " n"]]]:
    """PPO (arXiv 1707.06347, eq. 7): max(-A·r, -A·clip(r, 1±c)), weighted and *summed*.

    The caller divides by the global number of edges. Also returns, per edge, the ratio and whether the clip is what
    held it (its gradient is then 0).
    """
    ratio = torch.exp(log_density - old_log_density)
    free, held = -advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)
    loss = torch.maximum(free, held)
    if weight is not None:
        loss = loss * weight
    return loss.sum(), {"ratio": ratio.detach(), "clipped": (held > free).detach().float()}
