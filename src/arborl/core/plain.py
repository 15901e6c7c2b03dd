# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Tensors as Python lists, and unique: the few calls whose types torch leaves open, closed in one place."""

import torch
from torch import Tensor


def ints(values: Tensor) -> list[int]:
    return values.tolist()


def floats(values: Tensor) -> list[float]:
    return values.tolist()


def bools(values: Tensor) -> list[bool]:
    return values.tolist()


def unique(values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct values in order, and where in them each value stands."""
    return torch.unique(values, return_inverse=True)
