"""Finding reward functions, calling them, and holding them to their contract."""

import asyncio
import inspect
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..config.schema import Config, RewardConfig
from ..core.advantage import combine
from ..core.errors import InputError
from ..tools.imports import import_object
from .catalog import BUILT_IN

Columns = Mapping[str, Sequence[object]]
Reward = Callable[[Tensor, Sequence[str], Columns], Tensor | Mapping[str, Tensor]]
"""(pictures N×3×H×W in [0,1], or videos N×F×3×H×W, N prompts, the prompt file's further fields) -> N scores, or a
dict of named parts.

NaN is "no score": the leaf is masked, never counted as 0. Named parts are averaged into the score and logged apart.
"""


LARGEST = 1e15
"""The largest score in size: spreads are sums of squares, which float32 has to hold."""
RAISED = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)
"""What a reward may raise. The others than `Exception` would end the run: sys.exit as if all were well, and asyncio's
timeouts.
"""
RESERVED = ("pictures", "total")
"""Names that metrics and tree files use beside those of rewards."""


class RewardFailed(Exception):  # noqa: N818 (a name that callers know)
    """A reward could not score what it was given. One line says why."""

    def __init__(self, text: str) -> None:
        super().__init__("".join(c if c.isprintable() else " " for c in text))


class Failures(NamedTuple):
    """Pictures that a reward failed on, and why (the last reason)."""

    pictures: int
    why: str


@dataclass(frozen=True)
class Scores:
    """Scores of the leaves: each reward (and each named part, as `reward/part`), and the leaf score they make."""

    parts: dict[str, Float[Tensor, "prompts leaves"]]
    total: Float[Tensor, "prompts leaves"]
    failures: dict[str, Failures] = field(default_factory=dict)


class Answers(NamedTuple):
    """Scores of some pictures by reward and `reward/part`, NaN where there is none; and what failures cost."""

    scores: dict[str, Float[Tensor, " n"]]
    failures: dict[str, Failures]


@dataclass(frozen=True)
class Rewards:
    """The configured rewards. Those held out are asked in evaluations alone."""

    functions: dict[str, Reward]
    weights: dict[str, float]
    combine_how: str = "zscore"
    held_out: frozenset[str] = frozenset()
    names: dict[str, list[str]] = field(default_factory=dict)  # what each reward was seen to answer: itself, its parts

    @property
    def trained(self) -> "Rewards":
        """Those that training asks."""
        return replace(self, functions={n: f for n, f in self.functions.items() if n not in self.held_out})

    @property
    def is_remote(self) -> bool:
        """Whether servers compute every reward, so that decoding can go on meanwhile."""
        return all(getattr(function, "is_remote", False) for function in self.functions.values())

    @contextmanager
    def cancelled(self) -> Iterator[None]:
        """Whatever ends the block early also cancels the requests to servers."""
        try:
            yield
        except BaseException:
            for function in self.functions.values():
                getattr(function, "cancel", lambda: None)()
            raise

    @property
    def watched(self) -> list[str]:
        return [name for name in self.functions if name in self.held_out]

    @property
    def directions(self) -> dict[str, float]:
        """Which way each reward is to go: 1 up, -1 down for one with a negative weight."""
        return {name: -1.0 if self.weights[name] < 0 else 1.0 for name in self.functions}

    def __call__(self, images: Tensor, prompts: Sequence[str], columns: Columns, strict: bool = False) -> Answers:
        """Every reward's scores of some pictures, each from pictures of its own: one may write into what it is given.

        A reward that raises has no score for them: it is anyone's code, and may be on another machine. What is wrong
        with it for good, such as a result of the wrong shape, still ends the run; `strict`, so does everything.
        """
        scores: dict[str, Tensor] = {}
        failed: dict[str, Failures] = {}
        broken = ~images.flatten(1).isfinite().all(1).cpu()
        if broken.any():  # a picture that is none gets no score, and no reward is to stumble over it
            images = images.clone()
            images[broken] = 0
        for name, function in self.functions.items():
            try:
                answer = function(images.clone(), list(prompts), deepcopy(dict(columns)))
            except InputError:
                raise
            except RAISED as error:
                if strict and isinstance(error, Exception):
                    raise
                if strict:
                    raise RewardFailed(describe_failure(error)) from None
                failed[name] = Failures(len(prompts), describe_failure(error))
                scores |= {part: torch.full((len(prompts),), torch.nan) for part in self.names.get(name, [name])}
                continue
            if failures := getattr(function, "take_failures", list)():
                failed[name] = Failures(sum(some.pictures for some in failures), failures[-1].why)
            named = _named(name, answer, len(prompts))
            self.names[name] = [part for part, _ in named]
            scores |= {part: torch.where(broken, torch.nan, values) for part, values in named}
        return Answers(scores, failed)

    def combine(
        self, parts: dict[str, Float[Tensor, "prompts leaves"]], failures: dict[str, Failures] | None = None
    ) -> Scores:
        weighed = self._weighed(parts)
        none = torch.full_like(next(iter(parts.values())), torch.nan)  # where rewards are only looked at
        return Scores(parts, combine(weighed, self.weights, self.combine_how) if weighed else none, failures or {})

    def _weighed(self, parts: dict[str, Float[Tensor, "prompts leaves"]]) -> dict[str, Float[Tensor, "prompts leaves"]]:
        """The scores of the rewards that are trained."""
        return {name: parts[name] for name in self.functions if self.weights[name]}

    def plain_sum(self, parts: dict[str, Float[Tensor, "prompts leaves"]]) -> Float[Tensor, "prompts leaves"] | None:
        """The sum of scores by weight, where what is optimised is a sum of z-scores; None elsewhere."""
        weighed = self._weighed(parts)
        several = self.combine_how == "zscore" and len(weighed) > 1
        return combine(weighed, self.weights, "sum") if several else None


