"""Where a local model is, in one pass over a piece of it.

    reference = weights + share * residual + sparse pushes in flight, one after the other

Either the local model becomes the reference, or its distance from it is computed. Every product and sum is rounded by
itself, in this order, so the floats are those of as many passes as there are terms.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.kernels import dense, fixed, native
from weightgrad.kernels.gaps import GapStreams, Signs, entry_values

MOST_PUSHES = 16
"""So many lists of entries, at most: PUSHES of csrc/reference.c."""

Parts = Sequence[tuple[int, Tensor]]
"""The memory of a local model: contiguous float32 tensors that follow each other, each with its first element."""


@dataclass(frozen=True)
class AddedEntries:
    """Sparse entries that are part of the reference.

    Attributes:
        streams: their places.
        values: their values, float32 or signs.
        first: the element from which on places count.
        share: what each value is multiplied by.
    """

    streams: GapStreams
    values: Tensor | Signs
    first: int
    share: float

    def add(self, out: Tensor) -> bool:
        """Add them to a tensor; returns False if the streams are bad, and then nothing was written."""
        here = out[self.first : self.first + self.streams.numel]
        return self.streams.scatter(self.values, [(0, here)], fixed.ADD, self.share)

    def as_native(self) -> native.Entries:
        """As C takes them."""
        return native.Entries(self.streams.as_native(), entry_values(self.values, self.share), self.first)


def place(
    parts: Parts, weights: Tensor, residual: Tensor | None, share: float, entries: Sequence[AddedEntries]
) -> bool:
    """Make the local model the reference.

    Args:
        parts: the local model, which is overwritten.
        weights: of the global model, flat and contiguous.
        residual: what has stayed behind; None: nothing.
        share: of the residual.
        entries: what is added, in this order.

    Returns:
        Whether all streams are good; otherwise nothing was written.
    """
    lib = native.library_for(weights)
    if lib is not None and len(entries) <= MOST_PUSHES:
        return not _call(lib, parts, weights, residual, share, entries, None)
    whole = dense.reference(weights, residual, share, torch.empty_like(weights))
    if not all(one.add(whole) for one in entries):
        return False
    for first, own in parts:
        own.copy_(whole[first : first + own.numel()])
    return True


def distance(
    parts: Parts, weights: Tensor, residual: Tensor | None, share: float, entries: Sequence[AddedEntries], out: Tensor
) -> bool:
    """Write local model - reference to `out`, which has memory of its own; see `place`."""
    lib = native.library_for(weights)
    if lib is not None and len(entries) <= MOST_PUSHES:
        return not _call(lib, parts, weights, residual, share, entries, out)
    dense.reference(weights, residual, share, out)
    if not all(one.add(out) for one in entries):
        return False
    for first, own in parts:
        here = out[first : first + own.numel()]
        torch.sub(own, here, out=here)
    return True


def _call(
    lib: ctypes.CDLL,
    parts: Parts,
    weights: Tensor,
    residual: Tensor | None,
    share: float,
    entries: Sequence[AddedEntries],
    out: Tensor | None,
) -> int:
    areas = (native.Area * len(parts))(
        *(native.Area(first, first + own.numel(), own.data_ptr()) for first, own in parts)
    )
    added = (native.Entries * len(entries))(*(one.as_native() for one in entries))
    where = weights.data_ptr(), native.pointer(residual), share
    return int(lib.wg_local_model(*where, areas, len(parts), added, len(entries), native.pointer(out)))
