"""Pictures by the ODE: for evaluations, samples and exports."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.noise import fold
from ..core.tensors import ints
from ..core.tree import deterministic
from ..data.prompts import LocalPrompts, Prompts
from .batches import batches
from .method import naming_settings
from .policy import Policy
from .rollout import grow_trees

EVALUATION = 2**32
"""Folded into the seed in place of an epoch, so that evaluation noise is never training noise."""


def generate(
    policy: Policy,
    prompts: Prompts,
    ids: Int[Tensor, " prompts"],
    start: Float[Tensor, "prompts 1 *latent"] | None = None,
) -> Float[Tensor, "prompts 1 *latent"]:
    """One latent a prompt by the ODE, a batch of prompts at a time.

    From noise that depends on (seed, id) alone, or from a given one.
    """
    config = policy.config
    with naming_settings():
        plan = deterministic(policy.model.schedule(config.eval.num_steps or config.sample.num_steps))
    key = fold(config.seed, EVALUATION)
    leaves: list[Tensor] = []
    for batch in batches(len(prompts), policy.batch_sizes.sample):
        some = prompts.take(ints(batch.rows))
        local, own = LocalPrompts(some, ids[batch.rows], len(prompts)), None if start is None else start[batch.rows]
        leaves.append(grow_trees(policy, plan, policy.encode(some), key, local, start=own).leaves)
    return torch.cat(leaves)


def noise_of_seeds(policy: Policy, seeds: Sequence[int]) -> Float[Tensor, "seeds 1 *latent"]:
    """The noise of a diffusers pipeline that is given `torch.Generator().manual_seed(seed)`."""
    return torch.stack([policy.model.noise_of_seed(seed).float() for seed in seeds])
