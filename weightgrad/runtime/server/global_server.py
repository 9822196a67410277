"""The global server of a deployment: a coordinator and the processes that serve the elements of the model.

One thread owns the state machine. Every input is in the log before anybody is told what followed from it, so a server
that is killed at any moment reads the log again and knows everything that any site has been told.

With one process this is the plain `weightgrad serve`. Under torchrun this is process 0; the others run
`runtime/server/worker.py`, and all of them close every round with the same pushes.
"""

from __future__ import annotations

import logging
from collections import deque

from weightgrad.core.server.coordinator import ServerCoordinator
from weightgrad.errors import LinkError, ProtocolError
from weightgrad.event_log import EventLog
from weightgrad.runtime.metrics import ServerMetrics
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.security.credentials import Credentials, Revoked
from weightgrad.runtime.server.admission import Admission
from weightgrad.runtime.server.duties import ServerDuties
from weightgrad.runtime.server.end_of_run import EndOfRun
from weightgrad.runtime.server.group import ServerGroup
from weightgrad.runtime.server.inbox import Inbox
from weightgrad.runtime.server.inputs import HungUp, ServerInputs
from weightgrad.runtime.server.operator_desk import OperatorDesk, Question
from weightgrad.runtime.server.orders import (
    Closed,
    Ready,
    parse,
)
from weightgrad.runtime.server.peer_check import PeerCheck
from weightgrad.runtime.server.process import ServerProcess
from weightgrad.runtime.server.roster import Roster
from weightgrad.runtime.server.rounds import ServerRounds
from weightgrad.runtime.server.run_identity import RunIdentity
from weightgrad.runtime.server.serve_options import ServeOptions
from weightgrad.runtime.server.snapshots import ServerSnapshots
from weightgrad.runtime.server.wait_report import WaitReport
from weightgrad.runtime.server.worker_processes import WorkerProcesses
from weightgrad.runtime.telemetry import Telemetry
from weightgrad.runtime.transport.transport import EntryRequest, Peer, ServerTransport
from weightgrad.wire.message_bytes import MessageLimits, pack
from weightgrad.wire.message_header import is_control
from weightgrad.wire.message_parts import without_values
from weightgrad.wire.messages import Leave, Message, RoundResult

__all__ = ["GlobalServer", "ServeOptions"]

log = logging.getLogger("weightgrad.serve")

_POLL_S = 0.2
_FEED_S = 0.02  # between two looks at links that carry a download
_SOCKETS_S = 2.0  # between two counts of the bytes on sockets
_OPERATOR = Peer("", 0)  # whose question it is, the question knows
_CONTROL_LIMITS = MessageLimits(max_bytes=1 << 20)


def _closes(found: tuple[Peer | int, bytes | memoryview]) -> bool:
    """Whether a message helps to close a round: the word of another process that it has closed its part."""
    sender, data = found
    return isinstance(sender, int) and isinstance(parse(bytes(data)), Closed)


def _anything(found: tuple[Peer | int, bytes | memoryview]) -> bool:
    del found
    return True