def _named(name: str, answer: object, count: int) -> list[tuple[str, Float[Tensor, " n"]]]:
    """A reward's answer by name, its parts by `reward/part`."""
    if not isinstance(answer, Mapping):
        return [(name, _checked(name, answer, count))]
    for part in answer:
        _check_part(name, part)
    parts = [(f"{name}/{part}", _checked(f"{name}/{part}", values, count)) for part, values in answer.items()]
    if not parts:
        raise InputError(f"rewards.{name}.fn", None, "returned an empty dict", "named tensors of scores")
    if len({part for part, _ in parts}) < len(parts):
        raise InputError(f"rewards.{name}.fn", None, "returned two parts of one name", "a name for each")
    return [(name, torch.stack([values for _, values in parts]).mean(0)), *parts]


def _check_part(name: str, part: object) -> None:
    """A part's name goes into metrics, files and the terminal."""
    text = str(part)
    if not text or not text.isprintable() or {*text} & {*"[]"}:
        problem = "cannot be the name of a part"
        raise InputError(f"rewards.{name}.fn", text or "''", problem, "printable characters other than [ and ]")


def _checked(name: str, scores: object, count: int) -> Float[Tensor, " n"]:
    """One finite or NaN float per picture, on the host; anything else is an error that says what came back."""
    key, allowed = (
        f"rewards.{name.split('/')[0]}.fn",
        f"a float tensor of shape ({count},), one score a picture",
    )
    if not isinstance(scores, Tensor):
        raise InputError(key, None, f"returned a {type(scores).__name__} for {name}", allowed)
    if scores.shape != (count,):
        raise InputError(key, None, f"returned shape {tuple(scores.shape)} for {name}", allowed)
    if not scores.dtype.is_floating_point:
        raise InputError(key, None, f"returned {scores.dtype} for {name}", allowed)
    values = scores.detach().float().cpu()
    if (values.abs() > LARGEST).any():
        what = "an infinite score" if scores.isinf().any() else "a score too large to count with"
        allowed = f"finite scores, at most {LARGEST:.0e} in size, or NaN for no score"
        raise InputError(key, None, f"returned {what} for {name}", allowed)
    return values


