"""The numbers of an epoch over all ranks; docs/metrics.md says what each means."""

import math
from collections.abc import Mapping

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor

from ..distributed.gather import gather, gather_strings, max_rank
from ..engine.cost import BACKWARD_COST
from ..engine.update import Stats
from ..rewards import Rewards, Scores


def score_metrics(
    scores: Scores, diversity: Tensor, rewards: Rewards, prompts: int, accelerator: Accelerator
) -> dict[str, float]:
    """Of the epoch's leaves on all ranks: the reward, each reward and part of it, how far leaves differ.

    The reward is the score that is optimised; but of several that are z-scored, whose mean is always 0, their plain sum
    by weight.
    """
    total = gather(scores.total.float(), accelerator)[:prompts]
    unknown = torch.full_like(scores.total, torch.nan, dtype=torch.float32)
    parts = {
        name: gather(scores.parts.get(name, unknown), accelerator)[:prompts]
        for name in gather_strings([*scores.parts], accelerator)
    }
    plain = rewards.plain_sum(parts)
    shown = total if plain is None else plain.float()
    values = {
        "reward": float(shown.nanmean()),
        "reward_stderr": stderr(shown),
        "reward_std": float(std(shown).nanmean()),
        "reward_failed": float(total.isnan().sum()),
    }
    if plain is not None:
        values["reward_zscored_std"] = float(std(total).nanmean())
    for name, found in parts.items():
        part = found.flatten()
        values |= {f"rewards/{name}/mean": float(part.nanmean()), f"rewards/{name}/std": float(std(part))}
        values[f"rewards/{name}/stderr"] = stderr(found)
        if name in rewards.functions:
            values[f"rewards/{name}/failed"] = float(part.isnan().float().mean())
    return values | {"diversity": float(gather(diversity, accelerator)[:prompts].mean())}


def update_metrics(
    advantage: Float[Tensor, "prompts edges"],
    trainable: Bool[Tensor, " edges"],
    stats: Stats,
    prompts: int,
    accelerator: Accelerator,
) -> dict[str, float]:
    """Of the epoch's advantages and optimizer steps, on all ranks. `trainable` is what the loss can train."""
    size = gather(advantage[:, trainable].abs().float(), accelerator)[:prompts]
    metrics = {"advantage_abs": float(size.nanmean()), "advantage_zero": float((size == 0).float().mean())}
    sums = torch.stack([values.double().cpu() for values in stats.sums.values()])
    summed = dict(zip(stats.sums, gather(sums[None], accelerator).sum(0).tolist(), strict=True))
    edges, parents = summed.pop("edges"), summed.pop("parents")
    metrics |= {"edges": edges, "parents": parents}
    metrics |= {name: value / edges for name, value in summed.items() if edges}
    if "ratio" in stats.sums:
        metrics["ratio_error"] = max_rank(float(stats.ratio_error), accelerator)
    return metrics | {
        "grad_norm": stats.grad_norm,
        "steps": stats.steps,
        "steps_skipped": stats.skipped,
        "steps_nonfinite": stats.nonfinite,
    }


def speed_metrics(forwards: int, parents: int, flops: int, seconds: Mapping[str, float]) -> dict[str, float]:
    """Needed operations a second, all processes together; `flops` are those of a forward, `seconds` of the stages."""
    needed = {"rollout": forwards, "update": BACKWARD_COST * parents}
    return {f"tflops/{stage}": 1e-12 * flops * count / seconds[stage] for stage, count in needed.items()}


def std(values: Float[Tensor, "*group n"]) -> Float[Tensor, "*group"]:
    """Population standard deviation over the last axis, of what is not NaN."""
    return ((values - values.nanmean(-1, keepdim=True)) ** 2).nanmean(-1).sqrt()


def stderr(scores: Float[Tensor, "prompts leaves"]) -> float:
    """The standard error of a mean over prompts: a prompt's leaves share its difficulty, so its mean counts once."""
    means = scores.nanmean(1)
    means = means[~means.isnan()]
    return float(means.std() / len(means) ** 0.5) if len(means) > 1 else math.nan
