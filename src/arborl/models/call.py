"""What the call of a diffusers pipeline takes, and whether it has the shape that its loop can be driven by."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import diffusers

from ..config.bounds import nearest
from ..core.errors import InputError
from .loop import can_pass_over

SETTINGS_FOR = {
    "prompt": "prompts.path",
    "negative_prompt": "sample.negative_prompt",
    "height": "sample.resolution",
    "width": "sample.width",
    "num_frames": "sample.num_frames",
    "frames": "sample.num_frames",
    "num_inference_steps": "sample.num_steps",
    "max_sequence_length": "model.max_sequence_length",
    "sigmas": "sample.sigmas",
    "timesteps": "sample.sigmas",
}
"""Arguments of a call that have settings of their own."""
NUMBERS = ("num_images_per_prompt", "num_videos_per_prompt")
OURS = ("latents", "generator", "output_type", "return_dict", *NUMBERS)
"""Arguments that the engine gives."""
COLUMN = "column:"
"""What a setting of the call begins with that is another for each prompt."""
NO_PICTURES = {
    "prompt",
    "attention",
    "num",
    "scale",
    "rate",
    "strength",
    "length",
    "size",
    "index",
    "timestep",
    "type",
    "factor",
    "noise",
}
"""Words of arguments that are numbers or of texts, whatever else they say."""
METHODS = ("encode_prompt", "prepare_latents")
"""Methods without which a call has another shape."""
UNFIT = {
    "Flux2KleinKVPipeline": "keeps what it attended to from one step to the next",
    "LTX2ConditionPipeline": "moves two states, pictures and sound, in one loop",
    "LTX2ImageToVideoPipeline": "moves two states, pictures and sound, in one loop",
    "LTX2InContextPipeline": "moves two states, pictures and sound, in one loop",
    "LTX2Pipeline": "moves two states, pictures and sound, in one loop",
}
"""Pipelines whose step is no function of latents, noise level and prompt alone."""


def pipeline_class(name: str, path: str) -> type:
    """The class of that name in diffusers; an `InputError` where there is none, or its loop cannot be driven."""
    found = None if name.startswith("_") else getattr(diffusers, name, None)
    if not (isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline)):
        problem = f"its index names {name}, which diffusers {diffusers.__version__} does not have"
        cure = "a newer diffusers, or a family of your own (docs/extending.md); code in a model's folder is never run"
        raise InputError("model.path", path, problem, cure=cure)
    if problem := shape_problem(found):
        raise InputError("model.path", path, f"{name} {problem}", cure="a family of your own (docs/extending.md)")
    return found


def shape_problem(cls: type) -> str:
    """Why a pipeline's loop cannot be driven; empty where it can."""
    if cls.__name__ in UNFIT:
        return UNFIT[cls.__name__]
    names = inspect.unwrap(cls.__call__).__code__.co_names
    lacking = [name for name in METHODS if name not in names or not hasattr(cls, name)]
    if lacking:
        return f"has no {' and no '.join(lacking)} in its call"
    if "scheduler" not in names or "step" not in names:
        return "takes no step of a scheduler in its call"
    if "prompt" not in takes(cls):
        return "takes no prompt"
    return ""


@cache
def takes(cls: type) -> Mapping[str, inspect.Parameter]:
    """The arguments of the pipeline's call."""
    own = inspect.signature(inspect.unwrap(cls.__call__)).parameters
    return {name: parameter for name, parameter in own.items() if name != "self"}


def frames_argument(cls: type) -> str | None:
    """The argument that is a video's number of frames; none where pictures are made."""
    named = [name for name in ("num_frames", "frames") if name in takes(cls)]
    return next((name for name in named if isinstance(takes(cls)[name].default, int)), None)


def is_settable(name: str) -> bool:
    """Whether an argument is one for `model.call`."""
    return name not in SETTINGS_FOR and name not in OURS and "embeds" not in name and not name.startswith("callback")


def guidance_argument(cls: type) -> str | None:
    """The argument that `sample.guidance_scale` means: the one that is used by default."""
    named = [name for name in ("guidance_scale", "true_cfg_scale") if name in takes(cls)]
    with_default = [name for name in named if isinstance(takes(cls)[name].default, int | float)]
    return next(iter(with_default or named), None)


def columns(call: Mapping[str, Any]) -> dict[str, str]:
    """Arguments of the call that are columns of the prompt file, and the columns' names."""
    return {name: v.removeprefix(COLUMN) for name, v in call.items() if isinstance(v, str) and v.startswith(COLUMN)}


def constants(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the call that are the same for every prompt."""
    return {name: value for name, value in call.items() if name not in columns(call)}


def is_pictures(argument: str) -> bool:
    """Whether an argument is a picture, or several: by its name, as pipelines have no other sign."""
    words = set(argument.split("_"))
    return bool(words & {"image", "images", "video", "videos", "mask", "masks", "frames"}) and not words & NO_PICTURES


def check_call(cls: type, call: Mapping[str, Any]) -> None:
    """Every setting of the call is an argument of it, which no other setting is for."""
    for name, value in call.items():
        key = f"model.call.{name}"
        if name in SETTINGS_FOR:
            raise InputError(key, value, "has a setting of its own", cure=SETTINGS_FOR[name])
        if name == guidance_argument(cls):
            raise InputError(key, value, "has a setting of its own", cure="sample.guidance_scale")
        if name not in takes(cls) or not is_settable(name):
            near = nearest(name, [other for other in takes(cls) if is_settable(other)])
            raise InputError(key, value, f"{cls.__name__}'s call takes no such argument{near}")
        if not can_pass_over(cls) and "trunc" in name and value != 1:
            problem = f"{cls.__name__}'s loop cannot be led past steps, and this depends on a step's number"
            raise InputError(key, value, problem, "1")
