"""One bit an element and two means a column (Seide's one-bit SGD), and plain sign bits.

A tensor is rows x cols, cut into tiles of at most MAX_TILE rows. For each tile and column,
the mean of the values whose sign bit is clear and of those whose sign bit is set; bit i of
the stream is the sign of element i, row by row.

Error feedback is lazy so that one pass over memory is enough: `held` keeps h and the error,
h - mean, is worked out at the next call from `old_means`. csrc/columns.c draws the sum tree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weightgrad.kernels import fixed, native, threads
from weightgrad.kernels.bits import pack_twin, unpack_twin

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


def onebit(
    x: Tensor, held: Tensor | None, old_means: Tensor | None, grid: Grid, bits: Tensor, means: Tensor
) -> bool:
    """Fill `bits` and `means` (tiles, 2, cols).

    False when there is a NaN or Inf: then `held` has become the error of the last call, up to
    rounding, and `old_means` is zero.
    """
    lib = native.library_for(x)
    if lib is None:
        return _onebit_twin(x, held, old_means, grid, bits, means)
    scratch = torch.empty(7 * max(grid.cols, 32), dtype=torch.float32)
    good: int = lib.wg_onebit(
        x.data_ptr(),
        native.pointer(held),
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
    """out (mode)= the mean each element's sign bit stands for."""
    lib = native.library_for(out)
    if lib is not None:
        lib.wg_onebit_decode(
            bits.data_ptr(), means.data_ptr(), grid.rows, grid.cols, grid.tile, mode, out.data_ptr()
        )
        return
    for tile, start, height in _tiles(grid):
        step = max(1, fixed.CHUNK // grid.cols)
        step = -(-step // 8) * 8  # whole bytes
        for row in range(start, start + height, step):
            stop = min(start + height, row + step)
            first, last = row * grid.cols, stop * grid.cols
            signs = unpack_twin(bits[first // 8 : -(-last // 8)], last - first // 8 * 8, 1)[first % 8 :]
            value = torch.where(signs.view(-1, grid.cols) != 0, means[tile, 1], means[tile, 0])
            fixed.put(out[first:last], value.view(-1), mode)


def signs(x: Tensor, bits: Tensor) -> None:
    """Fill `bits` with the sign bits of x."""
    lib = native.library_for(x)
    if lib is None:
        for start in range(0, x.numel(), fixed.CHUNK):
            piece = torch.signbit(x[start : start + fixed.CHUNK]).to(torch.uint8)
            packed = pack_twin(piece, 1)
            bits[start // 8 : start // 8 + packed.numel()] = packed
        return

    def work(start: int, stop: int) -> None:
        lib.wg_signs(x.data_ptr() + 4 * start, stop - start, bits.data_ptr() + start // 8)

    threads.run_split(x.numel(), 32, work)


def lost(held: Tensor, means: Tensor, grid: Grid) -> Tensor:
    """held - mean of its sign: the error that `held` stands for, in a new tensor."""
    out = torch.empty_like(held)
    for tile, start, height in _tiles(grid):
        part = slice(start * grid.cols, (start + height) * grid.cols)
        h = held[part].view(-1, grid.cols)
        out[part] = (h - torch.where(torch.signbit(h), means[tile, 1], means[tile, 0])).view(-1)
    return out


def _tiles(grid: Grid) -> list[tuple[int, int, int]]:
    return [(t, t * grid.tile, min(grid.tile, grid.rows - t * grid.tile)) for t in range(grid.tiles)]


def _tree_sum(lines: Tensor) -> Tensor:
    """Column sums of (..., lines, width) by the tree of fan-in 32, three levels."""
    for _ in range(3):
        missing = -lines.shape[-2] % _TREE
        if missing:
            lines = torch.cat((lines, lines.new_zeros(*lines.shape[:-2], missing, lines.shape[-1])), dim=-2)
        lines = fixed.add_rows(lines.unflatten(-2, (-1, _TREE)))
    return lines[..., 0, :]


def _tile_means(h: Tensor) -> Tensor:
    """Means (2, cols) of a (rows, cols) tile by sign."""
    rows, cols = h.shape
    negative = torch.signbit(h)
    count = negative.sum(0)
    zero = torch.zeros((), dtype=h.dtype, device=h.device)
    sums = []
    for part in (torch.where(negative, zero, h), torch.where(negative, h, zero)):
        if cols == 1:
            lanes = _tree_sum(fixed.padded(part.view(-1), 32).view(-1, 32))
            sums.append(fixed.fold_lanes(lanes).view(1))
        else:
            sums.append(_tree_sum(part))
    counts = torch.stack((rows - count, count)).clamp(min=1)
    return torch.stack(sums) / counts.to(torch.float32)


def _onebit_twin(
    x: Tensor, held: Tensor | None, old_means: Tensor | None, grid: Grid, bits: Tensor, means: Tensor
) -> bool:
    h = x
    if held is not None and old_means is not None:
        error = lost(held, old_means, grid)
        h = x + error
        if not bool(torch.isfinite(h).all()):
            held.copy_(error)
            old_means.zero_()
            return False
        held.copy_(h)
    elif not bool(torch.isfinite(h).all()):
        return False
    for tile, start, height in _tiles(grid):
        means[tile] = _tile_means(h[start * grid.cols : (start + height) * grid.cols].view(-1, grid.cols))
    signs(h, bits)
    return True
