"""Messages in parts: each rank gets what it holds, and nothing is lost or doubled on the way back together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightgrad.errors import ProtocolError
from weightgrad.kernels import fixed
from weightgrad.wire import message_parts
from weightgrad.wire.intervals import Intervals, Span
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.message_parts import (
    ResultAssembly,
    merge_relayed,
    model_parts,
    of_holder,
    push_parts,
    result_parts,
    without_values,
)
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import ModelPart, Push, RelayedPush, ResultPart, RoundResult, Segment

from .message_samples import (
    interleaved,
    model_part,
    payload,
    plain,
    push,
    pushes,
    relayed_push,
    reply,
    result,
    result_part,
    results,
    segment,
    spread,
)

NUMEL = 400
values = interleaved(width=20)
part_sizes = st.sampled_from([1, 60, 200, 4 << 20])
some = settings(max_examples=60)


@st.composite
def divisions(draw: st.DrawFn) -> tuple[Intervals, ...]:
    """The index space, divided among one to four holders, each with any intervals of it."""
    owners = draw(st.integers(1, 4))
    bounds = sorted(draw(st.sets(st.integers(1, NUMEL - 1), max_size=12)) | {0, NUMEL})
    held: list[list[Span]] = [[] for _ in range(owners)]
    for span in pairwise(bounds):
        held[draw(st.integers(0, owners - 1))].append(span)
    return tuple(Intervals.of(spans) for spans in held)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new part for almost every segment."""
    monkeypatch.setattr(message_parts, "PART_BYTES", 100)


def control(message: Push | RoundResult) -> bytes:
    return pack(without_values(message))


def served_by(one: RoundResult, served: Intervals) -> RoundResult:
    """What a server process that serves these elements has of a result whose segments no two processes share."""
    relayed = tuple(
        push if push.segments is None else replace(push, segments=of_holder(push.segments, served))
        for push in one.relayed
    )
    return replace(one, segments=of_holder(one.segments, served), relayed=relayed)


def cut_at(segments: tuple[Segment, ...], bounds: tuple[Intervals, ...]) -> tuple[Segment, ...]:
    """The elements of segments, in new ones that lie within one of these sets each."""
    elements = Intervals.of(span for one in segments for span in one.intervals.spans)
    sets = [elements & served for served in bounds]
    found = [Segment.at(one, payload("fp32", (one.numel,), place)) for place, one in enumerate(sets) if one]
    return tuple(sorted(found, key=lambda one: one.start))


def moved(segments: tuple[Segment, ...], held: Intervals) -> torch.Tensor:
    """What a rank that holds these elements makes of segments."""
    vector = torch.zeros(held.numel)
    for one in segments:
        one.into(vector, fixed.ADD, held)
    return vector


# -- pushes -----------------------------------------------------------------------------------


@some
@given(pushes(values), st.integers(0, 7), part_sizes)
def test_the_parts_of_a_push_are_all_of_it_in_order(message: Push, rank: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_parts, "PART_BYTES", size)
        parts = list(push_parts(message, rank))
        whole = nbytes(message)
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {(part.site, part.round, part.rank) for part in parts} == {(message.site, message.round, rank)}
    assert [one for part in parts for one in part.segments] == list(message.segments)
    if message.segments:  # without any, a push is its control message alone, and the part says only so
        assert all(part.segments for part in parts)
        assert whole == len(control(message)) + sum(len(pack(part)) for part in parts)
    else:
        assert len(parts) == 1
        assert whole == len(control(message))


def test_a_part_is_closed_when_it_is_large_enough() -> None:
    many = push(segments=tuple(segment(i * 2**18, shape=(2**18,)) for i in range(10)))  # a little over 1 MiB each
    parts = list(push_parts(many, 0))
    assert [len(part.segments) for part in parts] == [4, 4, 2]
    assert nbytes(many) == len(control(many)) + sum(len(pack(part)) for part in parts)
    long = push(segments=(segment(0, shape=(2**21,)), segment(2**21)))
    assert [len(part.segments) for part in push_parts(long, 0)] == [1, 1]


# -- round results ----------------------------------------------------------------------------


@some
@given(results(values), part_sizes)
def test_the_size_of_a_result_is_that_of_its_parts_for_one_rank_that_holds_everything(
    message: RoundResult, size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_parts, "PART_BYTES", size)
        parts = list(result_parts(message, Intervals.whole(NUMEL)))
        whole = nbytes(message)
    if message.moves:
        assert whole == len(control(message)) + sum(len(pack(part)) for part in parts)
    else:
        assert whole == len(control(message))


