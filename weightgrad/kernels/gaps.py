"""Sorted indices from the two streams that `bits.pack_gaps` writes: check them, list them, or write values to them.

Streams come from the network, so every function checks them first. That costs little beside the indices: gaps are not
negative, so the sum of all says whether the last index is in range.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.kernels import native, select
from weightgrad.kernels.bits import GapCode, gaps_between, unpack_reference


@dataclass(frozen=True)
class Signs:
    """Values that are all of one size: their sign bits, set where a value is negative."""

    bits: Tensor
    size: float

    def values(self, count: int) -> Tensor:
        """All of them as float32."""
        size = torch.full((), self.size, dtype=torch.float32, device=self.bits.device)
        return torch.where(unpack_reference(self.bits, count, 1) != 0, -size, size)


@dataclass(frozen=True)
class GapStreams:
    """The low bits and the unary parts of `count` gaps between indices below `numel`."""

    low: Tensor
    unary: Tensor
    count: int
    code: GapCode
    numel: int

    def as_native(self) -> native.GapStreams:
        """As C takes them."""
        low, unary = self.low.data_ptr(), self.unary.data_ptr()
        counts = self.unary.numel(), self.count, self.numel
        return native.GapStreams(low, unary, *counts, self.code.width, self.code.rice)

    def good(self) -> bool:
        """Whether they hold exactly `count` ascending indices below `numel`, and nothing else."""
        lib = native.library_for(self.low)
        if lib is None:
            return _unpack_reference(self) is not None
        return not lib.wg_check_gaps(ctypes.byref(self.as_native()))

    def indices(self) -> Tensor | None:
        """The indices, int64; None if the streams are not good."""
        lib = native.library_for(self.low)
        if lib is None:
            return _unpack_reference(self)
        indices = torch.empty(self.count, dtype=torch.int64)
        bad = lib.wg_unpack_gaps(ctypes.byref(self.as_native()), indices.data_ptr())
        return None if bad else indices

    def scatter(
        self, values: Tensor | Signs, areas: Sequence[tuple[int, Tensor]], mode: int, share: float = 1.0
    ) -> bool:
        """Write share * value to the place of each index, as `mode` says; the indices are not listed.

        Args:
            values: Float32, one for each index.
            areas: Flat contiguous float32 tensors, each with the index of its first element, ascending; an index that
                none of them has is left out. All are on the device of the streams, or there is only one.
            mode: `fixed.STORE`, `ADD` or `SUBTRACT`.
            share: What each value is multiplied by.

        Returns:
            Whether the streams are good; otherwise nothing was written.
        """
        lib = native.library_for(self.low)
        if lib is not None and all(out.device == self.low.device for _, out in areas):
            ends = [(first, first + out.numel(), out.data_ptr()) for first, out in areas]
            room = (native.Area * len(ends))(*(native.Area(*end) for end in ends))
            streams, what = self.as_native(), entry_values(values, share)
            return not lib.wg_scatter_gaps(ctypes.byref(streams), ctypes.byref(what), mode, room, len(ends))
        indices = self.indices()
        if indices is None:
            return False
        flat = values.values(self.count) if isinstance(values, Signs) else values
        flat = flat if share == 1 else flat * share
        for first, out in areas:
            here = self._within(indices, first, first + out.numel())
            select.scatter(indices[here], flat[here], out, mode, first=first)
        return True

    def _within(self, indices: Tensor, first: int, end: int) -> slice:
        """Which of the indices are from `first` to below `end`; asks a device only if it must."""
        if first == 0 and end >= self.numel:
            return slice(self.count)
        edges = torch.tensor([first, end]).to(indices.device)
        return slice(*torch.searchsorted(indices, edges).cpu().tolist())


def entry_values(values: Tensor | Signs, share: float) -> native.EntryValues:
    """Values and what each is multiplied by, as C takes them."""
    if isinstance(values, Signs):
        return native.EntryValues(None, values.bits.data_ptr(), values.size, share)
    return native.EntryValues(values.data_ptr(), None, 0.0, share)


def _unpack_reference(streams: GapStreams) -> Tensor | None:
    low, unary, count, code, numel = streams.low, streams.unary, streams.count, streams.code, streams.numel
    flags = unpack_reference(low, low.numel() * 8, 1)
    used = count * code.width
    if bool(flags[used:].any()):
        return None
    powers = torch.arange(code.width, device=low.device)
    gaps = (flags[:used].view(count, code.width).to(torch.int64) << powers).sum(1)
    if code.rice:
        ones = unpack_reference(unary, unary.numel() * 8, 1).nonzero().view(-1)
        if ones.numel() != count or -(-(int(ones[-1]) + 1 if count else 0) // 8) != unary.numel():
            return None
        quotients = gaps_between(ones)
        if count and int(quotients.max()) > numel >> code.width:
            return None
        gaps += quotients << code.width
    # Checked in floats first: a hostile sum could wrap around.
    if count and float(gaps.double().sum()) + count > 2.0**62:
        return None
    indices = torch.cumsum(gaps + 1, 0) - 1
    if count and int(indices[-1]) >= numel:
        return None
    return indices
