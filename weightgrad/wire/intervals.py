"""Intervals of the index space.

All trainable parameters of a model, in a fixed order, form one index space: elements 0 .. numel-1. A rank of a site
*holds* some intervals of it, a process of the global server *serves* some, and every message says which intervals it is
about. Whoever holds intervals stores their elements one interval after the other, in a vector of `numel` elements;
`Intervals` knows where in that vector an element lies.

    held = Intervals(((0, 6), (20, 24)))      # ten elements
    held.storage(2, 8)                        # Intervals(((2, 6), (20, 22))): elements 2..7 of the vector
    held.runs(Intervals(((4, 22),)))          # (4, 0, 2), (6, 16, 2): what two holders have in common, and where
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from weightgrad.errors import ProtocolError

Span: TypeAlias = tuple[int, int]
"""The elements start .. stop-1 of the index space."""


class Run(NamedTuple):
    """Neighbouring elements that two holders have in common, and where they lie in the vector of each."""

    mine: int
    theirs: int
    count: int  # type: ignore[assignment]  # of elements; nobody needs that of a tuple


@dataclass(frozen=True)
class Intervals:
    """A set of elements of the index space, as spans that ascend, are not empty and do not touch.

    Raises:
        ProtocolError: the spans are not in that form; `Intervals.of` brings them into it.
    """

    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        end = -1
        for start, stop in self.spans:
            if not end < start < stop:
                raise ProtocolError(
                    f"the interval {start} to {stop} after one that ends at {max(end, 0)}: intervals ascend, are not "
                    "empty and do not touch"
                )
            end = stop

    @staticmethod
    def of(spans: Iterable[Span]) -> Intervals:
        """Sort spans, join those that touch, and drop empty ones.

        Raises:
            ProtocolError: two spans overlap.
        """
        found: list[Span] = []
        for start, stop in sorted(span for span in spans if span[0] != span[1]):
            if found and start < found[-1][1]:
                raise ProtocolError(f"the interval {start} to {stop} overlaps one that ends at {found[-1][1]}")
            if found and start == found[-1][1]:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
        return Intervals(tuple(found))

    @staticmethod
    def whole(numel: int) -> Intervals:
        """All elements of an index space."""
        return Intervals(((0, numel),) if numel else ())

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """Where each span begins in the vector, and the length of the vector."""
        return (0, *accumulate(stop - start for start, stop in self.spans))

    @property
    def numel(self) -> int:
        """How many elements they have."""
        return self._offsets[-1]

    @property
    def first(self) -> int:
        """The first element; 0 if there is none."""
        return self.spans[0][0] if self.spans else 0

    @property
    def end(self) -> int:
        """One past the last element; 0 if there is none."""
        return self.spans[-1][1] if self.spans else 0

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __and__(self, other: Intervals) -> Intervals:
        """What both have."""
        return Intervals.of(
            (self.spans[place][0] + within, self.spans[place][0] + within + count)
            for place, within, _, count in self._common(other)
        )

    def __sub__(self, other: Intervals) -> Intervals:
        """What only this one has."""
        left: list[Span] = []
        both = (self & other).spans
        place = 0
        for start, stop in self.spans:
            at = start
            while place < len(both) and both[place][0] < stop:
                left.append((at, both[place][0]))
                at = both[place][1]
                place += 1
            left.append((at, stop))
        return Intervals.of(left)

    def __or__(self, other: Intervals) -> Intervals:
        """What either has."""
        return Intervals.of((*self.spans, *(other - self).spans))

    def contains(self, other: Intervals) -> bool:
        """Whether every element of another set is in this one."""
        return (self & other).numel == other.numel

    def storage(self, start: int, stop: int) -> Intervals:
        """The elements that lie at start .. stop-1 in the vector of a holder."""
        found: list[Span] = []
        place = bisect_right(self._offsets, start) - 1
        while start < stop:
            first, last = self.spans[place]
            at = first + start - self._offsets[place]
            count = min(stop - start, last - at)
            found.append((at, at + count))
            start, place = start + count, place + 1
        return Intervals.of(found)

    def runs(self, other: Intervals) -> tuple[Run, ...]:
        """The elements that another holder has too, as runs of neighbours in both vectors, in ascending order."""
        found: list[Run] = []
        for place, within, at, count in self._common(other):
            run = Run(self._offsets[place] + within, at, count)
            last = found[-1] if found else None
            if last is not None and (last.mine + last.count, last.theirs + last.count) == (run.mine, run.theirs):
                found[-1] = Run(last.mine, last.theirs, last.count + run.count)
            else:
                found.append(run)
        return tuple(found)

    def slice_of(self, other: Intervals) -> slice | None:
        """Where another set lies in the vector of a holder of this one; None if not in one stretch, or not all."""
        runs = self.runs(other)
        whole = len(runs) == 1 and runs[0].count == other.numel
        return slice(runs[0].mine, runs[0].mine + runs[0].count) if whole else None

    def _common(self, other: Intervals) -> Iterator[tuple[int, int, int, int]]:
        """(span of mine, offset within it, place in the other's vector, count) of all common stretches."""
        # Often one side is a small part of the other: what ends before it begins is not looked at.
        i = bisect_right(self.spans, other.first, key=_stop)
        j = bisect_right(other.spans, self.first, key=_stop)
        while i < len(self.spans) and j < len(other.spans):
            (a, b), (c, d) = self.spans[i], other.spans[j]
            start, stop = max(a, c), min(b, d)
            if start < stop:
                yield i, start - a, other._offsets[j] + start - c, stop - start
            if b <= d:
                i += 1
            else:
                j += 1


def _stop(span: Span) -> int:
    return span[1]
