"""Rollout + advantages + mask -> optimizer steps, by the loss. One forward of a call trains all its kept edges."""

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.errors import InputError
from ..core.kernels import Coefficients
from ..core.losses import Calls, EdgeBatch, EdgeLoss, LeafBatch, LeafLoss, Who, noised
from ..core.noise import Key
from ..core.tensors import ints, to_device, unique
from ..distributed.accelerator import Accelerator, backward
from ..distributed.gather import gather
from ..models.base import Cond
from .batches import Batch, batches
from .checks import gradient_sizes, reached_groups, unequal_gradients
from .contracts import check_loss_answer
from .policy import Policy
from .rollout import Rollout
from .state import State

COUNTED = ("edges", "parents")
"""Sums that are of every loss: the trained edges, and the model calls that train them."""


@dataclass
class Stats:
    """Sums over an epoch's optimizer steps. They stay on the device until someone asks.

    Every rank has every name, also one that had nothing to train: the ranks add them up.
    """

    sums: dict[str, Tensor]
    ratio_error: Tensor = field(default_factory=lambda: torch.zeros(()))  # largest |ratio - 1| in the first step
    grad_norm: float = 0.0
    steps: int = 0
    skipped: int = 0  # no edge had an advantage
    nonfinite: int = 0  # the gradient was not finite
    reached: dict[str, bool] = field(default_factory=dict[str, bool])  # kinds of layers, and whether a gradient came
    unequal: list[str] = field(default_factory=list[str])  # parameters whose gradients differed between ranks
    ratios: Tensor | None = None  # of the first prompt's edges, NaN where not trained; where its trees are recorded

    @classmethod
    def of(cls, loss: EdgeLoss | LeafLoss) -> "Stats":
        return cls({name: torch.zeros(()) for name in (*COUNTED, *loss.metrics)})

    def add(self, **values: Tensor | int) -> None:
        for name, value in values.items():
            value = torch.as_tensor(value).detach()
            self.sums[name] = self.sums[name].to(value.device) + value


class Trained(NamedTuple):
    """Some model calls and the kept edges that they train: `calls` are (prompt, call) rows, `row` says which of them
    each edge belongs to, `by_group` which of them may share a call of the model.
    """

    calls: Int[Tensor, "c 2"]
    prompt: Int[Tensor, " e"]
    edge: Int[Tensor, " e"]
    row: Int[Tensor, " e"]
    by_group: list[Int[Tensor, " some"]]

    def batch(self, group: int, batch: Batch) -> "Trained":
        """A run of a group's calls and their edges (rows past the valid ones are padding and have none)."""
        rows = self.by_group[group][batch.rows]
        place = torch.full((len(self.calls),), -1)
        place[rows[: batch.valid]] = torch.arange(batch.valid)
        inside = place[self.row] >= 0
        row = place[self.row[inside]]
        return Trained(self.calls[rows], self.prompt[inside], self.edge[inside], row, [torch.arange(batch.valid)])


