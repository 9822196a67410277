"""How alike the sites' updates are: of the entries that two sites sent, how many have the same sign.

Sparse pushes hardly overlap, so the angle between them says little: with four sites it is near 90 degrees whether
their data are alike or not. The signs at the entries that two sites sent do say something. Sites with the same kind of
data agree on most signs, until the learning rate is so small that only noise is left; sites with different labels
contradict each other. The measure counts and uses no floats, so it is the same on every machine.

In large models only a sample of the entries is compared, the same for every site, and of many sites only the first
few: this is an estimate and must cost much less than the round.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightgrad.wire.messages import Segment

_COMPARE_ALL_BELOW = 1 << 21  # elements of the largest model of which every entry is compared
_MAX_SITES = 8
_MIX = np.uint64(0x9E3779B97F4A7C15)  # spreads neighbouring indices, so that the sample has entries of every layer


class Signs(NamedTuple):
    """How many pairs of sites sent the same entry, and how many of these pairs sent it with the same sign."""

    common: int
    same: int


class Agreement:
    """Compares the signs of one round's pushes as they are added. Memory: the sampled indices and signs."""

    def __init__(self, numel: int) -> None:
        self._bits = max(0, (numel - 1).bit_length() - (_COMPARE_ALL_BELOW - 1).bit_length())
        self._sites = 0
        self._indices: list[npt.NDArray[np.int64]] = []
        self._signs: list[npt.NDArray[np.bool_]] = []

    def add(self, segments: tuple[Segment, ...]) -> None:
        """Add one site's push. Only sparse segments count: a dense one does not choose its entries."""
        self._sites += 1
        for segment in segments if self._sites <= _MAX_SITES else ():
            if (entries := segment.entries) is not None:
                indices, values = _places(entries.indices().cpu().numpy(), segment), entries.values().cpu().numpy()
                kept = (values != 0) & self._is_sampled(indices)
                self._indices.append(indices[kept])
                self._signs.append(np.signbit(values[kept]))

    def _is_sampled(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        if not self._bits:
            return np.ones(indices.shape, dtype=np.bool_)
        mixed: npt.NDArray[np.uint64] = indices.astype(np.uint64) * _MIX
        sampled: npt.NDArray[np.bool_] = mixed >> np.uint64(64 - self._bits) == 0
        return sampled

    def signs(self) -> Signs:
        """The counts over all pairs of sites."""
        if not self._indices:
            return Signs(0, 0)
        indices = np.concatenate(self._indices)
        order = np.argsort(indices, kind="stable")  # each push is sorted already, and a stable sort merges them
        indices, signs = indices[order], np.concatenate(self._signs)[order]
        common = same = 0
        for apart in range(1, min(self._sites, _MAX_SITES)):  # the senders of an entry are neighbours now
            both = indices[apart:] == indices[:-apart]
            common += int(np.count_nonzero(both))
            same += int(np.count_nonzero(both & (signs[apart:] == signs[:-apart])))
        return Signs(common, same)


def _places(entries: npt.NDArray[np.int64], segment: Segment) -> npt.NDArray[np.int64]:
    """Where the entries of a segment lie in the index space."""
    if not segment.spans:
        return entries + segment.start
    starts, stops = (np.array(one, dtype=np.int64) for one in zip(*segment.spans, strict=True))
    offsets = np.concatenate(([0], np.cumsum(stops - starts)[:-1]))
    span = np.searchsorted(offsets, entries, side="right") - 1
    found: npt.NDArray[np.int64] = starts[span] + entries - offsets[span]
    return found
