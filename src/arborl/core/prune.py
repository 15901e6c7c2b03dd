"""Which edges the update trains. Rollout and rewards stay whole; pruning only drops edges from the loss."""

from jaxtyping import Bool, Float
from torch import Tensor

from .tree import Plan


def trainable(plan: Plan, advantage: Float[Tensor, "prompts edges"]) -> Bool[Tensor, "prompts edges"]:
    """Edges that can be trained at all: drawn from a density, with a scored leaf somewhere below them."""
    return plan.stochastic.to(advantage.device) & ~advantage.isnan()
