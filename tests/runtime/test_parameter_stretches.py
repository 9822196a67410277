"""Where intervals lie in parameters, against a count of every element."""

from __future__ import annotations

import torch

from weightgrad.runtime.model.parameter_stretches import ParameterStretches, Stretch
from weightgrad.wire.intervals import Intervals

SPANS = [(0, 4), (4, 4), (6, 10), (12, 20)]  # the rank has a part of the index space, and nothing of one parameter


def by_counting(intervals: Intervals) -> list[tuple[int, int, int]]:
    """(parameter, place in it, offset within the intervals) of every element that the rank has."""
    elements = [at for start, stop in intervals.spans for at in range(start, stop)]
    return [
        (number, at - start, offset)
        for offset, at in enumerate(elements)
        for number, (start, stop) in enumerate(SPANS)
        if start <= at < stop
    ]


def test_stretches_are_the_elements_of_the_intervals() -> None:
    stretches = ParameterStretches(SPANS)
    for spans in ([(0, 20)], [(2, 8)], [(0, 1), (3, 7), (9, 13), (19, 20)], [(10, 12)], [(4, 6), (16, 17)]):
        intervals = Intervals.of(spans)
        found = [
            (one.parameter, one.place + step, one.offset + step)
            for one in stretches.of(intervals)
            for step in range(one.size)
        ]
        assert found == by_counting(intervals)


def test_entries_are_dealt_to_the_stretches_in_which_they_lie() -> None:
    stretches, intervals = ParameterStretches(SPANS), Intervals.of([(2, 14)])
    found = stretches.of(intervals)
    assert found == (Stretch(0, 2, 0, 2), Stretch(2, 0, 4, 4), Stretch(3, 0, 10, 2))
    indices = torch.tensor([1, 3, 4, 7, 9, 11])
    assert stretches.entries(found, indices, 12) == [(0, 1), (2, 4), (5, 6)]
    assert stretches.entries(stretches.of(Intervals.of([(6, 10)])), torch.tensor([0, 3]), 4) == [(0, 2)]
