"""Leaves decoded and scored in bounded memory, and cheap statistics of their pictures."""

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn import functional

from ..core.errors import InputError
from ..core.tensors import ints
from ..data.prompts import Prompts
from ..rewards.base import Answers, Failures, Rewards, Scores
from .batches import batches
from .policy import Policy
from .rollout import Rollout


def as_bytes(pictures: Shaped[Tensor, "n *picture"]) -> Tensor:
    """Pictures or videos in [0, 1] as uint8, rounded."""
    return (pictures * 255).round().clamp(0, 255).to(torch.uint8).cpu()


def middle_frames(pictures: Shaped[Tensor, "n *picture"]) -> Shaped[Tensor, "n 3 height width"]:
    """Pictures as they are; of videos the frame in the middle."""
    return pictures if pictures.ndim == 4 else pictures[:, pictures.shape[1] // 2]


DARK, SATURATED, EDGE = 0.05, 0.9, 0.1
"""Luma below which a pixel is dark, spread of its channels above which it is saturated, step that makes an edge."""
BINS = 8
THUMBNAIL = 16


def statistics(images: Float[Tensor, "n 3 height width"]) -> dict[str, Float[Tensor, " n"]]:
    """Cheap numbers of each picture: shares of dark and of saturated pixels, colour entropy in bits (of 8×8×8 bins, so
    0 to 9), share of pixels on an edge.
    """
    images = images.float().nan_to_num().clamp(0, 1)
    luma = (images * images.new_tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1)
    steps = functional.pad(luma.diff(dim=2).abs(), (0, 1)) + functional.pad(luma.diff(dim=1).abs(), (0, 0, 0, 1))
    bins = (images * BINS).long().clamp(max=BINS - 1).flatten(2)
    colour = bins[:, 0] * BINS**2 + bins[:, 1] * BINS + bins[:, 2]
    offset = torch.arange(len(images), device=images.device)[:, None] * BINS**3
    counts = torch.bincount((colour + offset).flatten(), minlength=len(images) * BINS**3).view(len(images), -1)
    share = counts / colour.shape[1]
    return {
        "dark": (luma < DARK).float().mean((1, 2)),
        "saturated": (images.amax(1) - images.amin(1) > SATURATED).float().mean((1, 2)),
        "entropy": torch.special.entr(share).sum(1) / math.log(2),  # pyright: ignore[reportUnknownMemberType]
        "edges": (steps > EDGE).float().mean((1, 2)),
    }


def thumbnails(images: Float[Tensor, "n 3 height width"]) -> Float[Tensor, "n 3 16 16"]:
    """Small versions of pictures, for their distance from one another."""
    return functional.adaptive_avg_pool2d(images.float().nan_to_num(), THUMBNAIL).cpu()


def diversity(leaves: Float[Tensor, "prompts leaves 3 16 16"]) -> Float[Tensor, " prompts"]:
    """Diversity of a prompt's leaves: mean distance of two thumbnails, in pixel values."""
    flat = leaves.flatten(2)
    count = flat.shape[1]
    if count < 2:
        return flat.new_zeros(len(flat))
    distance = torch.cdist(flat, flat) / math.sqrt(flat.shape[-1])
    return distance.sum((1, 2)) / (count * (count - 1))


class Scored(NamedTuple):
    """Results of decoding and scoring: scores, statistics of the pictures, and the first pictures themselves."""

    scores: Scores
    statistics: dict[str, Float[Tensor, "prompts leaves"]]  # none where they were not asked for
    thumbnails: Float[Tensor, "prompts leaves 3 16 16"]
    pictures: Tensor  # uint8, n×3×H×W
    nonfinite: Bool[Tensor, "prompts leaves"]  # leaves that the decoder made no picture of


@torch.no_grad()
def decode_and_score(
    policy: Policy,
    rewards: Rewards,
    leaves: Float[Tensor, "prompts leaves *latent"],
    prompts: Prompts,
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
    broken: list[Tensor] = []
    failures: dict[str, Failures] = {}
    pictures = [torch.empty(0, dtype=torch.uint8)]
    pending: Future[Answers] | None = None

    def keep(answer: Answers) -> None:
        answers.append(answer.scores)
        for name, (more, why) in answer.failures.items():
            failures[name] = Failures(more + (failures[name].pictures if name in failures else 0), why)

    with ThreadPoolExecutor(1) as other, rewards.cancelled():
        for batch in batches(len(flat), policy.batch_sizes.decode):
            index = ints(batch.rows)
            some = captions.take(index)
            with stage("decode"):
                images = policy.decode(flat[batch.rows].to(policy.device), some)
            if pending:
                keep(pending.result())
            if rewards.is_remote:  # servers score these while the next are decoded
                pending = other.submit(torch.no_grad()(rewards.__call__), images, some.texts, some.columns)
            else:
                keep(rewards(images, some.texts, some.columns))
            shown = middle_frames(images)
            like.append({name: values.cpu() for name, values in statistics(shown).items()} if measured else {})
            small.append(thumbnails(shown))
            broken.append(~images.flatten(1).isfinite().all(1).cpu())
            if index[0] < keep_pictures:
                pictures.append(as_bytes(shown)[: keep_pictures - index[0]])
        if pending:
            keep(pending.result())
    parts = {name: values.view(-1, count) for name, values in _joined(answers).items()}
    return Scored(
        rewards.combine(parts, failures),
        {name: torch.cat([some[name] for some in like]).view(-1, count) for name in like[0]},
        torch.cat(small).unflatten(0, (-1, count)),
        torch.cat(pictures[1:] or pictures),
        torch.cat(broken).view(-1, count),
    )


class LeafScores(NamedTuple):
    """The scores of a process's leaves, none in places that only fill up, and what their pictures showed besides."""

    scores: Scores
    diversity: Float[Tensor, " prompts"]  # among each prompt's leaves
    undecoded: int  # leaves that the decoder made no picture of


def score(
    policy: Policy,
    rewards: Rewards,
    rollout: Rollout,
    stage: Callable[[str], AbstractContextManager[None]] = nullcontext,
) -> LeafScores:
    """A rollout's leaves decoded and scored."""
    leaves, real = rollout.leaves, rollout.prompts.num_real
    empty = torch.full((len(leaves) - real, leaves.shape[1]), torch.nan)
    apart = torch.full((len(leaves),), torch.nan)
    if not real:
        return LeafScores(Scores({}, empty.double()), apart, 0)
    prompts = rollout.prompts.prompts.take(range(real))
    scored = decode_and_score(policy, rewards, leaves[:real], prompts, stage=stage)
    apart[:real], found = diversity(scored.thumbnails), scored.scores
    parts = {name: torch.cat([values, empty]) for name, values in found.parts.items()}
    scores = Scores(parts, torch.cat([found.total, empty.to(found.total)]), found.failures)
    return LeafScores(scores, apart, int(scored.nonfinite.sum()))


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
