"""The words of the scenes, what each means, and the captions they make. A new word is one line here.

Lengths are in units of the picture's side, x to the right and y downwards, (0, 0) at the top left corner.
"""

import re
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

import torch
from jaxtyping import Int
from torch import Tensor

TEMPLATE = "a {size} {colour} {shape} at the {place} on a {background} background"

SIZES = {"small": 0.10, "large": 0.17}
"""Radius."""

COLOURS = {
    "red": (0.84, 0.16, 0.16),
    "green": (0.18, 0.62, 0.22),
    "blue": (0.16, 0.28, 0.82),
    "yellow": (0.90, 0.80, 0.20),
    "purple": (0.58, 0.20, 0.66),
    "cyan": (0.25, 0.75, 0.80),
    "white": (0.90, 0.90, 0.90),
    "black": (0.10, 0.10, 0.10),
}
"""Inside the colour cube, not at its corners: a picture that is merely as saturated as can be meets none of them."""


def _polygon(corners: Sequence[tuple[float, float]], x: Tensor, y: Tensor) -> Tensor:
    """Signed distance to a convex polygon, corners clockwise as seen."""
    sides = zip(corners, [*corners[1:], corners[0]], strict=True)
    lines = [((x2 - x1, y2 - y1), (x1, y1)) for (x1, y1), (x2, y2) in sides]
    return torch.stack(
        [(dy * (x - px) - dx * (y - py)) / (dx * dx + dy * dy) ** 0.5 for (dx, dy), (px, py) in lines]
    ).amax(0)


def _box(half_width: float, half_height: float, x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs() - half_width, y.abs() - half_height)


SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": lambda x, y: torch.hypot(x, y) - 0.90,
    "square": lambda x, y: _box(0.95, 0.95, x, y),
    "triangle": lambda x, y: _polygon([(0.0, -1.24), (1.07, 0.62), (-1.07, 0.62)], x, y),
    "cross": lambda x, y: torch.minimum(_box(1.05, 0.36, x, y), _box(0.36, 1.05, x, y)),
    "ring": lambda x, y: (torch.hypot(x, y) - 0.78).abs() - 0.27,
}
"""Signed distance to the outline (negative inside) at points in units of the radius, around the centre of mass."""

_NEAR, _MIDDLE, _FAR = 0.26, 0.5, 0.74
PLACES = {
    "top left": (_NEAR, _NEAR),
    "top": (_MIDDLE, _NEAR),
    "top right": (_FAR, _NEAR),
    "left": (_NEAR, _MIDDLE),
    "centre": (_MIDDLE, _MIDDLE),
    "right": (_FAR, _MIDDLE),
    "bottom left": (_NEAR, _FAR),
    "bottom": (_MIDDLE, _FAR),
    "bottom right": (_FAR, _FAR),
}
"""Centre of the object."""

WORDS = {
    "size": list(SIZES),
    "colour": list(COLOURS),
    "shape": list(SHAPES),
    "place": list(PLACES),
    "background": list(COLOURS),
}
SIZE, COLOUR, SHAPE, PLACE, BACKGROUND = range(5)
"""A scene is five numbers, each a word's place in its list: the columns of the tensors that hold scenes."""

_PATTERN = re.compile(
    TEMPLATE.format(**{name: f"(?P<{name}>{'|'.join(words)})" for name, words in WORDS.items()}), re.IGNORECASE
)


@cache
def parse(caption: str) -> tuple[int, ...] | None:
    """The scene a caption describes; None where it is not of this grammar."""
    match = _PATTERN.fullmatch(" ".join(caption.split()))
    if match is None:
        return None
    scene = tuple(words.index(match[name].lower()) for name, words in WORDS.items())
    return scene if scene[COLOUR] != scene[BACKGROUND] else None


def describe(scene: Sequence[int]) -> str:
    """A scene's caption."""
    return TEMPLATE.format(**{name: words[i] for (name, words), i in zip(WORDS.items(), scene, strict=True)})


@cache
def all_scenes() -> Int[Tensor, "scenes 5"]:
    """Every scene: an object never has its background's colour."""
    every = product(*(range(len(words)) for words in WORDS.values()))
    return torch.tensor([scene for scene in every if scene[COLOUR] != scene[BACKGROUND]])


HELD_OUT_SHARE = 10
"""One caption in this many is held out."""


@cache
def split() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Training captions and held-out ones, each in a fixed mixed order.

    Which side a caption is on depends on its text alone: a new word moves none of those that were there.
    """
    mixed = sorted((describe(scene) for scene in all_scenes().tolist()), key=lambda text: zlib.crc32(text.encode()))
    sides: tuple[list[str], list[str]] = ([], [])
    for caption in mixed:
        sides[zlib.crc32(caption[::-1].encode()) % HELD_OUT_SHARE == 0].append(caption)
    return tuple(sides[0]), tuple(sides[1])
