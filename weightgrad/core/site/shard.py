"""What one rank of a site holds, and the work of a round on it: encode a push, apply a result, load a model.

A site is one `SiteCoordinator`, which decides when rounds start and end, and a `SiteShard` on each rank, which does
what it is told for the elements that the rank holds. Everything happens piece by piece (`core/pieces.py`), so a round
needs memory for a few pieces, whatever the size of the model.

There are two kinds: `update_shard.py` where sites share updates, `gradient_shard.py` where they share gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import Codec
from weightgrad.core import pieces
from weightgrad.core.layout import Layout
from weightgrad.core.local_model import LocalModel, Readable, Scratch
from weightgrad.core.parts.resume import Resume
from weightgrad.core.parts.selectors import All, Selector, View
from weightgrad.core.pieces import Piece
from weightgrad.core.residual import Look, Residual
from weightgrad.core.site.shard_orders import ApplyOrder, LoadOrder, PushOrder
from weightgrad.core.site.state_memory import HostMemory, StateMemory
from weightgrad.core.site.step_update import StepUpdate
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.messages import PushPart, RoundResult, Segment


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The parts of a strategy that work on what a rank holds."""

    selector: Selector
    up: Codec
    per_tensor: bool
    keep_loss: bool
    resume: Resume
    flush: Codec | None
    flush_local: bool = False
    measures: bool = False  # the trigger compares the fresh update with the last step


