"""One bit an element and two means a column (Seide's one-bit SGD), and plain sign bits.

A tensor is rows x cols, cut into tiles of at most MAX_TILE rows. For each tile and column,
the mean of the values whose sign bit is clear and of those whose sign bit is set; bit i of
the stream is the sign of element i, row by row.

Error feedback is lazy so that one pass over memory is enough: `residual` keeps h, and the error,
h - mean, is worked out at the next call from `old_means`. csrc/columns.c draws the sum tree.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from weightgrad.kernels import fixed, gpu, native, threads
from weightgrad.kernels.bits import pack_reference, unpack_reference

MAX_TILE = 32768  # 32^3: three levels of the tree
_TREE = 32


class Grid(NamedTuple):
    """A tensor seen as a matrix in tiles."""

    rows: int
    cols: int
    tile: int

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return -(-self.rows // self.tile)


def matrix_grid(shape: tuple[int, ...]) -> Grid:
    """How a tensor is seen as a matrix: matrices as they are, filters as out x rest, anything else as one column.

    A single column is cut into tiles of 32,768 too, so a flat bucket of many parameters has a pair of means for
    each of its pieces.
    """
    n = math.prod(shape)
    if len(shape) >= 2 and shape[0] and n:
        rows, cols = shape[0], n // shape[0]
        return Grid(rows, cols, min(MAX_TILE, rows)) if cols > 1 else Grid(n, 1, MAX_TILE)
    return Grid(n, 1, MAX_TILE)


def onebit(
    x: Tensor, residual: Tensor | None, old_means: Tensor | None, grid: Grid, bits: Tensor, means: Tensor
) -> bool:
    """Fill `bits` and `means` (tiles, 2, cols).

    False when there is a NaN or Inf: then `residual` has become the error of the last call, up to
    rounding, and `old_means` is zero.
    """
    lib = native.library_for(x)
    if (kernels := gpu.kernels_for(x, "columns")) is not None:
        return bool(kernels.onebit(x, residual, old_means, grid, bits, means))
    if lib is None:
        return _onebit_reference(x, residual, old_means, grid, bits, means)
    scratch = torch.empty(7 * max(grid.cols, 32), dtype=torch.float32)
    good: int = lib.wg_onebit(
        x.data_ptr(),
        native.pointer(residual),
        native.pointer(old_means),
        grid.rows,
        grid.cols,
        grid.tile,
        bits.data_ptr(),
        means.data_ptr(),
        scratch.data_ptr(),
    )
    return bool(good)


def onebit_decode(bits: Tensor, means: Tensor, grid: Grid, out: Tensor, mode: int = fixed.STORE) -> None:
    """Write to `out`, as `mode` says, the mean that each element's sign bit stands for."""
    lib = native.library_for(out)
    if (kernels := gpu.kernels_for(out, "columns")) is not None:
        kernels.onebit_decode(bits, means, grid, out, mode)
        return
    if lib is not None:
        lib.wg_onebit_decode(bits.data_ptr(), means.data_ptr(), grid.rows, grid.cols, grid.tile, mode, out.data_ptr())
        return
    for tile, start, height in _tiles(grid):
        step = max(1, fixed.CHUNK // grid.cols)
        step = -(-step // 8) * 8  # whole bytes
        for row in range(start, start + height, step):
            stop = min(start + height, row + step)
            first, last = row * grid.cols, stop * grid.cols
            signs = unpack_reference(bits[first // 8 : -(-last // 8)], last - first // 8 * 8, 1)[first % 8 :]
            value = torch.where(signs.view(-1, grid.cols) != 0, means[tile, 1], means[tile, 0])
            fixed.put(out[first:last], value.view(-1), mode)


def signs(x: Tensor, bits: Tensor) -> None:
    """Fill `bits` with the sign bits of x."""
    lib = native.library_for(x)
    if (kernels := gpu.kernels_for(x, "columns")) is not None:
        kernels.signs(x, bits)
        return
    if lib is None:
        for start in range(0, x.numel(), fixed.CHUNK):
            packed = pack_reference(_sign_codes(x[start : start + fixed.CHUNK]), 1)
            bits[start // 8 : start // 8 + packed.numel()] = packed
        return

    def work(start: int, stop: int) -> None:
        lib.wg_signs(x.data_ptr() + 4 * start, stop - start, bits.data_ptr() + start // 8)

    threads.run_split(x.numel(), 32, work)


def lost(residual: Tensor, means: Tensor, grid: Grid) -> Tensor:
    """Work out residual - mean of its sign, the error that `residual` and `means` stand for, in a new tensor."""
    out = torch.empty_like(residual)
    for tile, start, height in _tiles(grid):
        part = slice(start * grid.cols, (start + height) * grid.cols)
        out[part] = _lost_part(residual, means, grid, tile, part)
    return out


def _tiles(grid: Grid) -> list[tuple[int, int, int]]:
    return [(t, t * grid.tile, min(grid.tile, grid.rows - t * grid.tile)) for t in range(grid.tiles)]


def _up(lines: Tensor) -> Tensor:
    """One level of the tree: sums of 32 lines each, over the second to last dimension."""
    missing = -lines.shape[-2] % _TREE
    if missing:
        lines = torch.cat((lines, lines.new_zeros(*lines.shape[:-2], missing, lines.shape[-1])), dim=-2)
    return fixed.add_rows(lines.unflatten(-2, (-1, _TREE)))


def _onebit_reference(
    x: Tensor, residual: Tensor | None, old_means: Tensor | None, grid: Grid, bits: Tensor, means: Tensor
) -> bool:
    """Chunks of whole lines, so that the first level of the tree is done in the cache."""
    width = 32 if grid.cols == 1 else grid.cols
    step = max(1, fixed.CHUNK // (_TREE * width)) * _TREE * width
    for tile, first, height in _tiles(grid):
        start, stop = first * grid.cols, (first + height) * grid.cols
        levels, negatives = [], torch.zeros(width, dtype=torch.int64, device=x.device)
        for at in range(start, stop, step):
            part = slice(at, min(stop, at + step))
            h = x[part]
            if residual is not None and old_means is not None:
                h = _lost_part(residual, old_means, grid, tile, part).add_(h)
            if fixed.largest_bits(h) >= fixed.INFINITY_BITS:
                roll_back(x, residual, old_means, grid, at)
                return False
            if residual is not None:
                residual[part] = h
            lines = fixed.padded(h, width).view(-1, width)
            minus = fixed.scratch("minus", lines).copy_(_signs(lines))  # -1 where negative
            negatives -= minus.sum(0).to(torch.int64)  # exact: small counts
            packed = pack_reference(_sign_codes(h), 1)
            bits[at // 8 : at // 8 + packed.numel()] = packed
            both = fixed.scratch("both", lines.expand(2, *lines.shape))
            torch.clamp(lines, min=0.0, out=both[0])
            torch.clamp(lines, max=0.0, out=both[1])
            levels.append(_up(both))
        means[tile] = means_of(torch.cat(levels, dim=1), negatives, height, grid)
    return True


def means_of(lines: Tensor, negatives: Tensor, height: int, grid: Grid) -> Tensor:
    """The means (2, cols) of a tile, from the sums of 32 lines each (2, lines, width) and the count of negatives."""
    sums = _up(_up(lines))[:, 0]
    if grid.cols == 1:
        sums, negatives = fixed.fold_lanes(sums)[:, None], negatives.sum()[None]
    counts = torch.stack((height - negatives, negatives)).clamp(min=1)
    top = torch.finfo(torch.float32).max  # a sum may overflow
    return (sums / counts.to(torch.float32)).clamp(-top, top)


def roll_back(x: Tensor, residual: Tensor | None, old_means: Tensor | None, grid: Grid, done: int) -> None:
    """Undo the first `done` elements of a call that met a NaN or Inf: `residual` becomes the error, means are zero."""
    if residual is None or old_means is None:
        return
    rest = lost(residual, old_means, grid)[done:]
    residual[:done] -= x[:done]
    residual[done:] = rest
    old_means.zero_()


def _sign_codes(x: Tensor) -> Tensor:
    """1 where the sign bit is set, else 0: bytes in scratch memory."""
    return fixed.compared(x.view(torch.int32), "<", 0, "sign").view(torch.uint8)


def _signs(x: Tensor) -> Tensor:
    """-1 (all ones) where the sign bit is set, else 0: int32 in scratch memory."""
    return torch.bitwise_right_shift(x.view(torch.int32), 31, out=fixed.scratch("signs", x, torch.int32))


def _lost_part(residual: Tensor, means: Tensor, grid: Grid, tile: int, part: slice) -> Tensor:
    """residual - mean of its sign, in scratch memory. The choice is made on bits: faster than torch.where."""
    h = residual[part].view(-1, grid.cols)
    positive, negative = means[tile].view(torch.int32)
    mean = _signs(h).bitwise_and_(positive ^ negative).bitwise_xor_(positive).view(torch.float32)
    return torch.sub(h, mean, out=fixed.scratch("mean", h)).view(-1)
