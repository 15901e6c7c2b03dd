"""All trees of all prompts advance together, a level at a time, one model forward for each parent."""

import itertools
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.kernels import Coefficients, transition
from ..core.noise import Key, normal
from ..core.tensors import like, to_device, unflatten
from ..core.tree import Level, Plan
from ..data.prompts import LocalPrompts
from ..models.base import Cond
from .batches import batches_of_groups
from .policy import Policy


@dataclass(frozen=True)
class Epoch:
    """One epoch on one process: what it grows, from which noise, for which prompts."""

    number: int
    plan: Plan
    key: Key  # of the seed and the number: all that is drawn in it
    prompts: LocalPrompts
    recorded: bool = False  # its first prompt's trees are kept for drawings
    learning_rates: tuple[float, ...] = ()  # one for each optimizer step

    @property
    def texts(self) -> list[str]:
        return self.prompts.prompts.texts


@dataclass
class Rollout:
    """Every node's latent once, and every edge's log-density under the policy that drew it.

    Latents are float32, as drawn: the update evaluates the density of exactly the child that was sampled.
    """

    plan: Plan
    key: Key
    prompts: LocalPrompts
    cond: Cond
    latents: Float[Tensor, "prompts nodes *latent"]
    log_density: Float[Tensor, "prompts edges"]  # 0 on deterministic edges, which have none
    x0: Float[Tensor, "nodes *latent"] | None = None  # x̂0 at the first prompt's nodes, where asked for
    answers: Float[Tensor, "prompts parents *latent"] | None = None  # at trained parents, where the loss needs them

    @property
    def leaves(self) -> Float[Tensor, "prompts leaves *latent"]:
        return self.latents[:, self.plan.leaves]


def kept_latents(policy: Policy, plan: Plan) -> int:
    """The latents that a prompt's rollout holds until its update: those of the nodes, and answers of their size."""
    return plan.nodes + (len(plan.trained_parents) if policy.keeps_answers else 0)


def sample_trees(policy: Policy, epoch: Epoch, cond: Cond) -> Rollout:
    """The trees of an epoch, by the policy that the loss has roll out."""
    with policy.acting(policy.sampler):
        given = policy, epoch.plan, cond, epoch.key, epoch.prompts
        return grow_trees(*given, keep_x0=epoch.recorded, keep_answers=policy.keeps_answers)


@torch.no_grad()
def grow_trees(
    policy: Policy,
    plan: Plan,
    cond: Cond,
    key: Key,
    local: LocalPrompts,
    keep_x0: bool = False,
    keep_answers: bool = False,
    start: Float[Tensor, "prompts roots *latent"] | None = None,
) -> Rollout:
    """Grow a plan's trees for every prompt. The prompts' ids are global, so the noise does not depend on the rank.
    `start` replaces the noise that trees grow from.
    """
    prompts, device, prompt_ids, shape = len(cond), policy.device, local.ids, policy.latent_shape
    if start is None:
        roots = addresses(plan, prompt_ids, torch.arange(plan.roots), device)
        start = unflatten(policy.model.noise(key, roots), (prompts, plan.roots))
    frontier = start.to(device)
    storage = torch.device("cpu") if policy.config.sample.offload else device
    latents = torch.empty(prompts, plan.nodes, *shape, device=storage)
    log_density = torch.zeros(prompts, plan.edges, device=device)
    x0 = torch.empty(plan.nodes, *shape, device=device) if keep_x0 else None
    kept = (prompts, len(plan.trained_parents), *shape)
    answers = torch.empty(kept, device=storage) if keep_answers else None
    latents[:, : plan.roots] = frontier
    # Tables go to the device once, beforehand, and indices through pinned memory: no level waits for them.
    table = Coefficients(*(to_device(c.float(), device) for c in plan.coefficients))
    multistep = to_device(plan.multistep_coefficient.float(), device)
    x0_coefficients = tuple(to_device(c.float(), device) for c in plan.x0_coefficients)
    before = frontier if bool(plan.multistep.any()) else None  # x̂0 at the parents of the frontier's nodes
    first = 0  # the number of the frontier's first node
    for stochastic, levels in itertools.groupby(plan.levels, lambda level: bool(plan.stochastic[level.edges].any())):
        # What the update will look at again goes through its own code; the way to the leaves only has to be quick.
        retraced = stochastic and policy.compares_densities
        with policy.update_numerics() if retraced else policy.fast_sampling():
            for level in levels:
                parents, slot = to_device(level.parents, device), to_device(level.slot, device)
                children = slice(plan.roots + level.edges.start, plan.roots + level.edges.stop)
                x = frontier[:, parents - first]
                v = predict(policy, x, plan.timestep[level.parents].float(), cond, retraced)
                if x0 is not None:
                    x0[parents] = predict_x0(x0_coefficients, parents, x[:1], v[:1])[0]
                if answers is not None:
                    _keep_answers(answers, plan, level, v)
                gaussian = transition(
                    x[:, slot].flatten(0, 1),
                    v[:, slot].flatten(0, 1),
                    Coefficients(*(c[level.edges].repeat(prompts) for c in table)),
                )
                if before is not None:
                    here = predict_x0(x0_coefficients, parents, x, v)
                    change = (here - before[:, parents - first])[:, slot]
                    gaussian.mean.add_((_broadcast(multistep[level.edges], x) * change).flatten(0, 1))
                    before = here[:, slot]
                if stochastic:
                    where = addresses(plan, prompt_ids, plan.child[level.edges], device)
                    drawn = gaussian.sample(normal(key, where, shape, _families(plan, level.edges, prompts)))
                    log_density[:, level.edges] = unflatten(gaussian.log_density(drawn), (prompts, -1))
                else:
                    drawn = gaussian.mean
                frontier = unflatten(drawn, (prompts, -1))
                latents[:, children] = frontier.to(storage)
                first = children.start
    if x0 is not None:
        leaves = to_device(plan.leaves, device)
        x0[leaves] = latents[0, leaves.to(storage)].to(device)
    return Rollout(plan, key, local, cond, latents, log_density, x0, answers)


