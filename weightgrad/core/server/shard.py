"""What one process of the global server serves, and the work of a round on it: aggregate, encode, move.

The global server is one `ServerCoordinator`, which decides which pushes a round closes with, and a `ServerShard` in
each process, which closes it for the elements that the process serves. Everything happens piece by piece
(`core/pieces.py`): the pushes of all sites are decoded for one piece, aggregated, encoded, and added to the global
model before the next piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import Codec, Fp32
from weightgrad.codecs.registry import decode_into
from weightgrad.core import pieces
from weightgrad.core.controller.agreement import Agreement, Signs
from weightgrad.core.global_model import WEIGHTS, GlobalModel
from weightgrad.core.local_model import Scratch
from weightgrad.core.parts.aggregators import Aggregator, Contribution, Memory
from weightgrad.core.parts.selectors import All, Selector, View
from weightgrad.core.pieces import Piece
from weightgrad.core.random_streams import ServerStream
from weightgrad.core.residual import Look, Residual
from weightgrad.core.server.close_order import ClosedPart, ClosedPush, CloseOrder
from weightgrad.core.server.delay_compensation import DelayCompensation
from weightgrad.core.server.push_facts import PushFacts, are_of_the_same_values
from weightgrad.core.server.result_log import ResultLog
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.errors import EncodeError, WeightGradError
from weightgrad.kernels import fixed
from weightgrad.kernels.moments import moments
from weightgrad.kernels.noise import derive
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_parts import without_values
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import ModelPart, Push, RelayedPush, RoundResult, Segment


@dataclass(frozen=True, kw_only=True)
class ServerShardPlan:
    """The server's parts of a strategy that work on what a process serves."""

    aggregator: Aggregator
    down: Codec
    down_selector: Selector
    per_tensor: bool
    keep_loss: bool
    flush: Codec | None
    compensation: float = 0.0
    most_waiting: int = 8  # pushes of a site that may wait for their rounds to close


