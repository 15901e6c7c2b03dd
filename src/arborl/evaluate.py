"""Decoding and scoring in bounded memory, and evaluation: ODE pictures of fixed seeds, mean ± standard error."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .batches import batches, settled
from .collect import gather, gather_words
from .config.schema import Config
from .core.errors import InputError
from .core.noise import fold
from .core.tree import deterministic
from .models.base import Model
from .prompts import Prompts
from .record import as_bytes, stills
from .rewards.base import Answers, Lost, Rewards, Scores
from .rollout import rollout
from .together import Together
from .watch import statistics, thumbnails

EVALUATION = 2**32
"""Folded into the seed in place of an epoch, so that evaluation noise is never training noise."""


class Scored(NamedTuple):
    """What became of some leaves: their scores, what their pictures are like, and the first pictures themselves."""

    scores: Scores
    statistics: dict[str, Float[Tensor, "prompts leaves"]]  # none where they were not asked for
    thumbnails: Float[Tensor, "prompts leaves 3 16 16"]
    pictures: Tensor  # uint8, n×3×H×W


@torch.no_grad()
def decode_and_score(
    model: Model,
    rewards: Rewards,
    leaves: Float[Tensor, "prompts leaves *latent"],
    prompts: Prompts,
    batch_size: int,
    keep_pictures: int = 0,
    measured: bool = False,
    stage: Callable[[str], AbstractContextManager[None]] = nullcontext,
) -> Scored:
    """All leaves, decoded and scored a few at a time; the first `keep_pictures` pictures come back too, and where it is
    asked for what the pictures are like. Inside `stage("decode")` they are decoded.
    """
    count = leaves.shape[1]
    flat, captions = leaves.flatten(0, 1), prompts.repeat(count)
    answers: list[dict[str, Tensor]] = []
    like: list[dict[str, Tensor]] = []
    small: list[Tensor] = []
    lost: dict[str, Lost] = {}
    pictures = [torch.empty(0, dtype=torch.uint8)]
    pending: Future[Answers] | None = None

    def keep(answer: Answers) -> None:
        answers.append(answer.scores)
        for name, (more, why) in answer.lost.items():
            lost[name] = Lost(more + (lost[name].pictures if name in lost else 0), why)

    with ThreadPoolExecutor(1) as other, rewards.cancelled():
        for batch in batches(len(flat), batch_size):
            index = batch.rows.tolist()
            with stage("decode"):
                images = model.decode(flat[batch.rows].to(model.device))
            if pending:
                keep(pending.result())
            some = captions.take(index)
            if rewards.elsewhere:  # servers score these while the next are decoded
                pending = other.submit(torch.no_grad()(rewards.__call__), images, some.texts, some.columns)
            else:
                keep(rewards(images, some.texts, some.columns))
            shown = stills(images)
            like.append({name: values.cpu() for name, values in statistics(shown).items()} if measured else {})
            small.append(thumbnails(shown))
            if index[0] < keep_pictures:
                pictures.append(as_bytes(shown)[: keep_pictures - index[0]])
        if pending:
            keep(pending.result())
    parts = {name: values.view(-1, count) for name, values in _joined(answers).items()}
    return Scored(
        rewards.combine(parts, lost),
        {name: torch.cat([some[name] for some in like]).view(-1, count) for name in like[0]},
        torch.cat(small).unflatten(0, (-1, count)),
        torch.cat(pictures[1:] or pictures),
    )


def _joined(answers: list[dict[str, Tensor]]) -> dict[str, Float[Tensor, " n"]]:
    """The answers to all calls, one after another; where a reward scored nothing it may have named no parts."""
    names = list(dict.fromkeys(name for answer in answers for name in answer))
    for answer in answers:
        missing = [name for name in names if name not in answer]
        if different := [name for name in missing if not answer[name.split("/")[0]].isnan().all()]:
            problem = f"a reward named its parts differently from one call to the next ({', '.join(different)})"
            raise InputError("rewards", None, problem)
    none = torch.tensor(torch.nan)
    rows = [
        torch.cat([answer.get(name, none.expand(len(next(iter(answer.values()))))) for answer in answers])
        for name in names
    ]
    return dict(zip(names, rows, strict=True))


@dataclass(frozen=True)
class Evaluation:
    """Mean and standard error per reward over the prompts that got a score, and the first pictures."""

    mean: dict[str, float]  # of each reward, its parts as `reward/part`, and of the pictures' statistics
    stderr: dict[str, float]
    prompts: int
    failed: dict[str, int]  # pictures without a score, by reward
    problems: list[str]  # of rewards that failed, on any rank
    pictures: Tensor  # uint8, n×3×H×W
    captions: list[str]
    scores: list[float]  # of those pictures, by the first reward
    values: dict[str, Float[Tensor, " prompts"]]  # what the means are of, NaN where there is no score

    def shown(self) -> list[dict[str, Any]]:
        """Prompt and scores of each of the first pictures, as JSON has them."""
        scores = {name: values.tolist() for name, values in self.values.items() if not name.startswith("pictures/")}
        return [
            {"prompt": text, "scores": {name: None if v[i] != v[i] else v[i] for name, v in scores.items()}}
            for i, text in enumerate(self.captions)
        ]

    def metrics(self) -> dict[str, float]:
        found = {f"eval/{name}": value for name, value in self.mean.items()}
        found |= {f"eval/{name}_stderr": value for name, value in self.stderr.items()}
        return found | {f"eval/{name}_failed": count / self.prompts for name, count in self.failed.items()}


def evaluate(
    model: Model,
    rewards: Rewards,
    prompts: Prompts,
    config: Config,
    together: Together | None = None,
    keep_pictures: int = 16,
) -> Evaluation:
    """One deterministic picture a prompt, from noise that depends on (seed, place in the list); shared by the ranks."""
    accelerator = together.accelerator if together else None
    rank, ranks = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    total = config.eval.num_prompts
    share = math.ceil(total / ranks)
    ids = torch.arange(rank * share, rank * share + share)
    chosen = prompts.take([int(i) % len(prompts) for i in ids])
    with together.sampling() if together else nullcontext():
        leaves = generate(model, chosen, ids, config)
    size = settled(config.sample.decode_batch_size)
    with together.alone() if together else nullcontext():
        scores, like, _, pictures = decode_and_score(model, rewards, leaves, chosen, size, keep_pictures, measured=True)
    every = scores.parts | {f"pictures/{name}": values for name, values in like.items()}
    own = {name: torch.where(ids < total, values[:, 0], torch.nan) for name, values in every.items()}
    shown, first = min(len(pictures), total), next(iter(rewards.functions))
    # A rank whose reward has failed from the start may not know its parts; all must gather the same, in one order.
    names, unknown = gather_words([*own], accelerator), torch.full_like(ids, torch.nan, dtype=torch.float32)
    parts = {name: gather(own.get(name, unknown), accelerator)[:total] for name in names}
    parts = {name: parts[name] for name in [*own, *(name for name in names if name not in own)]}
    reasons = gather_words([f"rewards.{name} failed ({why})" for name, (_, why) in scores.lost.items()], accelerator)
    valid = {name: values[~values.isnan()].double() for name, values in parts.items()}
    return Evaluation(
        mean={name: float(v.mean()) for name, v in valid.items()},
        stderr={n: float(v.std() / math.sqrt(len(v))) if len(v) > 1 else math.nan for n, v in valid.items()},
        prompts=total,
        failed={name: total - len(valid[name]) for name in rewards.functions},
        problems=reasons,
        pictures=pictures[:shown],
        captions=chosen.texts[:shown],
        scores=own[first][:shown].tolist(),
        values=parts,
    )


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
    plan = deterministic(model.schedule(config.eval.num_steps or config.sample.num_steps))
    key = fold(config.seed, EVALUATION)
    leaves: list[Tensor] = []
    for batch in batches(len(prompts), settled(config.sample.batch_size)):
        cond = model.encode(prompts.take(batch.rows.tolist()).texts)
        own = None if start is None else start[batch.rows]
        leaves.append(rollout(model, plan, cond, key, ids[batch.rows], config.sample, start=own).leaves)
    return torch.cat(leaves)


def noise_of_seeds(seeds: Sequence[int], shape: tuple[int, ...]) -> Float[Tensor, "seeds 1 *shape"]:
    """What a diffusers pipeline starts from when it is given `torch.Generator().manual_seed(seed)`."""
    return torch.stack([torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