def update(
    policy: Policy,
    state: State,
    loss: EdgeLoss | LeafLoss,
    rollout: Rollout,
    advantage: Float[Tensor, "prompts edges"],
    keep: Bool[Tensor, "prompts edges"],
    rates: Sequence[float] | None = None,
) -> Stats:
    """An optimizer step for each learning rate (without any, `train.updates` steps at `train.learning_rate`), over a
    seeded partition of the model calls; then the old policy follows.

    A step's loss is the sum over its edges divided by their number on all ranks, so neither micro-batches nor ranks
    change it. A step none of whose edges has an advantage is left out on every rank, unless there is a regularizer to
    follow. `state.check_gradients` looks where the first two steps' gradients came to, and whether all ranks have the
    same.
    """
    stats, accelerator, local, train = Stats.of(loss), policy.accelerator, rollout.prompts, policy.config.train
    rates = train.updates * (train.learning_rate,) if rates is None else rates
    if rollout.x0 is not None:
        stats.ratios = torch.full((rollout.plan.edges,), torch.nan, device=policy.device)
    training = TrainingCalls(policy, loss, rollout, advantage)
    whose = local.ids.clamp_max(local.total - 1)
    part_of = partition(len(training.calls.node), local.total, len(rates), rollout.key)[whose]
    how = policy.batch_sizes.train, policy.config.sample.pad_batches, policy.update_batch_sizes
    for part, rate in enumerate(rates):
        trained = training.trained(keep, part_of == part)
        queues = [list(batches(len(rows), *how)) for rows in trained.by_group]
        useful = int((training.advantage_of(trained) != 0).any())
        count, useful, *calls = _across_ranks(accelerator, len(trained.edge), useful, [len(queue) for queue in queues])
        if count == 0 or (useful == 0 and not loss.has_regularizer):
            stats.skipped += 1
            continue
        learns = False
        # Group by group, in the same order on all ranks: each may be calls of another module.
        for group, call in ((group, call) for group, most in enumerate(calls) for call in range(most)):
            queue = queues[group]
            # Split weights have their gradients summed at every call: kept whole, they would cost what was saved.
            waits = call + 1 < calls[group] and not state.sharded
            with policy.no_sync() if waits else nullcontext():
                if call < len(queue):
                    total = training.loss_of(trained.batch(group, queue[call]), stats, first=stats.steps == 0)
                else:
                    total = training.idle(group)
                if total.requires_grad:  # not where a part is asked that is not trained, such as one of two experts
                    # Gradients are averaged over the ranks; the loss is a mean over the edges of all of them.
                    backward(total * (accelerator.num_processes / count), accelerator)
                    learns = True
        if not learns and policy.config.model.components:  # these steps are for parts that stay as they are
            stats.skipped += 1
            continue
        if not learns:
            raise InputError("model.train", None, "no trained weight has a part in the model's answer")
        if state.check_gradients and stats.steps < 2:
            sizes = gradient_sizes(state.parameters, accelerator)
            stats.unequal += unequal_gradients(sizes)
            reached = reached_groups({name: max(ranks) for name, ranks in sizes.items()})
            stats.reached = {name: found or stats.reached.get(name, False) for name, found in reached.items()}
        _step(state, stats, rate, train.max_grad_norm)
    if state.old and stats.steps:
        state.old.follow(_share(policy, float(loss.old_decay(state.steps))))
    return stats


def _step(state: State, stats: Stats, rate: float, most: float) -> None:
    """The optimizer's step at this learning rate, by gradients of at most this norm; none where they are not finite."""
    norm = clip_gradients(state.parameters.values(), most)
    stats.grad_norm = norm if math.isnan(norm) else max(stats.grad_norm, norm)
    if math.isfinite(norm):
        for settings in state.optimizer.param_groups:
            settings["lr"] = rate
        state.optimizer.step()
        state.steps += 1
        state.ema.step(state.steps)
        stats.steps += 1
        state.nonfinite_steps = 0
    else:  # gradients are the same on all ranks by now, so all of them come here together
        stats.nonfinite += 1
        state.nonfinite_steps += 1
    state.optimizer.zero_grad(set_to_none=True)


def _share(policy: Policy, keep: float) -> float:
    if not 0 <= keep <= 1:
        name = policy.config.loss.name
        raise InputError("loss.name", name, f"its old_decay is {keep}, no share of what the old policy is", "0..1")
    return keep


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> float:
    """Scale gradients down to a norm of at most `most`; the norm they had, over all ranks."""
    parameters = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return float(norm)


