"""Rollout + advantages + mask -> optimizer steps. One forward at a parent trains all its kept children."""

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config.schema import Config, TrainConfig
from ..core.errors import InputError
from ..core.kernels import Coefficients, transition
from ..core.losses import clipped_surrogate
from ..core.noise import Key
from ..core.tensors import like
from ..core.tree import Plan
from ..data.prompts import LocalPrompts
from ..models.base import Model
from .batches import batches, settled, to_device
from .checks import gradient_sizes, reached_groups, unequal_gradients
from .rollout import Rollout
from .state import State

SUMS = ("edges", "parents", "loss", "ratio", "clip_ratio", "approx_kl", "kl")


@dataclass
class Stats:
    """Sums over an epoch's optimizer steps. They stay on the device until someone asks.

    Every rank has every name, also one that had nothing to train: the ranks add them up.
    """

    sums: dict[str, Tensor] = field(default_factory=lambda: {name: torch.zeros(()) for name in SUMS})
    ratio_error: Tensor = field(default_factory=lambda: torch.zeros(()))  # largest |ratio - 1| in the first step
    grad_norm: float = 0.0
    steps: int = 0
    skipped: int = 0  # no edge had an advantage
    nonfinite: int = 0  # the gradient was not finite
    reached: dict[str, bool] = field(default_factory=dict)  # kinds of layers, and whether a gradient came to them
    unequal: list[str] = field(default_factory=list)  # parameters whose gradients differed between ranks
    ratios: Tensor | None = None  # of the first prompt's edges, NaN where not trained; where its trees are recorded

    def add(self, **values: Tensor | int) -> None:
        for name, value in values.items():
            value = torch.as_tensor(value).detach()
            self.sums[name] = self.sums[name].to(value.device) + value


class Edges(NamedTuple):
    """Some kept edges and their parents: `parents` are (prompt, node) rows, `row` says whose child each edge is."""

    parents: Int[Tensor, "p 2"]
    prompt: Int[Tensor, " e"]
    edge: Int[Tensor, " e"]
    row: Int[Tensor, " e"]

    def batch(self, index: Tensor, valid: int) -> "Edges":
        """The edges of a run of parents (rows past `valid` are padding and have none)."""
        inside = (self.row >= index[0]) & (self.row < index[0] + valid)
        return Edges(self.parents[index], self.prompt[inside], self.edge[inside], self.row[inside] - index[0])


def update(
    model: Model,
    state: State,
    accelerator: Accelerator,
    rollout: Rollout,
    advantage: Float[Tensor, "prompts edges"],
    keep: Bool[Tensor, "prompts edges"],
    config: Config,
    key: Key,
    local: LocalPrompts,
    check_gradients: bool = True,
) -> Stats:
    """`train.updates` optimizer steps over a seeded partition of the parents.

    A step's loss is the sum over its edges divided by their number on all ranks, so neither micro-batches nor ranks
    change it. A step none of whose edges has an advantage is left out on every rank, unless there is a KL to follow.
    `check_gradients` looks where the first two steps' gradients came to, and whether all ranks have the same.
    """
    stats, train = Stats(), config.train
    if rollout.x0 is not None:
        stats.ratios = torch.full((rollout.plan.edges,), torch.nan, device=model.device)
    part_of = _partition(rollout.plan, local.total, train.updates, key)[local.ids.clamp_max(local.total - 1)]
    for part in range(train.updates):
        edges = _edges(rollout.plan, keep.cpu() & (part_of[:, rollout.plan.parent] == part))
        queue = list(
            batches(len(edges.parents), settled(train.batch_size), config.sample.pad_batches, model.update_batch_sizes)
        )
        useful = int((advantage[edges.prompt, edges.edge] != 0).any())
        count, useful, calls = _across_ranks(accelerator, len(edges.edge), useful, len(queue))
        if count == 0 or (useful == 0 and train.kl == 0):
            stats.skipped += 1
            continue
        for call in range(calls):
            # Split weights have their gradients summed at every call: kept whole, they would cost what was saved.
            waits = call + 1 < calls and not state.sharded
            with accelerator.no_sync(model.module) if waits else nullcontext():
                if call < len(queue):
                    batch = edges.batch(*queue[call])
                    loss = _loss(model, rollout, advantage, batch, train, stats, first=stats.steps == 0)
                else:
                    loss = _idle_loss(model, rollout, with_reference=train.kl > 0)
                if not loss.requires_grad:
                    raise InputError("model.train", None, "no trained weight has a part in the model's answer")
                # Gradients are averaged over the ranks; the loss is a mean over the edges of all of them.
                accelerator.backward(loss * (accelerator.num_processes / count))
        if check_gradients and stats.steps < 2:
            sizes = gradient_sizes(state.parameters, accelerator)
            stats.unequal += unequal_gradients(sizes)
            reached = reached_groups({name: max(ranks) for name, ranks in sizes.items()})
            stats.reached = {name: found or stats.reached.get(name, False) for name, found in reached.items()}
        norm = clip_gradients(state.parameters.values(), train.max_grad_norm)
        stats.grad_norm = norm if math.isnan(norm) else max(stats.grad_norm, norm)
        if math.isfinite(norm):
            state.optimizer.step()
            state.ema.step()
            stats.steps += 1
            state.nonfinite_steps = 0
        else:  # gradients are the same on all ranks by now, so all of them come here together
            stats.nonfinite += 1
            state.nonfinite_steps += 1
        state.optimizer.zero_grad(set_to_none=True)
    return stats


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> float:
    """Scale gradients down to a norm of at most `most`; the norm they had, over all ranks."""
    parameters = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return float(norm)


