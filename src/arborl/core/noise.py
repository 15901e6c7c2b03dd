"""Gaussian noise as a pure function of where it is used: (seed, epoch, prompt, tree, node), element by element; and,
where siblings are balanced, of which nodes are siblings.

Philox4x32-10 (Salmon et al., SC 2011) in integer tensor arithmetic, so the bits are the same on every device, and
batch size, chunking, rank and order of calls cannot change a draw.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .tensors import to_device, unique

Key = tuple[int, int]
"""Two 32-bit words: the generator's key."""

_MASK = 0xFFFFFFFF
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: Key) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds over four 32-bit words, each held in an int64. The words broadcast against one another."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product needs 64 bits unsigned; int64 wraps to the same bit pattern, and the mask drops the sign.
        p0, p1 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def fold(seed: int, *numbers: int) -> Key:
    """A key from a seed and further numbers (an epoch, a purpose); each pair is mixed in by one Philox call."""
    key = (seed & _MASK, (seed >> 32) & _MASK)
    for number in numbers:
        words = (number & _MASK, (number >> 32) & _MASK, 0, 0)
        a, b, _, _ = philox(tuple(torch.tensor(w) for w in words), key)  # pyright: ignore[reportArgumentType]
        key = (int(a), int(b))
    return key


def normal(
    key: Key, address: Int[Tensor, "n 3"], shape: tuple[int, ...], family: Int[Tensor, " n"] | None = None
) -> Float[Tensor, "n *shape"]:
    """Standard normal float32 draws, one tensor of `shape` for each address (prompt, tree, node).

    Box-Muller in float64, rounded once, so that devices whose log and cos differ in the last bit still agree.
    Draws that share a number in `family` (on the host) are balanced; see `_balanced`.
    """
    # Metal has no float64; the same draws are made on the host there.
    place = torch.device("cpu") if address.device.type == "mps" else address.device
    prompt, tree, node = (column[:, None] for column in address.to(place).unbind(1))
    size = math.prod(shape)
    block = torch.arange((size + 3) // 4, device=place)[None, :]
    words = philox((block, node, tree, prompt), key)
    pairs: list[Tensor] = []
    for radius_bits, angle_bits in (words[:2], words[2:]):
        radius = torch.sqrt(-2 * torch.log((radius_bits.double() + 1) * 2.0**-32))
        angle = angle_bits.double() * (2 * math.pi * 2.0**-32)
        pairs += [radius * torch.cos(angle), radius * torch.sin(angle)]
    draws = torch.stack(pairs, dim=-1).flatten(1)[:, :size]
    if family is not None:
        draws = _balanced(draws, family)
    return draws.float().reshape(len(address), *shape).to(address.device)


def _balanced(draws: Float[Tensor, "n size"], family: Int[Tensor, " n"]) -> Float[Tensor, "n size"]:
    """√(k/(k-1))·(z - mean of the family's z) for each z of a family of k: the family sums to zero, its members have
    the correlation -1/(k-1), and each by itself is as normal as z. One alone stays as it is.

    These are antithetic variates; of two, z and -z. A family is added up in the order of its members, one after the
    other, so that every device comes to the same bits.
    """
    _, number = unique(family)
    sizes = torch.bincount(number)
    order = number.argsort(stable=True)
    place = torch.arange(len(number)) - (sizes.cumsum(0) - sizes)[number[order]]
    members = torch.full((len(sizes), int(sizes.max())), len(draws))  # what a family has no more of is a row of zeros
    members[number[order], place] = order
    factor = torch.where(sizes > 1, sizes / (sizes - 1).clamp_min(1), 1.0).double().sqrt()
    share = torch.where(sizes > 1, 1.0 / sizes, 0.0).double()
    number, members, factor, share = (to_device(table, draws.device) for table in (number, members, factor, share))
    padded = torch.cat([draws, draws.new_zeros(1, draws.shape[1])])
    total = torch.zeros_like(padded[members[:, 0]])
    for column in members.unbind(1):
        total += padded[column]
    return factor[number, None] * (draws - (share[:, None] * total)[number])
