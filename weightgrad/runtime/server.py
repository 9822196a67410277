"""The global server of a deployment: a ServerState that is fed by a transport, written to disk and monitored.

One thread owns the state machine. The result of a round is sent only after the state that produced it is on disk,
so a server that is killed at any moment comes back knowing everything that any site has been told.
"""

from __future__ import annotations

import logging
import queue
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from weightgrad.codecs import cost as codec_cost
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.guard import Guard
from weightgrad.core.layout import Layout
from weightgrad.core.optimizer_spec import OptimizerSpec
from weightgrad.core.random_streams import RunStream
from weightgrad.core.server_state import ClosedRound, Outbox, ServerState
from weightgrad.errors import CheckpointError, ProtocolError, WeightGradError
from weightgrad.event_log import EventLog
from weightgrad.kernels.noise import derive
from weightgrad.runtime import checkpoint
from weightgrad.runtime.admission import Admission, RunConfig, strategy_difference
from weightgrad.runtime.checkpoint import DiskResultLog
from weightgrad.runtime.metrics import ServerMetrics
from weightgrad.runtime.security.credentials import Credentials, Revoked
from weightgrad.runtime.telemetry import Telemetry
from weightgrad.runtime.transport.transport import EntryRequest, ServerTransport
from weightgrad.wire.message_bytes import MessageLimits, pack, unpack
from weightgrad.wire.messages import InitModel, Join, Leave, Message, Push

log = logging.getLogger("weightgrad.serve")

_NAME = "server"
_GOODBYE_S = 60.0  # to wait for sites that have finished and have not left
_DISCONNECT_S = 5.0  # to wait for sites that have left and are still connected
_POLL_S = 0.2
_SOCKETS_S = 2.0  # between two counts of the bytes on sockets


@dataclass(frozen=True)
class ServeOptions:
    """How a server runs, as opposed to what it trains.

    Attributes:
        state: directory of the checkpoints; None keeps nothing.
        out: directory for the final global model; None writes none.
        until_finished: whether the server ends when every site has finished.
        guard: refuses updates that are too large; None refuses only what is not finite.
    """

    state: Path | None = None
    out: Path | None = None
    until_finished: bool = False
    guard: Guard | None = None