def describe_failure(error: BaseException) -> str:
    """An exception in one line, with the place it was raised at; of a `RewardFailed` its text."""
    if isinstance(error, RewardFailed):
        return str(error)
    try:
        text = next(iter(str(error).splitlines()), "")
    except Exception:  # noqa: BLE001 (anyone's class; its kind and place say enough)
        text = ""
    described = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{described}, at {Path(frame.filename).name}:{frame.lineno}"


def rewards_of(config: Config, trains: bool = True) -> Rewards:
    """The rewards of a run, or of an evaluation by itself."""
    found = load_rewards(config.rewards, config.advantage.combine, config.model.path, config.eval.rewards, trains)
    if config.eval.best and config.eval.best not in found.functions:
        raise InputError("eval.best", config.eval.best, "is no reward of this run", ", ".join(found.functions))
    return found


def load_rewards(
    configs: Mapping[str, RewardConfig],
    combine_how: str = "zscore",
    pipeline: str = "",
    watched: Collection[str] = (),
    trains: bool = True,
) -> Rewards:
    """Find every configured reward, and those that evaluation watches; one line names all that are missing.

    Weights are looked for and not read: that is for the first call, on the pictures' device. `pipeline` is the model
    that is trained, whose tokenizer may serve a reward too.
    """
    weights = reward_weights(configs, watched)
    configs = {**configs, **{name: RewardConfig() for name in watched if name not in configs}}
    if not configs:
        raise InputError(
            "rewards",
            None,
            "no reward is configured",
            cure="rewards=<name>, or rewards.<name>.fn=package.module:function",
        )
    if trains and not any(weights.values()):
        problem = "every reward's weight is 0, so nothing is optimised"
        if unset := [name for name, config in configs.items() if config.weight is None]:
            problem += f" ({', '.join(unset)}: without a weight, what eval.rewards names is only watched)"
        raise InputError("rewards.<name>.weight", 0, problem, "a weight other than 0")
    for name in configs:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in RESERVED or name.endswith(("_stderr", "_failed")):
            allowed = "letters, digits, _ and -; not pictures or total, nor ending in _stderr or _failed"
            raise InputError("rewards", name, "cannot be a reward's name", allowed)
    functions: dict[str, Reward] = {}
    problems: list[str] = []
    for name, config in configs.items():
        try:
            functions[name] = make_reward(name, config, pipeline)
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError.joined(problems)
    return Rewards(functions, weights, combine_how, frozenset(name for name in watched if weights[name] == 0))


def reward_weights(configs: Mapping[str, RewardConfig], watched: Collection[str]) -> dict[str, float]:
    """The weight of every configured or watched reward; without one of its own, what is watched is not trained."""
    own = {name: config.weight for name, config in configs.items() if config.weight is not None}
    return {name: own.get(name, float(name not in watched)) for name in [*configs, *watched]}


def make_reward(name: str, config: RewardConfig, pipeline: str = "") -> Reward:
    """One reward: a server's, a built-in one, or the user's own function."""
    if config.url:
        from .remote import RemoteReward

        remote = RemoteReward(name, config)
        remote.check()
        return remote
    spec, key = config.fn or name, f"rewards.{name}.fn"
    if not config.fn and name not in BUILT_IN:
        problem = "is not set, and there is no built-in reward of that name"
        raise InputError(key, None, problem, f"package.module:function, or of {', '.join(BUILT_IN)}")
    known = BUILT_IN.get(spec)
    found: Any = import_object(key, known.fn if known else spec, BUILT_IN)
    if known and isinstance(found, type):
        return found(name, config, pipeline)
    try:
        inspect.signature(found).bind("images", "prompts", "columns")
    except (TypeError, ValueError):  # ValueError: nobody can say what it takes
        raise InputError(key, spec, "does not take what a reward is given", "(images, prompts, columns)") from None
    return found
