"""All trees of all prompts advance together, a level at a time, one model forward for each parent."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .batches import batches, settled
from .config.schema import SampleConfig
from .core.kernels import Coefficients, transition
from .core.noise import Key, normal
from .core.plain import like
from .core.tree import Plan
from .models.base import Cond, Model
from .record import Record


@torch.no_grad()
def rollout(
    model: Model,
    plan: Plan,
    cond: Cond,
    key: Key,
    prompt_ids: Int[Tensor, " prompts"],
    config: SampleConfig,
    keep_clean: bool = False,
    start: Float[Tensor, "prompts roots *latent"] | None = None,
) -> Record:
    """Grow the plan's trees for every prompt. `prompt_ids` are global, so the noise does not depend on the rank.

    `start` replaces the noise that trees grow from.
    """
    prompts, device = len(cond), model.device
    if start is None:
        roots = addresses(plan, prompt_ids, torch.arange(plan.roots), device)
        start = model.noise(key, roots).unflatten(0, (prompts, plan.roots))
    frontier = start.to(device)
    storage = torch.device("cpu") if config.offload else device
    latents = torch.empty(prompts, plan.nodes, *model.latent_shape, device=storage)
    log_density = torch.zeros(prompts, plan.edges, device=device)
    clean = torch.empty(plan.nodes, *model.latent_shape, device=device) if keep_clean else None
    latents[:, : plan.roots] = frontier
    looks_back = bool(plan.multistep.any())
    before = frontier if looks_back else None  # x̂0 at the parents of the frontier's nodes
    first = 0  # the number of the frontier's first node
    for level in plan.levels:
        x = frontier[:, level.parents - first]
        v = predict(model, x, plan.timestep[level.parents], cond, settled(config.batch_size), config.pad_batches)
        if clean is not None:
            clean[level.parents] = clean_of(plan, level.parents, x[:1], v[:1])[0]
        children = plan.child[level.edges]
        gaussian = transition(
            x[:, level.slot].flatten(0, 1),
            v[:, level.slot].flatten(0, 1),
            Coefficients(*(c[level.edges].repeat(prompts) for c in plan.coefficients)),
        )
        if before is not None:
            here = clean_of(plan, level.parents, x, v)
            change = (here - before[:, level.parents - first])[:, level.slot]
            gaussian.mean.add_((_spread(plan.momentum[level.edges], x) * change).flatten(0, 1))
            before = here[:, level.slot]
        if plan.stochastic[level.edges].any():
            drawn = gaussian.sample(normal(key, addresses(plan, prompt_ids, children, device), model.latent_shape))
            log_density[:, level.edges] = gaussian.log_density(drawn).unflatten(0, (prompts, len(children)))
        else:
            drawn = gaussian.mean
        frontier = drawn.unflatten(0, (prompts, len(children)))
        latents[:, children] = frontier.to(storage)
        first = int(children[0])
    if clean is not None:
        clean[plan.leaves] = latents[0, plan.leaves].to(device)
    return Record(plan, cond, latents, log_density, clean)


def clean_of(
    plan: Plan, nodes: Int[Tensor, " n"], x: Float[Tensor, "prompts n *latent"], v: Float[Tensor, "prompts n *latent"]
) -> Float[Tensor, "prompts n *latent"]:
    """x̂0, what the model takes the clean sample to be, at some nodes."""
    a, b = (_spread(c[nodes], x) for c in plan.clean)
    return a * x + b * v


def _spread(values: Float[Tensor, " n"], x: Float[Tensor, "prompts m *latent"]) -> Tensor:
    """One value a node (or edge), shaped so that it multiplies latents like those of x."""
    return like(values, x).view(-1, *[1] * (x.ndim - 2))


def addresses(
    plan: Plan, prompt_ids: Int[Tensor, " prompts"], nodes: Int[Tensor, " n"], device: torch.device
) -> Int[Tensor, "prompts_n 3"]:
    """Where each draw stands: (global prompt, tree, number within the tree), prompt by prompt."""
    prompt = prompt_ids.repeat_interleave(len(nodes))
    tree, number = (values[nodes].repeat(len(prompt_ids)) for values in (plan.tree, plan.number))
    return torch.stack([prompt, tree, number], 1).to(device)


def predict(
    model: Model,
    x: Float[Tensor, "prompts n *latent"],
    t: Float[Tensor, " n"],
    cond: Cond,
    batch_size: int,
    pad: bool,
) -> Float[Tensor, "prompts n *latent"]:
    """The model's velocities in micro-batches; small frontiers of different prompts share a call."""
    prompts, n = x.shape[:2]
    flat, times = x.flatten(0, 1), like(t.repeat(prompts), x)
    out = torch.empty_like(flat)
    for batch in batches(prompts * n, batch_size, pad):
        index = batch.rows.to(x.device)
        v = model.predict(flat[index], times[index], cond[index // n])
        out[index[: batch.valid]] = v[: batch.valid]
    return out.unflatten(0, (prompts, n))
