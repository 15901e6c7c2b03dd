"""The share of its caption that a picture makes come true, read from the picture alone.

The background is what most of the picture is; the object is what differs from it. Only then is the caption read: four
parts in [0, 1], each about words of its own, averaged by whoever asked. Nothing here needs the model that drew.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from textwrap import shorten
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from ...core.errors import InputError
from .grammar import BACKGROUND, COLOUR, COLOURS, PLACE, PLACES, all_scenes, describe, parse
from .render import masks, render

SEEN = 0.2
"""A pixel this far from the background, in RGB, belongs to the object."""
COLOUR_FULL, COLOUR_NONE = 0.08, 0.28
"""Distances in RGB at which a colour counts whole and not at all. No two of the grammar's are nearer than 0.45."""
EDGE_NONE = 0.4
"""And for the object's edge, whose pixels may be any blend of its colour and the background's."""
PLACE_FULL, PLACE_NONE = 0.03, 0.16
"""Distances from the named place, in picture sides, likewise. Neighbouring places are 0.24 apart."""
IOU_NONE = 0.6
"""Overlap with the named shape at which nothing counts; the most alike pair of different shapes has less than 0.8."""


def scene(
    images: Float[Tensor, "n 3 side side"], prompts: Sequence[str], columns: Mapping[str, Sequence[object]]
) -> dict[str, Float[Tensor, " n"]]:
    """The reward: four parts a picture. NaN where a prompt is not of the grammar."""
    if images.ndim != 4 or images.shape[-1] != images.shape[-2] or images.shape[-1] < 48:
        size = "×".join(map(str, images.shape[1:]))
        raise InputError("rewards.scene", size, "cannot read pictures of this shape", "3×N×N, N at least 48")
    parsed = [parse(prompt) for prompt in prompts]
    scenes = torch.tensor([found or (0,) * 5 for found in parsed], device=images.device)
    known = torch.tensor([found is not None for found in parsed], device=images.device)
    return {name: torch.where(known, values, torch.nan) for name, values in parts(images.float(), scenes).items()}


def check_captions(prompts: Sequence[str]) -> None:
    """An error if there is nothing here to score."""
    if not any(parse(prompt) for prompt in prompts):
        problem = f"can read none of the prompts (the first is “{shorten(prompts[0], 60, placeholder='…')}”)"
        raise InputError(
            "rewards.scene", None, problem, cure="captions of the scenes, or another reward: rewards=<name>"
        )


def example() -> tuple[Float[Tensor, "3 side side"], str]:
    """A picture for `scene` to read, and its caption."""
    drawn = (0, 0, 0, 0, 1)
    return render(torch.tensor([drawn]))[0].clamp(0, 1), describe(drawn)


scene.check_prompts = check_captions  # type: ignore[attr-defined]
scene.example = example  # type: ignore[attr-defined]


def parts(images: Float[Tensor, "n 3 side side"], scenes: Int[Tensor, "n 5"]) -> dict[str, Float[Tensor, " n"]]:
    """The four parts, for scenes that are already parsed."""
    palette = torch.tensor(list(COLOURS.values())).to(images)
    found = look(images)
    ink, named = palette[scenes[:, COLOUR]], torch.tensor(list(PLACES.values())).to(images)[scenes[:, PLACE]]
    inner = _mean(_fall(_distance(images, ink[:, :, None, None]), COLOUR_FULL, COLOUR_NONE), found.inside)
    edge = _mean(_fall(_distance_to_blend(images, found.paper, ink), COLOUR_FULL, EDGE_NONE), found.edge)
    paper = _distance(images, palette[scenes[:, BACKGROUND]][:, :, None, None])
    ideal = _sharpen(_smooth(masks(scenes, found.centre, images.shape[-1])))
    overlap = torch.minimum(found.mask, ideal).sum((1, 2))
    overlap = overlap / (torch.maximum(found.mask, ideal).sum((1, 2)) + found.stray)
    return {
        "colour": found.oneness * inner * edge,
        "background": _mean(_fall(paper, COLOUR_FULL, COLOUR_NONE), found.outside, at_least=0.5),
        "place": found.oneness * _fall((found.centre - named).norm(dim=1), PLACE_FULL, PLACE_NONE),
        "shape": ((overlap - IOU_NONE) / (1 - IOU_NONE)).clamp(0, 1),
    }


class Seen(NamedTuple):
    """Measurements of a picture, made without its caption."""

    paper: Float[Tensor, "n 3 1 1"]  # the background's colour
    mask: Float[Tensor, "n side side"]  # the object: 1 inside, 0 outside, between them at its edge
    inside: Bool[Tensor, "n side side"]  # pixels that are surely the object's
    edge: Bool[Tensor, "n side side"]  # the rest of its pixels
    outside: Bool[Tensor, "n side side"]  # pixels that are surely not
    centre: Float[Tensor, "n 2"]
    stray: Float[Tensor, " n"]  # pixels of fainter things apart from it
    oneness: Float[Tensor, " n"]  # 1 for one thing in one place, 0 for nothing, for many, and for what is all over