class ServerShard:
    """The elements of the global model that one process of the global server serves.

    Memory, in vectors of what is served: the global model (and a gradient and the optimizer's state where gradients are
    shared); the residual of results, once a codec has lost something; the aggregator's memory; the past models of
    `DelayCompensation`. Pushes are kept encoded until their round closes, results as long as the log keeps them.

    Args:
        global_model: the first global model of the served elements, which the shard owns from now on.
        plan: the server's parts of the strategy that work on them.
        key: the key of the random stream of the codec of results.
        log: keeps the last results for sites that were away.
        process: which of the server's processes this is.
    """

    def __init__(
        self, global_model: GlobalModel, plan: ServerShardPlan, key: int, log: ResultLog, *, process: int = 0
    ) -> None:
        self.global_model = global_model
        self.layout = global_model.layout
        self.served = global_model.held
        self.log = log
        self.holdings: dict[str, tuple[Intervals, ...]] = {}
        """For each site, what its ranks hold; a site that is not in it has one rank that holds everything."""
        self.pushes: dict[tuple[str, int], tuple[Segment, ...]] = {}
        """Encoded pushes of rounds that have not closed, by site and round."""
        self._process = process
        self._found: dict[tuple[str, int], float] = {}  # the squares of each of these pushes
        self.aligned = True
        """Whether sites can be sent each other's pushes as they are, without a piece that two ranks of a site need."""
        self.plan = plan
        self._scratch = Scratch()
        self._downloads_key = derive(key, ServerStream.DOWNLOADS)
        self.residual = Residual(self.served, plan.down, key, keep_loss=plan.keep_loss, scratch=self._scratch)
        self._flush = plan.flush if plan.keep_loss and not isinstance(plan.down, Fp32) else None
        self._memory = Memory(self.served)
        self._delay_compensation = DelayCompensation(global_model, plan.compensation)
        self._delay_compensation.record_model(sites=0)
        self._cut = lru_cache(maxsize=64)(self._cut_anew)

    # -- pushes in -----------------------------------------------------------------------------

    def receive(self, site: str, round_: int, segments: tuple[Segment, ...]) -> PushFacts:
        """Take in a complete push, and look at its values.

        Args:
            site: the site.
            round_: the round that the push was made for.
            segments: what the site pushed, as far as it is served here.

        Returns:
            What was found.
        """
        self.pushes[site, round_] = segments
        self._found[site, round_] = math.nan
        numel = sum(segment.payload.numel for segment in segments)
        problem = _misplaced(segments, self.served)
        if problem is None:
            try:
                squares = self._found[site, round_] = self._squares(segments)
                return PushFacts(squares=squares, numel=numel)
            except WeightGradError as error:
                problem = f"cannot be decoded: {error}"
        return PushFacts(squares=math.nan, numel=numel, problem=problem)

    def _squares(self, segments: Sequence[Segment]) -> float:
        total = 0.0
        for segment in segments:
            if segment.entries is not None:
                values = segment.entries.checked_values()
            else:
                values = self._scratch.of("decoded", segment.payload.numel)
                decode_into(segment.payload, values, fixed.STORE)
            total += moments(values).squares
        return total

    def forget(self, site: str, after: int) -> None:
        """Drop the pushes of a site for rounds after this one: they will be sent again."""
        for key in [key for key in self.pushes if key[0] == site and key[1] > after]:
            self.drop(*key)

    def drop(self, site: str, round_: int) -> None:
        """Drop a push that no round takes."""
        self.pushes.pop((site, round_), None)
        self._found.pop((site, round_), None)

    # -- rounds --------------------------------------------------------------------------------

    def close(self, order: CloseOrder) -> ClosedPart:
        """Aggregate the pushes of a round, encode the result, and move the global model by it.

        Args:
            order: which round, and how.

        Returns:
            The result.
        """
        pushes = [self._contribution(push) for push in order.pushes]
        result = replace(order.result, version=self.global_model.version + 1)
        touched = self._touched(pushes)
        if order.relays and touched:
            result = replace(result, relayed=self._relayed(pushes))
            self.global_model.apply(result)
        else:
            result = self._aggregate(order, pushes, touched, result)
        self._delay_compensation.record_model(sites=order.sites)
        self.log.append(result)
        signs: Signs | None = None
        if order.compares:
            agreement = Agreement(self.layout.numel)
            for push in pushes:
                agreement.add(push.segments)
            signs = agreement.signs()
        return ClosedPart(
            result=result,
            digest=0 if self.global_model.elsewhere else self.global_model.digest_value(),
            sizes=_sizes(result, order.receivers),
            signs=signs,
            first_result=self.log.first,
        )

    def _contribution(self, push: ClosedPush) -> Contribution:
        segments = self.pushes.pop((push.site, push.round), ())
        found = self._found.pop((push.site, push.round), math.nan)
        if not push.counts or (push.squares and not are_of_the_same_values(push.squares[self._process], found)):
            segments = ()
        segments = self._delay_compensation.compensate(segments, push.seen)
        return Contribution(site=push.site, round=push.round, weight=push.weight, segments=segments, scale=push.scale)

    def _relayed(self, pushes: Sequence[Contribution]) -> tuple[RelayedPush, ...]:
        return tuple(
            RelayedPush(site=push.site, round=push.round, weight=push.weight, segments=push.segments) for push in pushes
        )

    def _touched(self, pushes: Sequence[Contribution]) -> Intervals:
        """The elements that any push has."""
        touched = Intervals(())
        for push in pushes:
            spans = (span for segment in push.segments for span in segment.intervals.spans)
            touched = touched | (Intervals.of(spans) & self.served)
        return touched

    def _aggregate(
        self, order: CloseOrder, pushes: Sequence[Contribution], touched: Intervals, result: RoundResult
    ) -> RoundResult:
        flushes = order.last and self._flush is not None
        cut = self._cut(touched)
        if flushes and self.residual.vector is not None:  # apart: an aggregator takes no step where nothing was pushed
            cut = tuple(sorted((*cut, *self._cut(self.served - touched)), key=lambda piece: piece.start))
        model, found = self.global_model, []
        model.advance(result)
        for piece in cut:
            update = self.plan.aggregator.combine(pushes, piece.intervals, order.weight, self._memory, self._scratch)
            segment = self._encode(order, piece, update, flushes=flushes)
            if segment is not None:
                found.append(segment)
                if not model.takes_gradients:
                    model.add([segment])
        result = replace(result, segments=tuple(found))
        if model.takes_gradients and model.is_step(result):
            model.step_with(result)
        return result

    def _encode(self, order: CloseOrder, piece: Piece, update: Tensor | None, *, flushes: bool) -> Segment | None:
        """Encode the update of one piece; what the codec loses stays in the residual."""
        if update is None and not flushes:
            return None
        if update is None:
            update = self._scratch.of("total", piece.numel).zero_()
        codec = None if order.down is None else codecs.parse(order.down)
        selector = self.plan.down_selector if self.plan.down_selector.needs_residual else All()
        if flushes:  # all have finished: what the codec of results would lose, or has lost, goes out too
            selector, codec = All(), self._flush
            left = self.residual.of(piece.intervals)
            if not update.any() and (left is None or not left.any()):
                return None
        look = self._look(order)
        return self.residual.take(piece, update, selector, look, count=order.result.round, codec=codec)

    def _look(self, order: CloseOrder) -> Look:
        def look(piece: Piece, residual: Tensor) -> View:
            return View(
                residual=residual,
                global_model=lambda: self.global_model.weights(piece.intervals),
                step=order.result.step,
            )

        return look

    def _cut_anew(self, elements: Intervals) -> tuple[Piece, ...]:
        return pieces.common(elements, self.holdings.values(), self.layout, per_tensor=self.plan.per_tensor)

    def set_holdings(self, site: str, ranks: Sequence[Intervals]) -> None:
        """Say what the ranks of a site hold, so that results are cut where no two ranks must share a piece."""
        if self.holdings.get(site) != tuple(ranks):
            self.holdings[site] = tuple(ranks)
            self._cut.cache_clear()
            self.aligned = self._is_aligned()

    def _is_aligned(self) -> bool:
        """Whether no two ranks of a site need the same piece of another site's push."""
        for site, ranks in self.holdings.items():
            parts = [held & self.served for held in ranks]
            for sender, others in self.holdings.items() if len(parts) > 1 else ():
                for held in others if sender != site else ():
                    cut = pieces.cut(held & self.served, self.layout, per_tensor=self.plan.per_tensor)
                    if any(sum(bool(piece.intervals & own) for own in parts) > 1 for piece in cut):
                        return False
        return True

    # -- downloads -----------------------------------------------------------------------------

    def model_now(self) -> tuple[int, dict[str, Tensor]]:
        """The version of the global model and copies of its vectors, for a site that is sent them later.

        Where gradients are shared, the vectors must be of the version of which the site has been told the optimizer's
        other state. Where only sites step the model stays the first one, and nothing is copied.
        """
        model = self.global_model
        if model.elsewhere:
            return 0, model.vectors()
        return model.version, {name: vector.clone() for name, vector in model.vectors().items()}

    def model_parts(
        self, held: Intervals, codec: Codec | None = None, then: tuple[int, Mapping[str, Tensor]] | None = None
    ) -> Iterator[ModelPart]:
        """The global model for a rank, in parts that are made when they are asked for, and not before.

        Rounds may close in between. A part has the results of all rounds that closed before it was asked for: a site
        that is sent parts and results in this order ends with the present model.

        Args:
            held: what the rank holds.
            codec: a lossy codec for the vectors that bear it; None sends everything exact.
            then: what `model_now` returned; None: the model as it is when a part is asked for.
        """
        now = 0 if self.global_model.elsewhere else self.global_model.version
        version, found = (now, self.global_model.vectors()) if then is None else then
        cut = pieces.cut(held & self.served, self.layout, per_tensor=False)
        return self._model_parts(version, sorted(found.items()), cut, codec)

    def _model_parts(
        self, version: int, vectors: Sequence[tuple[str, Tensor]], cut: Sequence[Piece], codec: Codec | None
    ) -> Iterator[ModelPart]:
        key, left = derive(self._downloads_key, version), len(vectors) * len(cut)
        for index, (name, vector) in enumerate(vectors):
            # Optimizers divide by second moments and counts, which have no negative entries: one that a codec rounded
            # to zero would make a huge step.
            lossy = codec if codec is not None and bool((vector < 0).any()) else Fp32()
            for piece in cut:
                values = self._scratch.gather("decoded", vector, self.served, piece.intervals)
                try:
                    payload, _ = lossy.encode(values, {}, derive(key, index, piece.start))
                except EncodeError:  # such as a weight that is too large for fp16
                    payload, _ = Fp32().encode(values, {}, 0)
                segment, left = Segment.at(piece.intervals, payload), left - 1
                yield ModelPart(version=version, vector=name, segments=(segment,), last=left == 0)
        if not cut:
            yield ModelPart(version=version, vector=WEIGHTS, segments=(), last=True)

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything that must survive, as named tensors; vectors are not copied. Pushes are not part of it."""
        model = self.global_model
        return {
            **with_prefix("global_model.", model.state()),
            **with_prefix("result_residual.", self.residual.state()),
            **with_prefix("aggregator.", self._memory.vectors),
            "clock": torch.tensor([model.version, model.step]),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; pushes and past results are forgotten."""
        version, step = (int(number) for number in state["clock"])
        self.global_model.load_state(without_prefix("global_model.", state), version, step)
        self.residual.load(without_prefix("result_residual.", state))
        self._memory.vectors = {name: tensor.clone() for name, tensor in without_prefix("aggregator.", state).items()}
        self.pushes, self._found = {}, {}
        self.log.restart(version)
        self._delay_compensation.clear()
        self._delay_compensation.record_model(sites=0)


def values_bytes(site: str, segments: Sequence[Segment]) -> int:
    """The bytes of the values of a push, counted as one rank that holds all of them sends them: `nbytes` does so."""
    push = Push(site=site, round=1, after=0, step=0, seen=0, samples=0, segments=tuple(segments))
    return nbytes(push) - nbytes(without_values(push))


def _sizes(result: RoundResult, receivers: Mapping[str, bool]) -> dict[str, int]:
    """By site, the bytes of the values that it is sent."""
    found = {}
    for site, leaves_out in receivers.items():
        own = result.without(site) if leaves_out else result
        found[site] = nbytes(own) - nbytes(without_values(own))
    return found


def _misplaced(segments: Sequence[Segment], served: Intervals) -> str | None:
    """What is wrong with the places of segments: no element may be in two, and all must be served here."""
    for segment in segments:
        if segment.start < 0 or (segment.intervals & served).numel != segment.payload.numel:
            return f"has a segment at {segment.start} to {segment.end}, which is not served here"
    try:
        Intervals.of(span for segment in segments for span in segment.intervals.spans)
    except WeightGradError as error:
        return f"has segments that overlap: {error}"
    return None
