"""Evaluation: pictures by the ODE from fixed noise, mean ± standard error per reward."""

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.tensors import floats
from ..data.prompts import Prompts
from ..distributed.coordination import Coordinator
from ..distributed.gather import gather, gather_strings, sum_ranks
from ..rewards.base import Rewards
from .generate import generate
from .policy import Policy
from .score import decode_and_score


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
    nonfinite: int = 0  # pictures that the model did not answer for
    undecoded: int = 0  # and those that it did, but its decoder did not
    between: int = 0  # prompts of evaluations between the first and the last, where these have fewer

    def shown(self) -> list[dict[str, Any]]:
        """Prompt and scores of each of the first pictures, as JSON has them."""
        scores = {name: floats(values) for name, values in self.values.items() if not name.startswith("pictures/")}
        return [
            {"prompt": text, "scores": {name: None if math.isnan(v[i]) else v[i] for name, v in scores.items()}}
            for i, text in enumerate(self.captions)
        ]

    def metrics(self) -> dict[str, float]:
        """Of all prompts as `eval/…`, and of those that evaluations in between have as `eval_between/…`: means over
        other prompts are other numbers, and a curve of both would jump.
        """
        found: dict[str, float] = {}
        for name, prompts in (("eval", self.prompts), ("eval_between", self.between)):
            if not prompts or (name == "eval" and prompts == self.between):
                continue
            mean, stderr, failed = summarised({n: v[:prompts] for n, v in self.values.items()}, self.failed)
            found |= {f"{name}/{part}": value for part, value in mean.items()}
            found |= {f"{name}/{part}_stderr": value for part, value in stderr.items()}
            found |= {f"{name}/{part}_failed": count / prompts for part, count in failed.items()}
        return found


def summarised(
    parts: Mapping[str, Float[Tensor, " prompts"]], rewards: Iterable[str]
) -> tuple[dict[str, float], dict[str, float], dict[str, int]]:
    """Mean and standard error of what has a score, and the rewards' number of pictures without one."""
    valid = {name: values[~values.isnan()].double() for name, values in parts.items()}
    mean = {name: float(v.mean()) for name, v in valid.items()}
    stderr = {n: float(v.std() / math.sqrt(len(v))) if len(v) > 1 else math.nan for n, v in valid.items()}
    return mean, stderr, {name: len(parts[name]) - len(valid[name]) for name in rewards}


def evaluate(
    policy: Policy,
    rewards: Rewards,
    prompts: Prompts,
    coordinator: Coordinator | None = None,
    keep_pictures: int = 16,
    between: bool = False,
) -> Evaluation:
    """One deterministic picture a prompt, from noise that depends on (seed, place in the list); shared by the ranks.

    An evaluation in `between` takes the first `eval.num_between` prompts alone.
    """
    accelerator, config = coordinator.accelerator if coordinator else None, policy.config
    rank, ranks = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    fewer = min(config.eval.num_between or config.eval.num_prompts, config.eval.num_prompts)
    total = fewer if between else config.eval.num_prompts
    share = math.ceil(total / ranks)
    ids = torch.arange(rank * share, rank * share + share)
    chosen = prompts.take([int(i) % len(prompts) for i in ids])
    with coordinator.independent_sampling() if coordinator else nullcontext():
        leaves = generate(policy, chosen, ids)
    with coordinator.independent() if coordinator else nullcontext():
        scored = decode_and_score(policy, rewards, leaves, chosen, keep_pictures, measured=True)
    scores, like, pictures = scored.scores, scored.statistics, scored.pictures
    every = scores.parts | {f"pictures/{name}": values for name, values in like.items()}
    own = {name: torch.where(ids < total, values[:, 0], torch.nan) for name, values in every.items()}
    shown, first = min(len(pictures), total), next(iter(rewards.functions))
    # A rank whose reward has failed from the start may not know its parts; all must gather the same, in one order.
    names, unknown = gather_strings([*own], accelerator), torch.full_like(ids, torch.nan, dtype=torch.float32)
    parts = {name: gather(own.get(name, unknown), accelerator)[:total] for name in names}
    parts = {name: parts[name] for name in [*own, *(name for name in names if name not in own)]}
    reasons = gather_strings(
        [f"rewards.{name} failed ({why})" for name, (_, why) in scores.failures.items()], accelerator
    )
    broken = ~leaves.flatten(1).isfinite().all(1).cpu() & (ids < total)
    undecoded = scored.nonfinite[:, 0] & ~broken & (ids < total)
    mean, stderr, failed = summarised(parts, rewards.functions)
    return Evaluation(
        mean=mean,
        stderr=stderr,
        prompts=total,
        failed=failed,
        problems=reasons,
        pictures=pictures[:shown],
        captions=chosen.texts[:shown],
        scores=floats(own[first][:shown]),
        values=parts,
        nonfinite=int(sum_ranks(float(broken.sum()), accelerator)),
        undecoded=int(sum_ranks(float(undecoded.sum()), accelerator)),
        between=fewer if fewer < config.eval.num_prompts else 0,
    )
