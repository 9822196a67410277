"""One bit an element and two means a column, and plain sign bits: `csrc/columns.c` in Triton.

With error feedback: a first pass reads x, residual and, from the cache, the old means, and finds what is not finite; a
second reads the same from the cache, writes the residual and the signs; a third sums 32 lines at a time and writes two
sums and a count for each 32 elements of a column. From memory 8 bytes in and 4 + 1/8 + 12/32 out an element: 12.5, or
0.64 of the speed of a device copy (8). What is above the lines of the tree is a 32nd of the work, and torch does it
with the reference implementation's own functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightgrad.kernels import fixed
from weightgrad.kernels.gpu.scalar import BLOCK, magnitude, put

if TYPE_CHECKING:
    from weightgrad.kernels.columns import Grid

LANES = 128
"""Columns that a program sums: one for each thread of four warps."""


@triton.jit
def _mean_of(value, means, index, cols, tile, mask):
    """The mean that the sign of each value stands for."""
    row = index // cols
    place = (row // tile) * 2 * cols + index % cols
    negative = value.to(tl.int32, bitcast=True) < 0
    return tl.load(means + tl.where(negative, place + cols, place), mask=mask, other=0.0)


@triton.jit
def _h(x, residual, means, index, cols, tile, mask, feedback: tl.constexpr):
    h = tl.load(x + index, mask=mask, other=0.0)
    if feedback:
        old = tl.load(residual + index, mask=mask, other=0.0)
        h = (old - _mean_of(old, means, index, cols, tile, mask)) + h
    return h


@triton.jit
def _largest(x, residual, means, n, cols, tile, tops, feedback: tl.constexpr, block: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    index = number * block + tl.arange(0, block)
    mask = index < n
    h = _h(x, residual, means, index, cols, tile, mask, feedback)
    tl.store(tops + number, tl.max(tl.where(mask, magnitude(h), 0), 0))


@triton.jit
def _signs(x, residual, means, n, cols, tile, bits, feedback: tl.constexpr, block: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * (block // 8) + tl.arange(0, block // 8)
    index = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    mask = index < n
    h = _h(x, residual, means, index, cols, tile, mask, feedback)
    if feedback:
        tl.store(residual + index, h, mask=mask)
    negative = mask & (h.to(tl.int32, bitcast=True) < 0)
    packed = tl.sum(negative.to(tl.int32) << tl.arange(0, 8)[None, :], 1)
    tl.store(bits + byte, packed.to(tl.uint8), mask=byte * 8 < n)


@triton.jit
def _lines(h, start, stop, width, sums, counts, lines, lanes: tl.constexpr):
    """Sum 32 lines of a tile: positive and negative values apart, and how many are negative."""
    line = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * lanes + tl.arange(0, lanes)
    up, down = tl.zeros([lanes], tl.float32), tl.zeros([lanes], tl.float32)
    count = tl.zeros([lanes], tl.int32)
    for row in range(32):
        index = start + (line * 32 + row) * width + lane
        value = tl.load(h + index, mask=(lane < width) & (index < stop), other=0.0)
        up += tl.where(value > 0, value, 0.0)
        down += tl.where(value < 0, value, 0.0)
        count += (value.to(tl.int32, bitcast=True) < 0).to(tl.int32)
    mask = lane < width
    tl.store(sums + line * width + lane, up, mask=mask)
    tl.store(sums + (lines + line) * width + lane, down, mask=mask)
    tl.store(counts + line * width + lane, count, mask=mask)


def onebit(
    x: Tensor, residual: Tensor | None, old_means: Tensor | None, grid: Grid, bits: Tensor, means: Tensor
) -> bool:
    """Fill `bits` and `means`; see kernels.columns.onebit."""
    from weightgrad.kernels.columns import means_of, roll_back

    n = x.numel()
    if not n:
        return True
    feedback = residual is not None and old_means is not None
    given = (x, residual if feedback else x, old_means if feedback else x)
    blocks = (-(-n // BLOCK),)
    tops = torch.empty(blocks, dtype=torch.int32, device=x.device)
    options = {"feedback": feedback, "block": BLOCK, "enable_fp_fusion": False}
    _largest[blocks](*given, n, grid.cols, grid.tile, tops, **options)
    if int(tops.max()) >= fixed.INFINITY_BITS:
        roll_back(x, residual, old_means, grid, 0)
        return False
    _signs[blocks](*given, n, grid.cols, grid.tile, bits, **options)
    if residual is not None and not feedback:
        residual.copy_(x)
    h, width = x if residual is None else residual, 32 if grid.cols == 1 else grid.cols
    for tile in range(grid.tiles):
        start, height = tile * grid.tile * grid.cols, min(grid.tile, grid.rows - tile * grid.tile)
        stop = start + height * grid.cols
        lines = -(-(stop - start) // (32 * width))
        sums = torch.empty(2, lines, width, device=x.device, dtype=torch.float32)
        counts = torch.empty(lines, width, dtype=torch.int32, device=x.device)
        _lines[(lines, -(-width // LANES))](
            h, start, stop, width, sums, counts, lines, lanes=LANES, enable_fp_fusion=False
        )
        means[tile] = means_of(sums, counts.sum(0), height, grid)
    return True


def signs(x: Tensor, bits: Tensor) -> None:
    """Fill `bits` with the sign bits of x; see kernels.columns.signs."""
    n = x.numel()
    if n:
        _signs[(-(-n // BLOCK),)](x, x, x, n, n, n, bits, feedback=False, block=BLOCK, enable_fp_fusion=False)


@triton.jit
def _decode(bits, means, n, cols, tile, out, mode: tl.constexpr, block: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = index < n
    negative = (tl.load(bits + index // 8, mask=mask, other=0).to(tl.int32) >> (index % 8).to(tl.int32)) & 1
    place = (index // cols // tile) * 2 * cols + index % cols
    put(out + index, tl.load(means + place + negative * cols, mask=mask, other=0.0), mask, mode)


def onebit_decode(bits: Tensor, means: Tensor, grid: Grid, out: Tensor, mode: int) -> None:
    """Write the mean that each sign bit stands for; see kernels.columns.onebit_decode."""
    n = grid.rows * grid.cols
    if n:
        _decode[(-(-n // BLOCK),)](
            bits, means, n, grid.cols, grid.tile, out, mode=mode, block=BLOCK, enable_fp_fusion=False
        )
