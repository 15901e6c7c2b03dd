"""Pictures by the ODE: for evaluations, samples and exports."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..config.schema import Config
from ..core.noise import fold
from ..core.tree import deterministic
from ..data.prompts import Prompts
from ..models.base import Model
from .batches import batches, settled
from .method import naming_settings
from .rollout import sample_trees

EVALUATION = 2**32
"""Folded into the seed in place of an epoch, so that evaluation noise is never training noise."""


def generate(
    model: Model,
    prompts: Prompts,
    ids: Int[Tensor, " prompts"],
    config: Config,
    start: Float[Tensor, "prompts 1 *latent"] | None = None,
) -> Float[Tensor, "prompts 1 *latent"]:
    """One latent a prompt by the ODE, a batch of prompts at a time.

    From noise that depends on (seed, id) alone, or from a given one.
    """
    with naming_settings():
        plan = deterministic(model.schedule(config.eval.num_steps or config.sample.num_steps))
    key = fold(config.seed, EVALUATION)
    leaves: list[Tensor] = []
    for batch in batches(len(prompts), settled(config.sample.batch_size)):
        cond = model.encode(prompts.take(batch.rows.tolist()).texts)
        own = None if start is None else start[batch.rows]
        leaves.append(sample_trees(model, plan, cond, key, ids[batch.rows], config.sample, start=own).leaves)
    return torch.cat(leaves)


def noise_of_seeds(seeds: Sequence[int], shape: tuple[int, ...]) -> Float[Tensor, "seeds 1 *shape"]:
    """The noise of a diffusers pipeline that is given `torch.Generator().manual_seed(seed)`."""
    return torch.stack([torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
