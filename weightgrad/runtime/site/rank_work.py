"""What every rank of a site does when rank 0 orders it, for the elements that it holds.

Orders come in groups (`runtime/site/orders.py`): between `begin_round` and `end_round` weights may be in the form that
rounds work on, and only then. Where weights have moved, the ranks that have the same ones are sent them at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from weightgrad.core.global_model import digest_of
from weightgrad.core.random_streams import RunStream
from weightgrad.core.shared_buffers import BUFFER
from weightgrad.core.site.gradient_shard import GradientShard
from weightgrad.core.site.local_changes import LocalChanges
from weightgrad.core.site.shard import SiteShard
from weightgrad.core.site.shard_orders import PushOrder
from weightgrad.core.site.strategy import SiteStrategy
from weightgrad.core.site.update_shard import UpdateShard
from weightgrad.core.vector_checks import without_prefix
from weightgrad.errors import RefusedError
from weightgrad.kernels.noise import derive
from weightgrad.runtime.admission_messages import AdmissionReply
from weightgrad.runtime.model.replicas import ReplicaExchange
from weightgrad.runtime.model.trained_model import TrainedModel
from weightgrad.runtime.model.weights_snapshot import WeightsSnapshot
from weightgrad.runtime.optimizer.ahead_replica import AheadReplica
from weightgrad.runtime.optimizer.user_replica import UserReplica
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.site.background_push import BackgroundPush
from weightgrad.runtime.site.buffers import SiteBuffers
from weightgrad.runtime.site.orders import (
    Abandon,
    Apply,
    Continue,
    GatherBuffers,
    Keep,
    Load,
    Look,
    Measure,
    PushNothing,
    Release,
    SiteOrder,
    TakeBuffers,
    Wait,
    parse,
)
from weightgrad.runtime.site.rank_connection import RankConnection
from weightgrad.runtime.site.rank_step import RankStep
from weightgrad.wire.messages import RoundResult, Segment

_SMALL_NUMEL = 1 << 22  # below it memory for pieces is kept between rounds: its page faults take longer than its use


class RankWork:
    """One rank's part of the rounds of its site.

    Args:
        name: The name of the site.
        plan: The site's parts of the strategy.
        group: The ranks of the site.
        connection: This rank's connections to the global server.
        model: What is trained.
        rank_step: What happens around the optimizer's steps.
        reply: The server's reply to the admission request.

    Attributes:
        shard: What this rank holds.
        share: Brings weights that this rank has written to the ranks that have the same.
        replica: The user's module and optimizer, where gradients are shared.
        buffers: The buffers of the user's module.
        gathered: The buffers that were put together last.
        steps: Optimizer steps done.
        next_decision: The step after which the ranks listen to rank 0 again.
        moved: Whether weights have moved since `begin_round`.
        squares: The squared norms that were measured last, of all ranks.
        all_there: Whether all ranks had what rank 0 asked for last.
    """

    def __init__(
        self,
        name: str,
        plan: SiteStrategy,
        group: SiteGroup,
        connection: RankConnection,
        model: TrainedModel,
        rank_step: RankStep,
        reply: AdmissionReply,
    ) -> None:
        self._name, self._plan, self._group, self._model = name, plan, group, model
        self._connection, self._rank_step = connection, rank_step
        self.steps = self.next_decision = 0
        self.moved = self._redistributed = False
        self.squares: tuple[float, float] = (0.0, 0.0)
        self.all_there = True
        self.buffers = SiteBuffers(
            model.module, group, averages=model.averages_buffers, stages=model.stages, shared=model.shares_buffers
        )
        self.gathered: Mapping[str, Tensor] = {}
        self.share = ReplicaExchange(model.sharding, group, model.weights)
        self.replica: UserReplica | AheadReplica | None = None
        self.shard = self._make_shard(derive(reply.seed, RunStream.SITE_STATE, reply.number))
        self.shard.served = reply.served
        self._changes = self.shard.changes if isinstance(self.shard, UpdateShard) else LocalChanges()
        updates = not plan.shares_gradients and not rank_step.releases_weights
        self._passes_on_changes = updates and self.share.takes_changes
        self._background = BackgroundPush()
        beside = updates and self.shard.step_update is None
        on_host = model.memory.device.type == "cpu"
        possible = beside and on_host and WeightsSnapshot.possible(model.weights)
        self._snapshot = WeightsSnapshot(model.weights) if possible else None

    def _make_shard(self, key: int) -> SiteShard:
        model = self._model
        if not self._plan.shares_gradients:
            model.weights.begin()
            shard = UpdateShard(self._name, model.layout, model.weights, self._plan.for_shard, key, model.memory)
            model.weights.end(changed=False)
            return shard
        replica = UserReplica(
            model.weights,
            self._rank_step.gradients,
            model.optimizer,
            model.layout,
            self.share,
            self._step_now,
            model.announced.numbers,
            model.memory,
        )
        self.replica = replica
        if self._plan.resume.ahead:
            self.replica = AheadReplica(replica, lambda: self.shard.in_flight, lambda: model.announced.rate)
        plan = self._plan.for_shard
        return GradientShard(self._name, model.layout, model.weights, plan, key, self.replica, model.memory)

    def _step_now(self) -> None:
        """Take an optimizer step that the user has not asked for."""
        self._rank_step.busy = True
        try:
            self._model.optimizer.step()
        finally:
            self._rank_step.busy = False

    def follow(self) -> None:
        """Do what rank 0 says, until it says to go on.

        Raises:
            RefusedError: Rank 0 could not go on.
        """
        self.begin_round()
        self._connection.poll()
        while True:
            order = parse(self._group.bytes_from_first(b""))
            if isinstance(order, Continue):
                break
            if isinstance(order, Abandon):
                raise RefusedError(f"rank 0 of {self._name} could not go on: {order.why}")
            self.do(order)
        self.end_round()
        self.steps, self.next_decision = order.step, order.next_decision

    def begin_round(self) -> None:
        """Orders follow."""
        self.finish_push()
        self.moved = self._redistributed = False
        if self._passes_on_changes:
            self._changes.begin()

    def _work(self) -> None:
        """Before weights are read or written: bring them into the form that rounds work on."""
        if not self._redistributed:
            self._redistributed = True
            self._rank_step.for_rounds()
            self._model.weights.begin()
            if self._plan.shares_gradients:
                self._rank_step.gradients.begin()

    def end_round(self) -> None:
        """All orders are done; called on every rank."""
        if self._redistributed:
            if self.moved and not self._rank_step.releases_weights:
                self._share()
            self._model.weights.end(changed=self.moved)
            if self._plan.shares_gradients:
                self._rank_step.gradients.end(changed=True)
            self._redistributed = False
            self._clear_scratch()
        if self.moved:
            self.buffers.average()
        self._background.start()

    def _share(self) -> None:
        """Bring ranks with the same weights to what has been written here."""
        if self._passes_on_changes:
            self.share.share_changes(self._changes.listed)
            self._changes.end()
        else:
            self.share.share()

    def _clear_scratch(self) -> None:
        if self.shard.held.numel > _SMALL_NUMEL and not self._background.pending:
            self.shard.scratch.clear()

    # -- pushes beside the training --------------------------------------------------------------

    @property
    def pushing(self) -> bool:
        """Whether a push is being encoded, or waits for the end of the round to be."""
        return self._background.pending

    def finish_push(self) -> None:
        """Wait until the last push is encoded and queued; raises what went wrong with it."""
        if self._background.pending:
            self._background.finish()
            self._clear_scratch()

    def before_step(self) -> None:
        """The optimizer is about to write to the parameters."""
        if self._snapshot is not None:
            self._snapshot.before_writing()

    def _push(self, order: PushOrder) -> None:
        """Encode a push and queue it: now, or if nothing waits for it, beside the next passes."""
        snapshot = self._snapshot
        if snapshot is None or order.final or order.places or order.waits:
            gradient = self._rank_step.gradients if self._plan.shares_gradients and not order.final else None
            self._send(order.round, self.shard.stream_push(order, gradient))
            return
        snapshot.take([piece.intervals for piece in self.shard.chosen(order)])

        @torch.no_grad()
        def encode() -> None:
            self._connection.send_push(order.round, self.shard.stream_push(order, weights=snapshot))

        self._background.leave(encode)

    def _send(self, round_: int, segments: Iterable[Segment]) -> None:
        """Encode a push, queue it, and note how long that took."""
        began = time.perf_counter()
        self._connection.send_push(round_, segments)
        seconds, residual = time.perf_counter() - began, self.shard.residual.vector
        self._connection.telemetry.encoded(round_, seconds, residual, self._connection.trip_s)

    def do(self, order: SiteOrder) -> None:
        """Do what rank 0 has decided."""
        self.finish_push()
        if isinstance(order, PushOrder):
            self._work()
            self._push(order)
            self.moved |= order.places
        elif isinstance(order, PushNothing):
            self.shard.in_flight[order.round] = ()
            self._connection.send_push(order.round, ())
        elif isinstance(order, Apply):
            self._work()
            result = RoundResult(version=order.order.version, round=0, step=0, rate=order.rate, options=order.options)
            self.shard.apply(order.order, self._connection.take_result(result))
            self.moved |= not self._plan.shares_gradients
        elif isinstance(order, Load):
            self._work()
            reply = order.join_reply()
            scalars = {name: one for name, one in reply.scalars.items() if not name.startswith(BUFFER)}
            loaded = self._connection.load(order.order, self.shard, replace(reply, scalars=scalars))
            self.all_there = not self._group.maximum(0 if loaded else 1)
            self.buffers.take(without_prefix(BUFFER, reply.scalars), None)
            self.moved = True
        elif isinstance(order, Measure):
            since, last = self._group.sums(list(self.shard.squares()))
            self.squares = since, last
        elif isinstance(order, Look):
            if not self._connection.has_result(order.version):
                self._connection.poll()
            there = self._connection.has_result(order.version)
            self.all_there = not self._group.maximum(0 if there else 1)
        elif isinstance(order, Release):
            self.shard.release(order.through)
        elif isinstance(order, Keep):
            self._work()
            self.shard.keep(self._rank_step.gradients)
        elif isinstance(order, GatherBuffers):
            self.gathered = self.buffers.gather(order.round)
        elif isinstance(order, TakeBuffers):
            self.buffers.take(order.buffers(), order.through)
        elif isinstance(order, Wait):
            self._connection.poll()

    def digest(self) -> str:
        """The digest of the site's global model; called on every rank."""
        self.finish_push()
        if isinstance(self.shard, UpdateShard):
            own = digest_of(self.shard.global_model.cpu(), self.shard.held)
        else:
            own = self._model.digest()
        return f"{self._group.whole_sum(own):016x}"