class GlobalServer:
    """The global server of one run.

    Args:
        run_config: what every site must agree with.
        options: how the server runs.
        transport: the connections to the sites; `run` starts and stops it.
        credentials: the server's certificates, whose directory has the list of revoked ones; None without TLS.
        events: the event log, if one is written.
        metrics: where to count; by default a new set.
        group: the processes of the server; by default this one alone.

    Raises:
        CheckpointError: the state in `options.state` is damaged, of another run, or used by another process.
    """

    def __init__(
        self,
        run_config: RunConfig,
        options: ServeOptions,
        transport: ServerTransport,
        credentials: Credentials | None = None,
        events: EventLog | None = None,
        metrics: ServerMetrics | None = None,
        group: ServerGroup | None = None,
    ) -> None:
        self.transport = transport
        self.run_config, self._options = run_config, options
        self.group = group or ServerGroup()
        self.metrics = metrics or ServerMetrics()
        self.telemetry = Telemetry(events, self.metrics)
        revoked = Revoked(credentials.directory / "revoked.txt") if credentials is not None else None
        peers = PeerCheck(
            Roster(run_config.sites, options.state, run_config.bit_s),
            secure=credentials is not None,
            revoked=revoked,
            on_refused=self.telemetry.refused_connection,
        )
        self.admission = Admission(
            run_config,
            peers,
            on_refused=self.telemetry.refused_connection,
            max_parameters=options.largest_model(),
            first_site=options.first_site,
            agree_s=options.agree_s,
            max_ranks=options.max_ranks,
        )
        if credentials is not None:
            self.metrics.certificate(credentials.expires)
        self.process = ServerProcess(
            0,
            run_config.strategy_for,
            run_config.seed,
            transport,
            options.state,
            self.telemetry.sent,
            self.metrics.checkpointed,
            options.result_bytes,
        )
        self.end = EndOfRun(run_config, options, transport, lambda: self.coordinator, self.admission.roster)
        self._inbox: Inbox[tuple[Peer | int, bytes | memoryview]] = Inbox()
        self.desk = OperatorDesk(self, lambda question: self._inbox.put_control((_OPERATOR, question)))
        self._deferred: deque[tuple[Peer | int, bytes | memoryview]] = deque()  # until a round is closed
        self._workers = WorkerProcesses(self.group, options.advertise)
        self.inputs = ServerInputs(
            run_config,
            options.guard,
            self.admission,
            self.process,
            self.group,
            self.telemetry,
            self.end,
            self._send,
            self._begin,
        )
        identity = RunIdentity(run_config, self.group.size)
        self.snapshots = ServerSnapshots(
            identity, self.admission, self.process, self.inputs, self.telemetry, options.state
        )
        self.failed: BaseException | None = None
        self._stopping = self._ending = False
        self._duties = ServerDuties(
            self.inputs,
            self.snapshots,
            WaitReport(self.telemetry, self._send, options.waiting_s),
            self.admission,
            self.telemetry,
            transport,
            run_config.sites,
            options.first_model_s,
        )
        self._sockets_counted = 0.0
        self.admission.version = lambda: self.coordinator.version if self.coordinator is not None else None
        self.admission.on_first = self.inputs.first_model.expect
        try:
            self.snapshots.restore()
        except BaseException:
            self.process.close()
            raise

    @property
    def rounds(self) -> ServerRounds | None:
        """The coordinator and what it does with inputs; None before there is a global model."""
        return self.inputs.rounds

    @property
    def coordinator(self) -> ServerCoordinator | None:
        """Decides; None before there is a global model."""
        return self.inputs.coordinator

    @property
    def now(self) -> float:
        """Seconds since the server was first started, without those in which it was not running."""
        return self.telemetry.now

    # -- the run ----------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop` is called or, if the options say so, until every site has finished.

        Raises:
            CheckpointError: the state could not be written, or another process has a state of another time.
            LinkError: another process of the server has ended.
        """
        try:
            self._start_processes()
            self.desk.reconcile()
            self.transport.answer_with(self.desk)
            self.transport.start(self)
            log.info("waiting for %s", ", ".join(self.admission.roster.sites))
            while not self._stopping and self.end.should_continue():
                self._process_next()
            if self.failed is not None:
                raise self.failed
        except BaseException as error:
            self.failed = error
            raise
        finally:
            self._inbox.close()
            if self.failed is None and not self._stopping:
                self.end.dismiss()
            self.transport.stop(2.0)
            try:
                self._write_end()
            finally:
                self.process.close()

    def _start_processes(self) -> None:
        """Wait until the other server processes have come up, and go on together."""
        self.group.start(lambda process, data: self._inbox.put_control((process, data)), self._process_ended)
        while not self._workers.all_ready and not self._stopping:
            found = self._inbox.get(_POLL_S)
            if found is None:
                continue
            note = parse(bytes(found[1]))
            if isinstance(note, Ready):
                self._workers.ready(note, self.rounds)
            else:
                self._deferred.append(found)
        self._workers.resume(self.rounds, self.desk.introduce)
        self.admission.servers = self._workers.located(self.admission.servers)

    def _begin(self) -> None:
        """The first global model is complete: it is on the disk before anybody is told of it."""
        self.inputs.begin()
        self.snapshots.write(wait=True)
        self.inputs.take_early()

    def _process_ended(self, why: str) -> None:
        if not self._ending:
            self.failed = self.failed or LinkError(why)
            self._stopping = True

    def stop(self) -> None:
        """Let `run` return soon. Any thread or signal handler may call this."""
        self._stopping = True  # nothing else: a signal may come in the middle of anything

    def _process_next(self) -> None:
        """Handle the next message, or the next deadline, or wait a little."""
        if self.now - self._sockets_counted > _SOCKETS_S:
            self._sockets_counted = self.now
            self.metrics.sockets(self.transport.socket_bytes())
        downloads = self.process.serving is not None and self.process.serving.feed()
        wake = self.coordinator.next_wake() if self.coordinator is not None else None
        wait = _FEED_S if downloads else _POLL_S
        found = self._next_input(wait if wake is None else min(wait, max(0.0, wake - self.now)))
        if found is not None:
            sender, data = found
            if isinstance(sender, int):
                self.inputs.handle_note(bytes(data), self.now)
            elif isinstance(data, Question):
                self.desk.handle(data)
            elif isinstance(data, HungUp):
                self.inputs.hang_up(sender, data, self.now)
            else:
                self.telemetry.received(sender.site, len(data))
                self.inputs.handle(sender, data, self.now)
        self._duties.look(idle=found is None)

    def _next_input(self, timeout: float) -> tuple[Peer | int, bytes | memoryview] | None:
        """The next message; while the processes are closing a round, what would decide something has to wait."""
        closing = self.rounds is not None and self.rounds.closing
        if self._deferred and not closing:
            return self._deferred.popleft()
        return self._inbox.get(timeout, accepts=_closes if closing else _anything)

    def _send(self, site: str, message: Message) -> None:
        """Queue a control message for the coordinator of a site."""
        data = pack(without_values(message) if isinstance(message, RoundResult) else message)
        if self.transport.send(Peer(site, 0), data, control=True):
            self.telemetry.sent(site, len(data))

    # -- what the transport calls, from its own threads -----------------------------------------

    def check_peer(self, entry: EntryRequest) -> None:
        """See `Application.check_peer`."""
        self.admission.peers.check(entry)

    def enter(self, entry: EntryRequest) -> bytes:
        """See `Application.enter`."""
        return self.admission.enter(entry)

    def on_message(self, peer: Peer, data: memoryview, control: bool) -> None:
        """See `Application.on_message`."""
        if control != is_control(data):
            raise ProtocolError(f"{peer} sent a message on the wrong lane")
        if control:
            self._inbox.put_control((peer, data), peer.site, len(data))
        else:
            self._inbox.put_bulk((peer, data), peer.site, len(data))

    def on_lost(self, peer: Peer, left: bool) -> None:
        """See `Application.on_lost`."""
        if peer.rank == 0:
            self.telemetry.disconnected(peer.site, left=left)
            self.admission.lost(peer.site)
            if left:
                self._inbox.put_control((peer, HungUp(pack(Leave(site=peer.site)))))

    def on_refused(self, reason: str) -> None:
        """See `Application.on_refused`."""
        self.telemetry.refused_connection(reason)

    # -- status, and the end --------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """What /healthz shows."""
        core = self.coordinator
        return {
            "healthy": self.failed is None and not (core is not None and core.stuck(self.now)),
            "version": core.version if core is not None else None,
            "step": core.step if core is not None else None,
            "waiting_for": core.waits_for() if core is not None else list(self.admission.roster.sites),
            "connected": sorted({peer.site for peer, one in self.transport.sessions().items() if one.streams}),
        }

    def _write_end(self) -> None:
        self._ending = True
        self.end.write(self.process, self.group, self.failed)
        self.telemetry.write("end", status="finished" if self.end.finished else "interrupted")