class TrainingCalls:
    """The model calls that train with a rollout, and what the loss makes of their answers."""

    def __init__(
        self, policy: Policy, loss: EdgeLoss | LeafLoss, rollout: Rollout, advantage: Float[Tensor, "prompts edges"]
    ) -> None:
        self.policy, self.loss, self.rollout, self.advantage = policy, loss, rollout, advantage
        self.device, self.ids = policy.device, rollout.prompts.ids
        self.calls: Calls = loss.calls(rollout.plan)
        plan = rollout.plan
        self.ancestor = loss.ancestors(plan, rollout.key, self.ids) if isinstance(loss, LeafLoss) else None
        self.level = self._level_of_edges() if self.ancestor is None else plan.step[self.ancestor]
        """The noise level of each call (prompts × calls), as a row of the schedule."""
        self.group_of_step = policy.call_groups(rollout.plan.schedule.timestep.float())
        """Of the steps of the schedule, so that ranks number groups alike."""

    def trained(
        self, keep: Bool[Tensor, "prompts edges"], among: Bool[Tensor, "prompts calls"] | None = None
    ) -> Trained:
        """The calls (`among` some of them) that have kept edges, in order, and these edges. A leaf whose ancestor at a
        level has no advantage is not trained there.
        """
        kept = keep.cpu()[:, self.calls.edge]
        if self.ancestor is not None:
            kept &= ~self.advantage.cpu().gather(1, self.ancestor)[:, self.calls.call].isnan()
        prompt, pair = (kept if among is None else kept & among[:, self.calls.call]).nonzero(as_tuple=True)
        calls, row = unique(torch.stack([prompt, self.calls.call[pair]], 1))
        group = self.group_of_step[self.level[calls[:, 0], calls[:, 1]]]
        by_group = [(group == number).nonzero().flatten() for number in range(int(self.group_of_step.max()) + 1)]
        return Trained(calls, prompt, self.calls.edge[pair], row, by_group)

    def _level_of_edges(self) -> Int[Tensor, "prompts calls"]:
        """Where the edges start that a call serves; they leave one node."""
        level = torch.zeros(len(self.calls.node), dtype=torch.long)
        level[self.calls.call] = self.rollout.plan.step[self.calls.edge]
        return level.expand(len(self.ids), -1)

    def loss_of(self, trained: Trained, stats: Stats, first: bool) -> Float[Tensor, ""]:
        """The summed loss of one micro-batch: a forward a call, then whatever the loss makes of its edges."""
        prompt, call = trained.calls.unbind(1)
        step = self.level[prompt, call]
        t, cond = self.rollout.plan.schedule.timestep[step].float(), self.rollout.cond[prompt]
        x = _at(self.rollout.latents, prompt, self.calls.node[call], self.device)
        if isinstance(self.loss, EdgeLoss):
            answers = self._ask(x, t, cond)
            loss, seen = self.loss(answers, self._edges(trained, x))
        else:
            x, batch = self._leaves(self.loss, trained, x, step)
            answers = self._ask(x, t, cond)
            loss, seen = self.loss({who: v[: len(batch.x)] for who, v in answers.items()}, batch)
        check_loss_answer(self.policy.config.loss.name, self.loss, loss, seen, len(trained.edge))
        stats.add(edges=len(trained.edge), parents=len(unique(trained.row)[0]))
        stats.add(**{name: values.sum() for name, values in seen.items()})
        if "ratio" in seen:
            self._keep_ratios(seen["ratio"].detach(), trained, stats, first)
        return loss

    def idle(self, group: int) -> Float[Tensor, ""]:
        """Forwards whose gradient is zero: ranks must make the same calls, also those out of work."""
        first = torch.zeros(self.policy.min_batch_size, dtype=torch.long)
        x, timestep = _at(self.rollout.latents, first, first, self.device), self.rollout.plan.schedule.timestep
        t = timestep[self.group_of_step == group][first].float()
        return 0.0 * self._ask(x, t, self.rollout.cond[first])["policy"].sum()

    def _ask(self, x: Float[Tensor, "c *latent"], t: Float[Tensor, " c"], cond: Cond) -> dict[Who, Tensor]:
        """Everyone's answers; the trained policy's last, whose gradients take memory from then on."""
        everyone: tuple[Who, ...] = (*self.loss.asks, "policy")
        return {who: self.policy.predict(x, t, cond, who) for who in everyone}

    def _edges(self, trained: Trained, x: Float[Tensor, "c *latent"]) -> EdgeBatch:
        plan, rollout, device = self.rollout.plan, self.rollout, self.device

        def of_edges(values: Tensor) -> Tensor:
            return to_device(values[trained.edge].float(), device)

        return EdgeBatch(
            x=x,
            row=to_device(trained.row, device),
            child=_at(rollout.latents, trained.prompt, plan.child[trained.edge], device),
            log_density=_at(rollout.log_density, trained.prompt, trained.edge, device),
            advantage=self.advantage_of(trained),
            noise_weight=of_edges(plan.noise_weight),
            coefficients=Coefficients(*map(of_edges, plan.coefficients)),
            step_size=of_edges((plan.schedule.sigma - plan.schedule.sigma_next)[plan.step]),
            old_answer=self._old_answers(trained),
        )

    def _old_answers(self, trained: Trained) -> Float[Tensor, "c *latent"] | None:
        """The rollout's own answers at the parents."""
        if self.rollout.answers is None:
            return None
        prompt, call = trained.calls.unbind(1)
        place = torch.searchsorted(self.rollout.plan.trained_parents, self.calls.node[call])
        return _at(self.rollout.answers, prompt, place, self.device)

    def _leaves(
        self, loss: LeafLoss, trained: Trained, x0: Float[Tensor, "c *latent"], step: Int[Tensor, " c"]
    ) -> tuple[Float[Tensor, "c *latent"], LeafBatch]:
        """Leaves noised again; and what is known of them, less those that only fill up the call."""
        prompt, call = (to_device(column, self.device) for column in trained.calls.unbind(1))
        schedule, n = self.rollout.plan.schedule, len(trained.edge)
        exact = schedule.sigma[step]
        sigma, alpha = (to_device(level.float(), self.device) for level in (exact, schedule.alpha(exact)))
        ids = to_device(self.ids, self.device)[prompt]
        noise = loss.noise(self.rollout.key, ids, call, self.policy.latent_shape)
        x = noised(x0, noise, alpha, sigma)
        known = (x[:n], x0[:n], noise[:n], sigma[:n], alpha[:n])
        return x, LeafBatch(*known, self.advantage_of(trained), schedule.prediction)

    def advantage_of(self, trained: Trained) -> Float[Tensor, " e"]:
        """What each edge is trained with: its own advantage, or of a leaf at a level that of its ancestor there."""
        edge = trained.edge
        if self.ancestor is not None:
            edge = self.ancestor[trained.prompt, trained.calls[trained.row, 1]]
        return _at(self.advantage.float(), trained.prompt, edge, self.device)

    def _keep_ratios(self, ratio: Float[Tensor, " e"], trained: Trained, stats: Stats, first: bool) -> None:
        if first:
            stats.ratio_error = torch.maximum(stats.ratio_error.to(self.device), (ratio - 1).abs().max())
        if stats.ratios is not None:
            own = (trained.prompt == 0).nonzero().squeeze(1)
            stats.ratios[to_device(trained.edge[own], self.device)] = ratio.float()[to_device(own, self.device)]


def _at(values: Tensor, first: Tensor, second: Tensor, device: torch.device) -> Tensor:
    """`values[first, second]` on the device, by indices on the host, wherever the values are."""
    if values.device.type == "cpu":
        return to_device(values[first, second], device)
    return values[to_device(first, values.device), to_device(second, values.device)]


def partition(calls: int, prompts: int, parts: int, key: Key) -> Int[Tensor, "prompts calls"]:
    """Which optimizer step each call of a (global) prompt trains in, evenly; the same for every number of ranks."""
    generator = torch.Generator().manual_seed(key[0] << 31 | key[1] >> 1)
    order = torch.randperm(prompts * calls, generator=generator)
    return (order % parts).view(prompts, calls)


def _across_ranks(accelerator: Accelerator, edges: int, useful: int, calls: Sequence[int]) -> list[int]:
    """Edges and usefulness summed over the ranks, and the most micro-batches of each group any of them has."""
    mine = [edges, useful, *calls]
    if accelerator.num_processes == 1:
        return mine
    everyone = gather(torch.tensor([mine]), accelerator)
    return [*ints(everyone[:, :2].sum(0)), *ints(everyone[:, 2:].amax(0))]
