"""Sums of h, h*h and |h| and the largest |h| of a tensor, exactly repeatable.

Partial sums in double for each block of 4,096 elements by a fixed tree, then `math.fsum`, which
rounds once whatever the order: threads, chunks and devices agree.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from weightgrad.kernels import fixed, native, threads

BLOCK = 4096


class Moments(NamedTuple):
    """What a pass over a tensor of n elements finds; not finite if the tensor is not."""

    n: int
    sum: float
    squares: float
    absolute: float
    largest: float

    @property
    def sigma(self) -> float:
        """Standard deviation around the mean."""
        if self.n == 0:
            return 0.0
        mean = self.sum / self.n
        return math.sqrt(max(0.0, self.squares / self.n - mean * mean))

    @property
    def finite(self) -> bool:
        """Whether every element is finite."""
        return math.isfinite(self.largest)


def moments(x: Tensor, residual: Tensor | None = None, *, absolute: bool = False) -> Moments:
    """Find the moments of x, or of x + residual.

    Args:
        x: Flat float32.
        residual: Flat float32 of the same size, or None.
        absolute: Whether to sum |h| too; it is NaN otherwise.
    """
    n = x.numel()
    partials = torch.zeros(-(-n // BLOCK), 3, dtype=torch.float64)
    lib = native.library_for(x)
    if lib is None:
        top = _moments_reference(x, residual, partials, absolute)
    else:

        def work(start: int, stop: int) -> int:
            add = None if residual is None else residual.data_ptr() + 4 * start
            at = partials.data_ptr() + start // BLOCK * 24
            result: int = lib.wg_moments(x.data_ptr() + 4 * start, add, stop - start, int(absolute), at)
            return result

        top = max(threads.run_split(n, BLOCK, work))
    if top >= fixed.INFINITY_BITS:
        return Moments(n, math.nan, math.nan, math.nan, math.inf)
    sums = [math.fsum(column) for column in partials.t()[: 3 if absolute else 2].tolist()]
    return Moments(n, sums[0], sums[1], sums[2] if absolute else math.nan, fixed.float_of_bits(top))


def largest_bits(x: Tensor) -> int:
    """Return the bits of the largest |x| of a flat float32 tensor: INFINITY_BITS or more when it is not finite."""
    lib = native.library_for(x)
    if lib is not None:
        return max(
            threads.run_split(
                x.numel(), BLOCK, lambda start, stop: int(lib.wg_largest(x.data_ptr() + 4 * start, stop - start))
            )
        )
    pieces = x.split(fixed.CHUNK) if x.numel() else ()
    return max((fixed.largest_bits(piece) for piece in pieces), default=0)


def _moments_reference(x: Tensor, residual: Tensor | None, partials: Tensor, absolute: bool) -> int:
    top = 0
    for start in range(0, x.numel(), fixed.CHUNK):
        h = x[start : start + fixed.CHUNK]
        if residual is not None:
            h = torch.add(h, residual[start : start + fixed.CHUNK], out=fixed.scratch("sum", h))
        top = max(top, fixed.largest_bits(h))
        h = fixed.padded(h, BLOCK)
        wide = fixed.scratch("wide", h, torch.float64).copy_(h)
        parts = [fixed.block_sums(wide, BLOCK), *([fixed.block_sums(wide.abs(), BLOCK)] if absolute else [])]
        parts.insert(1, fixed.block_sums(wide.mul_(wide), BLOCK))
        sums = torch.stack(parts)
        first = start // BLOCK
        partials[first : first + sums.shape[1], : len(parts)] = sums.t().cpu()
    return top
