"""Finding reward functions, calling them, and holding them to their contract."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..config.schema import RewardConfig
from ..core.advantage import combine
from ..core.errors import InputError
from ..imports import find

Columns = Mapping[str, Sequence[object]]
Reward = Callable[[Tensor, Sequence[str], Columns], Tensor | Mapping[str, Tensor]]
"""(pictures N×3×H×W in [0,1], or videos N×F×3×H×W, N prompts, the prompt file's further fields) -> N scores, or a
dict of named parts.

NaN is "no score": the leaf is masked, never counted as 0. Named parts are averaged into the score and logged apart.
"""

BUILT_IN = {
    "brightness": "arborl.rewards.canary:brightness",
    "jpeg": "arborl.rewards.canary:jpeg",
    "place": "arborl.rewards.canary:place",
    "scene": "arborl.scenes.score:scene",
}
NOT_YET = {
    "hps": "HPS-v2.1 and its weights (hps_ckpt/HPS_v2.1_compressed.pt) are not part of this version; "
    "use a reward of your own with rewards=none rewards.mine.fn=package.module:function",
}


@dataclass(frozen=True)
class Scores:
    """What the leaves scored: each reward (and each named part, as `reward/part`), and the leaf score they make."""

    parts: dict[str, Float[Tensor, "prompts leaves"]]
    total: Float[Tensor, "prompts leaves"]


@dataclass(frozen=True)
class Rewards:
    """The configured rewards."""

    functions: dict[str, Reward]
    weights: dict[str, float]
    how: str = "zscore"

    def __call__(self, images: Tensor, prompts: Sequence[str], columns: Columns) -> dict[str, Float[Tensor, " n"]]:
        """Every reward's scores of some pictures, and its parts under `reward/part`."""
        scores: dict[str, Tensor] = {}
        for name, function in self.functions.items():
            answer = function(images, prompts, columns)
            if isinstance(answer, Mapping):
                parts = {part: _checked(f"{name}/{part}", values, len(prompts)) for part, values in answer.items()}
                if not parts:
                    raise InputError(f"rewards.{name}.fn", None, "returned an empty dict", "named tensors of scores")
                scores[name] = torch.stack(list(parts.values())).mean(0)
                scores |= {f"{name}/{part}": values for part, values in parts.items()}
            else:
                scores[name] = _checked(name, answer, len(prompts))
        return scores

    def combine(self, parts: dict[str, Float[Tensor, "prompts leaves"]]) -> Scores:
        return Scores(parts, combine({name: parts[name] for name in self.functions}, self.weights, self.how))


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
    if scores.isinf().any():
        raise InputError(key, None, f"returned an infinite score for {name}", "finite scores, or NaN for no score")
    return scores.detach().float().cpu()


def load_rewards(configs: Mapping[str, RewardConfig], how: str = "zscore") -> Rewards:
    """Find every configured function; one line names all that are missing."""
    if not configs:
        raise InputError(
            "rewards",
            None,
            "no reward is configured",
            "rewards=<name>, or rewards.<name>.fn=package.module:function",
        )
    if all(config.weight == 0 for config in configs.values()):
        raise InputError(
            "rewards.<name>.weight",
            0,
            "every reward's weight is 0, so nothing is optimised",
            "a weight other than 0",
        )
    functions: dict[str, Reward] = {}
    problems: list[str] = []
    for name, config in configs.items():
        try:
            functions[name] = _find(f"rewards.{name}.fn", config.fn)
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError.joined(problems)
    return Rewards(functions, {name: config.weight for name, config in configs.items()}, how)


def _find(key: str, spec: str) -> Reward:
    """A built-in reward by name, or the user's own."""
    if spec in NOT_YET:
        raise InputError(key, spec, NOT_YET[spec])
    function = find(key, BUILT_IN.get(spec, spec), BUILT_IN)
    try:
        inspect.signature(function).bind("images", "prompts", "columns")
    except TypeError:
        raise InputError(key, spec, "does not take what a reward is given", "(images, prompts, columns)") from None
    return function