class GlobalServer:
    """The global server of one run.

    Args:
        run_config: what every site must agree with.
        options: how the server runs.
        transport: the connections to the sites; `run` starts and stops it.
        credentials: the server's certificates, whose directory has the list of revoked ones; None without TLS.
        events: the event log, if one is written.
        metrics: where to count; by default a new set.

    Raises:
        CheckpointError: the state in `options.state` is damaged, or of another run.
    """

    def __init__(
        self,
        run_config: RunConfig,
        options: ServeOptions,
        transport: ServerTransport,
        credentials: Credentials | None = None,
        events: EventLog | None = None,
        metrics: ServerMetrics | None = None,
    ) -> None:
        self.transport = transport
        self.run_config, self._options = run_config, options
        self._guard = options.guard or Guard(factor=1e9)  # which refuses only what is not finite
        self.metrics = metrics or ServerMetrics()
        self.telemetry = Telemetry(events, self.metrics)
        revoked = Revoked(credentials.directory / "revoked.txt") if credentials is not None else None
        self.admission = Admission(
            run_config, secure=credentials is not None, revoked=revoked, on_refused=self.telemetry.refused_connection
        )
        if credentials is not None:
            self.metrics.certificate(credentials.expires)
        self.core: ServerState | None = None
        # While the queue is full, `on_message` blocks, and the transport lets sites wait.
        self._inbox: queue.Queue[tuple[str, memoryview]] = queue.Queue(maxsize=256)
        self._joins_before_model: dict[str, Join] = {}
        self._checkpoint_number = 0
        self.failed: BaseException | None = None
        self._stopping = False
        self._finished_since: float | None = None
        self._late_round = 0  # the last round that was reported as late
        self._sockets_counted = 0.0
        self.admission.version = lambda: self.core.global_model.version if self.core is not None else None
        self._restore()

    @property
    def now(self) -> float:
        """Seconds since the server was started."""
        return self.telemetry.now

    # -- the run ----------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop` is called or, if the options say so, until every site has finished."""
        self.transport.start(self)
        log.info("waiting for %s", ", ".join(self.run_config.sites))
        try:
            while not self._stopping and self._should_continue():
                self._process_next()
        except BaseException as error:
            self.failed = error
            raise
        finally:
            self.transport.stop(2.0)
            self._write_end()

    def _should_continue(self) -> bool:
        """Whether the run is not over, or sites may still come back for its last results.

        A site that crashed after its last push, or after this server crashed before it could send the last result,
        must still find a server.
        """
        if self.core is None or not (self._options.until_finished and self._finished()):
            self._finished_since = None
            return True
        sending = any(one.streams and one.unacknowledged_bytes for one in self.transport.sessions().values())
        if self._finished_since is None or sending:  # sending a whole global model may take minutes
            self._finished_since = time.monotonic()
        someone_stays = any(member.live for member in self.core.members.by_name.values())
        timeout = _GOODBYE_S if someone_stays else _DISCONNECT_S
        waits = someone_stays or bool(self.transport.sessions())
        return waits and time.monotonic() < self._finished_since + timeout

    def stop(self) -> None:
        """Let `run` return soon. Any thread or signal handler may call this."""
        self._stopping = True  # nothing else: a signal may come in the middle of anything

    def _process_next(self) -> None:
        """Handle the next message, or the next deadline, or wait a little."""
        if self.now - self._sockets_counted > _SOCKETS_S:
            self._sockets_counted = self.now
            self.metrics.sockets(self.transport.socket_bytes())
        wake = self.core.next_wake() if self.core is not None else None
        timeout = _POLL_S if wake is None else min(_POLL_S, max(0.0, wake - self.now))
        try:
            site, data = self._inbox.get(timeout=timeout)
        except queue.Empty:
            self._report_late_round()
            if self.core is not None and wake is not None and self.now >= wake:
                self._carry_out(self.core.wake(self.now))
            return
        self.telemetry.received(site, len(data))
        self._handle_bytes(site, data)

    def _report_late_round(self) -> None:
        """Report, once a round, that the oldest open round takes much longer than the rounds before."""
        if self.core is None or (late := self.core.overdue(self.now)) is None or late[0] == self._late_round:
            return
        self._late_round, missing = late
        self.telemetry.round_is_late(self._late_round, missing)

    # -- messages ---------------------------------------------------------------------------

    def _handle_bytes(self, site: str, data: bytes | memoryview) -> None:
        try:
            message = unpack(data, self._limits())
            self._check_sender(site, message)
            self._handle(site, message)
        except CheckpointError:
            raise
        except WeightGradError as error:
            self.telemetry.refused_update(site, f"{type(error).__name__}: {error}")
            self.transport.drop(site, str(error))  # or the site would wait for a result for ever

    def _handle(self, site: str, message: Message) -> None:
        if isinstance(message, InitModel):
            self._init_model(message)
        elif self.core is not None:
            self._receive(self.core, message)
        elif isinstance(message, Join):
            self._joins_before_model[site] = message
        else:
            raise ProtocolError(f"{site} sent a {type(message).__name__} before there was a global model")

    def _receive(self, core: ServerState, message: Message) -> None:
        if isinstance(message, Push):
            self._check_push(core, message)
            self.telemetry.pushed(message, core.global_model.version)
        elif isinstance(message, Join):
            self.telemetry.joined(message)
        elif isinstance(message, Leave):
            self.telemetry.leaves(message.site)
        self._carry_out(core.receive(message, self.now))
        if isinstance(message, Leave):
            self._save(core)  # or a restarted server would wait for the site to leave

    def _check_sender(self, site: str, message: Message) -> None:
        named = getattr(message, "site", None)
        if named != site:
            raise ProtocolError(f"{site} sent a {type(message).__name__} in the name of {named!r}")

    def _check_push(self, core: ServerState, push: Push) -> None:
        if push.seen > core.global_model.version:
            raise ProtocolError(
                f"{push.site} pushes on global model version {push.seen}, the server has {core.global_model.version}"
            )
        if core.global_model.takes_gradients and push.segments and push.rate is None:
            raise ProtocolError(f"{push.site} sent gradients without the learning rate to step with")

    def _limits(self) -> MessageLimits:
        numel = self.admission.layout.numel if self.admission.layout is not None else 2**32
        return MessageLimits(max_bytes=64 * 2**20 + 40 * numel, max_elements=numel)

    def _carry_out(self, out: Outbox) -> None:
        assert self.core is not None
        for site, why in out.refused:
            self.telemetry.refused_update(site, why)
        for name in out.held_back:
            self.telemetry.held_back(name)
        for name in out.lost:
            self.telemetry.lost(name)
        if out.closed:
            self._save(self.core, out.closed)
        for closed in out.closed:
            self.telemetry.closed(closed)
        for name, message in out.messages:
            data = pack(message)
            if self.transport.send(name, data):
                self.telemetry.sent(name, len(data))
        self.metrics.wait_for(self.core.waits_for())

    # -- the first global model, and checkpoints ----------------------------------------------

    def _init_model(self, message: InitModel) -> None:
        if self.core is not None or message.site != self.admission.initializer or self.admission.layout is None:
            return
        weights = message.snapshot.get("weights", torch.empty(0))
        if self._options.state is not None:
            shutil.rmtree(self._options.state / "results", ignore_errors=True)  # results of another run
        core = self._make_state(self.admission.layout, self.admission.optimizer)
        if weights.shape != core.global_model.vector.shape:
            raise ProtocolError(f"{message.site} sent {weights.numel()} weights, which are of another model")
        core.global_model.vector.copy_(weights)
        if core.global_model.digest() != self.admission.digest:
            raise ProtocolError(f"the weights that {message.site} sent are not those it announced")
        self.admission.initialized = True
        for name in self.run_config.sites:
            core.members.join(name)
        self._save(core)
        self.core = core
        log.info("%s sent the first global model: %s parameters", message.site, f"{weights.numel():,}")
        joins, self._joins_before_model = self._joins_before_model, {}
        for join in joins.values():
            self._handle_bytes(join.site, pack(join))

    def _make_state(self, layout: Layout, optimizer: dict[str, Any] | None) -> ServerState:
        strategy = self.admission.strategy = self.run_config.fit(layout.numel)
        source = OptimizerSpec.parse(optimizer) if strategy.shares == "gradients" and optimizer is not None else None
        global_model = GlobalModel(layout, torch.zeros(layout.numel), optimizer=source, rate=_no_learning_rate)
        key = derive(self.run_config.seed, RunStream.GLOBAL_SERVER)
        state = self._options.state
        results = DiskResultLog(state / "results", max(2**26, 64 * layout.numel)) if state is not None else None
        core = ServerState(global_model, strategy.for_server(), key, guard=self._guard, log=results)
        if core.controller is not None:
            core.controller.codec_bytes_s = codec_cost.measured_round_trip_bytes_s(strategy.wan_codec("up"))
        return core

    def _save(self, core: ServerState, closed: Sequence[ClosedRound] = ()) -> None:
        if self._options.state is None:
            return
        began = time.monotonic()
        self._checkpoint_number += 1
        facts = {
            "layout": [[slot.name, list(slot.shape)] for slot in core.global_model.layout.slots],
            **self._run_identity(core.global_model.layout),
            "digest": self.admission.digest,
            "optimizer": self.admission.optimizer,
            "rounds": [one.to_dict() for one in closed],
        }
        checkpoint.write(self._options.state, _NAME, self._checkpoint_number, core.checkpoint(), facts)
        self.metrics.checkpointed(time.monotonic() - began)

    def _restore(self) -> None:
        if self._options.state is None or (found := checkpoint.newest(self._options.state, _NAME)) is None:
            return
        for line in found.damaged:
            log.error("%s; continuing from the checkpoint before it", line)
        self.admission.layout = Layout.of_shapes((name, tuple(shape)) for name, shape in found.facts["layout"])
        for name, value in self._run_identity(self.admission.layout).items():
            if (then := found.facts[name]) != value:
                what = f"{name} is {then}, here it is {value}"
                if name == "strategy":
                    what = f"strategy is another, {strategy_difference(value, then) or 'the overlap'}"
                raise CheckpointError(
                    f"{self._options.state} is of another run: its {what}; "
                    "give --state another directory, or the recipe of that run"
                )
        self.admission.digest, self.admission.optimizer = found.facts["digest"], found.facts["optimizer"]
        self.admission.initialized = True
        self.core = self._make_state(self.admission.layout, self.admission.optimizer)
        self._checkpoint_number = found.number
        self.core.restore(found.tensors)  # its sites join again by themselves
        version, step = self.core.global_model.version, self.core.global_model.step
        log.info("continuing from global model version %d, step %d", version, step)
        self.telemetry.write_missing_rounds(found.facts.get("rounds", []))

    def _run_identity(self, layout: Layout) -> dict[str, Any]:
        strategy = self.run_config.fit(layout.numel).to_dict()
        return {"strategy": strategy, "seed": self.run_config.seed, "sites": list(self.run_config.sites)}

    # -- what the transport calls, from its own threads -----------------------------------------

    def check_peer(self, entry: EntryRequest) -> None:
        """See `Application.check_peer`."""
        self.admission.check_peer(entry)

    def enter(self, entry: EntryRequest) -> bytes:
        """See `Application.enter`."""
        return self.admission.enter(entry)

    def on_message(self, site: str, data: memoryview) -> None:
        """See `Application.on_message`."""
        self._inbox.put((site, data))

    def on_lost(self, site: str, left: bool) -> None:
        """See `Application.on_lost`."""
        self.telemetry.disconnected(site, left=left)
        self.admission.lost(site)

    def on_refused(self, reason: str) -> None:
        """See `Application.on_refused`."""
        self.telemetry.refused_connection(reason)

    # -- status, and the end --------------------------------------------------------------------

    def _finished(self) -> bool:
        core = self.core
        if core is None:
            return False
        members = core.members.by_name.values()
        return bool(members) and all(m.done or not m.live for m in members) and any(m.done for m in members)

    def status(self) -> dict[str, object]:
        """What /healthz shows."""
        core = self.core
        return {
            "healthy": self.failed is None,
            "version": core.global_model.version if core is not None else None,
            "step": core.global_model.step if core is not None else None,
            "waiting_for": core.waits_for() if core is not None else list(self.run_config.sites),
            "connected": sorted(site for site, one in self.transport.sessions().items() if one.streams),
        }

    def _write_end(self) -> None:
        try:
            self._write_global_model()
        except (OSError, SafetensorError) as error:
            size = 0 if self.core is None else self.core.global_model.vector.nbytes
            failure = checkpoint.cannot_write((self._options.out or Path()) / "model.safetensors", error, size)
            if self.failed is None:
                raise failure from error
            log.error("%s", failure)  # the first failure is the one that is raised

    def _write_global_model(self) -> None:
        if self.core is not None and self._options.out is not None:
            layout, vector = self.core.global_model.layout, self.core.global_model.vector
            tensors = {slot.name: slot.of(vector).clone() for slot in layout.slots}
            save_file(tensors, str(self._options.out / "model.safetensors"))
        self.telemetry.write("end", status="finished" if self._finished() else "interrupted")


def _no_learning_rate(step: int) -> float:
    raise WeightGradError(f"no push had the learning rate of step {step}; sites must send it with shared gradients")
