"""Inputs of a run: rewards and prompts, found and checked before anything is written."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from ..config.schema import Config
from ..core.errors import InputError
from ..core.noise import fold
from ..data.prompts import PromptLists, Prompts, hold_out, load_prompts
from ..models import Model, model_class
from ..rewards import Rewards, rewards_of
from ..rewards.base import RewardFailed

T = TypeVar("T")


def load_inputs(config: Config) -> tuple[Rewards, PromptLists]:
    """Rewards and prompts; one line names all that is missing, the model's weights included."""
    problems: list[str] = []

    def attempt(load: Callable[[], T]) -> T | None:
        try:
            return load()
        except InputError as error:
            problems.append(str(error))
            return None

    family = model_class(config)
    rewards = attempt(lambda: rewards_of(config))
    # Where something is missing anyway, what a run would have to fetch is worth knowing too.
    attempt(lambda: family.check(config, may_fetch=not problems))
    lists = attempt(lambda: training_prompts(config, family))
    if config.eval.prompts:
        evaluation = attempt(lambda: load_prompts(config.eval.prompts, key="eval.prompts"))
        lists = PromptLists(lists.training, evaluation) if lists and evaluation else None
    # Some rewards have nothing to say of some prompts; better told now than found after a run.
    for function in rewards.functions.values() if rewards else ():
        for some in lists or ():
            attempt(partial(getattr(function, "check_prompts", _any), some.texts))
    if rewards is None or lists is None or problems:
        raise InputError.joined(problems)
    return rewards, lists


def _any(texts: Sequence[str]) -> None:
    """Most rewards take any prompt."""


def training_prompts(config: Config, family: type[Model]) -> PromptLists:
    """Prompts of training, and those that evaluations draw where `eval.prompts` names no file: what is held out of the
    file, or the model's own held-out ones; else those of training.
    """
    prompts = load_prompts(config.prompts.path, family.default_prompts)
    if config.eval.prompts:
        return PromptLists(prompts, prompts)
    if config.prompts.path:
        return hold_out(prompts, config.prompts.held_out)
    return PromptLists(prompts, Prompts(list(family.heldout_prompts), {}) if family.heldout_prompts else prompts)


def evaluation_prompts(config: Config, family: type[Model]) -> Prompts:
    """Prompts of evaluations alone: a run's training file may have stayed elsewhere."""
    if config.eval.prompts:
        return load_prompts(config.eval.prompts, key="eval.prompts")
    return training_prompts(config, family).evaluation


@torch.no_grad()
def probe(model: Model, rewards: Rewards, prompts: Prompts) -> list[str]:
    """Score two pictures of pure noise, so that a reward that does not keep its contract is known before the run.

    What looks wrong but may be meant is returned, a line each.
    """
    two = prompts.take([0, len(prompts) - 1])
    noise = model.noise(fold(0, 0), torch.tensor([[0, 0, 0], [1, 0, 0]], device=model.device))
    pictures = torch.cat([model.decode(part) for part in noise.split(1)])
    if pictures.shape[-3:-2] != (3,) or pictures.ndim != 4 + model.video:
        allowed = "N×F×3×H×W" if model.video else "N×3×H×W"
        raise InputError("model", None, f"its decoder returned shape {tuple(pictures.shape)} for 2 latents", allowed)
    if not pictures.isfinite().all():
        raise InputError("model", None, "its decoder returned pictures that are not finite", "see arborl doctor")

    def ask(index: list[int]) -> dict[str, torch.Tensor]:
        some = two.take(index)
        found = rewards(pictures[index], some.texts, some.columns, strict=True).scores
        return {name: found[name][index] for name in rewards.functions}  # by picture again

    try:
        scores, turned = ask([0, 1]), ask([1, 0])
        apart = [name for name in scores if _differ(scores[name], turned[name])]
        again = ask([0, 1]) if apart else scores  # one that differs from call to call anyway says nothing here
    except RewardFailed as error:
        raise InputError("rewards", None, str(error)) from None
    return [
        f"rewards.{name} scores two pictures differently when they come in the other order, with their prompts: it "
        "must score picture i by prompt i and by nothing else in the call"
        for name in apart
        if not _differ(scores[name], again[name])
    ]


def _differ(one: torch.Tensor, two: torch.Tensor) -> bool:
    allowed = torch.maximum(0.05 * (one[0] - one[1]).abs(), 1e-3 * one.abs().max())
    return bool(((one - two).abs() > allowed).any())
