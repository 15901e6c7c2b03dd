# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateImportUsage=false
# pyright: reportPrivateUsage=false
"""Small conversions; the few calls whose types torch leaves open are closed here."""

from collections.abc import Sequence

import torch
from torch import Tensor


def ints(values: Tensor) -> list[int]:
    return values.tolist()


def floats(values: Tensor) -> list[float]:
    return values.tolist()


def bools(values: Tensor) -> list[bool]:
    return values.tolist()


def like(values: Tensor, other: Tensor) -> Tensor:
    """In the other's dtype and on its device, in this order: not every device has float64."""
    return values.to(other.dtype).to(other.device)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device. A GPU is not waited for: from pinned memory the copy takes its turn in the queue."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def unique(values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct values (or rows) in order, and where in them each stands."""
    return torch.unique(values, return_inverse=True, dim=0)


def unflatten(values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The first axis as several."""
    return values.unflatten(0, sizes)


def lerp_all(tensors: Sequence[Tensor], others: Sequence[Tensor], weight: float) -> None:
    """Move each tensor that share of the way to the other, in place and in few kernels."""
    torch._foreach_lerp_(list(tensors), list(others), weight)


def largest_entries(tensors: Sequence[Tensor]) -> Tensor:
    """The largest entry of each tensor by size, in few kernels."""
    return torch.stack(torch._foreach_norm(list(tensors), float("inf")))