@some
@given(results(values), divisions(), part_sizes)
def test_each_rank_gets_exactly_the_segments_it_holds_something_of(
    message: RoundResult, ranks: tuple[Intervals, ...], size: int
) -> None:
    for held in ranks:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(message_parts, "PART_BYTES", size)
            parts = list(result_parts(message, held))
        mine = {element for start, stop in held.spans for element in range(start, stop)}

        def wanted(segments: tuple[Segment, ...], mine: set[int] = mine) -> list[Segment]:
            return [one for one in segments if any(mine & set(range(*span)) for span in one.intervals.spans)]

        assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
        assert {part.version for part in parts} == {message.version}
        assert [one for part in parts for one in part.segments] == wanted(message.segments)
        merged = merge_relayed(part.relayed for part in parts)
        assert [(one.site, one.round, one.weight) for one in merged] == [
            (one.site, one.round, one.weight) for one in message.relayed
        ]
        for one, sent in zip(merged, message.relayed, strict=True):
            assert one.segments == (None if sent.segments is None else tuple(wanted(sent.segments)))


def test_a_rank_that_holds_nothing_of_a_result_gets_one_part_that_says_so() -> None:
    message = result(segments=(segment(0), segment(10)), relayed=(relayed_push("ohio", (segment(0),)),))
    (part,) = result_parts(message, Intervals(((4, 8),)))
    assert part.last
    assert part.segments == ()
    assert [one.segments for one in part.relayed] == [()]


@pytest.mark.usefixtures("small_parts")
def test_relayed_pushes_are_cut_too() -> None:
    several = tuple(segment(10 * i) for i in range(4))
    relayed = (relayed_push("iowa", None), relayed_push("ohio", several), relayed_push("utah"))
    parts = list(result_parts(result(relayed=relayed), Intervals.whole(NUMEL)))
    assert len(parts) > 1
    assert max(nbytes(part) for part in parts) < 300
    assert all(plain(unpack(pack(part))) == plain(part) for part in parts)
    assert [plain(one) for one in merge_relayed(part.relayed for part in parts)] == [plain(one) for one in relayed]


# -- models -----------------------------------------------------------------------------------


def test_model_parts_are_made_when_they_are_asked_for() -> None:
    made: list[str] = []

    def segments(name: str) -> Iterator[Segment]:
        for place in range(3):
            made.append(f"{name} {place}")
            yield segment(2 * place)

    parts = model_parts(7, ((name, segments(name)) for name in ("moments", "weights")))
    assert made == []
    next(parts)
    assert made == ["moments 0", "moments 1"]  # one ahead, to know which part is the last
    next(parts)
    assert len(made) == 3
    rest = list(parts)
    assert [(part.vector, part.last) for part in rest] == [
        ("moments", False),
        ("weights", False),
        ("weights", False),
        ("weights", True),
    ]


def test_the_parts_of_a_model_say_which_vector_and_version() -> None:
    vectors = [("weights", [segment(0), spread((2, 4), (6, 8))]), ("moments", []), ("variance", [segment(4)])]
    parts = list(model_parts(3, vectors))
    assert [(part.version, part.vector, len(part.segments), part.last) for part in parts] == [
        (3, "weights", 1, False),
        (3, "weights", 1, False),
        (3, "variance", 1, True),
    ]
    assert all(plain(unpack(pack(part))) == plain(part) for part in parts)


@pytest.mark.parametrize("vectors", [[], [("weights", [])], [("weights", []), ("moments", [])]])
def test_a_model_of_nothing_is_one_part(vectors: list[tuple[str, list[Segment]]]) -> None:
    (part,) = model_parts(3, vectors)
    assert plain(part) == plain(ModelPart(version=3, vector="weights", segments=(), last=True))


# -- control messages -------------------------------------------------------------------------


@some
@given(pushes(values) | results(values))
def test_a_control_message_has_everything_but_the_values(message: Push | RoundResult) -> None:
    bare = without_values(message)
    assert type(bare) is type(message)
    assert nbytes(bare) == len(pack(bare))
    assert bare.segments == ()
    if isinstance(message, Push):
        assert plain(replace(bare, segments=message.segments)) == plain(message)
    else:
        assert isinstance(bare, RoundResult)
        assert not bare.moves
        assert [one.segments is None for one in bare.relayed] == [one.segments is None for one in message.relayed]
        assert plain(replace(bare, segments=message.segments, relayed=message.relayed)) == plain(message)


