"""The global server of a deployment: a coordinator and the processes that serve the elements of the model.

One thread owns the state machine. Every input is in the log before anybody is told what followed from it, so a server
that is killed at any moment reads the log again and knows everything that any site has been told.

With one process this is the plain `weightgrad serve`. Under torchrun this is process 0; the others run
`runtime/server_worker.py`, and all of them close every round with the same pushes.
"""

from __future__ import annotations

import logging
import time
from collections import deque

from weightgrad.codecs import cost as codec_cost
from weightgrad.core.guard import Guard
from weightgrad.core.operation import Operation
from weightgrad.core.optimizer_spec import AT_SITES
from weightgrad.core.server_coordinator import ServerCoordinator
from weightgrad.errors import CheckpointError, LinkError, ProtocolError, StrategyError, WeightGradError
from weightgrad.event_log import EventLog
from weightgrad.runtime.admission import Admission, RunConfig, ServedBy
from weightgrad.runtime.end_of_run import EndOfRun
from weightgrad.runtime.first_model import FirstModel
from weightgrad.runtime.inbox import Inbox
from weightgrad.runtime.metrics import ServerMetrics
from weightgrad.runtime.operator_desk import OperatorDesk, Question
from weightgrad.runtime.roster import Roster
from weightgrad.runtime.run_identity import RunIdentity
from weightgrad.runtime.security.credentials import Credentials, Revoked
from weightgrad.runtime.serve_options import ServeOptions
from weightgrad.runtime.server_group import ServerGroup
from weightgrad.runtime.server_orders import (
    Closed,
    Complete,
    Initialized,
    Note,
    Ready,
    Resume,
    Started,
    parse,
    to_bytes,
)
from weightgrad.runtime.server_process import ServerProcess
from weightgrad.runtime.server_rounds import ServerRounds
from weightgrad.runtime.server_storage import Input
from weightgrad.runtime.telemetry import Telemetry
from weightgrad.runtime.transport.transport import EntryRequest, Peer, ServerTransport
from weightgrad.runtime.wait_report import WaitReport
from weightgrad.wire.message_bytes import MessageLimits, pack, unpack
from weightgrad.wire.message_header import is_control
from weightgrad.wire.message_parts import without_values
from weightgrad.wire.messages import FinalPart, Join, Leave, Message, Push, RoundResult

__all__ = ["GlobalServer", "ServeOptions"]

log = logging.getLogger("weightgrad.serve")

_POLL_S = 0.2
_FEED_S = 0.02  # between two looks at links that carry a download
_SOCKETS_S = 2.0  # between two counts of the bytes on sockets
_LOOK_S = 0.5  # between two looks at what has to be said or written, while messages keep coming
_STARVED_S = 2.0  # for which messages go before a deadline that has expired
_OPERATOR = Peer("", 0)  # whose question it is, the question knows
_CONTROL_LIMITS = MessageLimits(max_bytes=1 << 20)


def _closes(found: tuple[Peer | int, bytes | memoryview]) -> bool:
    """Whether a message helps to close a round: the word of another process that it has closed its part."""
    sender, data = found
    return isinstance(sender, int) and isinstance(parse(bytes(data)), Closed)


def _anything(found: tuple[Peer | int, bytes | memoryview]) -> bool:
    del found
    return True


