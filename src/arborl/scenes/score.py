"""How much of its caption a picture makes come true, told from the picture alone.

The background is what most of the picture is; the object is what differs from it. Only then is the caption read: four
parts in [0, 1], each about words of its own, averaged by whoever asked. Nothing here needs the model that drew.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from ..core.errors import InputError
from .grammar import BACKGROUND, COLOUR, COLOURS, PLACE, PLACES, SHAPES, SIZES, parse
from .render import masks

SEEN = 0.2
"""A pixel this far from the background, in RGB, belongs to the object."""
COLOUR_FULL, COLOUR_NONE = 0.08, 0.28
"""Distances in RGB at which a colour counts whole and not at all. No two of the grammar's are nearer than 0.45."""
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


def parts(images: Float[Tensor, "n 3 side side"], scenes: Int[Tensor, "n 5"]) -> dict[str, Float[Tensor, " n"]]:
    """The four parts, for scenes that are already parsed."""
    palette = torch.tensor(list(COLOURS.values())).to(images)
    found = look(images)
    one = found.presence * found.compactness
    named = torch.tensor(list(PLACES.values())).to(images)[scenes[:, PLACE]]
    off = (found.centre - named).norm(dim=1)
    ideal = _sharpen(_smooth(masks(scenes, found.centre, images.shape[-1])))
    overlap = torch.minimum(found.mask, ideal).sum((1, 2)) / torch.maximum(found.mask, ideal).sum((1, 2))
    return {
        "colour": one * _mean(_near(images, palette[scenes[:, COLOUR]]), found.inside),
        "background": _mean(_near(images, palette[scenes[:, BACKGROUND]]), found.outside, at_least=0.5),
        "place": one * _fall(off, PLACE_FULL, PLACE_NONE),
        "shape": ((overlap - IOU_NONE) / (1 - IOU_NONE)).clamp(0, 1),
    }


class Seen(NamedTuple):
    """What is in a picture, before anyone says what should be."""

    mask: Float[Tensor, "n side side"]  # the object: 1 inside, 0 outside, between them at its edge
    inside: Bool[Tensor, "n side side"]  # pixels that are surely the object's
    outside: Bool[Tensor, "n side side"]  # and surely not
    centre: Float[Tensor, "n 2"]
    presence: Float[Tensor, " n"]  # 0 without an object, 1 from half the smallest one's area
    compactness: Float[Tensor, " n"]  # 1 where it is no more spread out than the largest object, 0 at twice that


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
    spread = (
        (weight.sum(1) * (axis - x[:, None]) ** 2).sum(1) + (weight.sum(2) * (axis - y[:, None]) ** 2).sum(1)
    ).sqrt()
    smallest, widest = _extremes()
    return Seen(
        mask=mask,
        inside=_erode(mask > 0.5),
        outside=_erode(mask < 0.5),
        centre=torch.stack([x, y], 1),
        presence=(area / (0.5 * smallest * side**2)).clamp(max=1),
        compactness=_fall(spread, 1.05 * widest, 2 * widest),
    )


def _extremes() -> tuple[float, float]:
    """The smallest area and the widest spread of the grammar's objects, in units of the picture's side."""
    sizes, shapes = torch.meshgrid(torch.arange(len(SIZES)), torch.arange(len(SHAPES)), indexing="ij")
    scenes = torch.zeros(sizes.numel(), 5, dtype=torch.long)
    scenes[:, 0], scenes[:, 2] = sizes.flatten(), shapes.flatten()
    mask = masks(scenes, torch.full((len(scenes), 2), 0.5))
    axis = (torch.arange(mask.shape[-1]) + 0.5) / mask.shape[-1] - 0.5
    square = axis[:, None] ** 2 + axis[None, :] ** 2
    area = mask.sum((1, 2))
    return float(area.min()) / mask[0].numel(), float(((mask * square).sum((1, 2)) / area).sqrt().max())


def _smooth(pictures: Float[Tensor, "n *channels side side"]) -> Float[Tensor, "n *channels side side"]:
    """The mean of each pixel and its neighbours: single pixels are noise, not things."""
    return functional.avg_pool2d(pictures, 3, 1, 1, count_include_pad=False)


def _distance(images: Float[Tensor, "n 3 side side"], colour: Float[Tensor, "n 3 1 1"]) -> Float[Tensor, "n side side"]:
    return (images - colour).square().sum(1).sqrt()  # `norm` over a short axis is ten times slower


def _sharpen(coverage: Tensor) -> Tensor:
    """A steeper edge: faint noise is no object, and a slightly soft edge no error."""
    return ((coverage - 0.25) / 0.5).clamp(0, 1)


def _erode(mask: Bool[Tensor, "n side side"]) -> Bool[Tensor, "n side side"]:
    """Pixels all of whose neighbours are in the mask too: its edge, where colours blend, is left out."""
    return functional.max_pool2d((~mask).float()[:, None], 3, 1, 1)[:, 0] == 0


def _near(images: Float[Tensor, "n 3 side side"], colour: Float[Tensor, "n 3"]) -> Float[Tensor, "n side side"]:
    return _fall(_distance(images, colour[:, :, None, None]), COLOUR_FULL, COLOUR_NONE)


def _mean(
    values: Float[Tensor, "n side side"], where: Bool[Tensor, "n side side"], at_least: float = 0.0
) -> Float[Tensor, " n"]:
    """Mean over some pixels, 0 where there are none; fewer than a share of the picture count as if they were that."""
    return (values * where).sum((1, 2)) / where.sum((1, 2)).clamp(min=max(1, at_least * where[0].numel()))


def _fall(distance: Tensor, full: float, none: float) -> Tensor:
    """1 up to `full`, 0 from `none`, straight between them."""
    return ((none - distance) / (none - full)).clamp(0, 1)
