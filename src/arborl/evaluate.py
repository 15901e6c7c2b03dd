"""Decoding and scoring in bounded memory, and evaluation: ODE pictures of fixed seeds, mean ± standard error."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor

from .batches import batches
from .collect import gather
from .config.schema import Config
from .core.errors import InputError
from .core.noise import fold
from .core.tree import deterministic
from .models.base import Model
from .prompts import Prompts
from .record import as_bytes, stills
from .rewards.base import Rewards, Scores
from .rollout import rollout

EVALUATION = 2**32
"""Folded into the seed in place of an epoch, so that evaluation noise is never training noise."""


@torch.no_grad()
def decode_and_score(
    model: Model,
    rewards: Rewards,
    leaves: Float[Tensor, "prompts leaves *latent"],
    prompts: Prompts,
    batch_size: int,
    keep_pictures: int = 0,
) -> tuple[Scores, Tensor]:
    """Scores of all leaves, decoded and scored a few at a time; the first `keep_pictures` pictures come back too."""
    count = leaves.shape[1]
    flat, captions = leaves.flatten(0, 1), prompts.repeat(count)
    parts: dict[str, list[Tensor]] = {}
    pictures: list[Tensor] = []
    for batch in batches(len(flat), batch_size):
        index = batch.rows.tolist()
        images = model.decode(flat[batch.rows].to(model.device))
        some = captions.take(index)
        found = rewards(images, some.texts, some.columns)
        if parts and found.keys() != parts.keys():
            different = ", ".join(sorted(found.keys() ^ parts.keys()))
            raise InputError(
                "rewards", None, f"a reward named its parts differently from one call to the next ({different})"
            )
        for name, values in found.items():
            parts.setdefault(name, []).append(values)
        if index[0] < keep_pictures:
            pictures.append(as_bytes(stills(images))[: keep_pictures - index[0]])
    scores = rewards.combine({name: torch.cat(values).view(-1, count) for name, values in parts.items()})
    return scores, torch.cat(pictures) if pictures else torch.empty(0, 3, 1, 1, dtype=torch.uint8)


@dataclass(frozen=True)
class Evaluation:
    """Mean and standard error per reward over the prompts that got a score, and the first pictures."""

    mean: dict[str, float]
    stderr: dict[str, float]
    prompts: int
    failed: int
    pictures: Tensor  # uint8, n×3×H×W
    captions: list[str]
    scores: list[float]  # of those pictures, by the first reward

    def metrics(self) -> dict[str, float]:
        return {f"eval/{name}": value for name, value in self.mean.items()} | {
            f"eval/{name}_stderr": value for name, value in self.stderr.items()
        }


def evaluate(
    model: Model,
    rewards: Rewards,
    prompts: Prompts,
    config: Config,
    accelerator: Accelerator | None = None,
    keep_pictures: int = 16,
) -> Evaluation:
    """One deterministic picture a prompt, from noise that depends on (seed, place in the list); shared by the ranks."""
    rank, ranks = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    total = config.eval.num_prompts
    share = math.ceil(total / ranks)
    ids = torch.arange(rank * share, rank * share + share)
    chosen = prompts.take([int(i) % len(prompts) for i in ids])
    leaves = generate(model, chosen, ids, config)
    scores, pictures = decode_and_score(model, rewards, leaves, chosen, config.sample.decode_batch_size, keep_pictures)
    own = {name: torch.where(ids < total, values[:, 0], torch.nan) for name, values in scores.parts.items()}
    shown, first = min(len(pictures), total), next(iter(rewards.functions))
    parts = {name: gather(values, accelerator)[:total] for name, values in own.items()}
    valid = {name: values[~values.isnan()].double() for name, values in parts.items()}
    return Evaluation(
        mean={name: float(v.mean()) for name, v in valid.items()},
        stderr={n: float(v.std() / math.sqrt(len(v))) if len(v) > 1 else math.nan for n, v in valid.items()},
        prompts=total,
        failed=total - len(valid[first]),
        pictures=pictures[:shown],
        captions=chosen.texts[:shown],
        scores=own[first][:shown].tolist(),
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
    for batch in batches(len(prompts), config.sample.batch_size):
        cond = model.encode(prompts.take(batch.rows.tolist()).texts)
        own = None if start is None else start[batch.rows]
        leaves.append(rollout(model, plan, cond, key, ids[batch.rows], config.sample, start=own).leaves)
    return torch.cat(leaves)


def noise_of_seeds(seeds: Sequence[int], shape: tuple[int, ...]) -> Float[Tensor, "seeds 1 *shape"]:
    """What a diffusers pipeline starts from when it is given `torch.Generator().manual_seed(seed)`."""
    return torch.stack([torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
