"""What the global server does with each input: before there is a global model, and in its rounds.

The inputs are messages of sites and notes of the other server processes. Each brings its time, and one from the log its
position, so that reading the log again (`runtime/server/snapshots.py`) comes to the same state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from weightgrad.codecs import cost as codec_cost
from weightgrad.core.optimizers.spec import AT_SITES, OptimizerSpec
from weightgrad.core.server.coordinator import ServerCoordinator
from weightgrad.core.server.guard import Guard
from weightgrad.core.server.operation import Operation
from weightgrad.errors import CheckpointError, LinkError, ProtocolError, WeightGradError
from weightgrad.runtime.checkpoints.input_log import LogRecord
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.server.admission import Admission
from weightgrad.runtime.server.end_of_run import EndOfRun
from weightgrad.runtime.server.first_model import FirstModel
from weightgrad.runtime.server.group import ServerGroup
from weightgrad.runtime.server.orders import Closed, Complete, Initialized, Note, Started, parse
from weightgrad.runtime.server.process import ServerProcess
from weightgrad.runtime.server.replay import sender_of
from weightgrad.runtime.server.rounds import Send, ServerRounds
from weightgrad.runtime.server.storage import Input
from weightgrad.runtime.telemetry import Telemetry
from weightgrad.runtime.transport.transport import Peer
from weightgrad.wire.message_bytes import MessageLimits, pack, unpack
from weightgrad.wire.message_header import is_control
from weightgrad.wire.messages import FinalPart, Join, Leave, Push

log = logging.getLogger("weightgrad.serve")

_CONTROL_LIMITS = MessageLimits(max_bytes=1 << 20)


class HungUp(bytes):
    """The Leave of a site that has closed its session and has not sent one."""


class ServerInputs:
    """The inputs of the coordinator's process.

    Args:
        run_config: what is trained.
        guard: refuses updates that are too large; None refuses only what is not finite.
        admission: who sends the first global model, and what is trained.
        process: this process, which is process 0.
        group: all processes.
        telemetry: what is reported.
        send: queues a control message for a site.
        begin: called when the first global model is complete: it calls `begin` and `take_early` here, and writes the
            first snapshot between the two.

    Attributes:
        first_model: what is known of the first global model before there is one.
        rounds: the coordinator and what it does with inputs; None before there is a global model.
    """

    def __init__(
        self,
        run_config: RunConfig,
        guard: Guard | None,
        admission: Admission,
        process: ServerProcess,
        group: ServerGroup,
        telemetry: Telemetry,
        end: EndOfRun,
        send: Send,
        begin: Callable[[], None],
    ) -> None:
        self._run_config, self._guard, self._admission = run_config, guard, admission
        self._process, self._group, self._telemetry, self._end = process, group, telemetry, end
        self._send, self._on_first_model = send, begin
        self.first_model = FirstModel(run_config, admission, process, group)
        self.rounds: ServerRounds | None = None

    @property
    def coordinator(self) -> ServerCoordinator | None:
        """Decides; None before there is a global model."""
        return None if self.rounds is None else self.rounds.coordinator

    # -- messages of sites ----------------------------------------------------------------------

    def handle(self, peer: Peer, data: bytes | memoryview, now: float) -> None:
        """Take a message of a rank; the session of a rank that sent a wrong one is ended.

        Raises:
            CheckpointError: it could not be written to the log.
            LinkError: another process of the server has ended.
        """
        try:
            if is_control(data):
                self._handle_control(peer.site, data, now)
            else:
                if self.rounds is None and peer.site == self._admission.initializer:
                    self.first_model.heard()
                self._handle_bulk(peer, data, now)
        except (CheckpointError, LinkError):
            raise
        except WeightGradError as error:
            self._telemetry.refused_update(peer.site, f"{type(error).__name__}: {error}")
            self._admission.pauses.misbehaved(peer.site, time.monotonic())
            self._process.transport.drop(peer, str(error))  # or the site would wait for a result for ever

    def hang_up(self, peer: Peer, data: HungUp, now: float) -> None:
        """Rank 0 of a site has closed its session without a Leave; rounds wait only if the strategy says how long."""
        core = self.coordinator
        member = core.members.by_name.get(peer.site) if core is not None else None
        if core is None or member is None or not member.live or peer in self._process.transport.sessions():
            return  # it has left, or has come back
        if not member.done:
            self._telemetry.gone(peer.site, waited_for=not core.plan.adapts)
            self._end.gone.add(peer.site)
        if core.plan.adapts:
            self.handle(peer, bytes(data), now)

    def _handle_control(self, site: str, data: bytes | memoryview, now: float, position: int | None = None) -> None:
        message = unpack(data, _CONTROL_LIMITS)
        named = getattr(message, "site", None)
        if named != site or not isinstance(message, Push | Join | Leave | FinalPart):
            raise ProtocolError(f"{site} sent a {type(message).__name__} in the name of {named!r}")
        if isinstance(message, Join):
            self._end.gone.discard(site)
        if isinstance(message, FinalPart) and self._admission.layout is not None and self.rounds is not None:
            self._end.take(message, self._admission.layout.numel)
        elif isinstance(message, FinalPart):
            raise ProtocolError(f"{site} sent its final state before there was a global model")
        elif self.rounds is not None:
            self.rounds.receive(message, data, now, position)
        elif isinstance(message, Join):
            self.first_model.join(message)
        else:
            raise ProtocolError(f"{site} sent a {type(message).__name__} before there was a global model")

    def _handle_bulk(self, peer: Peer, data: bytes | memoryview, now: float, position: int | None = None) -> None:
        for note in self._process.handle(peer, data, now, position):
            self._handle_own_note(note, now)

    # -- notes of server processes --------------------------------------------------------------

    def handle_note(self, data: bytes, now: float) -> None:
        """Act on what another process has to say."""
        note = parse(data)
        if isinstance(note, Complete | Closed):
            self._process.record(Input.PROCESS, now, data)
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

    # -- the first global model -----------------------------------------------------------------

    def _begin_if_complete(self) -> None:
        """When all other processes have the first global model on their disks, this one begins to serve it."""
        if self.first_model.complete:
            self._on_first_model()

    def begin(self) -> None:
        """Make the first global model the one that is served."""
        assert self._admission.layout is not None
        self._process.start_serving()
        coordinator = self.make_rounds(self._admission.layout.numel).coordinator
        coordinator.first_digest, coordinator.first_norm = self.first_model.digest, self.first_model.norm
        self._admission.initialized = True
        for name in self._admission.roster.first:
            coordinator.members.join(name)

    def take_early(self) -> None:
        """Take what sites said before there was a global model, as if it came now."""
        assert self._admission.layout is not None
        for peer, data in self._process.take_early():
            self.handle(peer, data, self._telemetry.now)
        numel = f"{self._admission.layout.numel:,}"
        log.info("%s sent the first global model: %s parameters", self._admission.initializer, numel)
        for join in self.first_model.take_joins():
            self.handle(Peer(join.site, 0), pack(join), self._telemetry.now)

    def make_rounds(self, numel: int) -> ServerRounds:
        """Let there be rounds, for a model of so many parameters."""
        coordinator = self._make_coordinator(numel)
        self.rounds = ServerRounds(coordinator, self._process, self._group, self._telemetry, self._send)
        return self.rounds

    def _make_coordinator(self, numel: int) -> ServerCoordinator:
        strategy = self._admission.strategy = self._run_config.strategy_for(numel, self._admission.optimizer)
        # Without a guard, one that refuses only what is not finite.
        guard = self._guard or Guard(factor=1e9, share=1e9)
        coordinator = ServerCoordinator(strategy.for_server(), numel, guard)
        coordinator.elsewhere = bool((self._admission.optimizer or {}).get(AT_SITES))
        if self._run_config.most_rate is not None:
            coordinator.most_rate = self._run_config.most_rate
        if strategy.shares == "gradients" and (self._admission.optimizer or {}).get("groups"):
            spec = OptimizerSpec.parse(self._admission.optimizer or {}, build=False)
            coordinator.checks.described, coordinator.checks.torchs_own = spec.numbers(), spec.is_torchs
        if coordinator.controller is not None:
            speed = codec_cost.measured_round_trip_bytes_s(strategy.wan_codec("up"))
            coordinator.controller.codec_bytes_s = speed
        return coordinator

    # -- inputs of the log ----------------------------------------------------------------------

    def replay(self, position: int, record: LogRecord) -> None:
        """Take an input of the log once more.

        Raises:
            WeightGradError: it was refused then, too.
        """
        assert self.rounds is not None
        known = self._process.in_snapshot(position)
        if known and record.kind in (Input.WAKE, Input.OPERATION):
            return
        if record.kind == Input.CONTROL:
            message = unpack(record.data, _CONTROL_LIMITS)
            if known and not isinstance(message, Push):
                return
            self._handle_control(getattr(message, "site", ""), record.data, record.time, position)
        elif record.kind == Input.BULK:
            self._handle_bulk(sender_of(self._process, record.data), record.data, record.time, position)
        elif record.kind == Input.WAKE:
            self.rounds.wake(record.time)
        elif record.kind == Input.PROCESS:
            self.handle_note(record.data, record.time)
        elif record.kind == Input.OPERATION:
            self.rounds.operate(Operation.parse(record.data), record.time)
