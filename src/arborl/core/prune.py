"""Which edges the update trains. Rollout and rewards stay whole; pruning only drops edges from the loss."""

from jaxtyping import Bool, Float
from torch import Tensor

from .tree import Plan


def prune(plan: Plan, advantage: Float[Tensor, "prompts edges"]) -> Bool[Tensor, "prompts edges"]:
    """The edges that stay in the loss: drawn from a density, with a scored leaf somewhere below them."""
    return plan.stochastic.to(advantage.device) & ~advantage.isnan()
