"""Ternary values at 1.6 bits, five trits a byte: `csrc/ternary.c` in Triton.

A program makes 1,024 bytes of 5,120 elements, in five loads that are each contiguous over the threads: byte j of a
group of 160 holds the elements j, j + 32 .. j + 128. A thread loads 4 bytes at a time, since the last group is narrower
than the others. Bytes an element, with error feedback: x and residual in, residual and a fifth of a
byte out, 12.2, or 0.66 of the speed of a device copy (8). Decoding reads a fifth of a byte and writes 4: 1.9 of a copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightgrad.kernels import fixed
from weightgrad.kernels.gpu.scalar import halves, level, noise16, put

BYTES = 1024


@triton.jit
def _place(n, block: tl.constexpr):
    """Of each byte: its place in the stream, the element of its lowest trit, and the distance to the next."""
    byte = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    group, column = byte // 32, byte % 32
    left = n - group * 160
    width = tl.where(left >= 160, 32, (left + 4) // 5)
    return byte, group * 160 + column, width, (left > 0) & (column < width)


@triton.jit
def _ternary(x, residual, n, scale, before, inverse, low, high, codes, feedback: tl.constexpr, block: tl.constexpr):
    byte, lowest, width, there = _place(n, block)
    packed = tl.zeros([block], tl.int32)
    power = 1
    for k in tl.static_range(5):
        index = lowest + k * width
        mask = there & (index < n)
        h = tl.load(x + index, mask=mask, other=0.0)
        if feedback:
            h = h + tl.load(residual + index, mask=mask, other=0.0)
        cut = tl.where(h > scale, scale, h)
        cut = tl.where(cut < -scale, -scale, cut)
        code = tl.where(mask, level(cut, before, inverse, noise16(low, high, index), 1, False), 0)
        if feedback:
            tl.store(residual + index, h - (code - 1).to(tl.float32) * scale, mask=mask)
        packed += code * power
        power = power * 3
    tl.store(codes + byte, packed.to(tl.uint8), mask=there)


@triton.jit
def _threshold(w, n, threshold, codes, block: tl.constexpr):
    byte, lowest, width, there = _place(n, block)
    packed = tl.zeros([block], tl.int32)
    power = 1
    for k in tl.static_range(5):
        index = lowest + k * width
        mask = there & (index < n)
        value = tl.load(w + index, mask=mask, other=0.0)
        code = 1 + (value > threshold).to(tl.int32) - (value < -threshold).to(tl.int32)
        packed += tl.where(mask, code, 0) * power
        power = power * 3
    tl.store(codes + byte, packed.to(tl.uint8), mask=there)


@triton.jit
def _decode(codes, n, scale, out, mode: tl.constexpr, block: tl.constexpr):
    byte, lowest, width, there = _place(n, block)
    rest = tl.load(codes + byte, mask=there, other=0).to(tl.int32)
    for k in tl.static_range(5):
        index = lowest + k * width
        put(out + index, (rest % 3 - 1).to(tl.float32) * scale, there & (index < n), mode)
        rest = rest // 3


def _grid(n: int) -> tuple[int]:
    return (-(-n // (BYTES * 5)) + 1,)  # a short last group may begin a block of its own


def ternary(x: Tensor, residual: Tensor | None, scale: float, key: int, codes: Tensor) -> None:
    """Fill `codes` with stochastic ternary codes; see kernels.ternary.ternary."""
    n = x.numel()
    if not n:
        return
    rule = fixed.ruler(torch.full((1,), scale, dtype=torch.float32), 1)
    second = x if residual is None else residual
    low, high = halves(key)
    _ternary[_grid(n)](
        x, second, n, scale, float(rule.before), float(rule.inverse), low, high, codes,
        feedback=residual is not None, block=BYTES, enable_fp_fusion=False,
    )  # fmt: skip


def threshold_codes(w: Tensor, threshold: float, codes: Tensor) -> None:
    """Fill `codes` with sign(w) where |w| > threshold; see kernels.ternary.threshold_codes."""
    if w.numel():
        _threshold[_grid(w.numel())](w, w.numel(), threshold, codes, block=BYTES, enable_fp_fusion=False)


def ternary_decode(codes: Tensor, n: int, scale: float, out: Tensor, mode: int) -> None:
    """Write (trit - 1) * scale to `out`; see kernels.ternary.ternary_decode."""
    if n:
        _decode[_grid(n)](codes, n, scale, out, mode=mode, block=BYTES, enable_fp_fusion=False)