def _keep_answers(
    answers: Float[Tensor, "prompts parents *latent"], plan: Plan, level: Level, v: Float[Tensor, "prompts n *latent"]
) -> None:
    """Of a level's parents those of the trained ones, in their places."""
    slot = torch.isin(level.parents, plan.trained_parents).nonzero().squeeze(1)
    place = torch.searchsorted(plan.trained_parents, level.parents[slot])
    answers[:, to_device(place, answers.device)] = v[:, to_device(slot, v.device)].to(answers.device)


def predict_x0(
    coefficients: tuple[Float[Tensor, " nodes"], ...],
    nodes: Int[Tensor, " n"],
    x: Float[Tensor, "prompts n *latent"],
    v: Float[Tensor, "prompts n *latent"],
) -> Float[Tensor, "prompts n *latent"]:
    """x̂0, what the model takes the clean sample to be, at some nodes; `coefficients` are the plan's."""
    a, b = (_broadcast(c[nodes], x) for c in coefficients)
    return a * x + b * v


def _broadcast(values: Float[Tensor, " n"], x: Float[Tensor, "prompts m *latent"]) -> Tensor:
    """One value a node (or edge), shaped so that it multiplies latents like those of x."""
    return like(values, x).view(-1, *[1] * (x.ndim - 2))


def addresses(
    plan: Plan, prompt_ids: Int[Tensor, " prompts"], nodes: Int[Tensor, " n"], device: torch.device
) -> Int[Tensor, "prompts_n 3"]:
    """Addresses of the draws: (global prompt, tree, index in the tree), prompt by prompt."""
    prompt = prompt_ids.repeat_interleave(len(nodes))
    tree, number = (values[nodes].repeat(len(prompt_ids)) for values in (plan.tree, plan.index_in_tree))
    return to_device(torch.stack([prompt, tree, number], 1), device)


def _families(plan: Plan, edges: slice, prompts: int) -> Int[Tensor, " prompts_e"] | None:
    """The plan's families of some edges, in every prompt its own."""
    if plan.family is None:
        return None
    family = plan.family[edges]
    return (family + torch.arange(prompts)[:, None] * (int(plan.family.max()) + 1)).flatten()


def predict(
    policy: Policy,
    x: Float[Tensor, "prompts n *latent"],
    t: Float[Tensor, " n"],  # on the host
    cond: Cond,
    retraced: bool = False,
) -> Float[Tensor, "prompts n *latent"]:
    """The model's velocities in micro-batches (see `batches`); small frontiers of different prompts share a call, where
    the model takes their timesteps together.

    What the update will look at again is `retraced`: where its code is compiled, in calls of sizes it rounds alike.
    """
    prompts, n = x.shape[:2]
    flat, times = x.flatten(0, 1), t.repeat(prompts)
    out = torch.empty_like(flat)
    alike = retraced and policy.compiled
    size = policy.batch_sizes.train if alike else policy.batch_sizes.sample
    sizes = policy.update_batch_sizes if alike else (policy.min_batch_size,)
    for batch in batches_of_groups(policy.call_groups(times), size, policy.config.sample.pad_batches, sizes):
        index = to_device(batch.rows, x.device)
        # Detached at once: the next call must find the memory of what a gradient would have needed free.
        v = policy.predict(flat[index], times[batch.rows], cond[batch.rows // n]).detach()
        out[index[: batch.valid]] = v[: batch.valid]
    return unflatten(out, (prompts, n))
