"""Inputs of a run: rewards and prompts, found and checked before anything is written."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from ..config.schema import Config
from ..core.errors import InputError
from ..core.noise import fold
from ..data.prompts import PromptLists, Prompts, hold_out, load_prompts, with_pictures
from ..models import Model, model_class
from ..rewards import Rewards, rewards_of
from ..rewards.base import RewardFailed
from ..rewards.consistency import Consistency, examine, unlike

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
        evaluation = attempt(lambda: prompts_for(config, family, config.eval.prompts, "eval.prompts"))
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


def prompts_for(config: Config, family: type[Model], path: str, key: str = "prompts.path") -> Prompts:
    """A file's prompts, with the pictures that the model takes beside them."""
    columns = family.columns(config)
    if columns and not path:
        problem = f"model.call takes {', '.join(columns)} from it"
        raise InputError(key, None, problem, "a .jsonl file with `prompt` and these columns")
    prompts = load_prompts(path, family.default_prompts, key)
    return with_pictures(prompts, path, columns, key) if columns else prompts


def training_prompts(config: Config, family: type[Model]) -> PromptLists:
    """Prompts of training, and those that evaluations draw where `eval.prompts` names no file: what is held out of the
    file, or the model's own held-out ones; else those of training.
    """
    prompts = prompts_for(config, family, config.prompts.path)
    if config.eval.prompts:
        return PromptLists(prompts, prompts)
    if config.prompts.path:
        return hold_out(prompts, config.prompts.held_out)
    return PromptLists(prompts, Prompts(list(family.heldout_prompts), {}) if family.heldout_prompts else prompts)


def evaluation_prompts(config: Config, family: type[Model], trained: Config | None = None) -> tuple[Prompts, str]:
    """Prompts of evaluations alone, and what they may be called: for a run's weights by what it `trained` on, as these
    settings may be others; and its training file may have stayed elsewhere.
    """
    if config.eval.prompts:
        return prompts_for(config, family, config.eval.prompts, "eval.prompts"), f"the prompts of {config.eval.prompts}"
    lists = training_prompts(config, family)
    if trained is None:
        return lists.evaluation, lists.evaluated_on
    try:
        known = training_prompts(trained, family).training
    except InputError:
        return lists.evaluation, "evaluation prompts"
    return lists.evaluation, PromptLists(known, lists.evaluation).evaluated_on


@torch.no_grad()
def probe(model: Model, rewards: Rewards, prompts: Prompts, goes_on: bool = False) -> list[str]:
    """Score three pictures of pure noise, so that a reward that does not keep its contract is known before the run.

    What looks wrong but may be meant is returned, a line each; of a run that `goes_on` all that looks wrong.
    """
    some = prompts.take([0, len(prompts) // 2, len(prompts) - 1])
    noise = model.noise(fold(0, 0), torch.tensor([[0, 0, 0], [1, 0, 0], [2, 0, 0]], device=model.device))
    decoded = torch.cat([model.decode_for(noise[[i]], some.take([i])) for i in range(len(noise))])
    if decoded.shape[-3:-2] != (3,) or decoded.ndim != 4 + model.video:
        allowed = "N×F×3×H×W" if model.video else "N×3×H×W"
        raise InputError("model", None, f"its decoder returned shape {tuple(decoded.shape)} for 3 latents", allowed)
    if not decoded.isfinite().all():
        raise InputError("model", None, "its decoder returned pictures that are not finite", cure="arborl doctor")
    found = {name: _consistency(rewards, name, unlike(decoded), some) for name in rewards.functions}
    for name, one in found.items():
        # Pictures of noise may all look alike to a judge that is only sometimes of another mind.
        if (error := one.error(name)) and not goes_on and (one.never_twice or not one.by_chance):
            raise error
    return [f"rewards.{name}: {one.noise}; better: {one.cure}" for name, one in found.items() if one.noise]


def _consistency(rewards: Rewards, name: str, pictures: torch.Tensor, prompts: Prompts) -> Consistency:
    """How one reward answers; an error if it does not."""
    only = replace(rewards, functions={name: rewards.functions[name]})

    def ask(index: list[int]) -> torch.Tensor:
        some = prompts.take(index)
        return only(pictures[index], some.texts, some.columns, strict=True).scores[name].double()

    try:
        return examine(ask, len(pictures))
    except RewardFailed as error:
        raise InputError(f"rewards.{name}", None, str(error)) from None
