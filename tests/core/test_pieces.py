"""How held elements are cut into pieces, dealt among ranks, and divided among server processes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightgrad.core import pieces
from weightgrad.core.layout import Layout
from weightgrad.core.pieces import Piece
from weightgrad.wire.intervals import Intervals

SHAPES = [("a", (6, 5)), ("b", (6,)), ("empty", (0, 4)), ("c", (4, 2, 3)), ("scalar", ()), ("d", (1, 17))]
LAYOUT = Layout.of_shapes(SHAPES)
N = LAYOUT.numel
WHOLE = Intervals.whole(N)

layouts = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 9)),
        st.tuples(st.integers(0, 7), st.integers(1, 5)),
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=8,
).map(lambda shapes: Layout.of_shapes((str(i), shape) for i, shape in enumerate(shapes)))


def listed(intervals: Intervals) -> list[int]:
    return [one for start, stop in intervals.spans for one in range(start, stop)]


def some(data: st.DataObject, layout: Layout) -> Intervals:
    """Some of the elements of a model."""
    chosen = data.draw(st.frozensets(st.integers(0, max(0, layout.numel - 1))))
    return Intervals.of((one, one + 1) for one in chosen) & Intervals.whole(layout.numel)


def rows_of(layout: Layout, ranks: int, rank: int) -> Intervals:
    """What a rank has of a model that is sharded by rows of each tensor, as FSDP does: the last ranks may get none."""
    spans = []
    for slot in layout.slots:
        rows = slot.shape[0] if slot.shape else 1
        width, each = slot.numel // max(1, rows), -(-rows // ranks)
        first, last = min(rows, rank * each), min(rows, (rank + 1) * each)
        spans.append((slot.start + first * width, slot.start + last * width))
    return Intervals.of(spans)


def dealt_pieces(available: list[Intervals], layout: Layout, *, per_tensor: bool, limit: int) -> list[Piece]:
    """The pieces of all ranks, as each of them cuts what it is dealt."""
    dealt = pieces.deal(available, layout, per_tensor=per_tensor, limit=limit)
    found = [piece for held in dealt for piece in pieces.cut(held, layout, per_tensor=per_tensor, limit=limit)]
    return sorted(found, key=lambda piece: piece.start)


# -- cut ---------------------------------------------------------------------------------------


@given(st.data(), layouts, st.integers(1, 20))
def test_flat_pieces_are_what_is_held_in_order(data: st.DataObject, layout: Layout, limit: int) -> None:
    held = some(data, layout)
    found = pieces.cut(held, layout, per_tensor=False, limit=limit)
    assert [one for piece in found for one in listed(piece.intervals)] == listed(held)
    assert all(piece.shape == (piece.numel,) for piece in found)
    assert all(piece.numel == limit for piece in found[:-1])
    assert all(0 < piece.numel <= limit for piece in found)


@given(st.data(), layouts, st.integers(1, 20), st.booleans())
def test_pieces_by_tensor_are_what_is_held_in_order(
    data: st.DataObject, layout: Layout, limit: int, flat: bool
) -> None:
    held = some(data, layout)
    found = pieces.cut(held, layout, per_tensor=True, limit=limit, flat=flat)
    assert [one for piece in found for one in listed(piece.intervals)] == listed(held)
    assert [piece.start for piece in found] == sorted({piece.start for piece in found})
    for piece in found:
        (slot,) = (slot for slot in layout.slots if slot.start <= piece.start < slot.stop)
        assert Intervals(((slot.start, slot.stop),)).contains(piece.intervals)
        row = slot.numel // slot.shape[0] if slot.shape else 1
        assert 0 < piece.numel <= max(limit, row)
        if flat or len(piece.shape) <= 1:
            assert piece.shape in ((piece.numel,), ())
        else:
            assert piece.shape == (piece.numel // row, *slot.shape[1:])


def test_a_tensor_is_a_piece_in_its_own_shape() -> None:
    found = pieces.cut(WHOLE, LAYOUT, per_tensor=True)
    assert [(piece.start, piece.shape) for piece in found] == [
        (slot.start, slot.shape) for slot in LAYOUT.slots if slot.numel
    ]
    flat = pieces.cut(WHOLE, LAYOUT, per_tensor=True, flat=True)
    assert [piece.shape for piece in flat] == [(slot.numel,) for slot in LAYOUT.slots if slot.numel]


def test_a_tensor_that_is_too_large_is_cut_by_rows() -> None:
    layout = Layout.of_shapes([("w", (7, 3)), ("b", (7,))])
    found = pieces.cut(Intervals.whole(28), layout, per_tensor=True, limit=8)
    assert [(piece.start, piece.shape) for piece in found] == [
        (0, (2, 3)),
        (6, (2, 3)),
        (12, (2, 3)),
        (18, (1, 3)),
        (21, (7,)),
    ]
    long_rows = pieces.cut(Intervals.whole(21), layout, per_tensor=True, limit=2)
    assert [piece.shape for piece in long_rows] == [(1, 3)] * 7, "a single row may be longer"


def test_what_is_no_whole_rows_of_a_tensor_is_flat() -> None:
    layout = Layout.of_shapes([("w", (4, 5))])
    found = pieces.cut(Intervals(((0, 10), (12, 15))), layout, per_tensor=True, limit=100)
    assert [(piece.start, piece.shape) for piece in found] == [(0, (2, 5)), (12, (3,))]


def test_the_size_of_a_piece_is_looked_up_when_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(pieces.cut(WHOLE, LAYOUT, per_tensor=False)) == 1
    monkeypatch.setattr(pieces, "PIECE", 10)
    assert len(pieces.cut(WHOLE, LAYOUT, per_tensor=False)) == -(-N // 10)
    assert len(pieces.common(WHOLE, [], LAYOUT, per_tensor=False)) == -(-N // 10)
    assert max(held.numel for held in pieces.deal([WHOLE] * 20, LAYOUT, per_tensor=False)) == 10


# -- deal --------------------------------------------------------------------------------------


@given(st.data(), layouts, st.integers(1, 4), st.integers(1, 20), st.booleans())
def test_each_element_is_dealt_to_one_rank_that_has_it(
    data: st.DataObject, layout: Layout, ranks: int, limit: int, per_tensor: bool
) -> None:
    available = [some(data, layout) for _ in range(ranks)]
    dealt = pieces.deal(available, layout, per_tensor=per_tensor, limit=limit)
    for has, held in zip(available, dealt, strict=True):
        assert has.contains(held)
    together = Intervals.of(span for held in dealt for span in held.spans)  # which refuses overlaps
    everything = Intervals(())
    for has in available:
        everything = everything | has
    assert together == everything


@given(layouts, st.integers(1, 5), st.integers(1, 20), st.booleans())
def test_the_number_of_replicas_changes_no_piece(layout: Layout, replicas: int, limit: int, per_tensor: bool) -> None:
    whole = Intervals.whole(layout.numel)
    one = dealt_pieces([whole], layout, per_tensor=per_tensor, limit=limit)
    assert dealt_pieces([whole] * replicas, layout, per_tensor=per_tensor, limit=limit) == one


@given(layouts, st.integers(1, 4), st.integers(1, 4), st.integers(1, 20), st.booleans())
def test_nor_does_that_of_replicas_of_shards(
    layout: Layout, shards: int, replicas: int, limit: int, per_tensor: bool
) -> None:
    """As in HSDP."""
    rows = [rows_of(layout, shards, rank) for rank in range(shards)]
    one = dealt_pieces(rows, layout, per_tensor=per_tensor, limit=limit)
    assert dealt_pieces(rows * replicas, layout, per_tensor=per_tensor, limit=limit) == one


def test_replicas_have_about_the_same_number_of_pieces() -> None:
    dealt = pieces.deal([WHOLE] * 3, LAYOUT, per_tensor=False, limit=10)
    counts = [len(pieces.cut(held, LAYOUT, per_tensor=False, limit=10)) for held in dealt]
    assert max(counts) - min(counts) <= 1


@given(st.data(), layouts, st.integers(0, 4))
def test_by_owners_groups_elements_by_who_has_them(data: st.DataObject, layout: Layout, count: int) -> None:
    holdings = [some(data, layout) for _ in range(count)]
    found = pieces.by_owners(holdings)
    expected: dict[tuple[int, ...], list[int]] = {}
    for element in range(layout.numel):
        owners = tuple(owner for owner, held in enumerate(holdings) if element in listed(held))
        if owners:
            expected.setdefault(owners, []).append(element)
    assert {owners: listed(own) for owners, own in found.items()} == expected
    assert list(found) == list(expected), "by their first elements"


# -- common ------------------------------------------------------------------------------------


@given(st.data(), layouts, st.integers(1, 20), st.booleans())
def test_a_common_piece_is_inside_one_rank_of_every_site(
    data: st.DataObject, layout: Layout, limit: int, per_tensor: bool
) -> None:
    served = some(data, layout)
    sites = [
        [rows_of(layout, ranks, rank) for rank in range(ranks)]
        for ranks in data.draw(st.lists(st.integers(1, 4), max_size=3))
    ]
    first = some(data, layout)
    sites.append([first, Intervals.whole(layout.numel) - first])
    found = pieces.common(served, sites, layout, per_tensor=per_tensor, limit=limit)
    assert sorted(one for piece in found for one in listed(piece.intervals)) == listed(served)
    assert [piece.start for piece in found] == sorted({piece.start for piece in found})
    for piece in found:
        for site in sites:
            assert sum(bool((held & piece.intervals).numel) for held in site) == 1
            assert any(held.contains(piece.intervals) for held in site)


def test_common_pieces_without_sharded_sites_are_those_of_one_holder() -> None:
    for per_tensor in (False, True):
        own = pieces.cut(WHOLE, LAYOUT, per_tensor=per_tensor, limit=8)
        assert pieces.common(WHOLE, [[WHOLE], [WHOLE]], LAYOUT, per_tensor=per_tensor, limit=8) == own


# -- fragments and processes -------------------------------------------------------------------


@given(layouts, st.integers(1, 9))
def test_fragments_are_whole_tensors_in_order(layout: Layout, count: int) -> None:
    found = pieces.fragments(layout, count)
    assert len(found) == count
    assert [one for own in found for one in listed(own)] == list(range(layout.numel))
    for slot in (slot for slot in layout.slots if slot.numel):
        assert sum(own.contains(Intervals(((slot.start, slot.stop),))) for own in found) == 1


@given(layouts, st.integers(1, 6), st.booleans())
def test_processes_divide_everything(layout: Layout, processes: int, whole_tensors: bool) -> None:
    found = pieces.divide(layout, processes, whole_tensors=whole_tensors)
    assert len(found) == processes
    assert [one for own in found for one in listed(own)] == list(range(layout.numel))
    if whole_tensors:
        starts = {slot.start for slot in layout.slots} | {layout.numel}
        assert all(edge in starts for own in found for span in own.spans for edge in span)
    else:
        sizes = [own.numel for own in found]
        assert max(sizes) - min(sizes) <= 1
    assert all(before.end <= after.first for before, after in pairwise(own for own in found if own))
