"""How a site enters a run: rank 0 asks the global server, and every rank hears the reply."""

from __future__ import annotations

import secrets
from contextlib import suppress

from torch import Tensor

from weightgrad import kernels
from weightgrad.core.strategies import Strategy
from weightgrad.errors import RefusedError, WeightGradError
from weightgrad.event_log import EventLog
from weightgrad.runtime import checkpoint
from weightgrad.runtime.admission import AdmissionReply, AdmissionRequest, parse_reply
from weightgrad.runtime.announced_optimizer import AnnouncedOptimizer
from weightgrad.runtime.flat_parameters import FlatParameters, digest
from weightgrad.runtime.join_options import JoinOptions
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.security.tls_check import ProblemKind, TlsProblem, diagnose
from weightgrad.runtime.server_connection import ServerConnection
from weightgrad.runtime.transport.grpc_client import GrpcClient

_ADMITTED = b"+"
_MIN_MESSAGE_BYTES = 1 << 30
_MESSAGE_BYTES_A_PARAMETER = 64
_MORE_BUFFERED_BYTES = 64 << 20


class Entry:
    """A site's entry into a run. On rank 0 it leaves the connection to the server and the site's event log."""

    def __init__(self, options: JoinOptions, group: SiteGroup) -> None:
        self._options, self._group = options, group
        self._client: GrpcClient | None = None
        self.connection: ServerConnection | None = None
        self.events: EventLog | None = None

    def enter(
        self,
        flat_parameters: FlatParameters,
        weights: Tensor,
        optimizer: AnnouncedOptimizer,
        strategy: Strategy | None,
        samples: int,
    ) -> AdmissionReply:
        """Ask the global server to be admitted.

        Args:
            flat_parameters: The parameters to be trained.
            weights: Their values, flat.
            optimizer: The user's optimizer.
            strategy: The strategy that the user asked for; None takes the server's.
            samples: How much the site's updates weigh.

        Returns:
            The server's reply, on every rank.

        Raises:
            RefusedError: The server did not admit the site; on ranks other than 0, rank 0 failed for any reason.
            LinkError: The server could not be reached, on rank 0.
        """
        told = b""
        if self._group.first:
            try:
                told = _ADMITTED + self._ask(flat_parameters, weights, optimizer, strategy, samples).pack()
            except WeightGradError as error:
                self._group.bytes_from_first(f"-{error}".encode())
                raise
        told = self._group.bytes_from_first(told)
        if told[:1] != _ADMITTED:
            raise RefusedError(f"rank 0 of this site could not join: {told[1:].decode()}")
        return parse_reply(told[1:])

    def _ask(
        self,
        flat_parameters: FlatParameters,
        weights: Tensor,
        optimizer: AnnouncedOptimizer,
        strategy: Strategy | None,
        samples: int,
    ) -> AdmissionReply:
        options, layout = self._options, flat_parameters.layout
        self._client = self._connect(layout.numel)
        before = checkpoint.newest(options.state, "rank-0") if options.state is not None else None
        spec = optimizer.spec(strategy)
        request = AdmissionRequest(
            site=options.site,
            layout=[(slot.name, list(slot.shape)) for slot in layout.slots],
            digest=digest(weights),
            version=-1 if before is None else int(before.facts["version"]),
            samples=samples,
            workers=self._group.size,
            strategy=strategy.to_dict() if strategy is not None else None,
            optimizer=spec.dump() if spec is not None else None,
            kernels=str(kernels.status()),
        )
        if options.state is not None:
            options.state.mkdir(parents=True, exist_ok=True)
            self.events = EventLog(options.state / "events.jsonl", append=True)
        self.connection = ServerConnection(self._client, request, self.events, self._why_not, metrics=options.metrics)
        return self.connection.enter(timeout=options.timeout)

    def hang_up(self) -> None:
        """Close the connection and the event log, whether the server has admitted the site or not."""
        if self.connection is not None:
            with suppress(WeightGradError):  # there is no session to close if the site was never admitted
                self.connection.close()
        if self._client is not None:
            self._client.close(0.0)
        if self.events is not None:
            self.events.close()

    def _connect(self, numel: int) -> GrpcClient:
        options = self._options
        largest = max(_MIN_MESSAGE_BYTES, _MESSAGE_BYTES_A_PARAMETER * numel)
        return GrpcClient(
            options.address,
            site=options.site,
            incarnation=secrets.randbits(63),
            credentials=options.credentials.for_client() if options.credentials is not None else None,
            streams=options.streams,
            max_message=largest,
            max_buffered=largest + _MORE_BUFFERED_BYTES,
        )

    def _why_not(self) -> TlsProblem | None:
        """Why the server cannot be reached, as far as a look at it tells."""
        problem = diagnose(self._options.address, self._options.credentials)
        insecure = self._options.credentials is None  # then a server without TLS is the right one
        return None if insecure and problem is not None and problem.kind is ProblemKind.NOT_TLS else problem
