"""Micro-batches go through everything once, in calls of known sizes; and how they reach the device."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from arborl.core.tensors import to_device
from arborl.engine.batches import batches

from conftest import CPU


@given(st.integers(0, 200), st.integers(1, 40), st.booleans(), st.sets(st.integers(1, 50)).map(sorted))
def test_micro_batches_walk_through_everything_once_in_calls_of_known_sizes(count, size, pad, sizes):
    found = list(batches(count, size, pad, sizes))
    walked = [int(row) for batch in found for row in batch.rows[: batch.valid]]
    assert walked == list(range(count))
    for batch in found:
        length = len(batch.rows)
        assert batch.valid <= length <= size
        assert length == size or not pad
        assert length in (size, batch.valid, *sizes)
        assert not [some for some in sizes if batch.valid <= some < length] or pad
        assert not batch.rows[batch.valid :].any()


def test_a_host_tensor_is_placed():
    values = torch.arange(3)
    assert torch.equal(to_device(values, CPU), values)


@given(count=st.integers(0, 50), size=st.integers(1, 20), pad=st.booleans())
def test_batches_cover_everything_once(count: int, size: int, pad: bool):
    found = list(batches(count, size, pad))
    assert torch.cat([b.rows[: b.valid] for b in found] or [torch.empty(0)]).tolist() == list(range(count))
    assert all(len(b.rows) == size if pad else len(b.rows) == b.valid for b in found)