@pytest.mark.usefixtures("small_parts")
def test_the_size_of_a_reply_is_that_of_all_that_follows_it() -> None:
    missed = [
        result(segments=(segment(0), segment(4), segment(8)), rate=0.5),
        result(relayed=(relayed_push("ohio", (segment(0), segment(2), segment(4))), relayed_push("utah", None))),
    ]
    everything = Intervals.whole(NUMEL)
    parts = [part for one in missed for part in result_parts(one, everything)]
    assert len(parts) > 2
    sent = len(pack(reply())) + sum(len(control(one)) for one in missed) + sum(len(pack(part)) for part in parts)
    assert nbytes(reply(results=tuple(missed))) == sent
    model = [model_part(segment(0), last=False), model_part(spread((2, 3), (5, 7)), vector="moments")]
    bare = reply(downloads=True, scalars={"clock": torch.zeros(2)})
    assert nbytes(replace(bare, parts=tuple(model))) == len(pack(bare)) + sum(len(pack(part)) for part in model)


# -- back together ----------------------------------------------------------------------------


@some
@given(results(values), divisions(), divisions(), part_sizes, st.randoms())
def test_what_every_rank_puts_together_moves_its_elements_as_the_whole_result(
    message: RoundResult, ranks: tuple[Intervals, ...], servers: tuple[Intervals, ...], size: int, rng: random.Random
) -> None:
    """Results cross from some server processes to some ranks, in any order of the processes."""
    relayed = tuple(
        one if one.segments is None else replace(one, segments=cut_at(one.segments, servers)) for one in message.relayed
    )
    message = replace(message, segments=cut_at(message.segments, servers), relayed=relayed)
    for held in ranks:
        assembly = ResultAssembly(frozenset(range(len(servers))))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(message_parts, "PART_BYTES", size)
            queues = [list(result_parts(served_by(message, served), held)) for served in servers]
        while any(queues):
            assert not assembly.complete(message.version)
            source = rng.choice([place for place, queue in enumerate(queues) if queue])
            part = unpack(pack(queues[source].pop(0)))
            assert isinstance(part, ResultPart)
            assembly.add(source, part)
        header = without_values(message)
        assert isinstance(header, RoundResult)
        found = assembly.take(header)
        assert torch.equal(moved(found.segments, held), moved(message.segments, held))
        assert [(one.site, one.round, one.weight) for one in found.relayed] == [
            (one.site, one.round, one.weight) for one in message.relayed
        ]
        for mine, sent in zip(found.relayed, message.relayed, strict=True):
            assert (mine.segments is None) == (sent.segments is None)
            assert torch.equal(moved(mine.segments or (), held), moved(sent.segments or (), held))
        assert plain(replace(found, segments=(), relayed=())) == plain(replace(message, segments=(), relayed=()))


def assembled(*sources: int) -> ResultAssembly:
    return ResultAssembly(frozenset(sources))


def test_a_result_is_complete_when_every_process_has_sent_its_last_part() -> None:
    assembly = assembled(0, 1)
    assembly.add(0, result_part(segment(8), last=False))
    assembly.add(1, result_part(segment(0)))
    assert not assembly.complete(1)
    with pytest.raises(ProtocolError, match="not complete"):
        assembly.take(result())
    assembly.add(0, result_part(segment(4)))
    assert assembly.complete(1)
    assert [one.start for one in assembly.take(result()).segments] == [0, 4, 8]
    assert not assembly.complete(1)


def test_a_result_of_which_nothing_came_is_not_complete() -> None:
    with pytest.raises(ProtocolError, match="version 1 is not complete"):
        assembled(0).take(result())


def test_a_result_that_is_sent_again_replaces_the_first() -> None:
    assembly = assembled(0)
    for start in (0, 10):
        assembly.add(0, result_part(segment(start), last=False))
        assembly.add(0, result_part(segment(start + 2)))
    assert [one.start for one in assembly.take(result()).segments] == [10, 12]


def test_a_result_that_is_sent_again_may_come_in_other_parts() -> None:
    assembly = assembled(0)
    assembly.add(0, result_part(segment(0), segment(2)))
    assembly.add(0, result_part(segment(0), last=False))
    assert not assembly.complete(1)
    assembly.add(0, result_part(segment(2)))
    assert [one.start for one in assembly.take(result()).segments] == [0, 2]


