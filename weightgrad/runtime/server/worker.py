"""A process of the global server other than the first: it serves its elements and does what the coordinator orders.

Its disk has its own snapshot and the log of its own inputs: parts of pushes, and orders. Parts are durable before the
coordinator hears that their push is complete, and orders to close a round before it hears that the round is closed. So
a process that was restarted has done everything that the coordinator counts on, and at most one round more; it tells
the coordinator once more what that may have missed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from weightgrad.errors import CheckpointError, LinkError, ProtocolError, RefusedError, WeightGradError
from weightgrad.runtime.admission_messages import rank_reply
from weightgrad.runtime.checkpoints.input_log import LogRecord
from weightgrad.runtime.server.final_model import write_final_model
from weightgrad.runtime.server.group import ServerGroup
from weightgrad.runtime.server.inbox import Inbox
from weightgrad.runtime.server.orders import (
    Admit,
    Begin,
    Close,
    Closed,
    Complete,
    Drop,
    Finish,
    Note,
    Order,
    Provide,
    Ready,
    Resume,
    Start,
    Started,
    parse,
    to_bytes,
)
from weightgrad.runtime.server.process import ServerProcess, StrategyFor
from weightgrad.runtime.server.replay import load, replay, sender_of
from weightgrad.runtime.server.roster import Roster, RosterFacts
from weightgrad.runtime.server.shard_server import ShardServer
from weightgrad.runtime.server.storage import Input
from weightgrad.runtime.transport.transport import EntryRequest, Peer, ServerTransport

log = logging.getLogger("weightgrad.serve")

_POLL_S = 0.2
_FEED_S = 0.02
_BEGIN_S = 60.0  # that a rank waits for the coordinator's order to this process


class ServerWorker:
    """One of the processes that obey the coordinator.

    Args:
        strategy_for: the strategy for a model of so many parameters and an optimizer.
        seed: the seed of the run.
        transport: the connections to the ranks; `run` starts and stops it.
        port: where it listens.
        check_peer: raises unless a peer may connect.
        roster: the sites that may take part, which `check_peer` goes by; the coordinator changes it.
        group: the processes of the server.
        state: directory of this process's state; None keeps nothing.
        out: directory for the final global model; None writes none.
    """

    def __init__(
        self,
        strategy_for: StrategyFor,
        seed: int,
        transport: ServerTransport,
        port: int,
        check_peer: Callable[[EntryRequest], None],
        group: ServerGroup,
        *,
        state: Path | None = None,
        out: Path | None = None,
        roster: Roster | None = None,
    ) -> None:
        self.transport, self.group, self._roster = transport, group, roster
        self._port, self._check_peer, self._out = port, check_peer, out
        self.process = ServerProcess(
            group.number, strategy_for, seed, transport, state, lambda site, size: None, lambda seconds: None
        )
        self._inbox: Inbox[tuple[Peer | int, bytes | memoryview]] = Inbox()
        self._stopping = False
        self._failed: str | None = None
        self._clock = 0.0
        self._complete: dict[tuple[str, int], Complete] = {}  # pushes of rounds that have not closed
        self._last_closed: Closed | None = None
        self._knows_model = threading.Event()
        try:
            self._restore()
        except BaseException:
            self.process.close()
            raise

    def run(self) -> None:
        """Serve until the coordinator says that the run is over.

        Raises:
            LinkError: the coordinator, or another process, has ended.
        """
        self.group.start(lambda process, data: self._inbox.put_control((process, data)), self._process_ended)
        self._introduce()
        try:
            while not self._stopping:
                self._process_next()
        finally:
            self._inbox.close()
            self.transport.stop(2.0)
            self.process.close()
        if self._failed is not None:
            raise LinkError(self._failed)
        self.group.close()

    def _introduce(self) -> None:
        """Say what is here, and what the coordinator may not have heard before all processes ended."""
        serving = self.process.serving
        version = -1 if serving is None else serving.shard.global_model.version
        self._tell(Ready(process=self.group.number, version=version, port=self._port))
        for note in self._complete.values():
            self._tell(note)
        if self._last_closed is not None:
            self._tell(self._last_closed)

    def stop(self) -> None:
        """Do nothing: the coordinator decides when the run is over."""

    def _process_ended(self, why: str) -> None:
        if not self._stopping:
            self._failed, self._stopping = why, True

    def _process_next(self) -> None:
        downloads = self.process.serving is not None and self.process.serving.feed()
        found = self._inbox.get(_FEED_S if downloads else _POLL_S)
        if found is None:
            self._write_snapshot_if_due()
            return
        sender, data = found
        if isinstance(sender, int):
            order = parse(bytes(data))
            assert isinstance(order, Begin | Start | Resume | Close | Provide | Drop | Admit | Finish)
            if isinstance(order, Close | Drop):
                self.process.record(Input.PROCESS, self._clock, bytes(data))
            self._obey(order)
        else:
            self._handle(sender, data)

    def _handle(self, sender: Peer, data: bytes | memoryview) -> None:
        try:
            for note in self.process.handle(sender, data, self._clock):
                self._after_part(note)
        except (CheckpointError, LinkError):  # it is this server that cannot go on: the site is to wait for its return
            raise
        except WeightGradError as error:
            log.error("a message of %s was refused: %s", sender, error)
            self.transport.drop(sender, str(error))

    def _after_part(self, note: Note) -> None:
        if isinstance(note, Complete):
            self.process.sync()
            self._complete[note.push.site, note.push.round] = note
        self._tell(note)

    def _tell(self, note: Note) -> None:
        if not self.process.replaying:
            self.group.send(0, to_bytes(note))

    def _obey(self, order: Order) -> None:
        if isinstance(order, Resume):
            self._resume(order)
        elif isinstance(order, Begin):
            self.process.prepare(order)
            self._knows_model.set()
        elif isinstance(order, Start):
            self.process.start_serving()
            self._snapshot(wait=True)
            for peer, data in self.process.take_early():
                self._handle(peer, data)
            self._tell(Started(process=self.group.number))
        elif isinstance(order, Finish):
            if order.write_model and self._out is not None and self.process.serving is not None:
                write_final_model(self._out, self.process.serving.shard, self.group)
            self._stopping = True
        elif isinstance(order, Drop):
            self._serving.drop(order.site, order.round)
            self._forget({(order.site, order.round)})
        elif isinstance(order, Provide):
            self._serving.provide(order.provision)
        elif isinstance(order, Admit):
            self._admit(order)
        else:
            assert isinstance(order, Close)
            self._close(order)

    def _admit(self, order: Admit) -> None:
        if self._roster is not None:
            self._roster.facts = RosterFacts.parse(order.roster)
        for peer in [peer for peer in self.transport.sessions() if peer.site == order.drop]:
            self.transport.drop(peer, order.why)

    def _resume(self, order: Resume) -> None:
        if order.version < 0:
            self.process.serving = None  # all processes were ended before the first model was on the coordinator's disk
        if self.process.serving is not None:
            self._knows_model.set()
        self.transport.start(self)

    def _close(self, order: Close) -> None:
        pushes = {(push.site, push.round) for push in order.order.pushes}
        if order.order.result.version <= self._serving.shard.global_model.version:
            for key in pushes:  # from the log, and in the snapshot already
                self._serving.drop(*key)
        else:
            self.process.before_close()
            self._last_closed = Closed(process=self.group.number, part=self._serving.close(order.order))
            self.process.sync()
            self._tell(self._last_closed)
        self._forget(pushes)

    def _forget(self, pushes: set[tuple[str, int]]) -> None:
        self.process.round_closed(pushes)
        for key in pushes:
            self._complete.pop(key, None)

    @property
    def _serving(self) -> ShardServer:
        assert self.process.serving is not None
        return self.process.serving

    # -- state on disk -------------------------------------------------------------------------

    def _write_snapshot_if_due(self) -> None:
        storage = self.process.storage
        if storage is not None and storage.due:
            self._snapshot(wait=False)

    def _snapshot(self, *, wait: bool) -> None:
        closed = None if self._last_closed is None else to_bytes(self._last_closed).decode()
        self.process.snapshot({}, {"processes": self.group.size, "last_closed": closed}, wait=wait)

    def _restore(self) -> None:
        if (found := load(self.process)) is None:
            return
        if found.facts["processes"] != self.group.size:
            raise CheckpointError(
                f"the state of server process {self.group.number} is of a server with {found.facts['processes']} "
                f"processes, this one has {self.group.size}; start as many as before, or begin the run anew"
            )
        self.process.restore(found)
        if found.facts["last_closed"] is not None:
            closed = parse(found.facts["last_closed"].encode())
            assert isinstance(closed, Closed)
            self._last_closed = closed
        replay(self.process, self._replay)

    def _replay(self, position: int, record: LogRecord) -> None:
        if record.kind == Input.PROCESS:
            order = parse(record.data)
            assert isinstance(order, Close | Drop)
            self._obey(order)
        else:
            sender = sender_of(self.process, record.data)
            for note in self.process.handle(sender, record.data, self._clock, position):
                self._after_part(note)

    # -- what the transport calls, from its own threads ------------------------------------------

    def check_peer(self, entry: EntryRequest) -> None:
        """See `Application.check_peer`."""
        self._check_peer(entry)

    def enter(self, entry: EntryRequest) -> bytes:
        """See `Application.enter`: any rank of a site of the run may send what it holds."""
        self._check_peer(entry)
        if not self._knows_model.wait(_BEGIN_S):  # its order may come a little after the rank
            raise RefusedError(
                f"{entry.peer} came to server process {self.group.number}, whose coordinator has not admitted the site"
            )
        return rank_reply(init_model=self.process.serving is None)

    def on_message(self, peer: Peer, data: memoryview, control: bool) -> None:
        """See `Application.on_message`."""
        if control:
            raise ProtocolError(f"{peer} sent a control message to a process that is not the coordinator")
        self._inbox.put_bulk((peer, data), peer.site, len(data))

    def on_lost(self, peer: Peer, left: bool) -> None:
        """See `Application.on_lost`."""

    def on_refused(self, reason: str) -> None:
        """See `Application.on_refused`."""
        log.warning("a connection was refused: %s", reason)
