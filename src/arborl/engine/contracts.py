"""Advantage and loss as the settings name them: a user's own are found, and held to their contract before a run."""

import inspect
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor

from ..config.schema import Config
from ..core.advantage import ADVANTAGES
from ..core.errors import ArgumentError, InputError, first_line
from ..core.kernels import Coefficients
from ..core.losses import LOSSES, EdgeBatch, EdgeLoss, LeafBatch, LeafLoss, Who
from ..core.noise import fold, normal
from ..core.tree import Plan
from ..tools.imports import import_object


def advantage_of(config: Config) -> Callable[..., Tensor]:
    """A function (plan, scores, log_density, knobs by name) -> prompts × edges. A user's own is held to that."""
    name = config.advantage.name
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    own = import_object("advantage.name", name, ADVANTAGES)
    knobs = advantage_arguments(config)
    try:
        inspect.signature(own).bind("plan", "scores", "log_density", **knobs)
    except (TypeError, ValueError):  # ValueError: nobody can say what it takes
        allowed = f"(plan, scores, log_density, **knobs), the knobs being {', '.join(knobs)}"
        raise InputError("advantage.name", name, "does not take what an advantage is given", allowed) from None

    def checked(plan: Plan, scores: Tensor, log_density: Tensor, **knobs: object) -> Tensor:
        return _check_advantage(name, own(plan, scores, log_density, **knobs), (len(scores), plan.edges))

    return checked


def advantage_arguments(config: Config, spread: float | None = None) -> dict[str, Any]:
    """An advantage's keyword arguments. `spread` is the standard deviation of the epoch's leaves."""
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
    advantage_of(config)(plan, scores.double(), density, **advantage_arguments(config, 1.0))


def _check_advantage(name: str, answer: object, shape: tuple[int, int]) -> Tensor:
    allowed = f"a float tensor of shape {shape}, prompts × edges"
    if not isinstance(answer, Tensor):
        raise InputError("advantage.name", name, f"returned a {type(answer).__name__}", allowed)
    if answer.shape != shape:
        raise InputError("advantage.name", name, f"returned shape {tuple(answer.shape)}", allowed)
    if not answer.dtype.is_floating_point:
        raise InputError("advantage.name", name, f"returned {answer.dtype}", allowed)
    return answer


LOSS_SETTINGS = ("clip", "kl", "edge_weight")
"""The settings of `loss` that a loss may take, by their names; what is in `loss.options` besides."""


TAKEN = {
    *("epoch", "edges", "parents", "ratio_error", "diversity", "window", "grad_norm", "step_time"),
    *("forwards", "forward_backwards", "advantage_abs", "advantage_zero", "learning_rate"),
}
"""Metrics of every epoch; and those that begin with `reward` or `steps`, or have a / in their names."""


