"""The one micro-batch iterator: rollout, update, decoding and scoring all walk through it."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    rows: Tensor  # positions to take, padded with position 0 when a fixed shape is asked for
    valid: int  # how many of them count


def settled(size: int | str) -> int:
    """A batch size once it is known: `auto` has been replaced by what was found (`fit.py`)."""
    if not isinstance(size, int):
        raise RuntimeError(f"a batch size is still {size!r}; fit.settle() finds one")
    return size


def batches(count: int, size: int, pad: bool = False) -> Iterator[Batch]:
    """Positions 0..count-1 in runs of `size`; with `pad` the last run has that length too."""
    for start in range(0, count, size):
        index = torch.arange(start, min(start + size, count))
        valid = len(index)
        if pad and valid < size:
            index = torch.cat([index, index.new_zeros(size - valid)])
        yield Batch(index, valid)
