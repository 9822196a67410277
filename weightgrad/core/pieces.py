"""Pieces: what is encoded at a time, and who encodes it.

Everything that is held is worked on in pieces of a few MB, so the memory in passing does not grow with the model. A
piece is a codec's whole world: the largest 1 % are the largest 1 % of each piece.

Two ways to cut what a rank holds:

- flat: into stretches of `limit_of(layout)` elements, wherever tensors begin and end; the last one is shorter;
- by tensor: each tensor, or the rows of it that are held, is a piece of its own in its own shape; tensors that are too
  large are cut into as many rows at a time as fit.

Ranks that hold the same elements (replicas) share the work: the pieces are cut as if one rank held everything and then
dealt among the ranks, so that the number of replicas does not change a bit of what is sent. This needs pieces of a
fixed size: a rank cuts what it was dealt again, and must find the same pieces. (Pieces of equal size, one n-th each,
would move by an element here and there.)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from weightgrad.core.layout import Layout, Slot
from weightgrad.wire.intervals import Intervals, Span

PIECE = 1 << 21
"""Elements of a piece, at most: 8 MB of float32. A model that is no larger is one piece."""
_LEAST = 1 << 19
_PIECES = 32  # of a model, at least, as long as they have `_LEAST` elements: some ten pieces are in memory at a time
_SMALL = 1 << 23  # a model of fewer elements has pieces of twice `_LEAST`: ten of them are little memory


@dataclass(frozen=True)
class Piece:
    """Elements that are encoded together, as a tensor of this shape."""

    intervals: Intervals
    shape: tuple[int, ...]

    @property
    def start(self) -> int:
        """The first element; it names the piece among those of one holder."""
        return self.intervals.first

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.intervals.numel


def limit_of(layout: Layout) -> int:
    """The elements of a piece, at most: the same on all ranks and processes, however the model is sharded."""
    if layout.numel <= PIECE:
        return PIECE
    least = 2 * _LEAST if layout.numel < _SMALL else _LEAST
    return min(PIECE, max(least, 1 << max(0, (layout.numel // _PIECES).bit_length() - 1)))


def cut(
    held: Intervals, layout: Layout, *, per_tensor: bool, limit: int | None = None, flat: bool = False
) -> tuple[Piece, ...]:
    """Cut what is held into pieces.

    Args:
        held: the elements.
        layout: where the tensors lie.
        per_tensor: whether each tensor is a piece of its own.
        limit: the elements of a piece, at most; a single row may be longer. None: `limit_of` the layout.
        flat: with `per_tensor`, whether the pieces are vectors, not in the shape of the tensors.

    Returns:
        The pieces in ascending order; together they are what is held.
    """
    limit = limit_of(layout) if limit is None else limit
    if per_tensor:
        return tuple(piece for slot in layout.slots for piece in _rows(held, slot, limit, flat=flat))
    found = [held.storage(start, min(start + limit, held.numel)) for start in range(0, held.numel, limit)]
    return tuple(Piece(intervals, (intervals.numel,)) for intervals in found)


def _rows(held: Intervals, slot: Slot, limit: int, *, flat: bool) -> Iterable[Piece]:
    """The pieces of one tensor."""
    width = math.prod(slot.shape[1:])
    for start, stop in (held & Intervals(((slot.start, slot.stop),) if slot.numel else ())).spans:
        whole_rows = len(slot.shape) > 0 and not ((start - slot.start) % width or (stop - slot.start) % width)
        unit = width if whole_rows else 1
        rows, step = (stop - start) // unit, max(1, limit // unit)
        for first in range(0, rows, step):
            last = min(rows, first + step)
            shape = (last - first, *slot.shape[1:]) if whole_rows and not flat else ((last - first) * unit,)
            if slot.shape == () and not flat:
                shape = ()
            yield Piece(Intervals(((start + first * unit, start + last * unit),)), shape)


def fragments(layout: Layout, count: int) -> list[Intervals]:
    """The tensors split into `count` fragments of about equal size, in order."""
    found: list[list[Span]] = [[] for _ in range(count)]
    for slot in (slot for slot in layout.slots if slot.numel):
        middle = (slot.start + slot.stop) / 2
        found[min(count - 1, int(middle * count / layout.numel))].append((slot.start, slot.stop))
    return [Intervals.of(spans) for spans in found]


def deal(
    available: Sequence[Intervals],
    layout: Layout,
    *,
    per_tensor: bool,
    served: Sequence[Intervals] | None = None,
    limit: int | None = None,
) -> list[Intervals]:
    """Divide the elements among the ranks of a site, so that each element is held by one rank that has it.

    Elements that the same ranks have are cut into pieces, and each of these ranks gets its share of the pieces, in
    order. So a rank of a sharded model holds its shard, and of n replicas each holds about one n-th.

    Args:
        available: for each rank, the elements whose weights it has.
        layout: where the tensors lie.
        per_tensor: whether each tensor is a piece of its own.
        served: what each process of the global server serves, since no piece is for two of them; None: one serves all.
        limit: the elements of a piece, at most; None: `limit_of` the layout.

    Returns:
        For each rank, what it holds.
    """
    held: list[list[Span]] = [[] for _ in available]
    parts = (Intervals.whole(layout.numel),) if served is None else served
    for owners, elements in by_owners(available).items():
        pieces = [piece for part in parts for piece in cut(elements & part, layout, per_tensor=per_tensor, limit=limit)]
        for place, rank in enumerate(owners):
            # Rounded up: a single piece is the first owner's.
            first, last = (-(-one * len(pieces) // len(owners)) for one in (place, place + 1))
            held[rank] += [span for piece in pieces[first:last] for span in piece.intervals.spans]
    return [Intervals.of(spans) for spans in held]


def by_owners(holdings: Sequence[Intervals]) -> dict[tuple[int, ...], Intervals]:
    """The elements grouped by which of the holders have them, in the order of their first elements."""
    events: list[tuple[int, int, int]] = []
    for owner, held in enumerate(holdings):
        for start, stop in held.spans:
            events += [(start, 1, owner), (stop, 0, owner)]
    found: dict[tuple[int, ...], list[Span]] = defaultdict(list)
    present: set[int] = set()
    last = 0
    for at, begins, owner in sorted(events):
        if present and at > last:
            found[tuple(sorted(present))].append((last, at))
        last = at
        present.add(owner) if begins else present.discard(owner)
    return {owners: Intervals.of(spans) for owners, spans in found.items()}


def common(
    served: Intervals,
    sites: Iterable[Sequence[Intervals]],
    layout: Layout,
    *,
    per_tensor: bool,
    limit: int | None = None,
) -> tuple[Piece, ...]:
    """Cut what a server process serves into pieces that no two ranks of any site must share.

    A result that is encoded in these pieces reaches each rank without a byte that the rank does not need, however
    differently the sites are sharded.

    Args:
        served: the elements of the server process.
        sites: for each site, what each of its ranks holds.
        layout: where the tensors lie.
        per_tensor: whether each tensor is a piece of its own.
        limit: the elements of a piece, at most; None: `limit_of` the layout.

    Returns:
        The pieces, by their first elements.
    """
    ranks = [held & served for site in sites for held in site]
    groups = [served, *ranks]
    pieces = [
        piece
        for elements in by_owners(groups).values()
        for piece in cut(elements, layout, per_tensor=per_tensor, limit=limit)
    ]
    return tuple(sorted(pieces, key=lambda piece: piece.start))


def rows(layout: Layout, ranks: int) -> list[Intervals]:
    """What each rank has of a model that FSDP2 shards: so many rows of every tensor; the last ranks may have fewer."""
    found: list[list[Span]] = [[] for _ in range(ranks)]
    for slot in layout.slots:
        count = slot.shape[0] if slot.shape else 1
        width, each = slot.numel // max(count, 1), -(-count // ranks)
        for rank, spans in enumerate(found):
            first, last = min(count, rank * each), min(count, (rank + 1) * each)
            spans.append((slot.start + first * width, slot.start + last * width))
    return [Intervals.of(spans) for spans in found]


def divide(layout: Layout, processes: int, *, whole_tensors: bool) -> list[Intervals]:
    """Divide the index space among the processes of the global server, about equally.

    Args:
        layout: where the tensors lie.
        processes: how many there are.
        whole_tensors: whether no tensor may be cut, because a codec or an optimizer needs all of it.

    Returns:
        What each process serves.
    """
    bounds = [place * layout.numel // processes for place in range(processes + 1)]
    if whole_tensors:
        starts = [slot.start for slot in layout.slots] + [layout.numel]
        bounds = [min(starts, key=lambda start: abs(start - bound)) for bound in bounds]
    return [Intervals.of([(first, last)]) for first, last in pairwise(bounds)]
