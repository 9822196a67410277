"""Finding the segments of a push that have some elements, without a look at all of them.

A push has about as many segments as the model has pieces, and both ends go through a round piece by piece: a look at
every segment for every piece would take longer than the round itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import Segment


class SegmentIndex:
    """Segments in the order of their first elements. Memory: two numbers for each.

    Args:
        segments: the segments of one push; no element is in two of them.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self._ordered = sorted(segments, key=lambda segment: segment.start)
        self._starts = [segment.start for segment in self._ordered]
        self._reach = list(accumulate((segment.end for segment in self._ordered), max))  # of it and those before it

    def within(self, intervals: Intervals) -> list[Segment]:
        """The segments that have some of these elements, in the order of their first elements."""
        first, last = bisect_right(self._reach, intervals.first), bisect_left(self._starts, intervals.end)
        return [one for one in self._ordered[first:last] if (intervals & one.intervals).numel]
