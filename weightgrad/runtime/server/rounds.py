"""What the coordinator of the global server does with each input, whether it has just come or is read from the log.

Every input brings its time, so that the log gives the same decisions again. Pushes are taken into rounds when all
processes have their values; a round is closed by all processes with the same pushes, and only then is anybody told.
While processes are closing a round, nothing else is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weightgrad.core.server.close_order import ClosedPart, CloseOrder
from weightgrad.core.server.coordinator import ServerCoordinator
from weightgrad.core.server.operation import Operation
from weightgrad.core.server.outbox import Decisions, Download
from weightgrad.core.server.push_facts import facts_of_all
from weightgrad.core.shared_buffers import BUFFER
from weightgrad.core.vector_checks import with_prefix
from weightgrad.errors import ProtocolError
from weightgrad.runtime.rate_limiter import RateLimiter
from weightgrad.runtime.server.group import ServerGroup
from weightgrad.runtime.server.orders import Close, Closed, Complete, Drop, Provide, to_bytes
from weightgrad.runtime.server.process import ServerProcess
from weightgrad.runtime.server.shard_server import CompletePush, Provision, ShardServer
from weightgrad.runtime.server.storage import Input
from weightgrad.runtime.telemetry import Telemetry
from weightgrad.runtime.transport.transport import Peer
from weightgrad.wire.message_bytes import pack
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import Join, Leave, Message, Push

Send = Callable[[str, Message], None]
"""Queues a control message for the coordinator of a site."""


_PATIENCE = 10_000  # rounds that may close while a push of a site that is there is on its way


@dataclass
class _PendingPush:
    """A push that is not complete yet: its control message, and what each process has found."""

    since: int  # the version of the global model when its first word came
    header: Push | None = None
    complete: dict[int, CompletePush] = field(default_factory=dict)


@dataclass
class _Closing:
    """A round that the processes are closing."""

    order: CloseOrder
    parts: dict[int, ClosedPart] = field(default_factory=dict)


class ServerRounds:
    """The coordinator and the processes that close its rounds.

    Args:
        coordinator: decides.
        process: this process, which is process 0.
        group: all processes.
        telemetry: what is reported.
        send: queues a control message for a site; not called while inputs are read from the log.
    """

    def __init__(
        self,
        coordinator: ServerCoordinator,
        process: ServerProcess,
        group: ServerGroup,
        telemetry: Telemetry,
        send: Send,
    ) -> None:
        self.coordinator = coordinator
        self.replayed: list[dict[str, Any]] = []
        """The rounds that were closed again from the log."""
        self._process, self._group, self._telemetry, self._send = process, group, telemetry, send
        self._pending: dict[tuple[str, int], _PendingPush] = {}
        self._joins = RateLimiter(per_s=1.0, burst=32)
        self._replies = RateLimiter(per_s=1.0, burst=64)  # to joins, and to pushes that follow on lost ones
        self._repeats = RateLimiter(per_s=1.0, burst=64)  # pushes that are known already
        self._closing: _Closing | None = None
        self._after_closing: list[Complete] = []  # what this process found while others were closing

    @property
    def closing(self) -> bool:
        """Whether a round is being closed. Until it is, control messages, notes and deadlines have to wait."""
        return self._closing is not None

    @property
    def pending(self) -> dict[tuple[str, int], int]:
        """(site, round) of the pushes that are not complete, and the version at which their first word came."""
        return {key: one.since for key, one in self._pending.items()}

    @property
    def _serving(self) -> ShardServer:
        assert self._process.serving is not None
        return self._process.serving

    # -- inputs --------------------------------------------------------------------------------

    def receive(
        self, message: Join | Leave | Push, data: bytes | memoryview, now: float, position: int | None = None
    ) -> None:
        """Take a control message of a site.

        Args:
            message: the message.
            data: its bytes, for the log.
            now: the time.
            position: where it is in the log, if it comes from there.

        Raises:
            ProtocolError: no site that works correctly would send it.
        """
        if isinstance(message, Push):
            if self._process.is_over((message.site, message.round), position):
                return
            self._check_push(message)
            if position is None:
                self._check_room(message)
        elif position is None and not self._joins.try_take(message.site):
            raise ProtocolError(f"{message.site} joins and leaves more often than once a second")
        position = position if position is not None else self._process.record(Input.CONTROL, now, data)
        if isinstance(message, Push):
            self._receive_push(message, now, position)
            return
        if not self._process.replaying:
            if isinstance(message, Join):
                self._telemetry.joined(message)
            else:
                self._telemetry.leaves(message.site)
        self._carry_out(self.coordinator.receive(message, now), now)
        if isinstance(message, Leave):
            self._process.sync()  # or a restarted server would wait for the site to leave

    def _check_push(self, push: Push) -> None:
        if push.seen > self.coordinator.version:
            raise ProtocolError(
                f"{push.site} pushes on global model version {push.seen}, the server has {self.coordinator.version}"
            )
        if self._serving.shard.global_model.takes_gradients and push.rate is None:
            raise ProtocolError(f"{push.site} sent gradients without the learning rate to step with")
        self.coordinator.check_push(push)

    def _check_room(self, push: Push) -> None:
        """Refuse what would fill memory or the log: pushes without values, and the same one again and again."""
        key = (push.site, push.round)
        waiting = {other for other, one in self._pending.items() if other[0] == push.site and one.header is not None}
        if key in waiting or self._is_taken(key):
            if not self._repeats.try_take(push.site):
                raise ProtocolError(f"{push.site} sends pushes that are known more often than once a second")
        elif len(waiting) >= self.coordinator.plan.most_waiting:
            raise ProtocolError(
                f"{push.site} pushes for round {push.round}, and the values of {len(waiting)} of its pushes have not "
                f"come; at most {self.coordinator.plan.most_waiting} may be on their way"
            )

    def _receive_push(self, push: Push, now: float, position: int) -> None:
        key = (push.site, push.round)
        if self._is_taken(key):
            out = Decisions()
            self.coordinator.expects(push, out)
            self._carry_out(out, now)
            return
        self._process.needed_from(key, position)
        since = self._process.began(key, self.coordinator.version)
        self._pending.setdefault(key, _PendingPush(since)).header = push
        self._take_if_complete(key, now)

    def operate(self, operation: Operation, now: float) -> None:
        """Do what the operator of the run asks for; it is on the disk before it has an effect.

        Raises:
            ProtocolError: it concerns a site that has never joined.
        """
        if operation.site:
            self.coordinator.members.check_known(operation.site)
        self._process.record(Input.OPERATION, now, operation.to_bytes())
        self._process.sync()
        self._carry_out(self.coordinator.operate(operation, now), now)

    def wake(self, now: float) -> None:
        """A deadline has expired."""
        self._process.record(Input.WAKE, now)
        self._carry_out(self.coordinator.wake(now), now)

    def note(self, note: Complete | Closed, now: float) -> None:
        """A process, this one or another, says that a push is complete or a round is closed."""
        if isinstance(note, Closed):
            if self._closing is not None and note.part.result.version == self._closing.order.result.version:
                self._closing.parts[note.process] = note.part
                self._finish_round_if_complete(now)
        elif self._closing is not None:
            self._after_closing.append(note)
        else:
            self._note_complete(note, now)

    def _note_complete(self, note: Complete, now: float) -> None:
        key = (note.push.site, note.push.round)
        if self._is_taken(key):  # sent again, since the site could not know that it had been received
            why = self.coordinator.rounds.refuse_others(*key, note.process, note.push.facts.squares)
            if why is not None and not self._process.replaying:
                self._telemetry.refused_update(note.push.site, why)
            self._drop_unless_open(key)
            return
        since = self._process.began(key, self.coordinator.version)
        self._pending.setdefault(key, _PendingPush(since)).complete[note.process] = note.push
        self._take_if_complete(key, now)

    # -- pushes --------------------------------------------------------------------------------

    def _is_taken(self, key: tuple[str, int]) -> bool:
        """Whether a push has been received into a round, which may have closed."""
        member = self.coordinator.members.by_name.get(key[0])
        return member is not None and key[1] <= member.pushed_round

    def _is_given_up(self, key: tuple[str, int], pending: _PendingPush) -> bool:
        """Whether a push that is not complete will not be.

        A site that is there may be slow: while one push of its crosses a thin line, other sites may close many rounds.
        It is given up only in the end, since the log cannot be cut before a push that is not complete.
        """
        member = self.coordinator.members.by_name.get(key[0])
        rounds = _PATIENCE if member is not None and member.live else 2 * self.coordinator.plan.most_waiting
        return self._is_taken(key) or pending.since < self.coordinator.version - rounds

    def _take_if_complete(self, key: tuple[str, int], now: float) -> None:
        """Take a push into its round when its control message and all of its values are here."""
        pending = self._pending[key]
        if pending.header is None or len(pending.complete) < self._group.size:
            return
        del self._pending[key]
        push, out = pending.header, Decisions()
        if self.coordinator.expects(push, out):
            parts = [pending.complete[process] for process in sorted(pending.complete)]
            size = nbytes(push) + sum(part.size for part in parts)
            facts = facts_of_all(part.facts for part in parts)
            self.coordinator.receive_push(push, facts, size, now, out)
            if not self._process.replaying:
                self._telemetry.pushed(push, self.coordinator.version, facts.squares, size)
        else:
            self._drop_unless_open(key)
        self._carry_out(out, now)

    def _drop_unless_open(self, key: tuple[str, int]) -> None:
        """Have all processes forget a push that no round will take."""
        if self.coordinator.is_open(*key):
            return
        self._tell_workers(Drop(site=key[0], round=key[1]))
        self._serving.drop(*key)
        self._process.round_closed({key})

    def record_pending(self, now: float) -> None:
        """Write pushes whose values have not begun to come to the log once more, so that it can be cut before them.

        They may take ten thousand rounds, and the log has the pushes of all sites meanwhile.
        """
        for key in self._pending.keys() - self._serving.incomplete.keys():
            header, complete = self._pending[key].header, self._pending[key].complete
            if header is not None and not complete:
                self._process.needed_anew(key, self._process.record(Input.CONTROL, now, pack(header)))

    # -- rounds --------------------------------------------------------------------------------

    def _carry_out(self, out: Decisions, now: float) -> None:
        if not self._process.replaying:
            for site, why in out.refused:
                self._telemetry.refused_update(site, why)
            for site, why in out.limited:
                self._telemetry.limited_update(site, why)
            for name in out.held_back:
                self._telemetry.held_back(name)
            for name in out.lost:
                self._telemetry.lost(name)
            for name in out.aside:
                self._telemetry.set_aside(name, self.coordinator.members.by_name[name].aside)
        if out.downloads or out.closed:
            self._process.sync()
        if not self._process.replaying:
            for download in out.downloads:
                if self._replies.try_take(download.site):
                    self._provide(download)
                else:
                    why = f"{download.site} asks for the way to the global model more often than once a second"
                    self._process.transport.drop(Peer(download.site, 0), why)
            for name, message in out.messages:
                self._send(name, message)
        self._close_next(now)
        self._telemetry.metrics.wait_for(self.coordinator.waits_for())

    def _close_next(self, now: float) -> None:
        """Let every process close the next round, if one is complete."""
        self.coordinator.aligned = self._serving.shard.aligned
        if self._closing is None and (order := self.coordinator.next_order()) is not None:
            self._process.sync()  # from here on the round can be closed again from the log
            self._closing = _Closing(order)
            self._tell_workers(Close(order=order))
            self._process.before_close()
            self._closing.parts[0] = self._serving.close(order)
            self._finish_round_if_complete(now)

    def close_again(self, versions: Mapping[int, int]) -> None:
        """After a restart: let those processes close the round that was being closed, which have not done so.

        Args:
            versions: of the global model, by process.
        """
        if self._closing is not None:
            for process, version in versions.items():
                if version < self._closing.order.result.version:
                    self._group.send(process, to_bytes(Close(order=self._closing.order)))

    def _finish_round_if_complete(self, now: float) -> None:
        closing = self._closing
        if closing is None or len(closing.parts) < self._group.size:
            return
        self._closing = None
        parts = [closing.parts[process] for process in sorted(closing.parts)]
        out = self.coordinator.round_closed(closing.order, parts, now)
        self._process.round_closed({(push.site, push.round) for push in closing.order.pushes})
        for key in [key for key, pending in self._pending.items() if self._is_given_up(key, pending)]:
            del self._pending[key]
            self._drop_unless_open(key)
        for closed in out.closed:
            if self._process.replaying:
                self.replayed.append(closed.to_dict())
            else:
                self._telemetry.closed(closed)
        notes, self._after_closing = self._after_closing, []
        self._carry_out(out, now)
        for note in notes:
            self.note(note, now)

    def _tell_workers(self, order: Close | Drop | Provide) -> None:
        if not self._process.replaying:
            for process in range(1, self._group.size):
                self._group.send(process, to_bytes(order))

    # -- joining sites -------------------------------------------------------------------------

    def _provide(self, download: Download) -> None:
        """Tell a site the way to the present global model, and have the processes send it."""
        reply = download.reply
        if reply.downloads:
            buffers = with_prefix(BUFFER, self.coordinator.buffers.mean)
            reply = replace(reply, scalars={**self._serving.shard.global_model.scalars(), **buffers})
        self._send(download.site, reply)
        for result in download.results:
            self._send(download.site, result)
        whole = reply.downloads
        since = None if whole and not download.results else self.coordinator.version - len(download.results)
        if whole or download.results or download.epoch is not None:
            provision = Provision(
                site=download.site, epoch=download.epoch, since=since, whole=whole, codec=download.codec
            )
            self._tell_workers(Provide(provision=provision))
            self._serving.provide(provision)
