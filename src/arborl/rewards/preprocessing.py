"""Pictures made ready for a network, on their device, as the projects that trained the networks did it on PIL's."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from .base import RewardFailed

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_ASPECT = 32
"""Sides that differ by a larger factor are refused where the shorter decides the size: the longer would explode."""


def as_rgb(images: Tensor) -> Tensor:
    """Three channels: grey becomes three alike, transparency is dropped (as PIL's `convert("RGB")` does)."""
    channels = images.shape[-3] if images.ndim in (4, 5) else 0
    if channels not in (1, 3, 4):
        raise RewardFailed(f"a reward takes N×3×H×W pictures or N×F×3×H×W videos, and was given {tuple(images.shape)}")
    if channels == 1:
        return images.expand(*images.shape[:-3], 3, -1, -1)
    return images[..., :3, :, :]


def check_aspect(images: Tensor) -> None:
    """A picture whose shorter side decides its size must not be much longer than that."""
    height, width = images.shape[-2:]
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise RewardFailed(f"pictures of {width}×{height} are too long and thin to be scored: at most 1:{MAX_ASPECT}")


def quantised(images: Float[Tensor, "n 3 height width"]) -> Float[Tensor, "n 3 height width"]:
    """The 256 levels a picture has once it is saved."""
    return (images * 255).round() / 255


def letterbox(images: Float[Tensor, "n 3 height width"], size: int) -> Float[Tensor, "n 3 size size"]:
    """Fit into a square, the longer side filling it, with black around: what HPS-v2 sees.

    Bicubic with antialiasing on floats, neither clamped nor rounded; Python's `round` for the sides.
    """
    height, width = images.shape[-2:]
    scale = size / max(height, width)
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    images = quantised(images)
    if (rows, columns) != (height, width):
        images = functional.interpolate(images, (rows, columns), mode="bicubic", antialias=True, align_corners=False)
    left, top = (size - columns) // 2, (size - rows) // 2
    return functional.pad(images, (left, size - columns - left, top, size - rows - top))


def centre_crop(
    images: Float[Tensor, "n 3 height width"], size: int, rounded: bool = False
) -> Float[Tensor, "n 3 size size"]:
    """Shorter side to `size`, then the middle; within 1 of 255 of PIL's bicubic, which does an axis at a time in bytes.

    Of an odd margin transformers leaves out the smaller half before the picture (`rounded=False`), torchvision rounds
    to even.
    """
    check_aspect(images)
    height, width = images.shape[-2:]
    shorter = min(height, width)
    rows, columns = (int(size * side / shorter) for side in (height, width))
    images = (images * 255).round()
    for target in ((height, columns), (rows, columns)):  # width first, as PIL does
        if tuple(images.shape[-2:]) != target:
            images = functional.interpolate(images, target, mode="bicubic", antialias=True, align_corners=False)
            images = images.clamp(0, 255).round()
    top, left = ((side - size) / 2 for side in (rows, columns))
    top, left = (round(top), round(left)) if rounded else (int(top), int(left))
    return images[..., top : top + size, left : left + size] / 255


def normalised(images: Float[Tensor, "n 3 height width"]) -> Float[Tensor, "n 3 height width"]:
    """Less CLIP's mean, in units of its spread."""
    mean, std = (images.new_tensor(values).view(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
    return (images - mean) / std
