"""A site's connection to the global server: feeds the SiteState with what comes and sends what it answers.

Bytes move in the transport's threads while the site computes. Only the training thread touches the SiteState,
between two steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from weightgrad.core.site_state import SiteState
from weightgrad.errors import LinkError, RefusedError
from weightgrad.event_log import EventLog
from weightgrad.runtime import health
from weightgrad.runtime.admission import AdmissionReply, AdmissionRequest, parse_reply
from weightgrad.runtime.link_monitor import LinkMonitor
from weightgrad.runtime.security.tls_check import TlsProblem
from weightgrad.runtime.telemetry import SiteTelemetry
from weightgrad.runtime.transport.transport import ClientTransport, LinkEvent
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.messages import InitModel, Message, Push

log = logging.getLogger("weightgrad")

_POLL_S = 0.2  # between two looks at the connection during a wait
_SAMPLE_S = 2.0  # between two looks at the sockets
_REJOIN_TIMEOUT_S = 24 * 3600.0


class ServerConnection:
    """The connection that the local server (rank 0 of a site) has to the global server.

    Args:
        client: the transport; it is closed with this object.
        request: what the site says about itself to be admitted.
        events: the site's event log, if it has one.
        diagnose: finds out why the server cannot be reached; None if no reason was found.
        metrics: HOST:PORT to serve /metrics and /healthz of this site on; None serves nothing.

    Attributes:
        waited: seconds that training has waited for the global server.
        up_bytes: encoded bytes of all messages sent.
        down_bytes: encoded bytes of all messages received.

    Raises:
        LinkError: `metrics` cannot be listened on.
    """

    def __init__(
        self,
        client: ClientTransport,
        request: AdmissionRequest,
        events: EventLog | None,
        diagnose: Callable[[], TlsProblem | None],
        *,
        metrics: str | None = None,
    ) -> None:
        self._client, self._request, self._diagnose = client, request, diagnose
        self._state: SiteState | None = None
        self.telemetry = SiteTelemetry(request.site, events)
        self.waited = 0.0
        self.up_bytes = self.down_bytes = 0
        self._sampled = 0.0
        self.watch = LinkMonitor(request.site, None)
        self._metrics_page: health.HealthServer | None = None
        if metrics is not None:
            self._metrics_page = health.serve(
                metrics, self.telemetry.metrics, lambda: self.telemetry.status(self._state)
            )
            log.info("%s: metrics and health on port %d", request.site, self._metrics_page.port)

    @property
    def now(self) -> float:
        """Seconds since this site came."""
        return self.telemetry.now

    def enter(self, *, timeout: float = 60.0) -> AdmissionReply:
        """Ask the global server to admit this site.

        Args:
            timeout: seconds to wait for a server that is not there yet.

        Raises:
            RefusedError: the server refused, or the certificates do not fit.
            LinkError: the server could not be reached in time.
        """
        until, warned = time.monotonic() + timeout, False
        while True:
            try:
                return parse_reply(self._client.enter(self._request.pack(), timeout=max(1.0, min(10.0, timeout))))
            except LinkError as error:
                problem = self._diagnose()
                if problem is not None and problem.is_final:
                    time.sleep(1.0)  # a server that is being stopped disconnects in the same way
                    before, problem = problem, self._diagnose()
                    if problem == before:
                        raise RefusedError(problem.reason) from error
                reason = "" if problem is None else problem.reason
                if time.monotonic() > until:
                    raise LinkError(f"{error}" + (f" ({reason})" if reason else "")) from error
                if not warned:
                    log.warning("%s: %s; trying again", self._request.site, reason or error)
                warned = True
                time.sleep(0.5)

    def attach(self, state: SiteState) -> None:
        """Give this state machine the messages that come from now on."""
        self._state = state

    def start(self) -> None:
        """Let messages flow."""
        self._client.start()

    def send(self, messages: list[Message]) -> None:
        """Queue messages; returns at once."""
        for message in messages:
            data = pack(message)
            self._client.send(data)
            self.up_bytes += len(data)
            self.telemetry.sent(len(data), message if isinstance(message, Push) else None)

    def init_model(self, message: InitModel) -> None:
        """Send the weights that become the first global model."""
        self.send([message])

    def pump(self, timeout: float = 0.0) -> bool:
        """Handle what has come.

        Args:
            timeout: seconds to wait for the first message.

        Returns:
            Whether a message had come.
        """
        state = self._state
        assert state is not None
        if self.now - self._sampled > _SAMPLE_S or state.step_timer.trip == 0:
            self._sampled = self.now
            if (total := self._client.socket_bytes()) is not None:
                self.watch.sample(self.now, total.sent, self._client.unacknowledged_bytes)
            state.step_timer.trip = self._client.round_trip_s
        self._handle_link_events(state)
        data = self._client.receive(timeout)
        found = data is not None
        while data is not None:
            self.down_bytes += len(data)
            self.telemetry.received(len(data))
            self.send(state.receive(unpack(data), self.now))
            data = self._client.receive(0.0)
        return found

    def _handle_link_events(self, state: SiteState) -> None:
        for event in self._client.events():
            self.telemetry.link_event(event, self._client.why)
            if event is LinkEvent.GONE:
                self._join_again(state)

    def _join_again(self, state: SiteState) -> None:
        """Enter and join after the global server was restarted."""
        version, digest = state.global_model.version, state.global_model.digest()
        self._request = replace(self._request, version=version, digest=digest)
        reply = self.enter(timeout=_REJOIN_TIMEOUT_S)
        self._client.start()
        if reply.init_model:  # the server stopped before the first global model was on its disk
            self.init_model(InitModel(site=state.name, snapshot={"weights": state.global_model.vector}))
        self.send(state.join(same_start=reply.same_start or version > 0))

    def wait_until_unblocked(self) -> bool:
        """Apply the results that have come, and wait for those that training needs before its next step.

        Returns:
            Whether the model of the site has changed.
        """
        state = self._state
        assert state is not None
        full_downloads = state.full_downloads
        self.pump()
        moved = bool(state.apply_results())
        began, why = time.monotonic(), state.blocked(self.now)
        first = why
        while why is not None:
            self.pump(_POLL_S)
            moved = bool(state.apply_results()) or moved
            why = None if state.finished else state.blocked(self.now)
        if first is not None:
            seconds = time.monotonic() - began
            self.waited += seconds
            self.telemetry.waited_for_server(state.step, seconds, first)
        self.telemetry.metrics.update(state)
        if state.full_downloads == full_downloads:
            return moved
        self.telemetry.downloaded(state.global_model.version, exact=state.exact)
        return True

    def socket_bytes(self) -> dict[str, int] | None:
        """Bytes that crossed the sockets to the server, TLS and gRPC included; None where they are not counted."""
        found = self._client.socket_bytes()
        return None if found is None else {"sent": found.sent, "received": found.received}

    def close(self) -> None:
        """Wait until the server has everything, leave in order, and stop serving metrics."""
        try:
            self._client.wait_sent(10.0)
            self._client.close(2.0)
        finally:
            self._stop_metrics()

    def abort(self) -> None:
        """Disconnect at once and without a goodbye, as a process that is killed does."""
        self._client.abort()
        self._stop_metrics()

    def _stop_metrics(self) -> None:
        page, self._metrics_page = self._metrics_page, None
        if page is not None:
            page.stop()
