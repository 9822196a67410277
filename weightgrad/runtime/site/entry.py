"""How a site enters a run: rank 0 asks the global server, every rank hears the reply, and every rank connects."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from weightgrad import kernels
from weightgrad.core.layout import Layout
from weightgrad.core.site.coordinator import SiteCoordinator
from weightgrad.core.strategies import Strategy
from weightgrad.errors import LinkError, RefusedError, WeightGradError
from weightgrad.event_log import EventLog
from weightgrad.runtime import health
from weightgrad.runtime.admission_messages import AdmissionReply, AdmissionRequest, parse_reply
from weightgrad.runtime.doctor import join_checks
from weightgrad.runtime.join_options import JoinOptions
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.security.tls_check import ProblemKind, TlsProblem, diagnose
from weightgrad.runtime.site.link_monitor import LinkMonitor
from weightgrad.runtime.site.rank_connection import RankConnection
from weightgrad.runtime.site.server_entry import enter, rank_request
from weightgrad.runtime.site.server_link import ServerLink
from weightgrad.runtime.site.server_watch import ServerWatch
from weightgrad.runtime.telemetry import SiteTelemetry
from weightgrad.runtime.transport.grpc_client import GrpcClient
from weightgrad.runtime.transport.grpc_settings import channel_options
from weightgrad.runtime.transport.process_channels import ProcessChannels
from weightgrad.wire.intervals import Intervals

_ADMITTED = b"+"
_MAX_MESSAGE = 256 << 20
_LEAST_BUFFERED = 256 << 20


class Entry:
    """A site's entry into a run, on one rank.

    Attributes:
        telemetry: what this rank reports.
        events: the site's event log, on rank 0 of a site with a state directory.
        connection: this rank's connections, once `connect` has made them.
    """

    def __init__(self, options: JoinOptions, group: SiteGroup) -> None:
        self._options, self._group = options, group
        self._epoch = group.number_from_first(secrets.randbits(31))
        self._incarnation = secrets.randbits(63)
        self._request: AdmissionRequest | None = None
        self._coordinator_client: GrpcClient | None = None
        self.events: EventLog | None = None
        self.connection: RankConnection | None = None
        if group.first and options.state is not None:
            options.state.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.events = EventLog(options.state / "events.jsonl", append=True)
        self.telemetry = SiteTelemetry(options.site, self.events)
        self._metrics_page: health.HealthServer | None = None
        self.status: Callable[[], dict[str, object]] = lambda: self.telemetry.status(None)
        if group.first and options.metrics is not None:
            self._metrics_page = health.serve(options.metrics, self.telemetry.metrics, lambda: self.status())

    def ask(
        self,
        layout: Layout,
        optimizer: Mapping[str, Any],
        strategy: Strategy | None,
        samples: int,
        version: int,
        frozen: Mapping[str, str] | None = None,
    ) -> AdmissionReply:
        """Ask the global server to be admitted; called on every rank.

        Args:
            layout: The parameters to be trained, in this site's order.
            optimizer: What is told of the user's optimizer.
            strategy: The strategy that the user asked for; None takes the server's.
            samples: How much the site's updates weigh.
            version: The version of the site's global model; -1 without one.
            frozen: The digests of parameters that take no part, which must be the same at all sites.

        Returns:
            The server's reply.

        Raises:
            RefusedError: The server did not admit the site; on ranks other than 0, rank 0 failed for any reason.
            LinkError: The server could not be reached, on rank 0.
        """
        told = b""
        if self._group.first:
            self._request = AdmissionRequest(
                site=self._options.site,
                layout=[(slot.name, list(slot.shape)) for slot in layout.slots],
                version=version,
                epoch=self._epoch,
                samples=samples,
                workers=self._group.size,
                strategy=strategy.to_dict() if strategy is not None else None,
                optimizer=dict(optimizer),
                kernels=str(kernels.status()),
                frozen=dict(frozen or {}),
            )
            try:
                self._coordinator_client = self._client(self._options.address, layout.numel)
                asked_at = time.time()
                told = _ADMITTED + self._admitted(timeout=self._options.timeout)
                self._say_checks(asked_at, told[1:], layout.numel)
            except WeightGradError as error:
                self._group.bytes_from_first(f"-{error}".encode())
                raise
        told = self._group.bytes_from_first(told)
        if told[:1] != _ADMITTED:
            raise RefusedError(f"rank 0 of this site could not join: {told[1:].decode()}")
        return parse_reply(told[1:])

    def _say_checks(self, asked_at: float, reply: bytes, parameters: int) -> None:
        """Look at what `weightgrad doctor` would, as far as it costs nothing, and write a line of it."""
        options = self._options
        server = parse_reply(reply).facts.get("server")
        asked_at = max(asked_at, self._coordinator_client.asked_at if self._coordinator_client is not None else 0.0)
        join_checks.say(
            options.site, join_checks.join_findings(options.credentials, server, asked_at, options.state, parameters)
        )

    def _admitted(self, *, timeout: float) -> bytes:
        assert self._request is not None
        assert self._coordinator_client is not None
        return enter(self._coordinator_client, self._request.pack(), timeout=timeout, diagnose=self._why_not)

    def connect(self, reply: AdmissionReply, holdings: Sequence[Intervals]) -> RankConnection:
        """Connect to every server process that serves what this rank holds; called on every rank.

        Args:
            reply: The server's reply.
            holdings: What each rank of the site holds.

        Raises:
            RefusedError: A server process did not admit this rank.
            LinkError: A server process could not be reached.
        """
        links: dict[int, ServerLink] = {}
        held, speakers = holdings[self._group.rank], []
        request = rank_request(self._options.site, self._group.rank)
        for number, ((address, _), serves) in enumerate(zip(reply.servers, reply.served, strict=True)):
            speakers.append(sum(bool(one & serves) for one in holdings))
            served = serves & held
            coordinates = number == 0 and self._group.first
            if not served and not coordinates:
                continue
            client = self._coordinator_client if coordinates else None
            if client is None:
                client = self._client(self._address(address), held.numel)
                enter(client, request, timeout=self._options.timeout)
            client.start()
            links[number] = ServerLink(client, served, request)
        self.connection = RankConnection(
            self._options.site, self._group.rank, speakers, self._epoch, held, links, self.telemetry
        )
        if self._group.first:
            self.connection.server_watch = ServerWatch(self._options.address, self._options.reconnect)
            self.connection.watch = LinkMonitor(self._options.site, reply.facts.get("bit_s"))
        return self.connection

    def speak_for(self, coordinator: SiteCoordinator, restarted: Callable[[AdmissionReply], None]) -> None:
        """Report on the coordinator of this site, and enter again for it if the server is restarted; on rank 0.

        Args:
            coordinator: The site's coordinator.
            restarted: Called with the reply of a server that was restarted.
        """
        assert self.connection is not None
        self.status = lambda: self.telemetry.status(coordinator)
        self.connection.rejoin = lambda: restarted(self.enter_again(coordinator.version))

    def enter_again(self, version: int) -> AdmissionReply:
        """Enter on rank 0 after the coordinator of the server was restarted; waits for it for `reconnect` seconds."""
        assert self._request is not None
        assert self._coordinator_client is not None
        self._request = replace(self._request, version=version)
        try:
            reply = parse_reply(self._admitted(timeout=self._options.reconnect))
        except LinkError as error:
            watch = self.connection.server_watch if self.connection is not None else None
            raise error if watch is None else watch.gives_up(error) from error
        self._coordinator_client.start()
        return reply

    def hang_up(self) -> None:
        """Close the connections and the event log, whether the server has admitted the site or not."""
        if self.connection is not None:
            with suppress(WeightGradError):
                self.connection.hang_up()
        if self._coordinator_client is not None:
            self._coordinator_client.close(0.0)
        self.close()

    def close(self) -> None:
        """Stop serving metrics, and close the event log."""
        page, self._metrics_page = self._metrics_page, None
        if page is not None:
            page.stop()
        if self.events is not None:
            self.events.close()

    def _address(self, address: str) -> str:
        known = self._options.address
        if not address:
            return known
        return known.rpartition(":")[0] + address if address.startswith(":") else address

    def _client(self, address: str, numel: int) -> GrpcClient:
        options = self._options
        channels = ProcessChannels(
            address, credentials=options.credentials, options=channel_options(streams=options.streams)
        )
        return GrpcClient(
            channels,
            site=options.site,
            rank=self._group.rank,
            incarnation=self._incarnation,
            max_message=_MAX_MESSAGE,
            max_buffered=max(_LEAST_BUFFERED, 5 * numel) + _MAX_MESSAGE,
            announces_end=options.state is None,  # with a checkpoint it can come back, and is worth waiting for
        )

    def _why_not(self) -> TlsProblem | None:
        """Why the server cannot be reached, as far as a look at it tells."""
        problem = diagnose(self._options.address, self._options.credentials)
        insecure = self._options.credentials is None  # then a server without TLS is the right one
        return None if insecure and problem is not None and problem.kind is ProblemKind.NOT_TLS else problem
