"""Scenes to pictures, many at a time, on any device."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .grammar import BACKGROUND, COLOUR, COLOURS, PLACE, PLACES, SHAPE, SHAPES, SIZE, SIZES

SIDE = 64
"""Pixels."""


def masks(scenes: Int[Tensor, "n 5"], centres: Float[Tensor, "n 2"], side: int = SIDE) -> Float[Tensor, "n side side"]:
    """The share of each pixel that each scene's object covers, the object centred where `centres` says."""
    axis = (torch.arange(side, device=centres.device, dtype=centres.dtype) + 0.5) / side
    radius = torch.tensor(list(SIZES.values())).to(centres)[scenes[:, SIZE], None, None]
    x = (axis[None, None, :] - centres[:, 0, None, None]) / radius
    y = (axis[None, :, None] - centres[:, 1, None, None]) / radius
    x, y = torch.broadcast_tensors(x, y)
    distance = torch.empty_like(x)
    for index, outline in enumerate(SHAPES.values()):
        which = (scenes[:, SHAPE] == index).nonzero().squeeze(1)
        distance[which] = outline(x[which], y[which])
    return (0.5 - distance * radius * side).clamp(0, 1)


def render(
    scenes: Int[Tensor, "n 5"],
    shift: Float[Tensor, "n 2"] | None = None,
    tint: Float[Tensor, "n 2 3"] | None = None,
    side: int = SIDE,
) -> Float[Tensor, "n 3 side side"]:
    """The pictures of some scenes; `shift` moves the objects, `tint` is added to their colour and the background's."""
    centres = torch.tensor(list(PLACES.values()), device=scenes.device)[scenes[:, PLACE]]
    colours = torch.tensor(list(COLOURS.values()), device=scenes.device)
    ink, paper = colours[scenes[:, COLOUR]], colours[scenes[:, BACKGROUND]]
    if shift is not None:
        centres = centres + shift
    if tint is not None:
        ink, paper = ink + tint[:, 0], paper + tint[:, 1]
    mask = masks(scenes, centres, side)[:, None]
    return paper[:, :, None, None] * (1 - mask) + ink[:, :, None, None] * mask
