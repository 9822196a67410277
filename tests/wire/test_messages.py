"""A segment puts its values where they belong, and a result leaves out what its receiver has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightgrad import codecs
from weightgrad.errors import ProtocolError
from weightgrad.kernels import fixed
from weightgrad.wire.intervals import Intervals, Span
from weightgrad.wire.messages import Segment

from .message_samples import interleaved, payload, plain, relayed_push, result, segment, spread

MODES = {
    fixed.STORE: lambda old, new: new,
    fixed.ADD: lambda old, new: old + new,
    fixed.SUBTRACT: lambda old, new: old - new,
}
NUMEL = 400


@st.composite
def sets(draw: st.DrawFn) -> Intervals:
    bounds = sorted(draw(st.sets(st.integers(0, NUMEL), max_size=10)))
    return Intervals(tuple(zip(bounds[::2], bounds[1::2], strict=False)))


@settings(max_examples=100)
@given(interleaved(width=20), sets(), st.sampled_from(sorted(MODES)))
def test_a_segment_changes_the_elements_it_has_and_no_others(
    segments: tuple[Segment, ...], held: Intervals, mode: int
) -> None:
    before = torch.linspace(-1, 1, NUMEL)
    wanted = before.clone()
    elements = [element for start, stop in held.spans for element in range(start, stop)]
    vector, part = before.clone(), before[elements].clone()
    for one in segments:
        mine = [element for start, stop in one.intervals.spans for element in range(start, stop)]
        wanted[mine] = MODES[mode](wanted[mine], codecs.decode(one.payload).view(-1))
        one.into(vector, mode)
        one.into(part, mode, held)
    assert torch.equal(vector, wanted)
    assert torch.equal(part, wanted[elements])


@pytest.mark.parametrize("one", [segment(9), segment(-1), segment(2**40), spread((0, 1), (10, 11))])
def test_a_segment_beyond_the_vector(one: Segment) -> None:
    with pytest.raises(ProtocolError, match="train the same model"):
        one.into(torch.zeros(10), fixed.ADD)


@pytest.mark.parametrize(
    ("start", "spans"),
    [
        (0, ((0, 2),)),
        (1, ((0, 1), (2, 3))),
        (0, ((0, 1), (2, 4))),
        (0, ((0, 1), (1, 2))),
        (2, ((2, 3), (0, 1))),
        (0, ((0, 2), (1, 1))),
        (-1, ((-1, 0), (2, 3))),
    ],
)
def test_a_segment_whose_intervals_do_not_fit(start: int, spans: tuple[Span, ...]) -> None:
    with pytest.raises(ProtocolError):
        Segment(start, payload("fp32", (2,)), spans)


@pytest.mark.parametrize("spans", [(), ((0, 1),), ((0, 3),), ((0, 1), (2, 4))])
def test_a_segment_with_more_or_fewer_values_than_elements(spans: tuple[Span, ...]) -> None:
    with pytest.raises(ProtocolError, match="2 values for"):
        Segment.at(Intervals(spans), payload("fp32", (2,)))


@pytest.mark.parametrize("spans", [((3, 5),), ((3, 4), (6, 7))])
def test_a_segment_at_intervals(spans: tuple[Span, ...]) -> None:
    one = Segment.at(Intervals(spans), payload("fp32", (2,)))
    assert one.intervals == Intervals(spans)
    assert (one.start, one.end) == (3, spans[-1][1])
    assert bool(one.spans) == (len(spans) > 1)


def test_a_result_for_a_site_that_has_its_own_push() -> None:
    own, other = relayed_push("ohio", (segment(0),)), relayed_push("iowa", (segment(2),))
    empty = relayed_push("ohio", round=2)  # in a control message every push is
    found = result(relayed=(other, own, empty)).without("ohio")
    left_out = [relayed_push("ohio", None), relayed_push("ohio", None, round=2)]
    assert [plain(push) for push in found.relayed] == [plain(push) for push in (other, *left_out)]
    assert found.moves == other.segments
