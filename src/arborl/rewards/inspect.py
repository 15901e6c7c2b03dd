"""Which rewards are ready here, and whether one works: `arborl rewards`."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional

from ..config.schema import Config, RewardConfig
from ..core.errors import InputError, first_line
from ..tools.imports import import_object
from .base import Reward, Rewards, make_reward
from .catalog import BUILT_IN
from .consistency import Consistency, examine, unlike
from .neural import NetworkReward

SIDE, FRAMES = 512, 17
OTHERS = ["a cat", "two dogs at the sea"]
"""Prompts beside that of a drawn picture, for a reward that is to take any."""


class Availability(NamedTuple):
    """A built-in reward, and what it lacks; nothing if it is ready."""

    name: str
    lacks: str


def availability(config: Config) -> list[Availability]:
    """Every built-in reward with its configured files."""
    found: list[Availability] = []
    for name in BUILT_IN:
        try:
            make_reward(name, config.rewards.get(name, RewardConfig()), config.model.path)
            found.append(Availability(name, ""))
        except InputError as error:
            found.append(Availability(name, str(error)))
    return found


def named(spec: str, config: Config) -> tuple[str, Reward]:
    """A reward by its name, or by package.module:function; with the settings that `rewards.<name>` has."""
    name = spec.rsplit(":", 1)[-1]
    settings = config.rewards.get(name, RewardConfig())
    return name, make_reward(name, replace(settings, fn=settings.fn or spec), config.model.path)


class TryOut(NamedTuple):
    scores: dict[str, float]
    load: float  # seconds of the first call, which loads what is to be loaded
    again: float  # seconds of the next
    size: str
    device: str
    noise: str  # what it does by chance, if that shows
    fault: InputError | None  # the part of its contract that it breaks


def try_out(
    spec: str, config: Config, picture: Path | None = None, prompt: str | None = None, device: str | None = None
) -> TryOut:
    """Score one picture, the user's or one that is drawn for it, twice; then it and darker ones in several ways."""
    name, reward = named(spec, config)
    image, text = example(spec if spec in BUILT_IN else name, reward)
    takes_any = prompt is None and spec not in BUILT_IN and not hasattr(reward, "example")
    image, text = image if picture is None else read_picture(picture), text if prompt is None else prompt
    where = usable(device)
    load, _ = _timed(name, reward, image, text, where)
    again, scores = _timed(name, reward, image, text, where)
    size = "×".join(str(side) for side in reversed(image.shape[-2:]))
    noise, fault = "", None
    if not isinstance(reward, NetworkReward):  # which on a CPU takes seconds a picture, and tests hold to this
        prompts = [text, *(OTHERS if takes_any else [text, text])]
        found = _consistency(name, reward, image.to(where), prompts)
        noise = f"{found.noise}; better: {found.cure}" if found.noise else ""
        fault = found.error(name)
    return TryOut(scores, load, again, size, str(where), noise, fault)


def _consistency(name: str, reward: Reward, image: Tensor, prompts: list[str]) -> Consistency:
    """How a reward answers for a picture in three exposures."""
    pictures = unlike(torch.stack([_as_given(reward, image)] * 3))

    def ask(index: list[int]) -> Tensor:
        return _scored(name, reward, pictures[index], [prompts[i] for i in index])[name].double()

    return examine(ask, len(pictures))


def warm_up(name: str, reward: Reward, device: torch.device) -> None:
    """Load what a built-in reward has to load, or say why it cannot be."""
    _timed(name, reward, *example(name, reward), device)


def _timed(
    name: str, reward: Reward, image: Tensor, prompt: str, device: torch.device
) -> tuple[float, dict[str, float]]:
    image = _as_given(reward, image).to(device)
    start = time.perf_counter()
    scores = _scored(name, reward, image[None], [prompt])
    return time.perf_counter() - start, {part: float(values[0]) for part, values in scores.items()}


def _as_given(reward: Reward, image: Tensor) -> Tensor:
    """A picture; or a video that stands still, for a reward of videos."""
    return image[None].expand(FRAMES, -1, -1, -1) if getattr(reward, "of_videos", False) else image


def _scored(name: str, reward: Reward, images: Tensor, prompts: list[str]) -> dict[str, Tensor]:
    scores, lost = Rewards({name: reward}, {name: 1.0})(images, prompts, {})
    if lost:
        raise InputError(f"rewards.{name}", None, lost[name].why)
    return scores


def usable(device: torch.device | str | None) -> torch.device:
    """The device of this name, or the best there is."""
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        raise InputError("--device", device, first_line(error)) from None


def read_picture(path: Path) -> Tensor:
    """A picture file as 3×H×W in [0, 1]."""
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise InputError("--picture", path, "has more than 8 bits a channel", "a PNG, JPEG or WebP file of 8")
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError) as error:
        raise InputError("--picture", path, f"cannot be read ({error})", "a PNG, JPEG or WebP file") from None
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255


def example(name: str, reward: Reward) -> tuple[Tensor, str]:
    """A picture that suits a reward, and its prompt: the reward's own `example`, else a scene."""
    if name == "ocr":
        canvas = Image.new("RGB", (SIDE, SIDE), "white")
        ImageDraw.Draw(canvas).text((90, 200), "OPEN", fill="black", font=ImageFont.load_default(120))
        return torch.from_numpy(np.asarray(canvas).copy()).permute(2, 0, 1) / 255, 'a sign that says "OPEN"'
    if own := getattr(reward, "example", None):
        return own()
    scene: Any = import_object("rewards", BUILT_IN["scene"].fn, BUILT_IN)
    picture, prompt = scene.example()
    return functional.interpolate(picture[None], (SIDE, SIDE), mode="bilinear")[0].clamp(0, 1), prompt
