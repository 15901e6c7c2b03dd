"""The one micro-batch iterator: rollout, update, decoding and scoring all walk through it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    rows: Tensor  # positions to take, padded with position 0 when a fixed shape is asked for
    valid: int  # how many of them count


class BatchSizes(NamedTuple):
    """Rows at a time: as the settings say, or what was found where they say `auto` (`engine/autotune.py`)."""

    sample: int  # latents of a model call while sampling
    decode: int  # pictures decoded and scored
    train: int  # latents of a forward + backward

    def by_setting(self) -> dict[str, int]:
        return dict(zip(BATCH_SIZE_SETTINGS, self, strict=True))


BATCH_SIZE_SETTINGS = ("sample.batch_size", "sample.decode_batch_size", "train.batch_size")


def batches(count: int, size: int, pad: bool = False, sizes: Sequence[int] = ()) -> Iterator[Batch]:
    """Positions 0..count-1 in runs of `size`. The last run is padded to that length if `pad` says so; else to the next
    of `sizes`, which are in order, if there is one.
    """
    for start in range(0, count, size):
        index = torch.arange(start, min(start + size, count))
        valid = len(index)
        full = size if pad else next((some for some in sizes if valid <= some <= size), valid)
        if valid < full:
            index = torch.cat([index, index.new_zeros(full - valid)])
        yield Batch(index, valid)


def batches_of_groups(groups: Tensor, size: int, pad: bool = False, sizes: Sequence[int] = ()) -> Iterator[Batch]:
    """The same of positions that bear a group's number: group by group, none shared by two."""
    for group in range(int(groups.max()) + 1 if len(groups) else 0):
        rows = torch.arange(len(groups))[groups == group]
        for batch in batches(len(rows), size, pad, sizes):
            yield Batch(rows[batch.rows], batch.valid)