class _HungUp(bytes):
    """The Leave of a site that has closed its session and has not sent one."""


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
        self.admission = Admission(
            run_config,
            secure=credentials is not None,
            revoked=revoked,
            on_refused=self.telemetry.refused_connection,
            max_parameters=options.largest_model(),
            first_site=options.first_site,
            agree_s=options.agree_s,
            max_ranks=options.max_ranks,
            roster=Roster(run_config.sites, options.state, run_config.bit_s),
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
        self.rounds: ServerRounds | None = None
        """The coordinator and what it does with inputs; None before there is a global model."""
        self.first_model = FirstModel(run_config, self.admission, self.process, self.group)
        self.end = EndOfRun(run_config, options, transport, lambda: self.coordinator, self.admission.roster)
        self._inbox: Inbox[tuple[Peer | int, bytes | memoryview]] = Inbox()
        self.desk = OperatorDesk(self, lambda question: self._inbox.put_control((_OPERATOR, question)))
        self._deferred: deque[tuple[Peer | int, bytes | memoryview]] = deque()  # until a round is closed
        self._workers: dict[int, Ready] = {}
        self.failed: BaseException | None = None
        self._stopping = self._ending = False
        self._identity = RunIdentity(run_config, self.group.size)
        self._waits = WaitReport(self.telemetry, self._send, options.waiting_s)
        self._looked = self._due_since = 0.0
        self._sockets_counted = 0.0
        self.admission.version = lambda: self.coordinator.version if self.coordinator is not None else None
        self.admission.on_first = self.first_model.expect
        try:
            self._restore()
        except BaseException:
            self.process.close()
            raise

    @property
    def coordinator(self) -> ServerCoordinator | None:
        """Decides; None before there is a global model."""
        return None if self.rounds is None else self.rounds.coordinator

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
        while len(self._workers) < self.group.size - 1 and not self._stopping:
            found = self._inbox.get(_POLL_S)
            if found is None:
                continue
            note = parse(bytes(found[1]))
            if isinstance(note, Ready):
                self._worker_ready(note)
            else:
                self._deferred.append(found)
        version = self.coordinator.version if self.coordinator is not None else -1
        for process in sorted(self._workers):
            self.desk.introduce(process)
            self.group.send(process, to_bytes(Resume(version=version)))
        if self.rounds is not None:
            self.rounds.close_again({process: note.version for process, note in self._workers.items()})
        self._set_addresses()

    def _worker_ready(self, note: Ready) -> None:
        """Another process has come up; its disk must fit this one's."""
        rounds = self.rounds
        lowest = highest = -1
        if rounds is not None:
            lowest = rounds.coordinator.version
            highest = lowest + 1 if rounds.closing else lowest
        else:
            highest = 0  # this process ended before the first global model was on its disk
        if not lowest <= note.version <= highest:
            raise CheckpointError(
                f"server process {note.process} has global model version {note.version}, the coordinator {lowest} "
                "(-1 is none); start all processes with the states that they wrote together, or all with empty ones"
            )
        self._workers[note.process] = note

    def _set_addresses(self) -> None:
        """Note where sites reach each process; what it serves stays."""
        ports = [0, *(self._workers[number].port for number in sorted(self._workers))]
        addresses = self._options.advertise or tuple("" if not port else f":{port}" for port in ports)
        if len(addresses) != self.group.size:
            raise StrategyError(
                f"--advertise has {len(addresses)} addresses and the server {self.group.size} processes; "
                "give one HOST:PORT for each, in the order of their ranks"
            )
        known = self.admission.servers
        spans = [one.spans for one in known] if len(known) == self.group.size else [[] for _ in addresses]
        self.admission.servers = [ServedBy(address, own) for address, own in zip(addresses, spans, strict=True)]

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
                self._handle_note(bytes(data), self.now)
            elif isinstance(data, Question):
                self.desk.handle(data)
            elif isinstance(data, _HungUp):
                self._handle_hang_up(sender, data, self.now)
            else:
                self.telemetry.received(sender.site, len(data))
                self._handle_bytes(sender, data, self.now)
        self._do_what_is_due(idle=found is None)

    def _do_what_is_due(self, *, idle: bool) -> None:
        """Deadlines, snapshots and reports: when no message waits, and also while a site keeps messages coming.

        Messages go first, since one that waits may be what a deadline is about; but only for so long.
        """
        if time.monotonic() - self._looked > _LOOK_S or idle:
            self._looked = time.monotonic()
            self._report_waits()
            self._give_up_first_model()
            self._write_snapshot_if_due()
        wake = self.coordinator.next_wake() if self.coordinator is not None else None
        if self.rounds is None or self.rounds.closing or wake is None or self.now < wake:
            self._due_since = time.monotonic()
        elif idle or time.monotonic() - self._due_since > _STARVED_S:
            self._due_since = time.monotonic()
            self.rounds.wake(self.now)

    def _next_input(self, timeout: float) -> tuple[Peer | int, bytes | memoryview] | None:
        """The next message; while the processes are closing a round, what would decide something has to wait."""
        closing = self.rounds is not None and self.rounds.closing
        if self._deferred and not closing:
            return self._deferred.popleft()
        return self._inbox.get(timeout, accepts=_closes if closing else _anything)

    def _report_waits(self) -> None:
        """Say for whom the oldest open round, or the first global model, waits."""
        core, now = self.coordinator, self.now
        if core is not None:
            waiting, late = core.waiting(now), core.overdue(now)
        else:
            waiting, late = self.first_model.waiting(), True
        late = late or (waiting is not None and any(self.telemetry.is_away(site) for site in waiting.missing))
        self._waits.look(waiting, now, self.run_config.sites, late=late)

    def _give_up_first_model(self) -> None:
        """Let another site send the first global model if the one that was to does not."""
        if self.rounds is not None or self.admission.initializer is None:
            return
        if self.first_model.silent_s < self._options.first_model_s:
            return
        if (late := self.admission.give_up_first()) is not None:
            why = f"{late} has sent nothing of the first global model for {self._options.first_model_s:g} s"
            log.warning("%s: the next site may send it", why)
            for peer in [peer for peer in self.transport.sessions() if peer.site == late]:
                self.transport.drop(peer, why)

    # -- inputs -----------------------------------------------------------------------------

    def _handle_bytes(self, peer: Peer, data: bytes | memoryview, now: float) -> None:
        try:
            if is_control(data):
                self._handle_control(peer.site, data, now)
            else:
                if self.rounds is None and peer.site == self.admission.initializer:
                    self.first_model.heard()
                for note in self.process.handle(peer, data, now):
                    self._handle_own_note(note, now)
        except (CheckpointError, LinkError):
            raise
        except WeightGradError as error:
            self.telemetry.refused_update(peer.site, f"{type(error).__name__}: {error}")
            self.admission.misbehaved(peer.site, time.monotonic())
            self.transport.drop(peer, str(error))  # or the site would wait for a result for ever

    def _handle_hang_up(self, peer: Peer, data: _HungUp, now: float) -> None:
        """Rank 0 of a site has closed its session without a Leave; rounds wait only if the strategy says how long."""
        core = self.coordinator
        member = core.members.by_name.get(peer.site) if core is not None else None
        if core is None or member is None or not member.live or peer in self.transport.sessions():
            return  # it has left, or has come back
        if not member.done:
            self.telemetry.gone(peer.site, waited_for=not core.plan.adapts)
            self.end.gone.add(peer.site)
        if core.plan.adapts:
            self._handle_bytes(peer, bytes(data), now)

    def _handle_control(self, site: str, data: bytes | memoryview, now: float, position: int | None = None) -> None:
        message = unpack(data, _CONTROL_LIMITS)
        named = getattr(message, "site", None)
        if named != site or not isinstance(message, Push | Join | Leave | FinalPart):
            raise ProtocolError(f"{site} sent a {type(message).__name__} in the name of {named!r}")
        if isinstance(message, Join):
            self.end.gone.discard(site)
        if isinstance(message, FinalPart) and self.admission.layout is not None and self.rounds is not None:
            self.end.take(message, self.admission.layout.numel)
        elif isinstance(message, FinalPart):
            raise ProtocolError(f"{site} sent its final state before there was a global model")
        elif self.rounds is not None:
            self.rounds.receive(message, data, now, position)
        elif isinstance(message, Join):
            self.first_model.join(message)
        else:
            raise ProtocolError(f"{site} sent a {type(message).__name__} before there was a global model")

    def _handle_note(self, data: bytes, now: float) -> None:
        """Act on what another process has to say."""
        note = parse(data)
        if isinstance(note, Complete | Closed):
            self.process.record(Input.PROCESS, now, data)
            assert self.rounds is not None
            self.rounds.note(note, now)
        elif isinstance(note, Started):
            self.first_model.started(note.process)
            self._begin_if_complete()
        else:
            assert isinstance(note, Initialized)
            self._handle_own_note(note, now)

    def _handle_own_note(self, note: Note, now: float) -> None:
        if isinstance(note, Initialized):
            self.first_model.arrived(note)
            self._begin_if_complete()
        elif isinstance(note, Complete):
            assert self.rounds is not None
            self.rounds.note(note, now)

    def _send(self, site: str, message: Message) -> None:
        """Queue a control message for the coordinator of a site."""
        data = pack(without_values(message) if isinstance(message, RoundResult) else message)
        if self.transport.send(Peer(site, 0), data, control=True):
            self.telemetry.sent(site, len(data))

    # -- the first global model ---------------------------------------------------------------

    def _begin_if_complete(self) -> None:
        """When all other processes have the first global model on their disks, this one begins to serve it."""
        admission = self.admission
        if not self.first_model.complete:
            return
        assert admission.layout is not None
        self.process.start_serving()
        self.rounds = self._make_rounds(admission.layout.numel)
        coordinator = self.rounds.coordinator
        coordinator.first_digest, coordinator.first_norm = self.first_model.digest, self.first_model.norm
        admission.initialized = True
        for name in admission.roster.first:
            coordinator.members.join(name)
        self._snapshot(wait=True)
        for peer, data in self.process.take_early():
            self._handle_bytes(peer, data, self.now)
        log.info("%s sent the first global model: %s parameters", admission.initializer, f"{admission.layout.numel:,}")
        for join in self.first_model.take_joins():
            self._handle_bytes(Peer(join.site, 0), pack(join), self.now)

    def _make_rounds(self, numel: int) -> ServerRounds:
        return ServerRounds(self._make_coordinator(numel), self.process, self.group, self.telemetry, self._send)

    def _make_coordinator(self, numel: int) -> ServerCoordinator:
        strategy = self.admission.strategy = self.run_config.strategy_for(numel, self.admission.optimizer)
        # Without a guard, one that refuses only what is not finite.
        guard = self._options.guard or Guard(factor=1e9, share=1e9)
        coordinator = ServerCoordinator(strategy.for_server(), numel, guard)
        coordinator.elsewhere = bool((self.admission.optimizer or {}).get(AT_SITES))
        if self.run_config.most_rate is not None:
            coordinator.most_rate = self.run_config.most_rate
        if coordinator.controller is not None:
            speed = codec_cost.measured_round_trip_bytes_s(strategy.wan_codec("up"))
            coordinator.controller.codec_bytes_s = speed
        return coordinator

    # -- state on disk ------------------------------------------------------------------------

    def _write_snapshot_if_due(self) -> None:
        storage = self.process.storage
        if storage is not None and storage.due and self.rounds is not None and not self.rounds.closing:
            self._snapshot(wait=False)

    def _snapshot(self, *, wait: bool) -> None:
        assert self.rounds is not None
        assert self.coordinator is not None
        speed = self.coordinator.controller.codec_bytes_s if self.coordinator.controller is not None else None
        facts = {
            **self._identity.facts(self.admission.layout.numel if self.admission.layout is not None else 0),
            "first_digest": self.coordinator.first_digest,
            "first_norm": self.coordinator.first_norm,
            "optimizer": self.admission.optimizer,
            "servers": [[one.address, [list(span) for span in one.spans]] for one in self.admission.servers],
            "codec_bytes_s": speed,
            "time": self.now,
        }
        self.process.snapshot(self.coordinator.state(), facts, wait=wait, keep=self.rounds.pending)

    def _restore(self) -> None:
        storage = self.process.storage
        if storage is None or (found := storage.load()) is None:
            return
        for line in found.damaged:
            log.error("%s; continuing from the snapshot before it", line)
        own = self.process.restore(found)
        assert self.process.serving is not None
        self.admission.layout = self.process.serving.shard.layout
        self._identity.check(found.facts, self.admission.layout.numel, self._options.state)
        self.admission.optimizer = found.facts["optimizer"]
        self.admission.initialized = True
        self.admission.servers = [
            ServedBy(address, [(start, stop) for start, stop in spans]) for address, spans in found.facts["servers"]
        ]
        self.rounds = self._make_rounds(self.admission.layout.numel)
        coordinator = self.rounds.coordinator
        coordinator.first_digest, coordinator.first_norm = found.facts["first_digest"], found.facts["first_norm"]
        if coordinator.controller is not None and found.facts["codec_bytes_s"] is not None:
            coordinator.controller.codec_bytes_s = found.facts["codec_bytes_s"]
        coordinator.load(own)
        self.telemetry.continue_from(float(found.facts["time"]))
        self._replay()
        log.info("continuing from global model version %d, step %d", coordinator.version, coordinator.step)
        self.telemetry.write_missing_rounds(self.rounds.replayed)

    def _replay(self) -> None:
        """Take every input of the log once more; the state machines end where they were."""
        storage = self.process.storage
        assert storage is not None
        assert self.process.serving is not None
        self.process.replaying = True
        try:
            for position, record in storage.records():
                self.telemetry.continue_from(record.time)
                self._replay_one(position, record.kind, record.time, record.data)
        finally:
            self.process.replaying = False
        self.process.serving.forget_connections()
        assert self.rounds is not None
        self.rounds.coordinator.forget_connections()

    def _replay_one(self, position: int, kind: int, now: float, data: bytes) -> None:
        try:
            if kind == Input.CONTROL:
                message = unpack(data, _CONTROL_LIMITS)
                self._handle_control(getattr(message, "site", ""), data, now, position)
            elif kind == Input.BULK:
                message = unpack(data, self.process.limits())
                peer = Peer(getattr(message, "site", ""), getattr(message, "rank", 0))
                for note in self.process.handle(peer, data, now, position):
                    self._handle_own_note(note, now)
            elif kind == Input.WAKE:
                assert self.rounds is not None
                self.rounds.wake(now)
            elif kind == Input.PROCESS:
                self._handle_note(data, now)
            elif kind == Input.OPERATION:
                assert self.rounds is not None
                self.rounds.operate(Operation.parse(data), now)
        except CheckpointError:
            raise
        except WeightGradError:
            pass  # it was refused then, too

    # -- what the transport calls, from its own threads -----------------------------------------

    def check_peer(self, entry: EntryRequest) -> None:
        """See `Application.check_peer`."""
        self.admission.check_peer(entry)

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
                self._inbox.put_control((peer, _HungUp(pack(Leave(site=peer.site)))))

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
