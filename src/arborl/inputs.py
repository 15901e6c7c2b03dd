"""What a run is given: rewards and prompts, found and checked before anything is written."""

from collections.abc import Callable
from typing import TypeVar

import torch

from .config.schema import Config
from .core.errors import InputError
from .core.noise import fold
from .models import Model, model_class
from .prompts import Prompts, load_prompts
from .rewards import Rewards, load_rewards
from .scenes.score import check_captions

T = TypeVar("T")


def load_inputs(config: Config) -> tuple[Rewards, Prompts, Prompts]:
    """Rewards, training and held-out prompts; one line names all that is missing, the model's weights included."""
    problems: list[str] = []

    def attempt(load: Callable[[], T]) -> T | None:
        try:
            return load()
        except InputError as error:
            problems.append(str(error))
            return None

    family = model_class(config)
    rewards = attempt(lambda: load_rewards(config.rewards, config.advantage.combine))
    # Where something is missing anyway, what a run would have to fetch is worth knowing too.
    attempt(lambda: family.check(config, may_fetch=not problems))
    prompts = attempt(lambda: load_prompts(config.prompts.path, family.default_prompts))
    # Without a file of its own evaluation may draw what training does, and one missing list is told once.
    held_out = attempt(lambda: heldout_prompts(config, family)) if config.eval.prompts or prompts else None
    # The default reward knows the scenes' captions alone; with others it would have nothing to say for a whole run.
    if prompts and any(reward.fn == "scene" for reward in config.rewards.values()):
        attempt(lambda: check_captions(prompts.texts))
    if rewards is None or prompts is None or held_out is None or problems:
        raise InputError.joined(problems)
    return rewards, prompts, held_out


def heldout_prompts(config: Config, family: type[Model]) -> Prompts:
    """What evaluation draws: the file it names; else what training does, or where that is the model's own list, its
    held-out ones.
    """
    if config.eval.prompts:
        return load_prompts(config.eval.prompts, key="eval.prompts")
    if not config.prompts.path and family.heldout_prompts:
        return Prompts(list(family.heldout_prompts), {})
    return load_prompts(config.prompts.path, family.default_prompts)


@torch.no_grad()
def probe(model: Model, rewards: Rewards, prompts: Prompts) -> None:
    """Score two pictures of pure noise, so that a reward that does not keep its contract is known before the run."""
    two = prompts.take([0, len(prompts) - 1])
    noise = model.noise(fold(0, 0), torch.tensor([[0, 0, 0], [1, 0, 0]], device=model.device))
    pictures = torch.cat([model.decode(part) for part in noise.split(model.config.sample.decode_batch_size)])
    if not pictures.isfinite().all():
        raise RuntimeError("the decoder returned pictures that are not finite")
    rewards(pictures, two.texts, two.columns)
