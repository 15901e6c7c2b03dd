"""Weights that are converted once and kept: what is used later is what was written, to the last bit."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from arborl.rewards.files import converted


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARBORL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "arborl" / "rewards"


class Source:
    """A file of weights, and how often it was converted."""

    def __init__(self, path: Path) -> None:
        self.path, self.times = path, 0
        path.write_bytes(b"weights")

    def __call__(self) -> dict[str, Tensor]:
        self.times += 1
        weights = torch.arange(12.0).view(3, 4).T
        return {"a": weights, "scale": torch.tensor(4.6), "none": torch.zeros(0), "b": weights.to(torch.bfloat16)}

    def get(self) -> dict[str, Tensor]:
        return converted("rewards.x.path", self.path, "x", self)


def test_weights_are_converted_once(tmp_path: Path):
    source = Source(tmp_path / "x.pt")
    whole = source()
    for _ in range(3):
        found = source.get()
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert source.times == 2


def test_a_bit_that_turned_in_the_copy_is_not_used(tmp_path: Path, cache: Path):
    source = Source(tmp_path / "x.pt")
    whole = source.get()
    (copy,) = cache.iterdir()
    date = copy.stat().st_mtime_ns
    for place in range(1, len(copy.read_bytes()), 17):
        damaged = bytearray(copy.read_bytes())
        damaged[place] ^= 1
        copy.write_bytes(damaged)
        os.utime(copy, ns=(date, date))
        found = source.get()
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole), place
    before = source.times
    source.get()
    assert source.times == before, "the copy is whole again"


def test_a_source_that_was_mended_is_converted_anew(tmp_path: Path):
    """A download of gigabytes that was wrong in one byte has the same size; its date may be the server's."""
    source = Source(tmp_path / "x.pt")
    source.path.write_bytes(bytes(2**24))
    os.utime(source.path, (10**9, 10**9))
    source.get()
    with source.path.open("r+b") as file:
        file.seek(2**23 + 70)
        file.write(b"x")
    os.utime(source.path, (10**9, 10**9))
    source.get()
    assert source.times == 2
