"""Noise without a generator: a hash of (key, element index).

Rounding decisions must not depend on threads, chunks or devices, so an element's noise
is a pure function of the 64-bit key and its index: a two-round multiplicative hash (the
constants are Wellons' `lowbias32`) of a counter that serves two elements at a time,
sixteen bits each. Sixteen bits make a rounding probability exact to 1/65536 of a level.
The counter has 32 bits, so a tensor has at most MAX_ELEMENTS elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ELEMENTS = 1 << 33
_MASK64 = (1 << 64) - 1


def mix(key: int) -> int:
    """Spread a key over all 64 bits (SplitMix64's finalizer), so that near keys give unrelated noise."""
    key = (key + 0x9E3779B97F4A7C15) & _MASK64
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK64
    return key ^ (key >> 31)


def derive(seed: int, *parts: int) -> int:
    """Make a key for a combination of integers, e.g. derive(seed, site, round, tensor).

    Args:
        seed: The seed of the run.
        parts: What the key is for; their order matters.

    Returns:
        A key of 64 bits.
    """
    key = mix(seed & _MASK64)
    for part in parts:
        key = mix(key ^ (part & _MASK64))
    return key


def signed32(value: int) -> int:
    """Return the low 32 bits as the int32 with the same bits."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def noise16(key: int, first: int, n: int, device: torch.device, room: Tensor | None = None) -> Tensor:
    """Return the noise of elements first .. first+n-1 as int32 in 0..65535.

    Args:
        key: Picks the noise.
        first: Index of the first element, a multiple of 16.
        n: How many elements.
        device: Where the noise is made.
        room: Int32 of at least twice n rounded up to 16, in which the noise is made and returned; None makes one.
    """
    groups = -(-n // 16)
    if room is None:
        room = torch.empty(groups * 32, dtype=torch.int32, device=device)
    both = room[: groups * 16].view(groups, 2, 8)
    x, t = room[groups * 16 : groups * 32].view(2, groups * 8)
    torch.arange(groups * 8, dtype=torch.int32, device=device, out=x)
    x += signed32(first >> 4 << 3)

    def fold(shift: int) -> None:
        torch.bitwise_right_shift(x, shift, out=t)
        t.bitwise_and_((1 << (32 - shift)) - 1)
        x.bitwise_xor_(t)

    x ^= signed32(key)
    fold(16)
    x *= signed32(0x7FEB352D)
    x ^= signed32(key >> 32)
    fold(15)
    x *= signed32(0x846CA68B)
    fold(16)
    torch.bitwise_and(x.view(groups, 8), 0xFFFF, out=both[:, 0])
    torch.bitwise_right_shift(x.view(groups, 8), 16, out=both[:, 1])
    both[:, 1] &= 0xFFFF
    return both.view(-1)[:n]