def test_a_part_that_came_twice_is_not_added_twice() -> None:
    """A link that broke before the last part: whoever does not `forget` is told."""
    assembly = assembled(0)
    assembly.add(0, result_part(segment(0), last=False))
    assembly.add(0, result_part(segment(0), last=False))
    assembly.add(0, result_part(segment(2)))
    with pytest.raises(ProtocolError, match="overlaps"):
        assembly.take(result())
    assembly.add(0, result_part(segment(0), last=False))
    assembly.forget()
    assert not assembly.complete(1)
    assembly.add(0, result_part(segment(0), last=False))
    assembly.add(0, result_part(segment(2)))
    assert [one.start for one in assembly.take(result()).segments] == [0, 2]


def test_a_result_may_be_taken_without_the_values_of_some_processes() -> None:
    """As after a download, which contains them already."""
    assembly = assembled(0, 1)
    assembly.add(0, result_part(segment(0), relayed=(relayed_push("ohio", (segment(2),)),)))
    assembly.add(1, result_part(segment(8), last=False))
    assert assembly.complete_from(1, 0)
    assert not assembly.complete_from(1, 1)
    assert not assembly.complete_from(2, 0)
    with pytest.raises(ProtocolError, match="not complete"):
        assembly.take(result(), without={0})
    found = assembly.take(result(relayed=(relayed_push("ohio"),)), without={1})
    assert [one.start for one in found.moves] == [0, 2]


def test_versions_out_of_order() -> None:
    assembly = assembled(0, 1)
    for source, version in ((0, 3), (0, 1), (1, 2), (0, 2), (1, 3), (1, 1)):
        assembly.add(source, result_part(segment(10 * version + 4 * source), version=version))
    for version in (1, 2):
        found = assembly.take(result(version=version))
        assert [one.start for one in found.segments] == [10 * version, 10 * version + 4]
    assert assembly.complete(3)


def test_older_results_are_forgotten() -> None:
    assembly = assembled(0)
    for version in (1, 2, 3):
        assembly.add(0, result_part(version=version))
    assembly.take(result(version=2))
    assert [version for version in (1, 2, 3) if assembly.complete(version)] == [3]


def test_a_part_from_another_process_is_left_aside() -> None:
    assembly = assembled(1)
    assembly.add(0, result_part(segment(0), last=False))
    assert not assembly.complete(1)
    assembly.add(1, result_part(segment(4)))
    assert [one.start for one in assembly.take(result()).segments] == [4]


def test_a_rank_that_hears_from_nobody_has_every_result() -> None:
    header = result(relayed=(relayed_push("iowa", None), relayed_push("ohio")))
    found = assembled().take(header)
    assert plain(found) == plain(header)


# -- relayed pushes ---------------------------------------------------------------------------


def test_relayed_pushes_are_merged_by_site_and_round() -> None:
    one = [relayed_push("ohio", (segment(4),), round=2), relayed_push("iowa", (spread((0, 1), (9, 10)),))]
    two = [relayed_push("ohio", (segment(0), segment(8)), round=2), relayed_push("ohio", (segment(4),))]
    found = merge_relayed([one, two])
    assert [(push.site, push.round) for push in found] == [("iowa", 1), ("ohio", 1), ("ohio", 2)]
    assert [[one.start for one in push.segments or ()] for push in found] == [[0], [4], [0, 4, 8]]


@pytest.mark.parametrize("places", [(0, 1), (1, 0)])
def test_a_push_that_one_process_leaves_out_is_left_out(places: tuple[int, int]) -> None:
    """Also by a process that serves nothing of it: the site's own push is the same to all."""
    whole = result(relayed=(relayed_push("ohio", (segment(0),)),))
    parts = [
        served_by(whole, served).without("ohio").relayed for served in (Intervals(((0, 4),)), Intervals(((4, 8),)))
    ]
    assert [part[0].segments for part in parts] == [None, None]
    (found,) = merge_relayed(parts[place] for place in places)
    assert found.segments is None
    mixed = (parts[0], (relayed_push("ohio"),))
    (found,) = merge_relayed(mixed[place] for place in places)
    assert found.segments is None


def test_relayed_pushes_that_contradict_each_other() -> None:
    with pytest.raises(ProtocolError, match="weighs"):
        merge_relayed([[relayed_push("ohio", weight=1.0)], [relayed_push("ohio", weight=2.0)]])
    with pytest.raises(ProtocolError, match="overlaps"):
        merge_relayed([[relayed_push("ohio", (segment(0),))], [relayed_push("ohio", (segment(1),))]])


def test_no_relayed_pushes() -> None:
    assert merge_relayed([]) == merge_relayed([(), ()]) == ()
    none: tuple[RelayedPush, ...] = ()
    assert next(result_parts(result(relayed=none), Intervals(()))).relayed == none
