"""Rewards without weights: canaries that must rise if the engine works."""

import io
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from ..models.mixture import CANVAS, DOT, PIXELS, PLACES, TINT, pixel_grid, place_of
from .base import Columns, RewardFailed


def brightness(images: Tensor, prompts: Sequence[str], columns: Columns) -> Tensor:
    """Mean pixel value."""
    return images.flatten(1).mean(1)


def jpeg(images: Tensor, prompts: Sequence[str], columns: Columns) -> Tensor:
    """Minus the size of the picture as a JPEG of quality 95, in units of 500 kB: simpler pictures score higher.

    Of a video, the mean over its frames.
    """
    sizes: list[int] = []
    frames = images.flatten(0, -4)
    for picture in (frames * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy():
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, format="JPEG", quality=95)
        sizes.append(buffer.tell())
    return -torch.tensor(sizes, dtype=torch.float32).view(len(images), -1).mean(1) / 500_000


def place(images: Tensor, prompts: Sequence[str], columns: Columns) -> Tensor:
    """How near the mixture model's dot is to the corner its prompt names: 1 on it, 0 far off. NaN if none is named."""
    if images.shape[-2:] != (PIXELS, PIXELS):
        raise RewardFailed(f"the place reward reads {PIXELS}×{PIXELS} pictures of the mixture model")
    x, y = (axis.to(images) for axis in pixel_grid())
    centres = torch.tensor(list(PLACES.values())).to(images)
    named = [place_of(prompt) for prompt in prompts]
    target = centres[[index or 0 for index in named]][:, :, None, None]
    # How much of the dot lies near the target, in units of what a dot exactly on it would give.
    reach, width = 1.0, DOT * 2 * CANVAS / PIXELS
    near = torch.exp(-((x - target[:, 0]) ** 2 + (y - target[:, 1]) ** 2) / (2 * reach**2))
    whole = 2 * torch.pi * DOT**2 * sum(TINT) / 3 * reach**2 / (reach**2 + width**2)
    scores = (images.mean(1) * near).flatten(1).sum(1) / whole
    return torch.where(torch.tensor([index is None for index in named], device=scores.device), torch.nan, scores)
