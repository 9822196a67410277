"""What a rank holds where sites share updates.

The local model is always

    local model = reference + fresh update
    reference   = global model + share of the pushes in flight + share of the residual

The fresh update is what the local steps did since the last push. `core/parts/resume.py` says how large the shares are.
The reference is computed when it is needed, from what is kept anyway; nothing else of the model's size is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from weightgrad.codecs import Codec
from weightgrad.codecs.codec import not_finite
from weightgrad.codecs.sparse_entries import check_streams
from weightgrad.core import pieces
from weightgrad.core.global_model import WEIGHTS, check_complete
from weightgrad.core.layout import Layout
from weightgrad.core.local_model import LocalModel, add_into, gather, scatter
from weightgrad.core.parts.aggregators import relayed_shares
from weightgrad.core.parts.selectors import Selector
from weightgrad.core.pieces import Piece
from weightgrad.core.segment_index import SegmentIndex
from weightgrad.core.site.local_changes import LocalChanges
from weightgrad.core.site.shard import ShardPlan, SiteShard
from weightgrad.core.site.shard_orders import ApplyOrder, LoadOrder, PushOrder
from weightgrad.core.site.state_memory import StateMemory, result_in
from weightgrad.kernels import dense, fixed, local_model
from weightgrad.kernels.local_model import AddedEntries
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import RoundResult, Segment

_MANY = 30  # entries that are closer than so many elements share cache lines


class UpdateShard(SiteShard):
    """The elements that a rank holds, of the global model and the residual.

    Memory, in vectors of what is held: `global_model`; the residual, once something has stayed behind; and with
    `resume=mix(...)` also `anchor`, because a mixture cannot be computed from the other two. Pushes in flight are kept
    encoded.
    """

    def __init__(
        self,
        site: str,
        layout: Layout,
        local: LocalModel,
        plan: ShardPlan,
        key: int,
        memory: StateMemory | None = None,
    ) -> None:
        super().__init__(site, layout, local, plan, key, memory)
        self.global_model = torch.empty(self.held.numel, device=self.memory.device, dtype=torch.float32)
        for piece in self._pieces(self.held):
            own = local.read(piece.intervals, self.scratch.of("local", piece.numel))
            scatter(self.global_model, self.held, piece.intervals, own)
        self.borrows = False
        """Whether `global_model` is the memory of another replica with the same bits: it is copied before it moves."""
        self.anchor = self.global_model.clone() if plan.resume.own_share else None
        self._in_flight_share = 1.0
        self._waiting = Intervals(())  # where the local model is not at the reference: the next result puts it there
        self._placed: set[Piece] = set()  # while a push is encoded: pieces at the reference that it leads to
        self._indices: dict[int, SegmentIndex] = {}  # of the pushes in flight
        self.changes = LocalChanges()
        """What has moved the local model since ranks with the same weights were told; listed if there are any."""
        self._not_loaded: Intervals | None = None  # while a download is under way: what has not come yet
        if self.step_update is not None:
            self.step_update.begin(local)

    def _pieces(self, intervals: Intervals) -> tuple[Piece, ...]:
        return pieces.cut(intervals, self.layout, per_tensor=False)

    def stepped(self, gradient: LocalModel | None) -> None:
        """Measure the last step."""
        del gradient
        if self.step_update is not None:
            self.step_update.stepped(self.local)

    def squares(self) -> tuple[float, float]:
        """Of the fresh update, and of the last step's."""
        return self.step_update.squares(gradients=False) if self.step_update is not None else (0.0, 0.0)

    # -- where the local model is --------------------------------------------------------------

    def reference(self, intervals: Intervals, out: Tensor) -> Tensor:
        """What the local model would be without the fresh update.

        Args:
            intervals: some of the held elements.
            out: memory for the result.

        Returns:
            The values, rounded as the local model rounds them.
        """
        out = out[: intervals.numel]
        if self.anchor is not None:
            out.copy_(gather(self.anchor, self.held, intervals, out))
            return out
        dense.reference(self._weights(intervals), *self._residual_share(intervals), out)
        for segment in self._in_flight_in(intervals):
            segment.into(out, fixed.ADD, intervals, share=self._in_flight_share)
        return self.local.round_(out, intervals)

    def _residual_share(self, intervals: Intervals) -> tuple[Tensor | None, float]:
        """The residual of which the local model contains a share, and the share."""
        share = self.plan.resume.residual_share
        return (self.residual.of(intervals) if share else None), share

    def _in_flight_in(self, intervals: Intervals) -> list[Segment]:
        """The segments of the pushes in flight that have some of these elements, the oldest push first."""
        return [one for round_ in self.in_flight for one in self._index_of(round_).within(intervals)]

    def _index_of(self, round_: int) -> SegmentIndex:
        """The index of a push in flight, made when it is first asked for."""
        found, segments = self._indices.get(round_), self.in_flight_here(round_)
        if found is None or found.segments is not segments:
            self._indices = {one: index for one, index in self._indices.items() if one in self.in_flight}
            found = self._indices[round_] = SegmentIndex(segments)
        return found

    def _fresh(self, piece: Piece, gradient: LocalModel | None) -> Tensor:
        del gradient
        out = self.scratch.of("fresh", piece.numel)
        views = self._reads.views(piece.intervals)
        if views is None:
            self.reference(piece.intervals, out)
            local = self._reads.read(piece.intervals, self.scratch.of("local", piece.numel))
            return torch.sub(local, out, out=out)
        entries = self._entries(piece, self._in_flight_in(piece.intervals), self._in_flight_share)
        if self.anchor is None and entries is not None:
            where = self._weights(piece.intervals), *self._residual_share(piece.intervals), entries
            check_streams(local_model.distance(views, *where, out), entries)
            return out
        self.reference(piece.intervals, out)
        for part, own in _parts(views):
            torch.sub(own, out[part], out=out[part])
        return out

    def _entries(self, piece: Piece, segments: Sequence[Segment], share: float) -> list[AddedEntries] | None:
        """Segments as entries of a piece; None if one of them is not sparse, or not within the piece."""
        found: list[AddedEntries] = []
        for number, segment in enumerate(segments):
            place, entries = piece.intervals.slice_of(segment.intervals), segment.entries
            if place is None or entries is None or number == local_model.MOST_PUSHES:
                return None
            found.append(entries.added(place.start, share, f"entries {number}"))
        return found

    def fresh_update(self) -> Tensor:
        """What the local steps did since the last push, for all held elements; a new vector, for tests and audits."""
        found = torch.zeros(self.held.numel, device=self.memory.device, dtype=torch.float32)
        for piece in self._pieces(self.held - self._waiting):
            scatter(found, self.held, piece.intervals, self._fresh(piece, None))
        return found

    def _weights(self, intervals: Intervals) -> Tensor:
        return self.scratch.gather("global_model", self.global_model, self.held, intervals)

    def _place(self, chosen: tuple[Piece, ...]) -> None:
        """Put the local model at the reference."""
        if chosen:
            self.changes.end()
        for piece in chosen:
            if not self._place_at_once(piece, self._in_flight_in(piece.intervals), self._in_flight_share):
                out = self.reference(piece.intervals, self.scratch.of("fresh", piece.numel))
                self.local.write(piece.intervals, out)

    def _place_at_once(self, piece: Piece, in_flight: Sequence[Segment], share: float) -> bool:
        """Put the local model of a piece at the reference in one pass over its memory, if that is possible."""
        views = None if self.anchor is not None else self.local.views(piece.intervals)
        entries = None if views is None else self._entries(piece, in_flight, share)
        if views is None or entries is None:
            return False
        where = self._weights(piece.intervals), *self._residual_share(piece.intervals), entries
        check_streams(local_model.place(views, *where), entries)
        return True

    def _taken_at_once(self, order: PushOrder, piece: Piece, selector: Selector, codec: Codec | None) -> bool:
        """Put the fresh update into the residual, and the local model where only the entries of the push will move it.

        Raises:
            NonFiniteError: the update has a NaN or an Inf; what lies before it is in the residual.
        """
        self._placed.discard(piece)  # of a push that failed
        residual, own = self.residual.vector, self.held.slice_of(piece.intervals)
        if order.final or self._apart or self.anchor is not None or residual is None or own is None:
            return False
        views, in_flight = self._reads.views(piece.intervals), self._in_flight_in(piece.intervals)
        before = None if views is None else self._entries(piece, in_flight, self._in_flight_share)
        if views is None or before is None:
            return False
        after = None
        if order.places and self.residual.leaves_by_entries(selector, codec):
            same = order.in_flight_share == self._in_flight_share
            after = before if same else self._entries(piece, in_flight, order.in_flight_share)
        share = self.plan.resume.residual_share
        done = local_model.take_update(views, self._weights(piece.intervals), residual[own], share, before, after)
        check_streams(done is not None, before)
        if done != piece.numel:
            raise not_finite(self._fresh(piece, None))
        if after is not None:
            self._placed.add(piece)
            self.changes.end()
        return True

    def _taken(self, order: PushOrder, piece: Piece, segment: Segment | None) -> None:
        """Place a piece while it is in the cache: nothing that is encoded later looks at it."""
        if not order.places or self._apart:
            return
        in_flight = [*self._in_flight_in(piece.intervals), *(() if segment is None else (segment,))]
        if piece in self._placed:
            if segment is not None:
                self._place_entries(piece, in_flight, order.in_flight_share)
        elif self._place_at_once(piece, in_flight, order.in_flight_share):
            self._placed.add(piece)
            self.changes.end()

    def _place_entries(self, piece: Piece, in_flight: Sequence[Segment], share: float) -> None:
        """Put the local model at the reference where the entries of the last segment are; it is there elsewhere."""
        entries = self._entries(piece, in_flight, share)
        if entries is None:  # there are more than one pass can add
            self._placed.discard(piece)
            return
        views = self.local.views(piece.intervals)
        assert views is not None
        if _MANY * entries[-1].streams.count > piece.numel:  # a pass over everything is faster
            self._place_at_once(piece, in_flight, share)
            return
        where = self._weights(piece.intervals), *self._residual_share(piece.intervals), entries
        check_streams(local_model.place_entries(views, *where), entries)

    # -- rounds --------------------------------------------------------------------------------

    def _pushed(self, order: PushOrder, chosen: tuple[Piece, ...]) -> None:
        if self.anchor is not None:
            for piece in chosen:  # all that is in the local model now counts as pushed
                own = self._reads.read(piece.intervals, self.scratch.of("local", piece.numel))
                scatter(self.anchor, self.held, piece.intervals, own)
        elif order.places:
            self._in_flight_share = order.in_flight_share
            self._place(tuple(piece for piece in chosen if piece not in self._placed))
            self._placed.clear()
        elif order.waits:  # what the push is not about keeps its fresh update
            self._waiting = Intervals.of(span for piece in chosen for span in piece.intervals.spans)
        if self.step_update is not None:
            self.step_update.pushed(self.local)

    def release(self, through: int) -> None:
        """Free pushes of which nothing is in the local model: it waits to be put at the next global model."""
        if self._waiting == self.held and self.anchor is None and self.local.exact:
            for round_ in [one for one in self.in_flight if one <= through]:
                self.in_flight[round_] = ()

    def apply(self, order: ApplyOrder, result: RoundResult) -> None:
        """Move the global model and the local model by a result; the fresh update stays in the local model."""
        result = result_in(self.memory, self.filled_in(result))
        self._own()
        if self.anchor is not None:
            self._apply_mixed(order, result)
        elif not self.local.exact or order.in_flight_share != self._in_flight_share:
            self._apply_whole(order, result)
        elif self._waiting == self.held:
            self._move_global_model(result)
            self.remove_through(order.through)
        else:
            self._apply_change(order, result)
        if not self.in_flight:  # otherwise it is the result of another site's push: the site waits for its own
            self._place(self._pieces(self._waiting))
            self._waiting = Intervals(())
        if self.step_update is not None:
            self.step_update.moved(self.local)

    def _own_push(self, round_: int) -> tuple[Segment, ...] | None:
        return self.in_flight_here(round_) if round_ in self.in_flight else None

    def _own(self) -> None:
        """Have memory of its own for the global model, which is about to move."""
        if self.borrows:
            self.global_model, self.borrows = self.global_model.clone(), False

    def _apply_change(self, order: ApplyOrder, result: RoundResult) -> None:
        """Move the local model by what the reference moves: only what result and pushes hold is touched."""
        for segment, share in (*((one, 1.0) for one in result.segments), *relayed_shares(result.relayed)):
            segment.into(self.global_model, fixed.ADD, self.held, share=share)
            self.changes.make(self.local, segment, fixed.ADD, share)
        for segments in self.remove_through(order.through):
            for segment in segments:
                self.changes.make(self.local, segment, fixed.SUBTRACT, self._in_flight_share)
        if self._apart:
            self.changes.end()  # the encoded segments are on the device

    def _apply_whole(self, order: ApplyOrder, result: RoundResult) -> None:
        """Compute the whole local model anew."""
        self.changes.end()
        rest = self.held - self._waiting
        for piece in self._pieces(rest):  # the local model keeps the fresh update meanwhile
            self.local.write(piece.intervals, self._fresh(piece, None))
        self._move_global_model(result)
        self.remove_through(order.through)
        self._in_flight_share = order.in_flight_share
        self._resume(rest)

    def _resume(self, intervals: Intervals) -> None:
        """Put the local model at the reference, plus the fresh update that it has been left with."""
        for piece in self._pieces(intervals):
            out = self.reference(piece.intervals, self.scratch.of("fresh", piece.numel))
            out += self.local.read(piece.intervals, self.scratch.of("local", piece.numel))
            self.local.write(piece.intervals, out)

    def _apply_mixed(self, order: ApplyOrder, result: RoundResult) -> None:
        """Mix the local model with the global model where the result moved it."""
        assert self.anchor is not None
        self.changes.end()
        share = self.plan.resume.own_share
        for segment in result.segments:
            segment.into(self.global_model, fixed.ADD, self.held)
        self.remove_through(order.through)
        for segment in result.segments:
            intervals = segment.intervals & self.held
            local = self.local.read(intervals, self.scratch.of("local", intervals.numel))
            anchor = self.scratch.gather("anchor", self.anchor, self.held, intervals)
            mixed = torch.mul(local, share, out=self.scratch.of("fresh", intervals.numel))
            mixed += self._weights(intervals) * (1 - share)
            fresh = local - anchor
            self.local.write(intervals, self.local.round_(mixed, intervals))
            scatter(self.anchor, self.held, intervals, torch.sub(mixed, fresh, out=mixed))

    def _move_global_model(self, result: RoundResult) -> None:
        for segment in result.segments:
            segment.into(self.global_model, fixed.ADD, self.held)
        for segment, share in relayed_shares(result.relayed):
            segment.into(self.global_model, fixed.ADD, self.held, share=share)

    # -- downloads -----------------------------------------------------------------------------

    def begin_load(self, *, discards: bool) -> None:
        """Leave only the fresh update in the local model, until the new global model is there."""
        self.changes.end()
        self._own()
        if discards:
            self.residual.clear()
            self.in_flight.clear()
        without = self.held if discards else self._waiting
        if self._not_loaded is None:  # otherwise the download before was interrupted, and nothing else is left
            for piece in self._pieces(self.held - without):
                self.local.write(piece.intervals, self._fresh(piece, None))
        for piece in self._pieces(without):
            self.local.write(piece.intervals, self.scratch.of("fresh", piece.numel).zero_())
        self._waiting = Intervals(())
        self._not_loaded = self.held

    def load(self, name: str, segment: Segment) -> None:
        """Store weights of the new global model."""
        if name == WEIGHTS:
            assert self._not_loaded is not None
            for here in self.memory.arrive((segment,)):
                here.into(self.global_model, fixed.STORE, self.held)
            self._not_loaded = self._not_loaded - segment.intervals

    def load_result(self, result: RoundResult) -> None:
        """Move the new global model, as far as it is there."""
        self._move_global_model(result_in(self.memory, self.filled_in(result)))

    def end_load(self, order: LoadOrder, scalars: Mapping[str, Tensor]) -> None:
        """Put the local model beside the new global model.

        Raises:
            ProtocolError: a part of the weights has not come.
        """
        del scalars
        check_complete(self.held, self._not_loaded)
        self._not_loaded = None
        self.remove_through(order.included)
        self._in_flight_share = order.in_flight_share
        if self.anchor is not None:
            self.anchor.copy_(self.global_model)
            for round_ in self.in_flight:
                add_into(self.anchor, self.in_flight_here(round_), self.held)
            for piece in self._pieces(self.held):
                own = self.scratch.gather("anchor", self.anchor, self.held, piece.intervals)
                scatter(self.anchor, self.held, piece.intervals, self.local.round_(own, piece.intervals))
        self._resume(self.held)
        if self.step_update is not None:
            self.step_update.begin(self.local)

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Also the global model, the anchor, the share of pushes in flight, and where a result is waited for."""
        share = torch.tensor(self._in_flight_share, dtype=torch.float64)
        found = {**super().state(), "global_model": self.global_model, "in_flight_share": share}
        if self._waiting:
            found["waiting"] = torch.tensor(self._waiting.spans)
        return found if self.anchor is None else {**found, "anchor": self.anchor}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        super().load_state(state)
        self._own()
        self.global_model.copy_(state["global_model"])
        self._in_flight_share = float(state["in_flight_share"])
        waiting = state["waiting"].tolist() if "waiting" in state else []
        self._waiting = Intervals(tuple((start, stop) for start, stop in waiting))
        if self.anchor is not None:
            self.anchor.copy_(state["anchor"])


def _parts(views: Sequence[tuple[int, Tensor]]) -> Iterator[tuple[slice, Tensor]]:
    """Views of weights, each with its place as a slice."""
    for place, own in views:
        yield slice(place, place + own.numel()), own