class SiteShard(ABC):
    """The elements of a site's model that one rank holds.

    Args:
        site: the name of the site.
        layout: where the tensors lie in the index space.
        local: the weights that the rank trains on.
        plan: the parts of the strategy that work on them.
        key: the key of the random stream of the site's pushes.
        memory: where the vectors are; None: in memory of the host.
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
        self.site = site
        self.layout = layout
        self.held = local.held
        self.local = local
        self.plan = plan
        self.in_flight: dict[int, tuple[Segment, ...]] = {}  # encoded pushes without a result, by round, oldest first
        self.memory: StateMemory = HostMemory() if memory is None else memory
        self._here: dict[int, tuple[tuple[Segment, ...], tuple[Segment, ...]]] = {}  # those, and the same on a device
        self._reads: Readable = local  # the weights of which a push is made
        self.served: tuple[Intervals, ...] = (Intervals.whole(layout.numel),)
        """What each process of the global server serves: no piece of a push is for two of them."""
        self.within: Intervals | None = None
        """What the step is about, where gradients are shared and another optimizer has the rest; None: everything."""
        self.scratch = Scratch(self.memory.device)
        self.residual = Residual(self.held, plan.up, key, keep_loss=plan.keep_loss, scratch=self.scratch)
        needs = plan.selector.needs_step
        self.step_update = (
            StepUpdate(self.held, layout, elements=needs == "elements") if plan.measures or needs else None
        )

    # -- steps ---------------------------------------------------------------------------------

    @abstractmethod
    def stepped(self, gradient: LocalModel | None) -> None:
        """Take note of a local step, where the strategy compares with it; the gradient where gradients are shared."""

    def keep(self, gradient: LocalModel | None) -> None:
        """Keep what the last step made, where no push takes it; nothing to do where the local model has it."""
        if gradient is not None:
            kept = pieces.cut(self._about, self.layout, per_tensor=self.plan.per_tensor)
            self._expect(gradient, kept)
            for piece in kept:
                self.residual.put(piece, gradient.read(piece.intervals, self.scratch.of("fresh", piece.numel)))

    @abstractmethod
    def squares(self) -> tuple[float, float]:
        """The squared norms of what was made since the last push, and of the last step's update."""

    # -- rounds --------------------------------------------------------------------------------

    def push(self, order: PushOrder, gradient: LocalModel | None = None) -> tuple[Segment, ...]:
        """Encode a push, which is in flight from then on.

        Args:
            order: what to push.
            gradient: the gradient of the step, where gradients are shared.

        Returns:
            The segments, by what the server's processes serve and in ascending order.

        Raises:
            NonFiniteError: the update has a NaN or an Inf.
        """
        return tuple(self.stream_push(order, gradient))

    def chosen(self, order: PushOrder) -> tuple[Piece, ...]:
        """The pieces that a push is about, by what the server's processes serve and in ascending order."""
        return tuple(
            piece
            for served in self.served
            for piece in self._selector(order).pieces(
                self._about & served, self.layout, per_tensor=self.plan.per_tensor, fragment=order.fragment
            )
        )

    @property
    def _about(self) -> Intervals:
        """Of what is held, what the step is about."""
        return self.held if self.within is None else self.held & self.within

    def _selector(self, order: PushOrder) -> Selector:
        return All() if order.final else self.plan.selector

    def stream_push(
        self, order: PushOrder, gradient: LocalModel | None = None, weights: Readable | None = None
    ) -> Iterator[Segment]:
        """Encode a push piece by piece, so that one can be sent while the next is encoded; see `push`.

        The push is in flight, and the residual complete, when all segments have been taken.

        Args:
            order: what to push.
            gradient: the gradient of the step, where gradients are shared.
            weights: what is pushed; None: the local model. The weights of an earlier moment may be, if the push does
                not move the local model and nothing compares it with the last step.
        """
        selector, chosen = self._selector(order), self.chosen(order)
        flush = self.plan.flush if order.final and order.flush else None
        codec = flush if order.final else None if order.codec is None else codecs.parse(order.codec)
        self._reads = self.local if weights is None else weights
        found: list[tuple[Segment, Segment]] = []
        self._expect(self._reads if gradient is None else gradient, chosen)
        for both in self.memory.leave(self._encoded(order, chosen, selector, codec, gradient)):
            found.append(both)
            yield both[1]
        if gradient is not None:
            self._keep_rest(chosen, gradient)
        sent = self.in_flight[order.round] = tuple(one for _, one in found)
        if self._apart:
            self._here[order.round] = sent, tuple(one for one, _ in found)
        self._pushed(order, chosen)
        self._reads = self.local

    def _encoded(
        self,
        order: PushOrder,
        chosen: tuple[Piece, ...],
        selector: Selector,
        codec: Codec | None,
        gradient: LocalModel | None,
    ) -> Iterator[Segment]:
        """The segments of a push, with their bytes where the vectors are."""
        flush = codec if order.final else None
        for piece in chosen:
            in_residual = self._taken_at_once(order, piece, selector, codec)
            fresh = None if in_residual else self._fresh(piece, gradient)
            if order.final and flush is None and fresh is not None:
                self.residual.put(piece, fresh)
            elif not order.final or fresh is None or self._anything(piece, fresh):
                share = self.plan.resume.residual_share if order.final and self.plan.flush_local else 1.0
                rest = self.residual.hold_back(piece, 1 - share)
                segment = self.residual.take(piece, fresh, selector, self._view(order), count=order.round, codec=codec)
                if rest is not None:
                    self.residual.put(piece, rest)
                self._taken(order, piece, segment)
                if segment is not None:
                    yield segment

    def _expect(self, values: Readable, chosen: tuple[Piece, ...]) -> None:
        """Let what is read next come to the host meanwhile, if the vectors are there."""
        if not self._apart:
            values.expect([piece.intervals for piece in chosen])

    @property
    def _apart(self) -> bool:
        """Whether the vectors are not in memory of the host."""
        return self.memory.device.type != "cpu"

    def in_flight_here(self, round_: int) -> tuple[Segment, ...]:
        """A push in flight, with its bytes where the vectors are."""
        sent = self.in_flight[round_]
        if not self._apart:
            return sent
        if round_ not in self._here or self._here[round_][0] is not sent:  # of a checkpoint, or released
            self._here[round_] = sent, self.memory.arrive(sent)
        return self._here[round_][1]

    def _anything(self, piece: Piece, fresh: Tensor) -> bool:
        """Whether a piece has anything to push; a last push leaves out what has not."""
        left = self.residual.of(piece.intervals)
        return bool(fresh.any()) or (left is not None and bool(left.any()))

    def _keep_rest(self, chosen: tuple[Piece, ...], gradient: LocalModel) -> None:
        """Keep the gradient of what this round is not about."""
        rest = self._about - Intervals.of(span for piece in chosen for span in piece.intervals.spans)
        for piece in pieces.cut(rest, self.layout, per_tensor=False):
            self.residual.put(piece, gradient.read(piece.intervals, self.scratch.of("fresh", piece.numel)))

    def _view(self, order: PushOrder) -> Look:
        last = self.step_update

        def look(piece: Piece, residual: Tensor) -> View:
            return View(
                residual=residual,
                global_model=lambda: self._weights(piece.intervals),
                last_norm=lambda: last.last_norm(piece) if last is not None else 0.0,
                last_update=lambda: last.last_update(piece) if last is not None else None,
                step=order.step,
                threshold=order.threshold,
            )

        return look

    def _taken_at_once(self, order: PushOrder, piece: Piece, selector: Selector, codec: Codec | None) -> bool:
        """Put what was made since the last push into the residual, if one pass can do that and what comes with it."""
        del order, piece, selector, codec
        return False

    @abstractmethod
    def _fresh(self, piece: Piece, gradient: LocalModel | None) -> Tensor:
        """What was made since the last push, in memory that is used again."""

    def _taken(self, order: PushOrder, piece: Piece, segment: Segment | None) -> None:
        """A piece of a push has been encoded; the push is not in flight yet. None: nothing of the piece leaves."""
        del order, piece, segment

    @abstractmethod
    def _pushed(self, order: PushOrder, chosen: tuple[Piece, ...]) -> None:
        """A push has been encoded."""

    @abstractmethod
    def _weights(self, intervals: Intervals) -> Tensor:
        """The global model of some held elements; not to be written to."""

    @abstractmethod
    def apply(self, order: ApplyOrder, result: RoundResult) -> None:
        """Move by a round result, of which at least what this rank holds must be given."""

    def remove_through(self, round_: int) -> list[tuple[Segment, ...]]:
        """Forget the pushes up to and including this round, and return them: they are in the global model."""
        removed = [number for number in self.in_flight if number <= round_]
        found = [self.in_flight_here(number) for number in removed]
        for number in removed:
            del self.in_flight[number]
        self._here = {number: both for number, both in self._here.items() if number in self.in_flight}
        return found

    def release(self, through: int) -> None:
        """Free the memory of pushes that are in the global model, as far as their results do without them.

        Args:
            through: the pushes up to and including this round.
        """
        del through

    def filled_in(self, result: RoundResult) -> RoundResult:
        """Put the site's own pushes into a relayed result, from which the server leaves them out."""
        relayed = [
            replace(push, segments=self._own_push(push.round)) if push.segments is None else push
            for push in result.relayed
        ]
        return replace(result, relayed=tuple(relayed))

    def _own_push(self, round_: int) -> tuple[Segment, ...] | None:
        return self.in_flight.get(round_)

    # -- downloads -----------------------------------------------------------------------------

    @abstractmethod
    def begin_load(self, *, discards: bool) -> None:
        """A download begins. From now on `load` and `load_result` are called in the order of their messages.

        Args:
            discards: whether the residual and the pushes in flight are discarded.
        """

    @abstractmethod
    def load(self, name: str, segment: Segment) -> None:
        """Store a part of the downloaded model: of its weights, or of a vector of its optimizer."""

    @abstractmethod
    def load_result(self, result: RoundResult) -> None:
        """Apply a result that came between parts of the download; parts that come later contain it already."""

    @abstractmethod
    def end_load(self, order: LoadOrder, scalars: Mapping[str, Tensor]) -> None:
        """The download is complete; `scalars` are what the model's optimizer keeps beside vectors."""

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """What must survive, as named tensors; vectors are not copied. The local model is not part of it."""
        found = with_prefix("residual.", self.residual.state())
        if self.step_update is not None:
            found |= with_prefix("step_update.", self.step_update.state())
        for round_, segments in self.in_flight.items():
            found[f"in_flight.{round_}"] = pack_in_flight(round_, segments)
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.residual.load(without_prefix("residual.", state))
        if self.step_update is not None and (saved := without_prefix("step_update.", state)):
            self.step_update.load(saved)
        rounds = without_prefix("in_flight.", state)
        self.in_flight = {int(round_): unpack_in_flight(rounds[round_]) for round_ in sorted(rounds, key=int)}


def pack_in_flight(round_: int, segments: tuple[Segment, ...]) -> Tensor:
    """Segments as a tensor of bytes, for a checkpoint."""
    part = PushPart(site="-", round=round_, rank=0, segments=segments, last=True)
    return torch.frombuffer(bytearray(pack(part)), dtype=torch.uint8)


def unpack_in_flight(tensor: Tensor) -> tuple[Segment, ...]:
    """The segments that `pack_in_flight` packed."""
    part = unpack(tensor.numpy().data)
    assert isinstance(part, PushPart)
    return part.segments
