"""How alike the sites' updates are: of the entries that two of them sent, how many have the same sign.

Sparse pushes hardly overlap, so the angle between them says little: with four sites, alike or not, it is near a right
one. The signs at the entries that two sites sent do say something. Sites with the same kind of data agree on most of
them, until the learning rate is so small that noise is all that is left; sites whose labels are unlike contradict each
other. Counts, not floats: the same on every machine.

Of large models a share of the entries is looked at, the same of every site, and of many sites the first few: this is
an estimate, and must not cost what it tells about.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightgrad.codecs import unpack_entries
from weightgrad.wan.messages import Part

_WHOLE = 1 << 21  # elements of a model of which every entry is looked at
_SITES = 8
_MIX = np.uint64(0x9E3779B97F4A7C15)  # spreads neighbours: a share of the entries is one of every layer


class Signs(NamedTuple):
    """Pairs of sites that sent the same entry, and those of them that sent it with the same sign."""

    common: int
    same: int


class Agreement:
    """The signs of one round's pushes, as they are added."""

    def __init__(self, numel: int) -> None:
        self._bits = max(0, (numel - 1).bit_length() - (_WHOLE - 1).bit_length())
        self._sites = 0
        self._at: list[npt.NDArray[np.int64]] = []
        self._signs: list[npt.NDArray[np.bool_]] = []

    def add(self, parts: tuple[Part, ...]) -> None:
        """One site's push. What is not sparse is passed over: who sends everything contradicts nobody by choice."""
        self._sites += 1
        for one in parts if self._sites <= _SITES else ():
            if one.payload.codec == "sparse":
                places, found = unpack_entries(one.payload)
                at, values = places.cpu().numpy() + one.start, found.cpu().numpy()
                kept = (values != 0) & self._looked_at(at)
                self._at.append(at[kept])
                self._signs.append(np.signbit(values[kept]))

    def _looked_at(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        if not self._bits:
            return np.ones(at.shape, dtype=np.bool_)
        mixed: npt.NDArray[np.uint64] = at.astype(np.uint64) * _MIX
        looked: npt.NDArray[np.bool_] = mixed >> np.uint64(64 - self._bits) == 0
        return looked

    def signs(self) -> Signs:
        """Over all pairs of sites."""
        if not self._at:
            return Signs(0, 0)
        at = np.concatenate(self._at)
        order = np.argsort(at, kind="stable")  # merges what is sorted already
        at, signs = at[order], np.concatenate(self._signs)[order]
        common = same = 0
        for apart in range(1, min(self._sites, _SITES)):  # an entry's senders stand side by side
            both = at[apart:] == at[:-apart]
            common += int(np.count_nonzero(both))
            same += int(np.count_nonzero(both & (signs[apart:] == signs[:-apart])))
        return Signs(common, same)
