"""Rewards without weights: canaries that must rise if the engine works."""

import io
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from .base import Columns


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
