"""Columns of kept entries (Dryden's adaptive quantization).

A slot is a tile and a column. Entries come in row-major order and leave sorted by slot, rows
ascending: fifteen bits of row within the tile, one of sign. For each slot, its count and the
mean of its positive and of its negative entries. Sums are integers, value * factor rounded, so
that any order gives the same mean.
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from weightgrad.kernels import fixed, native
from weightgrad.kernels.columns import Grid
from weightgrad.kernels.moments import largest_bits
from weightgrad.kernels.select import MAX_SCRATCH

_scratch = threading.local()


class Columns(NamedTuple):
    """Kept entries by slot, valid until the thread's next call."""

    counts: Tensor  # (slots,) int32
    means: Tensor  # (slots, 2) float32
    entries: Tensor  # (k,) int16: row | sign << 15


def exact_factor(largest: float) -> float:
    """Return the power of two that brings the largest value to about 2**40: 2**15 of them fit in 2**55."""
    return 1.0 if largest == 0.0 else math.ldexp(1.0, 40 - math.frexp(largest)[1])


def columns_of(indices: Tensor, values: Tensor, grid: Grid, residual: Tensor | None) -> Columns:
    """Sort entries into columns; with `residual`, residual[index] = value - mean."""
    k, slots = indices.numel(), grid.tiles * grid.cols
    factor = exact_factor(fixed.float_of_bits(largest_bits(values)))
    lib = native.library_for(values)
    if lib is None:
        return _columns_reference(indices, values, grid, residual, factor)
    capacity = 2 * k // max(1, slots) + 32
    need = k + slots * capacity
    if need > MAX_SCRATCH:
        room = torch.empty(need, dtype=torch.int16)
    else:
        if getattr(_scratch, "room", -1) < need:
            _scratch.room, _scratch.entries = need, torch.empty(need, dtype=torch.int16)
        room = _scratch.entries
    entries, shelf = room[:k], room[k:need]
    counts = torch.empty(slots, dtype=torch.int16)
    means = torch.empty(slots, 2, dtype=torch.float32)
    sums = torch.empty(2 * slots, dtype=torch.int64)
    tallies = torch.empty(slots, dtype=torch.int32)
    lib.wg_columns_of(
        indices.data_ptr(),
        values.data_ptr(),
        k,
        grid.cols,
        grid.tile,
        slots,
        factor,
        counts.data_ptr(),
        means.data_ptr(),
        entries.data_ptr(),
        sums.data_ptr(),
        tallies.data_ptr(),
        shelf.data_ptr(),
        capacity,
        native.pointer(residual),
    )
    return Columns(counts.to(torch.int32) & 0xFFFF, means, entries)


def entries_of(columns: Columns, grid: Grid) -> tuple[Tensor, Tensor] | None:
    """Return (indices, values) in slot order; None when an entry lies outside its tile or rows do not ascend."""
    k = columns.entries.numel()
    lib = native.library_for(columns.entries)
    if lib is None:
        return _entries_reference(columns, grid)
    counts = columns.counts.to(torch.int16)
    indices = torch.empty(k, dtype=torch.int64)
    values = torch.empty(k, dtype=torch.float32)
    bad = lib.wg_entries_of(
        counts.data_ptr(),
        columns.means.data_ptr(),
        columns.entries.data_ptr(),
        grid.rows,
        grid.cols,
        grid.tile,
        counts.numel(),
        indices.data_ptr(),
        values.data_ptr(),
    )
    return None if bad else (indices, values)


def _columns_reference(indices: Tensor, values: Tensor, grid: Grid, residual: Tensor | None, factor: float) -> Columns:
    slots = grid.tiles * grid.cols
    row = indices // grid.cols
    slot = (row * -grid.cols).add_(indices)  # the column: a second division would cost more
    if grid.tiles > 1:
        tile = row // grid.tile
        slot.add_(tile, alpha=grid.cols)
        row.sub_(tile, alpha=grid.tile)
    sign = torch.signbit(values).to(torch.int64)
    whole = values.double().mul_(factor).round_().to(torch.int64)
    half = (2 * slot).add_(sign)
    sums = torch.zeros(2 * slots, dtype=torch.int64, device=values.device).index_add_(0, half, whole)
    both = torch.bincount(half, minlength=2 * slots)
    means = (sums.double() / both.clamp(min=1).double() / factor).float()
    order = torch.argsort(slot, stable=True)
    code = row.add_(sign, alpha=1 << 15)
    if residual is not None:
        residual[indices] = values - means[half]
    counts = both.view(-1, 2).sum(1).to(torch.int32)
    return Columns(counts, means.view(-1, 2), code[order].to(torch.int16))


def _entries_reference(columns: Columns, grid: Grid) -> tuple[Tensor, Tensor] | None:
    counts = columns.counts.to(torch.int64)
    slot = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    code = columns.entries.to(torch.int64) & 0xFFFF
    row, sign = code & 0x7FFF, code >> 15
    first = slot // grid.cols * grid.tile
    ascending = row[1:] > row[:-1]
    if not bool((ascending | (slot[1:] != slot[:-1])).all()):
        return None
    if not bool((first + row < torch.clamp(first + grid.tile, max=grid.rows)).all()):
        return None
    return (first + row) * grid.cols + slot % grid.cols, columns.means.view(-1)[2 * slot + sign]
