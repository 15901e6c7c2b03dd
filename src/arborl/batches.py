"""The one micro-batch iterator: rollout, update, decoding and scoring all walk through it. And the way to the GPU."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    rows: Tensor  # positions to take, padded with position 0 when a fixed shape is asked for
    valid: int  # how many of them count


def placed(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device. A GPU is not waited for: from pinned memory the copy takes its turn in the queue."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def settled(size: int | str) -> int:
    """A batch size once it is known: `auto` has been replaced by what was found (`fit.py`)."""
    if not isinstance(size, int):
        raise RuntimeError(f"a batch size is still {size!r}; fit.settle() finds one")
    return size


def batches(count: int, size: int, pad: bool = False) -> Iterator[Batch]:
    """Positions 0..count-1 in runs of `size`; with `pad` the last run has that length too.

    A single position that is left over takes one more along: compiled code has a graph of its own for one row.
    """
    bounds = [*range(0, count, size), count] if count else []
    if size > 2 and count % size == 1 and count > 1 and not pad:
        bounds[-2] -= 1
    for start, stop in itertools.pairwise(bounds):
        index = torch.arange(start, stop)
        valid = len(index)
        if pad and valid < size:
            index = torch.cat([index, index.new_zeros(size - valid)])
        yield Batch(index, valid)
