"""Measurements of faults that stay silent: `arborl doctor` shows all of them, a run warns of those that fail."""

import math
import re
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..config.schema import Config
from ..core.kernels import Coefficients, Gaussian, transition
from ..core.tensors import floats, ints, largest_entries, unique
from ..core.tree import Plan
from ..data.prompts import Prompts
from ..distributed.accelerator import Accelerator
from ..distributed.fsdp import local
from ..distributed.gather import by_replica, gather
from ..models.compile import uncompiled
from ..rewards import Rewards
from ..rewards.base import describe_failure
from ..rewards.consistency import examine
from .batches import batches
from .policy import Policy
from .rollout import Rollout


def gradient_sizes(
    parameters: Mapping[str, nn.Parameter], accelerator: Accelerator | None = None
) -> dict[str, list[float]]:
    """The largest entry of each parameter's gradient, for every copy that there is of it."""
    own = [None if p.grad is None else local(p.grad) for p in parameters.values()]
    found = [grad for grad in own if grad is not None and grad.numel()]
    sizes = torch.zeros(len(own))
    if found:
        known = torch.tensor([grad is not None and grad.numel() > 0 for grad in own])
        sizes[known] = largest_entries(found).float().cpu()  # one wait
    everyone = by_replica(gather(sizes[None], accelerator), list(parameters.values()))
    return {name: floats(parts.amax(1)) for name, parts in zip(parameters, everyone, strict=True)}


def unequal_gradients(sizes: Mapping[str, Sequence[float]]) -> list[str]:
    """The parameters whose gradients are not the same on all ranks, as they must be once they are summed."""
    return [name for name, ranks in sizes.items() if max(ranks) - min(ranks) > 1e-4 * max(ranks)]


def reached_groups(sizes: Mapping[str, float]) -> dict[str, bool]:
    """Whether a gradient other than zero has reached each kind of layer.

    Both halves of an adapter belong together, as one starts at zero and so gives the other no gradient at first; and
    so do a layer's copies in all blocks, as a last block may well have parts that lead nowhere.
    """
    reached: dict[str, bool] = {}
    for name, size in sizes.items():
        group = re.sub(r"(^|\.)\d+(?=\.)", r"\1*", re.sub(r"\.lora_[AB]\..*", "", name))
        reached[group] = reached.get(group, False) or size != 0  # what is not finite has a check of its own
    return reached


def unasked_parts(reached: Mapping[str, bool], parts: Sequence[str]) -> list[str]:
    """Those of several parts that no call of a step asked, such as an expert of other noise levels."""
    whole = {part: [found for name, found in reached.items() if name.startswith(f"{part}.")] for part in parts}
    return [part for part, found in whole.items() if part and found and not any(found) and any(reached.values())]


RATIO_BOUND, RATIO_BOUND_HALF, RATIO_BOUND_COMPILED = 1e-6, 1e-4, 1e-5
"""Bounds of rounding on the first update's |ratio - 1|: in float32; in half precision; and compiled, where
rollout and update run the same code (docs/performance.md has what was measured).
"""


class Finding(NamedTuple):
    """One line of a report."""

    what: str
    measured: str
    ok: bool | None  # None: good to know, neither right nor wrong
    advice: str = ""


def ratio_bound(policy: Policy) -> float:
    single = all(p.dtype == torch.float32 for p in policy.module.parameters())
    if policy.compiled:
        return RATIO_BOUND_COMPILED
    return RATIO_BOUND if single and policy.accelerator.mixed_precision == "no" else RATIO_BOUND_HALF


class StepCheck(NamedTuple):
    """The transitions of one denoising step, as the update sees them."""

    step: int
    ratio: float  # largest |ratio - 1|
    density: float  # largest difference of log-densities, the rollout's and the update's
    noise: float  # what was added in units of what the log-density takes it to be; 1 but for chance
    chance: float  # how far from 1 that may be by chance
    formula: float  # largest difference of the rollout's log-density and the Gaussian's formula


@torch.no_grad()
def recheck_steps(policy: Policy, rollout: Rollout) -> list[StepCheck]:
    """Every stochastic step of a rollout looked at again: one forward for each of its parents, and no more of them than
    a micro-batch has rows.
    """
    plan, size, device = rollout.plan, policy.batch_sizes.train, policy.device
    found: list[StepCheck] = []
    for step in ints(unique(plan.step[plan.stochastic])[0]):
        here = (plan.stochastic & (plan.step == step)).nonzero().flatten()
        parents, _ = unique(plan.parent[here])
        rows = torch.cartesian_prod(torch.arange(len(rollout.latents)), parents)[:size]
        edges, row = _edges_below(plan.parent, here, rows)
        (batch,) = batches(len(rows), size, sizes=policy.update_batch_sizes)
        prompt, node = rows[batch.rows].unbind(1)
        x = rollout.latents[prompt, node].to(device)
        with policy.update_numerics():
            v = policy.predict(x, plan.timestep[node].float(), rollout.cond[prompt]).detach()
        drawn_from = transition(x[row], v[row], Coefficients(*(c[edges] for c in plan.coefficients)))
        children = rollout.latents[prompt[row], plan.child[edges]].to(device)
        old = rollout.log_density[prompt[row], edges].to(device)
        draws = len(edges)
        if plan.family is not None:  # the last draw of a family follows from the others
            sizes = torch.bincount(unique(torch.stack([row, plan.family[edges]], 1))[1])
            draws -= int((sizes > 1).sum())
        found.append(_step(step, drawn_from, children, old, draws * children[0].numel()))
    return found


