"""Intervals of the index space, against Python's own sets."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightgrad.codecs import Fp32
from weightgrad.errors import ProtocolError
from weightgrad.kernels import fixed
from weightgrad.wire.intervals import Intervals, Run, Span
from weightgrad.wire.messages import Segment

NUMEL = 40
elements = st.frozensets(st.integers(0, NUMEL - 1))


def made(of: frozenset[int]) -> Intervals:
    return Intervals.of((one, one + 1) for one in of)


def listed(intervals: Intervals) -> list[int]:
    """The elements in the order in which a holder stores them."""
    return [one for start, stop in intervals.spans for one in range(start, stop)]


@given(elements)
def test_of_makes_spans_that_ascend_and_do_not_touch(own: frozenset[int]) -> None:
    found = made(own)
    assert listed(found) == sorted(own)
    assert all(start < stop for start, stop in found.spans)
    assert all(before[1] < after[0] for before, after in pairwise(found.spans))
    assert found.numel == len(own)
    assert bool(found) is bool(own)
    assert (found.first, found.end) == ((min(own), max(own) + 1) if own else (0, 0))


@given(st.lists(st.tuples(st.integers(0, NUMEL), st.integers(0, NUMEL)).map(lambda one: (min(one), max(one)))))
def test_of_sorts_joins_and_drops_empty_spans_and_refuses_overlaps(spans: list[Span]) -> None:
    counted = [one for start, stop in spans for one in range(start, stop)]
    if len(counted) > len(set(counted)):
        with pytest.raises(ProtocolError, match="overlaps"):
            Intervals.of(spans)
    else:
        assert Intervals.of(spans) == made(frozenset(counted))


@pytest.mark.parametrize(
    "spans", [((3, 3),), ((5, 3),), ((0, 2), (2, 4)), ((0, 3), (2, 4)), ((4, 6), (0, 2)), ((-1, 2),)]
)
def test_spans_in_another_form_are_refused(spans: tuple[Span, ...]) -> None:
    with pytest.raises(ProtocolError, match="ascend"):
        Intervals(spans)


@given(elements, elements)
def test_and_or_and_minus_are_those_of_sets(one: frozenset[int], other: frozenset[int]) -> None:
    a, b = made(one), made(other)
    assert a & b == made(one & other)
    assert a | b == made(one | other)
    assert a - b == made(one - other)
    assert a.contains(b) is (other <= one)
    assert (a == b) is (one == other)


@given(elements)
def test_the_whole_and_nothing(own: frozenset[int]) -> None:
    mine, whole, nothing = made(own), Intervals.whole(NUMEL), Intervals(())
    assert mine & whole == mine | nothing == mine - nothing == mine
    assert mine & nothing == mine - whole == mine - mine == nothing == Intervals.whole(0)
    assert mine | whole == whole
    assert (whole - mine) | mine == whole
    assert whole.contains(mine)
    assert mine.contains(nothing)


@given(elements, st.data())
def test_storage_is_what_lies_there_in_the_vector(own: frozenset[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(own)))
    stop = data.draw(st.integers(start, len(own)))
    assert listed(made(own).storage(start, stop)) == sorted(own)[start:stop]


@given(elements, elements)
def test_runs_say_where_common_elements_lie_in_both_vectors(one: frozenset[int], other: frozenset[int]) -> None:
    a, b = made(one), made(other)
    mine, theirs = listed(a), listed(b)
    runs = a.runs(b)
    found = []
    for run in runs:
        assert run.count > 0
        here = mine[run.mine : run.mine + run.count]
        assert here == theirs[run.theirs : run.theirs + run.count]
        found += here
    assert found == sorted(one & other), "each once, in ascending order"
    assert b.runs(a) == tuple(Run(run.theirs, run.mine, run.count) for run in runs)
    ends = [(run.mine + run.count, run.theirs + run.count) for run in runs]
    assert not set(ends) & {(run.mine, run.theirs) for run in runs}, "runs that are neighbours in both are one"


@given(elements, elements)
def test_slice_of_is_one_stretch_or_none(one: frozenset[int], other: frozenset[int]) -> None:
    a, b = made(one), made(other)
    found = a.slice_of(b)
    mine, theirs = listed(a), listed(b)
    places = [mine.index(element) for element in theirs] if other <= one else []
    stretch = bool(places) and places == list(range(places[0], places[0] + len(places)))
    assert (found is not None) is stretch
    if found is not None:
        assert mine[found] == theirs


@given(elements, elements, st.sampled_from([fixed.STORE, fixed.ADD, fixed.SUBTRACT]))
def test_a_segment_goes_where_its_elements_are_held(one: frozenset[int], other: frozenset[int], mode: int) -> None:
    held, sent = made(one), made(other)
    vector = torch.arange(held.numel, dtype=torch.float32) + 100
    values = torch.arange(sent.numel, dtype=torch.float32) + 1
    expected = dict(zip(listed(held), vector.tolist(), strict=True))
    for element, value in zip(listed(sent), values.tolist(), strict=True):
        if element in expected:
            before = 0.0 if mode == fixed.STORE else expected[element]
            expected[element] = before - value if mode == fixed.SUBTRACT else before + value
    segment = Segment.at(sent, Fp32().encode(values, {}, 0)[0])
    assert segment.intervals == sent
    segment.into(vector, mode, held)
    assert vector.tolist() == list(expected.values())


def test_many_spans_do_not_cost_their_product() -> None:
    """A rank that holds a row of each of many tensors: with the product, this test would take minutes."""
    count = 20_000
    held = Intervals(tuple((10 * place, 10 * place + 4) for place in range(count)))
    other = Intervals(tuple((10 * place + 2, 10 * place + 6) for place in range(count)))
    assert (held & other).numel == (held - other).numel == 2 * count
    assert (held | other).numel == 6 * count
    assert len(held.runs(other)) == count
    for place in range(0, count, 7):  # each is found without a look at the ones before it
        assert held.slice_of(Intervals(((10 * place, 10 * place + 4),))) == slice(4 * place, 4 * place + 4)
