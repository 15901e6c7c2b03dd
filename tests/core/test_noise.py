"""The generator: published test vectors, the right distribution, and draws that depend on their address alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arborl.core.noise import fold, normal, philox

# Known-answer vectors of Philox4x32-10 from the Random123 distribution: (counter, key, output).
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_meets_its_published_vectors(device, counter, key, expected):
    words = philox(tuple(torch.tensor([word], device=device) for word in counter), key)
    assert tuple(int(word) for word in words) == expected


def addresses(count: int) -> torch.Tensor:
    return torch.tensor([[n % 5, n // 5 % 3, n // 15] for n in range(count)])


@given(
    rows=st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 3), min_size=1, max_size=6, unique=True),
    shape=st.sampled_from([(1,), (2,), (3,), (4, 5), (2, 3, 3)]),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_draw_depends_on_its_address_alone(rows, shape, seed):
    key, address = fold(seed, 3), torch.tensor(rows)
    together = normal(key, address, shape)
    for row, expected in zip(address, together, strict=True):
        assert torch.equal(normal(key, row[None], shape)[0], expected)
    assert torch.equal(normal(key, address.flip(0), shape).flip(0), together)


def test_a_longer_draw_begins_with_the_shorter_one():
    key, address = fold(0, 0), addresses(3)
    assert torch.equal(normal(key, address, (100,))[:, :7], normal(key, address, (7,)))


def test_every_part_of_the_address_and_the_key_matters():
    base = normal(fold(1, 2), torch.tensor([[3, 4, 5]]), (64,))
    changed = [
        normal(fold(2, 2), torch.tensor([[3, 4, 5]]), (64,)),
        normal(fold(1, 3), torch.tensor([[3, 4, 5]]), (64,)),
        normal(fold(1 + 2**32, 2), torch.tensor([[3, 4, 5]]), (64,)),
        normal(fold(1, 2 + 2**32), torch.tensor([[3, 4, 5]]), (64,)),
        *(normal(fold(1, 2), torch.tensor([a]), (64,)) for a in ([4, 4, 5], [3, 5, 5], [3, 4, 6], [4, 3, 5])),
    ]
    for other in changed:
        assert abs(float(torch.corrcoef(torch.stack([base[0], other[0]]))[0, 1])) < 0.5
        assert not torch.equal(base, other)


def test_the_draws_are_standard_normal():
    draws = normal(fold(0, 0), addresses(400), (50, 50)).double()
    is_standard_normal(draws)
    flat, count = draws.flatten(), draws.numel()
    # Neighbouring elements and neighbouring nodes are uncorrelated.
    assert abs(float((flat[1:] * flat[:-1]).mean())) < 4 / count**0.5
    assert abs(float((draws[1:] * draws[:-1]).mean())) < 4 / count**0.5


# balanced


def sizes_of(families: list[int]) -> torch.Tensor:
    """The family numbers of some draws: families of these sizes, dealt out in turn, so that none stands together."""
    left, family = list(families), list[int]()
    while any(left):
        for number, size in enumerate(left):
            if size:
                family.append(7 * number)
                left[number] -= 1
    return torch.tensor(family)


def is_standard_normal(draws: torch.Tensor) -> None:
    """Its moments, and the Kolmogorov-Smirnov distance to the normal distribution function."""
    flat, count = draws.double().flatten(), draws.numel()
    assert abs(float(flat.mean())) < 4 / count**0.5
    assert float(flat.var()) == pytest.approx(1, abs=4 * (2 / count) ** 0.5)
    assert float((flat**4).mean()) == pytest.approx(3, abs=4 * (96 / count) ** 0.5)
    ordered = torch.special.ndtr(flat.sort().values)
    gap = (ordered - (torch.arange(count) + 0.5) / count).abs().max()
    assert float(gap) < 1.95 / count**0.5


@pytest.mark.parametrize("k", [2, 3, 4, 5, 6])
def test_each_balanced_sibling_is_standard_normal_and_together_they_sum_to_zero(k: int):
    draws = normal(fold(0, k), addresses(k), (50_000,), torch.zeros(k, dtype=torch.long))
    for sibling in draws:
        is_standard_normal(sibling)
    assert float(draws.sum(0).abs().max()) < 1e-6 * k
    expected = torch.full((k, k), -1 / (k - 1)).fill_diagonal_(1.0)
    torch.testing.assert_close(torch.corrcoef(draws.double()).float(), expected, rtol=0, atol=4 / 50_000**0.5)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 99))
def test_families_of_any_size_stand_side_by_side(families: list[int], seed: int):
    """Each is the slow formula on its own draws, to the bit, and whoever is alone keeps what it had."""
    family, key = sizes_of(families), fold(seed, 0)
    plain, found = (normal(key, addresses(len(family)), (3, 5), of) for of in (None, family))
    for number in family.unique():
        own = (family == number).nonzero().flatten()
        alone = normal(key, addresses(len(family))[own], (3, 5), torch.zeros(len(own), dtype=torch.long))
        assert torch.equal(found[own], alone)
        z, k = plain[own].double(), len(own)
        if k == 1:
            assert torch.equal(found[own], plain[own])
        else:
            torch.testing.assert_close(found[own].double(), (z - z.mean(0)) * (k / (k - 1)) ** 0.5, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("balanced", [False, True])
def test_the_gpu_draws_what_the_cpu_draws(balanced: bool):
    address = addresses(64)
    family = torch.arange(64) // torch.tensor([2, 3, 4, 6]).repeat(16) if balanced else None
    here, there = (normal(fold(0, 1), a, (16, 64, 64), family).cpu() for a in (address, address.cuda()))
    off = (here - there).abs()
    assert float(off.max()) <= 5e-7
    assert float((off > 0).float().mean()) < 1e-6