def _edges_below(parent: Tensor, among: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The edges that leave some (prompt, node) rows, and the row that each one leaves."""
    below = parent[among][None, :] == rows[:, 1:]
    row, column = below.nonzero(as_tuple=True)
    return among[column], row


def _step(step: int, policy: Gaussian, children: Tensor, old: Tensor, draws: int) -> StepCheck:
    change = policy.log_density(children) - old
    # The log-density's height at the mean shows which noise it assumes.
    std = torch.exp(-policy.log_density(policy.mean) - 0.5 * math.log(2 * math.pi))
    square = ((children - policy.mean) ** 2).flatten(1).mean(1)
    formula = -0.5 * square / std**2 - torch.log(std) - 0.5 * math.log(2 * math.pi)
    noise = float((square / std**2).mean().sqrt())
    chance = 5 / math.sqrt(2 * draws)
    return StepCheck(
        step,
        float((change.exp() - 1).abs().max()),
        float(change.abs().max()),
        noise,
        max(0.01, chance),
        float((old - formula).abs().max()),
    )


def check_transitions(steps: list[StepCheck], bound: float) -> list[Finding]:
    """Whether rollout and update are one policy, and whether its log-density is that of the noise that was drawn."""
    ratio, density = max(s.ratio for s in steps), max(s.density for s in steps)
    by_step = ", ".join(f"step {s.step}: {s.density:.1e}" for s in steps)
    same = Finding(
        "first-update ratio",
        f"within {ratio:.1e} of 1 (rounding explains {bound:.0e}); |Δ log-density| at {by_step}",
        ratio <= bound,
        "the rollout drew from another policy than the update evaluates: look for dropout, a changed dtype or a reward "
        "that touches the model; sample.pad_batches=true with equal batch sizes rules out rounding",
    )
    off = [s for s in steps if not abs(s.noise - 1) <= s.chance or not s.formula <= 1e-2 + 10 * density]
    shown = ", ".join(f"step {s.step}: {s.noise:.3f}" for s in steps)
    gap = max(s.formula for s in steps)
    noise = Finding(
        "noise in the log-density",
        f"drawn / assumed std at {shown}; the density is off by at most {gap:.1e}",
        not off,
        f"at step {off[0].step if off else 0} the log-density is not that of the noise that was drawn, so every ratio "
        "is wrong once weights move: look at the kernel's std (scaled at a split?) and at how the density is reduced",
    )
    return [same, noise]


@contextmanager
def watching_for_overflow(found: list[str]) -> Generator[None]:
    """Inside, the names of modules whose output is not finite are noted, in the order they ran."""

    def look(module: nn.Module, args: object, output: object) -> None:
        outputs = cast(Sequence[object], output) if isinstance(output, tuple | list) else [output]
        tensors = [t for t in outputs if isinstance(t, Tensor) and t.is_floating_point()]
        if any(not bool(t.isfinite().all()) for t in tensors):
            found.append(f"{type(module).__name__} in {tensors[0].dtype}".replace("torch.", ""))

    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def check_pictures(policy: Policy, latents: Float[Tensor, "n *latent"], prompts: Prompts) -> tuple[Tensor, Finding]:
    """Decoded latents, and whether they are pictures. An overflow that clamping hides is found where it arose."""
    layers, size = list[str](), policy.batch_sizes.decode
    with watching_for_overflow(layers), uncompiled():  # compiled code calls no hooks
        parts = batches(len(latents), size)
        some = (policy.decode(latents[b.rows].to(policy.device), prompts.take(ints(b.rows))) for b in parts)
        made = torch.cat(list(some))
    broken = int((~made.flatten(1).isfinite().all(1)).sum())
    low, high = (float(made.nan_to_num().min()), float(made.nan_to_num().max()))
    ends = made.nan_to_num().flatten(1)
    flat = int((ends.amax(1) == ends.amin(1)).sum())
    said = f"{len(made)} pictures {'×'.join(map(str, made.shape[1:]))}, values {low:.2f} to {high:.2f}"
    if layers or broken:
        where = f"; the first layer to overflow is a {layers[0]}" if layers else ""
        said += f", {broken} of them not finite{where}"
    return made, Finding(
        "decoded pictures",
        said + (f", {flat} of one colour throughout" if flat else ""),
        not layers and not broken and flat < len(made),
        "the decoder overflows in its precision: keep it in float32"
        if layers or broken
        else "nothing is drawn: look at the latents' scale",
    )


def free_disk(
    config: Config, parameters: Mapping[str, Tensor], with_old: bool = False, run: Path | None = None
) -> Finding:
    """Whether the checkpoints that are kept, and one more while it is written, have room; those of a run are there."""
    weights = sum(4 * p.numel() for p in parameters.values())
    averaged, old = int(config.train.ema_decay > 0), int(with_old)
    needed = weights * ((3 + averaged + old) * (config.log.keep + 1) + (1 + averaged) * 2)
    there = sum(file.stat().st_size for file in run.glob("checkpoints/*/*")) if run else 0
    needed = max(weights * (3 + averaged + old), needed - there)
    place = (run or Path(config.log.dir)).resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    return Finding(
        "free disk",
        f"{format_bytes(free)} at {place}; checkpoints take up to {format_bytes(needed)}",
        free > needed,
        f"make room, keep fewer (log.keep={config.log.keep}), or write elsewhere (log.dir)",
    )


def format_bytes(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


@torch.no_grad()
def check_rewards(rewards: Rewards, images: Tensor, prompts: Prompts) -> list[Finding]:
    """Whether each reward answers, tells pictures apart, and scores each picture by its own prompt."""
    return [_answer(rewards, name, images, prompts) for name in rewards.functions]


def _answer(rewards: Rewards, name: str, images: Tensor, prompts: Prompts) -> Finding:
    function, count = rewards.functions[name], len(images)
    only = Rewards({name: function}, {name: 1.0})
    seconds: list[float] = []  # of each call

    def ask(index: list[int], texts: list[int] | None = None) -> Tensor:
        start, some = time.perf_counter(), prompts.take(texts or index)
        scores = only(images[index], some.texts, some.columns, strict=True).scores[name].double()
        seconds.append(time.perf_counter() - start)
        return scores

    what, everyone = f"reward {name}", list(range(count))
    try:
        found = examine(ask, count)
        # Pictures are given to one another's prompts, where there are two.
        other = [next((j for j in everyone if prompts.texts[j] != prompts.texts[i]), i) for i in everyone]
        swapped = ask(everyone, other) if other != everyone else None
    except Exception as error:  # noqa: BLE001 (anyone's code; what it raised is the finding)
        return Finding(what, f"does not answer ({describe_failure(error)})", False, "see arborl rewards check")
    scores = found.scores
    known = scores[~scores.isnan()]
    if not len(known):
        return Finding(what, f"has no score for any of {count} pictures", False, "see arborl rewards check")
    each = 1000 * seconds[1] / count  # the first call may load weights
    said = f"{float(known.mean()):.4g} ± {found.spread:.2g} on {count} pictures, {each:.3g} ms each"
    said += f", {len(scores) - len(known)} without a score" if len(known) < len(scores) else ""
    if found.fault:
        problem, right = found.fault
        return Finding(what, f"{said}; {problem}", False, right)
    if found.spread < 1e-6:
        return Finding(what, f"{said}; all alike", False, "it cannot tell these pictures apart, so it teaches nothing")
    if swapped is not None and found.same_as(swapped):
        said += "; it does not look at the prompt"
    return Finding(what, f"{said}; {found.noise}", None, found.cure) if found.noise else Finding(what, said, True)


class Spread(NamedTuple):
    """Standard deviations of leaf scores: within a tree, and of the trees' means."""

    within: float
    between: float


def groups_of_leaves(plan: Plan) -> Int[Tensor, " leaves"]:
    """Which leaves of a prompt come from one tree; trajectories that never branch are all of one group."""
    tree = plan.tree[plan.leaves]
    return torch.zeros_like(tree) if int(torch.bincount(tree).max()) == 1 else tree


def spread_of(scores: Float[Tensor, "prompts leaves"], tree: Int[Tensor, " leaves"]) -> Spread:
    """`tree` says which of its prompt's trees a leaf belongs to."""
    groups = [scores[:, tree == number] for number in ints(unique(tree)[0])]
    means = torch.stack([group.nanmean(1) for group in groups], 1).flatten()
    squares = torch.stack([((g - g.nanmean(1, keepdim=True)) ** 2).nanmean(1) for g in groups], 1)
    return Spread(float(squares.nanmean().sqrt()), float(((means - means.nanmean()) ** 2).nanmean().sqrt()))


def check_spread(found: Mapping[int, Spread], window: int) -> Finding:
    """Whether the leaves of a tree score differently enough to learn from; by the place of the window."""
    here = found[window]
    shown = f"{here.within:.3g} within a tree, {here.between:.3g} between trees"
    best = max(found, key=lambda place: found[place].within)
    if len(found) > 1:
        shown += "; within, by first step of the window: "
        shown += ", ".join(f"{place}: {one.within:.3g}" for place, one in sorted(found.items()))
    enough: bool | None = True if here.within >= 0.1 * here.between else None
    enough = False if here.within < 1e-6 else enough  # what advantages take for equal
    advice = "a tree whose leaves score alike teaches little: raise kernel.eta, or branch earlier"
    if found[best].within > 1.5 * here.within:
        times = found[best].within / max(here.within, 1e-12)
        advice = f"with the window at step {best} leaves differ {times:.1f} times as much: let it stay there (tree.tou)"
    return Finding("spread of rewards", shown, enough, advice)
