"""What of the rewards is here, and whether one works: `arborl rewards`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional

from ..config.schema import Config, RewardConfig
from ..core.errors import InputError
from ..models.mixture import DOT, PIXELS, TINT
from ..scenes.grammar import describe
from ..scenes.render import render
from .base import Reward, Rewards, make_reward
from .catalog import BUILT_IN

SIDE, FRAMES = 512, 17


class State(NamedTuple):
    """A built-in reward, and what it lacks; nothing if it is ready."""

    name: str
    lacks: str


def states(config: Config) -> list[State]:
    """Every built-in reward with its configured files."""
    found: list[State] = []
    for name in BUILT_IN:
        try:
            make_reward(name, config.rewards.get(name, RewardConfig()), config.model.path)
            found.append(State(name, ""))
        except InputError as error:
            found.append(State(name, str(error)))
    return found


def named(spec: str, config: Config) -> tuple[str, Reward]:
    """A reward by its name, or by package.module:function; with the settings that `rewards.<name>` has."""
    name = spec.rsplit(":", 1)[-1]
    settings = config.rewards.get(name, RewardConfig())
    settings.fn = settings.fn or spec
    return name, make_reward(name, settings, config.model.path)


class Trial(NamedTuple):
    scores: dict[str, float]
    load: float  # seconds of the first call, which loads what is to be loaded
    again: float  # seconds of the next
    size: str
    device: str


def try_out(
    spec: str, config: Config, picture: Path | None = None, prompt: str | None = None, device: str | None = None
) -> Trial:
    """Score one picture, the user's or one that is drawn for it, twice."""
    name, reward = named(spec, config)
    image, text = example(spec if spec in BUILT_IN else name)
    if picture is not None:
        image = read_picture(picture)
    if getattr(reward, "of_videos", False):
        image = image[None].expand(FRAMES, -1, -1, -1)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    images, prompts = image[None].to(where), [text if prompt is None else prompt]
    seconds: list[float] = []
    scores: dict[str, Tensor] = {}
    for _ in range(2):
        start = time.perf_counter()
        scores = Rewards({name: reward}, {name: 1.0})(images, prompts, {}, strict=True).scores
        seconds.append(time.perf_counter() - start)
    size = "×".join(str(side) for side in reversed(images.shape[-2:]))
    numbers = {part: float(values[0]) for part, values in scores.items()}
    return Trial(numbers, seconds[0], seconds[1], size, str(where))


def read_picture(path: Path) -> Tensor:
    """A picture file as 3×H×W in [0, 1]."""
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError) as error:
        raise InputError("--picture", path, f"cannot be read ({error})", "a PNG, JPEG or WebP file") from None
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255


def example(name: str) -> tuple[Tensor, str]:
    """A picture that suits a reward, and its prompt."""
    if name == "ocr":
        canvas = Image.new("RGB", (SIDE, SIDE), "white")
        ImageDraw.Draw(canvas).text((90, 200), "OPEN", fill="black", font=ImageFont.load_default(120))
        return torch.from_numpy(np.asarray(canvas).copy()).permute(2, 0, 1) / 255, 'a sign that says "OPEN"'
    if name == "place":
        x, y = torch.meshgrid(torch.arange(PIXELS), torch.arange(PIXELS), indexing="xy")
        dot = torch.exp(-((x - PIXELS / 4) ** 2 + (y - PIXELS / 4) ** 2) / (2 * DOT**2))
        return torch.tensor(TINT).view(3, 1, 1) * dot, "a dot at the top left"
    scene: Sequence[int] = (0, 0, 0, 0, 1)
    side = 64 if name == "scene" else SIDE
    picture = render(torch.tensor([scene]))
    return functional.interpolate(picture, (side, side), mode="bilinear")[0].clamp(0, 1), describe(scene)