def loss_of(config: Config) -> EdgeLoss | LeafLoss:
    """The configured loss, with those of the settings that its constructor names. A user's own is held to that."""
    name, options = config.loss.name, config.loss.options
    found = LOSSES.get(name) or import_object("loss.name", name, LOSSES)
    if not (isinstance(found, type) and issubclass(found, EdgeLoss | LeafLoss)):
        kinds = "arborl.core.losses.EdgeLoss or LeafLoss"
        raise InputError("loss.name", name, "is not a subclass", f"one of {kinds}")
    if missing := sorted(found.__abstractmethods__):
        raise InputError("loss.name", name, f"lacks {', '.join(missing)}", "metrics and __call__")
    takes = inspect.signature(found).parameters.values()
    named = [one.name for one in takes if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    unknown = [] if any(one.kind == one.VAR_KEYWORD for one in takes) else sorted(options.keys() - {*named})
    if unknown:
        allowed = ", ".join(one for one in named if one not in LOSS_SETTINGS) or "none"
        raise InputError(f"loss.options.{unknown[0]}", options[unknown[0]], f"{name} takes no such argument", allowed)
    given = {one: getattr(config.loss, one) for one in LOSS_SETTINGS if one in named} | dict(options)
    for one in takes:
        if one.name in named and one.default is one.empty and one.name not in given:
            problem = f"{name} takes it, and has no default for it"
            raise InputError(f"loss.options.{one.name}", None, problem, "a number, a text, true or false")
    try:
        loss = found(**given)
    except ArgumentError as error:
        names = {one: ("loss." if one in LOSS_SETTINGS else "loss.options.") + one for one in given}
        names.setdefault(error.argument, f"loss.options.{error.argument}")
        raise error.renamed(names) from None
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError("loss.name", name, f"cannot be made of its settings ({why})") from error
    _check_loss(name, loss)
    return loss


def _check_loss(name: str, loss: EdgeLoss | LeafLoss) -> None:
    """What a loss says of itself is something that there is."""
    for what, allowed in (("metrics", "names"), ("asks", "of old, reference")):
        values = cast(object, getattr(loss, what))
        texts = isinstance(values, tuple) and all(isinstance(one, str) for one in cast(tuple[object, ...], values))
        if not texts or (what == "asks" and not {*loss.asks} <= {"old", "reference"}):
            raise InputError("loss.name", name, f"its {what} are {values!r}", f"a tuple {allowed}")
    if loss.sampler not in ("policy", "old"):
        raise InputError("loss.name", name, f"its sampler is {loss.sampler!r}", "policy, old")
    if callable(getattr(loss, "levels", None)):  # it would be ignored without a word
        problem = (
            "has a method levels, which nobody asks: a call's level is where the edge starts that it is trained with"
        )
        raise InputError("loss.name", name, problem, cure="ancestors, of a LeafLoss, or another name")
    if taken := [one for one in loss.metrics if one in TAKEN or "/" in one or one.startswith(("reward", "steps"))]:
        raise InputError("loss.name", name, f"calls a metric {taken[0]}, as every run does", cure="another name")


def check_loss_answer(name: str, loss: EdgeLoss | LeafLoss, total: object, seen: object, edges: int) -> None:
    """What a loss of a user's own returns is what the contract says."""

    def shape(value: object) -> str:
        return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"

    if not isinstance(total, Tensor) or total.shape != ():
        raise InputError("loss.name", name, f"returned {shape(total)} as its loss", "a scalar, the sum over edges")
    if not isinstance(seen, dict) or set(measured := cast(dict[str, object], seen)) != set(loss.metrics):
        found = ", ".join(map(str, cast(dict[object, object], seen))) if isinstance(seen, dict) else shape(seen)
        raise InputError("loss.name", name, f"measured {found or 'nothing'}", ", ".join(loss.metrics) or "nothing")
    for what, values in measured.items():
        if not isinstance(values, Tensor) or values.shape != (edges,):
            allowed = f"a tensor of one value an edge, here {edges}"
            raise InputError("loss.name", name, f"returned {shape(values)} for {what}", allowed)


def try_loss(config: Config, loss: EdgeLoss | LeafLoss, like: Tensor, prediction: str) -> None:
    """Ask a user's own loss about three edges drawn by chance, of latents like these three, so that what does not keep
    its contract is known before a run.
    """
    if config.loss.name in LOSSES:
        return
    address = torch.tensor([[number, 0, 0] for number in range(3)])
    policy, old, reference, x, x0, noise = (
        normal(fold(0, number), address, tuple(like.shape[1:])).to(like) for number in range(6)
    )
    answers: dict[Who, Tensor] = {"policy": policy.requires_grad_(), "old": old, "reference": reference}
    answers = {who: answer for who, answer in answers.items() if who in (*loss.asks, "policy")}
    one, advantage = like.new_ones(3), like.new_tensor([1.0, 0.0, -1.0])
    answer: object
    if isinstance(loss, EdgeLoss):
        kernel = Coefficients(one, -0.1 * one, 0.3 * one)
        row, answered = torch.arange(3, device=like.device), old if loss.needs_old_answers else None
        answer = loss(answers, EdgeBatch(x, row, x0, -one, advantage, one, kernel, 0.1 * one, answered))
    else:
        answer = loss(answers, LeafBatch(x, x0, noise, 0.5 * one, 0.5 * one, advantage, prediction))
    pair = cast(tuple[object, ...], answer)  # or anything else
    if type(pair) is not tuple or len(pair) != 2:
        kind = type(pair).__name__
        raise InputError("loss.name", config.loss.name, f"returned a {kind}", "its loss, and a dict of its metrics")
    check_loss_answer(config.loss.name, loss, *pair, edges=3)
    if not cast(Tensor, pair[0]).requires_grad:
        raise InputError("loss.name", config.loss.name, "returned a loss that no gradient goes through")
