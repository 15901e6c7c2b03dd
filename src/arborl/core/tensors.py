# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Small conversions; the few calls whose types torch leaves open are closed here."""

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


def unique(values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct values (or rows) in order, and where in them each stands."""
    return torch.unique(values, return_inverse=True, dim=0)
