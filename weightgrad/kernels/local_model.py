"""Where a local model is, in one pass over a piece of it.

    reference = weights + share * residual + sparse pushes in flight, one after the other

Either the local model becomes the reference, or its distance from it is computed, or at a push both: the distance goes
into the residual, and the local model becomes the reference that the new residual leads to. Every product and sum is
rounded by itself, in this order, so the floats are those of as many passes as there are terms.
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

STRETCH = 2048
"""Elements that are looked at before any of them is written: STRETCH of csrc/reference.c."""

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


def take_update(
    parts: Parts,
    weights: Tensor,
    residual: Tensor,
    share: float,
    before: Sequence[AddedEntries],
    after: Sequence[AddedEntries] | None,
) -> int | None:
    """Add the distance of the local model from its reference to the residual, and place the local model.

    Memory traffic: 12 bytes read and 8 written an element, where `distance`, a sum and `place` read 28 and write 12.

    Args:
        parts: the local model; overwritten if it is placed.
        weights: of the global model, flat and contiguous.
        residual: what has stayed behind, flat and contiguous; overwritten.
        share: of the residual in a reference; 0: it is in none.
        before: the entries of the reference from which the distance is taken.
        after: as many entries of the reference that the local model becomes; None: it stays.

    Returns:
        How many elements were taken: fewer than all if the new residual has a NaN or an Inf, which is in the next 2,048
        elements. None if a stream is bad, and then nothing was written.
    """
    lib = native.library_for(weights)
    if lib is not None and len(before) <= MOST_PUSHES:
        done = ctypes.c_uint64()
        areas, count = _areas(parts)
        lists = _entries(before), None if after is None else _entries(after)
        where = weights.data_ptr(), residual.data_ptr(), int(bool(share)), share, areas, count
        bad = lib.wg_take_update(*where, *lists, len(before), ctypes.byref(done))
        return None if bad else done.value
    shared = residual if share else None
    fresh = torch.empty_like(weights)
    if after is not None and not all(one.streams.good() for one in after):
        return None
    if not distance(parts, weights, shared, share, before, fresh):
        return None
    fresh += residual
    bad_places = (~torch.isfinite(fresh)).nonzero()
    done_elements = int(bad_places[0]) // STRETCH * STRETCH if bad_places.numel() else fresh.numel()
    residual[:done_elements] = fresh[:done_elements]
    if done_elements == fresh.numel() and after is not None:
        place(parts, weights, shared, share, after)
    return done_elements


def place_entries(
    parts: Parts, weights: Tensor, residual: Tensor | None, share: float, entries: Sequence[AddedEntries]
) -> bool:
    """Make the local model the reference where the last of the entries are; see `place`.

    Everywhere else it is the reference without these last entries, which are not added there.
    """
    lib = native.library_for(weights)
    if lib is not None and len(entries) <= MOST_PUSHES:
        where = weights.data_ptr(), native.pointer(residual), share
        return not lib.wg_place_entries(*where, *_areas(parts), _entries(entries), len(entries))
    return place(parts, weights, residual, share, entries)


def _areas(parts: Parts) -> tuple[ctypes.Array[native.Area], int]:
    ends = [native.Area(first, first + own.numel(), own.data_ptr()) for first, own in parts]
    return (native.Area * len(ends))(*ends), len(ends)


def _entries(entries: Sequence[AddedEntries]) -> ctypes.Array[native.Entries]:
    return (native.Entries * len(entries))(*(one.as_native() for one in entries))


def _call(
    lib: ctypes.CDLL,
    parts: Parts,
    weights: Tensor,
    residual: Tensor | None,
    share: float,
    entries: Sequence[AddedEntries],
    out: Tensor | None,
) -> int:
    where = weights.data_ptr(), native.pointer(residual), share, *_areas(parts)
    return int(lib.wg_local_model(*where, _entries(entries), len(entries), native.pointer(out)))