def look(images: Float[Tensor, "n 3 side side"]) -> Seen:
    """Tell the object from the background."""
    side = images.shape[-1]
    paper = images[:, :, ::2, ::2].flatten(2).median(2).values[:, :, None, None]
    off = _distance(images, paper)
    contrast = _mean(off, off > SEEN)
    contrast = _mean(off, off > 0.75 * contrast[:, None, None])  # without the object's edge, which is half background
    smooth = _distance(_smooth(images), paper)
    mask = torch.where((contrast > 0)[:, None, None], _sharpen(smooth / contrast[:, None, None]), 0)
    area = mask.sum((1, 2))
    axis = (torch.arange(side).to(images) + 0.5) / side
    weight = mask / area.clamp(min=1e-6)[:, None, None]
    x, y = (weight.sum(1) * axis).sum(1), (weight.sum(2) * axis).sum(1)
    spread = (weight.sum(1) * (axis - x[:, None]) ** 2).sum(1) + (weight.sum(2) * (axis - y[:, None]) ** 2).sum(1)
    limits = _limits()
    # The widest a thing may be: as the widest of the grammar's objects, and as a ring of its own area.
    widest = (limits.spread_of_area * area / side**2).clamp(max=limits.spread)
    stray = ((smooth > SEEN) & (_grow(mask > 0.5, 3) == 0)).sum((1, 2)).float()
    oneness = (area / (0.5 * limits.area * side**2)).clamp(max=1)
    oneness = oneness * _fall((spread / widest.clamp(min=1e-6)).sqrt(), 1.1, 1.5)
    oneness = oneness * _fall(stray / area.clamp(min=1), 0.05, 0.3)
    inside = _grow(mask <= 0.5, 1) == 0
    outside = _grow(mask >= 0.5, 1) == 0
    return Seen(paper, mask, inside, (mask > 0.5) & ~inside, outside, torch.stack([x, y], 1), stray, oneness)


class Limits(NamedTuple):
    """Of the grammar's objects, in units of the picture's side: the smallest area, the largest spread (the mean square
    distance from the centre), and the largest spread for its area.
    """

    area: float
    spread: float
    spread_of_area: float


@cache
def _limits() -> Limits:
    every = all_scenes()
    every = every[(every[:, COLOUR] == 0) & (every[:, BACKGROUND] == 1)]
    mask = masks(every, torch.full((len(every), 2), 0.5))
    axis = (torch.arange(mask.shape[-1]) + 0.5) / mask.shape[-1] - 0.5
    pixels = mask.sum((1, 2))
    spread = (mask * (axis[:, None] ** 2 + axis[None, :] ** 2)).sum((1, 2)) / pixels
    area = pixels / mask[0].numel()
    return Limits(float(area.min()), float(spread.max()), float((spread / area).max()))


def _smooth(pictures: Float[Tensor, "n *channels side side"]) -> Float[Tensor, "n *channels side side"]:
    """The mean of each pixel and its neighbours: single pixels are noise, not things."""
    return functional.avg_pool2d(pictures, 3, 1, 1, count_include_pad=False)


def _distance(images: Float[Tensor, "n 3 side side"], colour: Float[Tensor, "n 3 1 1"]) -> Float[Tensor, "n side side"]:
    return (images - colour).square().sum(1).sqrt()  # `norm` over a short axis is ten times slower


def _sharpen(coverage: Tensor) -> Tensor:
    """A steeper edge: faint noise is no object, and a slightly soft edge no error."""
    return ((coverage - 0.25) / 0.5).clamp(0, 1)


def _grow(mask: Bool[Tensor, "n side side"], by: int) -> Float[Tensor, "n side side"]:
    """The mask and everything within `by` pixels of it."""
    return functional.max_pool2d(mask.float()[:, None], 2 * by + 1, 1, by)[:, 0]


def _distance_to_blend(
    images: Float[Tensor, "n 3 side side"], paper: Float[Tensor, "n 3 1 1"], ink: Float[Tensor, "n 3"]
) -> Float[Tensor, "n side side"]:
    """Each pixel's distance to the nearest mixture of two colours, such as an object's edge has."""
    way = ink[:, :, None, None] - paper
    along = ((images - paper) * way).sum(1, keepdim=True) / way.square().sum(1, keepdim=True).clamp(min=1e-6)
    return (images - paper - along.clamp(0, 1) * way).square().sum(1).sqrt()


def _mean(
    values: Float[Tensor, "n side side"], where: Bool[Tensor, "n side side"], at_least: float = 0.0
) -> Float[Tensor, " n"]:
    """Mean over some pixels, 0 where there are none; fewer than a share of the picture count as if they were that."""
    return (values * where).sum((1, 2)) / where.sum((1, 2)).clamp(min=max(1, at_least * where[0].numel()))


def _fall(distance: Tensor, full: float, none: float) -> Tensor:
    """1 up to `full`, 0 from `none`, straight between them."""
    return ((none - distance) / (none - full)).clamp(0, 1)
