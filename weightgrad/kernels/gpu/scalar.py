"""What each operation means, one element at a time: `csrc/scalar.h` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from weightgrad.kernels.noise import signed32

BLOCK = 1024
"""Elements that a program works on."""

_FIRST = tl.constexpr(signed32(0x7FEB352D))
_SECOND = tl.constexpr(signed32(0x846CA68B))


def halves(key: int) -> tuple[int, int]:
    """The low and the high 32 bits of a key, each as an int32."""
    return signed32(key), signed32(key >> 32)


@triton.jit
def fold(x, shift: tl.constexpr):
    """x ^ (x >> shift), with zeros shifted in."""
    return x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))


@triton.jit
def noise16(low, high, index):
    """Sixteen uniform bits of each element; see noise.py. Integers of 32 bits wrap around."""
    counter = ((index >> 4) << 3 | (index & 7)).to(tl.int32)
    x = fold(counter ^ low, 16) * tl.full([], _FIRST, tl.int32)
    x = fold(x ^ high, 15) * tl.full([], _SECOND, tl.int32)
    x = fold(x, 16)
    return tl.where((index & 8) != 0, x >> 16, x) & 0xFFFF


@triton.jit
def magnitude(x):
    """The bits of |x|, which order like the magnitudes, NaN and Inf on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def nearest(y):
    """Round to the nearest integer, halves to even, as int32."""
    below = tl.floor(y)
    rest = y - below  # exact
    whole = below.to(tl.int32)
    up = (rest > 0.5) | ((rest == 0.5) & ((whole & 1) != 0))
    return whole + up.to(tl.int32)


@triton.jit
def ruler(norm, levels: tl.constexpr):
    """(before, inverse): from floats to 16.16 fixed point levels, as wg_make_ruler explains."""
    before = tl.where((norm < 7.888609052210118e-31) & (norm > 0), 18446744073709551616.0, 1.0).to(tl.float32)
    divisor = tl.where(norm > 0, norm * before, 1.0)
    inverse = tl.div_rn(tl.full([], levels * 65536, tl.float32) + tl.zeros_like(divisor), divisor)
    lower = (inverse.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    return before, tl.where(norm > 0, lower, 0.0)


@triton.jit
def level(h, before, inverse, noise, levels: tl.constexpr, clamped: tl.constexpr):
    """The level index 0 .. 2*levels of each element."""
    y = h * before * inverse
    if clamped:
        limit = tl.full([], levels * 65536, tl.float32)
        y = tl.where(y > limit, limit, y)
        y = tl.where(y < -limit, -limit, y)
    return (nearest(y) + levels * 65536 + noise) >> 16


@triton.jit
def put(pointer, value, mask, mode: tl.constexpr):
    """Store, add (1) or subtract (-1)."""
    if mode == 0:
        tl.store(pointer, value, mask=mask)
    else:
        old = tl.load(pointer, mask=mask, other=0.0)
        tl.store(pointer, old + value if mode == 1 else old - value, mask=mask)
