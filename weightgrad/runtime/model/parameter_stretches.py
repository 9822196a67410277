"""Where intervals of the index space lie in the parameters of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from weightgrad.wire.intervals import Intervals, Span


class Stretch(NamedTuple):
    """Neighbouring elements of one parameter within some intervals: its number, where they lie in both, how many."""

    parameter: int
    place: int
    offset: int
    size: int


class ParameterStretches:
    """Finds the stretches that intervals consist of, and remembers them: every round asks for the same.

    Args:
        spans: The elements of the index space that this rank has of each parameter, in ascending order.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self.of = lru_cache(maxsize=4096)(self._find)
        """The parts of the parameters that some intervals consist of, in ascending order."""
        self._edges = lru_cache(maxsize=4096)(_edges_of)

    def entries(self, stretches: tuple[Stretch, ...], indices: Tensor, numel: int) -> list[tuple[int, int]]:
        """Which of some entries lie in each stretch: the first of them, and the one after the last.

        Args:
            stretches: The stretches of some intervals.
            indices: Where the entries lie within the intervals, ascending.
            numel: How many elements the intervals have.
        """
        edges = self._edges(stretches)
        if edges.tolist() == [0, numel]:  # asks a device only if it must
            return [(0, indices.numel())]
        found: list[int] = torch.searchsorted(indices, edges.to(indices.device)).cpu().tolist()
        return list(zip(found[::2], found[1::2], strict=True))

    def _find(self, intervals: Intervals) -> tuple[Stretch, ...]:
        """The parts of the parameters that some intervals consist of, in ascending order."""
        found: list[Stretch] = []
        offset, place = 0, 0
        for start, stop in intervals.spans:
            while place < len(self._spans) and self._spans[place][1] <= start:
                place += 1
            at = place
            while at < len(self._spans) and self._spans[at][0] < stop:
                first, last = max(start, self._spans[at][0]), min(stop, self._spans[at][1])
                if first < last:
                    found.append(Stretch(at, first - self._spans[at][0], offset + first - start, last - first))
                at += 1
            offset += stop - start
        return tuple(found)


def _edges_of(stretches: tuple[Stretch, ...]) -> Tensor:
    """Where each stretch begins and ends within its intervals."""
    return torch.tensor([at for one in stretches for at in (one.offset, one.offset + one.size)], dtype=torch.int64)