def _loss(
    model: Model,
    rollout: Rollout,
    advantage: Tensor,
    batch: Edges,
    config: TrainConfig,
    stats: Stats,
    first: bool,
) -> Float[Tensor, ""]:
    """The summed loss of one micro-batch: a forward per parent, a density per edge."""
    plan, device = rollout.plan, model.device

    def of_edges(values: Tensor) -> Tensor:
        return to_device(values[batch.edge].float(), device)

    prompt, node = batch.parents.unbind(1)
    x = _at(rollout.latents, prompt, node, device)
    t = to_device(plan.timestep[node].float(), device)
    cond = rollout.cond[to_device(prompt, device)]
    child = _at(rollout.latents, batch.prompt, plan.child[batch.edge], device)
    row = to_device(batch.row, device)
    coefficients = Coefficients(*map(of_edges, plan.coefficients))
    policy = transition(x[row], model.predict(x, t, cond)[row], coefficients)

    new = policy.log_density(child)
    old = _at(rollout.log_density, batch.prompt, batch.edge, device)
    weight = of_edges(plan.noise_weight) if config.edge_weight == "noise" else None
    gain = _at(advantage.to(new.dtype), batch.prompt, batch.edge, device)
    loss, seen = clipped_surrogate(new, old, gain, config.clip, weight)
    ratio = seen["ratio"]
    if first:
        stats.ratio_error = torch.maximum(stats.ratio_error.to(device), (ratio - 1).abs().max())
    if stats.ratios is not None:
        own = (batch.prompt == 0).nonzero().squeeze(1)
        stats.ratios[to_device(batch.edge[own], device)] = ratio.detach().float()[to_device(own, device)]
    stats.add(
        edges=len(row),
        parents=len(torch.unique(batch.row)),
        loss=loss,
        ratio=ratio.sum(),
        clip_ratio=seen["clipped"].sum(),
        approx_kl=(ratio - 1 - (new.detach() - old)).sum(),
    )
    if config.kl > 0:
        with torch.no_grad(), model.reference():
            base = model.predict(x, t, cond)[row]
        divergence = policy.kl(transition(x[row], base, coefficients)).sum()
        stats.add(kl=divergence)
        loss = loss + config.kl * divergence
    return loss


def _at(values: Tensor, first: Tensor, second: Tensor, device: torch.device) -> Tensor:
    """`values[first, second]` on the device, by indices on the host, wherever the values are."""
    if values.device.type == "cpu":
        return to_device(values[first, second], device)
    return values[to_device(first, values.device), to_device(second, values.device)]


def _idle_loss(model: Model, rollout: Rollout, with_reference: bool) -> Float[Tensor, ""]:
    """A forward whose gradient is zero: ranks must make the same calls, also those out of work."""
    first = torch.zeros(model.min_batch_size, dtype=torch.long)
    x = _at(rollout.latents, first, first, model.device)
    t, cond = like(rollout.plan.timestep[first], x), rollout.cond[to_device(first, model.device)]
    loss = 0.0 * model.predict(x, t, cond).sum()
    if with_reference:  # its weights may be split over the ranks too
        with torch.no_grad(), model.reference():
            model.predict(x, t, cond)
    return loss


def _edges(plan: Plan, keep: Bool[Tensor, "prompts edges"]) -> Edges:
    prompt, edge = keep.nonzero(as_tuple=True)
    parents, row = torch.stack([prompt, plan.parent[edge]], 1).unique(dim=0, return_inverse=True)
    return Edges(parents, prompt, edge, row)


def _partition(plan: Plan, prompts: int, parts: int, key: Key) -> Int[Tensor, "prompts nodes"]:
    """Which optimizer step each (global prompt, node) trains in, evenly; the same for every number of ranks."""
    samples = plan.trained_parents
    generator = torch.Generator().manual_seed(key[0] << 31 | key[1] >> 1)
    order = torch.randperm(prompts * len(samples), generator=generator)
    part_of = torch.zeros(prompts, plan.nodes, dtype=torch.long)
    part_of[:, samples] = (order % parts).view(prompts, len(samples))
    return part_of


def _across_ranks(accelerator: Accelerator, edges: int, useful: int, calls: int) -> tuple[int, int, int]:
    """Edges and usefulness summed over the ranks, and the most micro-batches any of them has."""
    if accelerator.num_processes == 1:
        return edges, useful, calls
    everyone = accelerator.gather(torch.tensor([[edges, useful, calls]], device=accelerator.device))
    return int(everyone[:, 0].sum()), int(everyone[:, 1].sum()), int(everyone[:, 2].max())  # pyright: ignore
