"""The advantage that the settings name: one of the core's, or a function of the user's own."""

import inspect
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from .config.schema import Config
from .core.advantage import ADVANTAGES
from .core.errors import InputError
from .core.noise import fold, normal
from .core.tree import Plan
from .imports import find


def advantage_of(config: Config) -> Callable[..., Tensor]:
    """A function (plan, scores, log_density, knobs by name) -> prompts × edges. A user's own is held to that."""
    name = config.advantage.name
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    own = find("advantage.name", name, ADVANTAGES)
    knobs = knobs_of(config)
    try:
        inspect.signature(own).bind("plan", "scores", "log_density", **knobs)
    except (TypeError, ValueError):  # ValueError: nobody can say what it takes
        allowed = f"(plan, scores, log_density, **knobs), the knobs being {', '.join(knobs)}"
        raise InputError("advantage.name", name, "does not take what an advantage is given", allowed) from None

    def checked(plan: Plan, scores: Tensor, log_density: Tensor, **knobs: object) -> Tensor:
        return _checked(name, own(plan, scores, log_density, **knobs), (len(scores), plan.edges))

    return checked


def knobs_of(config: Config, spread: float | None = None) -> dict[str, Any]:
    """What an advantage is given by name. `spread` is the standard deviation of the epoch's leaves."""
    knobs = asdict(config.advantage)
    del knobs["name"]
    knobs["spread"] = {"group": None, "batch": spread, "none": 1.0}[knobs.pop("std")]
    return knobs


def try_advantage(config: Config, plan: Plan) -> None:
    """Ask it of two prompts with scores drawn by chance, so that what does not keep its contract is known before a
    run.
    """
    address = torch.tensor([[0, 0, 0], [1, 0, 0]])
    scores, density = (normal(fold(0, n), address, (count,)) for n, count in enumerate((len(plan.leaves), plan.edges)))
    advantage_of(config)(plan, scores.double(), density, **knobs_of(config, 1.0))


def _checked(name: str, answer: object, shape: tuple[int, int]) -> Tensor:
    allowed = f"a float tensor of shape {shape}, prompts × edges"
    if not isinstance(answer, Tensor):
        raise InputError("advantage.name", name, f"returned a {type(answer).__name__}", allowed)
    if answer.shape != shape:
        raise InputError("advantage.name", name, f"returned shape {tuple(answer.shape)}", allowed)
    if not answer.dtype.is_floating_point:
        raise InputError("advantage.name", name, f"returned {answer.dtype}", allowed)
    return answer
