"""Selection of the largest entries, fused with residual and momentum, and decode-and-add: `csrc/select.c` in Triton.

The first pass counts what passes the thresholds in each block of 1,024 elements and finds what is not finite; it writes
12 bytes a block. A prefix sum of the counts says where each block lists its entries; the second pass advances the
residual, lists, and clears. The list is in order, as the packed positions need it, whatever order programs run in.

Bytes an element: x and residual in, and again from the cache, residual out: 12 from memory, 0.67 of the speed of a
device copy (8); with momentum 20. What is listed, 12 bytes an entry, is 1 % of that at `topk(0.01)`. `scatter` reads 12
and writes 4 bytes an entry, at places that are far apart: 32 bytes move for each.
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
    from weightgrad.kernels.select import Selected, Thresholds


@triton.jit
def _advance(x, residual, velocity, momentum, index, mask, adds: tl.constexpr, moves: tl.constexpr):
    """(h, velocity) of some elements."""
    h = tl.load(residual + index, mask=mask, other=0.0)
    speed = h
    if adds:
        speed = tl.load(x + index, mask=mask, other=0.0)
        if moves:
            speed = momentum * tl.load(velocity + index, mask=mask, other=0.0) + speed
        h = h + speed
    return h, speed


@triton.jit
def _count(
    x, residual, velocity, momentum, n, above, below, counts, tops,
    adds: tl.constexpr, moves: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    index = number * block + tl.arange(0, block)
    mask = index < n
    h, _ = _advance(x, residual, velocity, momentum, index, mask, adds, moves)
    kept = mask & ((h >= above) | (h <= below))
    tl.store(counts + number, tl.sum(kept.to(tl.int64), 0))
    tl.store(tops + number, tl.max(tl.where(mask, magnitude(h), 0), 0))


@triton.jit
def _list(
    x, residual, velocity, momentum, n, above, below, ends, room, indices, values,
    adds: tl.constexpr, moves: tl.constexpr, clears: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    index = number * block + tl.arange(0, block)
    mask = index < n
    h, speed = _advance(x, residual, velocity, momentum, index, mask, adds, moves)
    kept = mask & ((h >= above) | (h <= below))
    ranks = tl.cumsum(kept.to(tl.int64), 0)
    place = tl.load(ends + number) - tl.sum(kept.to(tl.int64), 0) + ranks - 1
    listed = kept & (place < room)
    tl.store(indices + place, index, mask=listed)
    tl.store(values + place, h, mask=listed)
    if adds:
        if moves:
            tl.store(velocity + index, speed, mask=mask)
        tl.store(residual + index, tl.where(listed, 0.0, h) if clears else h, mask=mask)
    elif clears:
        tl.store(residual + index, tl.zeros_like(h), mask=listed)


def scan(
    x: Tensor | None,
    residual: Tensor,
    velocity: Tensor | None,
    momentum: float,
    thresholds: Thresholds,
    room: int,
    clear: bool,
) -> Selected:
    """Advance the residual and list what lies beyond the thresholds; see kernels.select.scan."""
    from weightgrad.kernels.select import Selected

    n, device = residual.numel(), residual.device
    blocks = -(-n // BLOCK)
    if not blocks:
        return Selected(torch.empty(0, dtype=torch.int64, device=device), residual[:0], 0, 0)
    counts = torch.empty(blocks, dtype=torch.int64, device=device)
    tops = torch.empty(blocks, dtype=torch.int32, device=device)
    first, second = residual if x is None else x, residual if velocity is None else velocity
    moves = {"adds": x is not None, "moves": x is not None and velocity is not None, "block": BLOCK}
    _count[(blocks,)](
        first, residual, second, momentum, n, thresholds.above, thresholds.below, counts, tops,
        **moves, enable_fp_fusion=False,
    )  # fmt: skip
    ends = torch.cumsum(counts, 0)
    bad = tops >= fixed.INFINITY_BITS
    total, broken, place = torch.stack((ends[-1], bad.any().long(), bad.int().argmax())).cpu().tolist()
    done = n
    if broken:
        blocks, done = place, place * BLOCK
        total = int(ends[blocks - 1]) if blocks else 0
    listed = min(total, room)
    indices = torch.empty(listed, dtype=torch.int64, device=device)
    values = torch.empty(listed, dtype=torch.float32, device=device)
    if blocks:
        _list[(blocks,)](
            first, residual, second, momentum, done, thresholds.above, thresholds.below, ends, room, indices, values,
            **moves, clears=clear, enable_fp_fusion=False,
        )  # fmt: skip
    return Selected(indices, values, total, done)


@triton.jit
def _scatter(indices, values, k, out, zeros: tl.constexpr, mode: tl.constexpr, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = place < k
    index = tl.load(indices + place, mask=mask, other=0)
    if zeros:
        tl.store(out + index, tl.zeros([block], tl.float32), mask=mask)
    else:
        put(out + index, tl.load(values + place, mask=mask, other=0.0), mask, mode)


def scatter(indices: Tensor, values: Tensor | None, out: Tensor, mode: int) -> None:
    """Write values to out[indices]; see kernels.select.scatter."""
    k = indices.numel()
    if k:
        given = out if values is None else values
        _scatter[(-(-k // BLOCK),)](
            indices, given, k, out, zeros=values is None, mode=mode, block=BLOCK, enable_fp_fusion=False
        )
