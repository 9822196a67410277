"""The sessions of a gRPC server: who the peer is, what it may send, and how a session ended."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
from cryptography import x509

from weightgrad.errors import CredentialsError, LinkError, ProtocolError, RefusedError, SpecError, WeightGradError
from weightgrad.runtime.transport.grpc_settings import INCARNATION_KEY, PROTOCOL_KEY, SITE_KEY, Keepalive
from weightgrad.runtime.transport.message_stream import MessageStream, Stream
from weightgrad.runtime.transport.receive_queue import BufferPool, check_memory_limits
from weightgrad.runtime.transport.transport import EntryRequest, Traffic
from weightgrad.wire.versions import TRANSPORT_VERSION

_MAX_NAME = 200
_MAX_REASON_CHARACTERS = 1000  # the reason travels in a header, whose length gRPC bounds


@dataclass(frozen=True, kw_only=True)
class TransportLimits:
    """What the global server accepts from one site, and its timeouts.

    Attributes:
        max_message: the longest message, in bytes.
        max_buffered: memory for messages that the application has not taken, in bytes.
        messages_per_s: how many messages a site may send in the long run.
        burst: how many messages may come at once after a quiet time.
        stream_bytes: how much is sent on one stream without an acknowledgement.
        keep_bytes: memory kept for further messages, for all sites together.
        lost_after_s: seconds without a stream after which a site is reported as lost.
        recheck_s: seconds between two checks of the peers that are connected.
        keepalive: how a connection that falls silent is noticed.
    """

    max_message: int = 1 << 30
    max_buffered: int = (1 << 30) + (64 << 20)
    messages_per_s: float = 2000.0
    burst: int = 10_000
    stream_bytes: int = 4 << 20
    keep_bytes: int = 512 << 20
    lost_after_s: float = 5.0
    recheck_s: float = 3.0
    keepalive: Keepalive = field(default_factory=Keepalive)

    @classmethod
    def for_messages_of(cls, max_message: int) -> TransportLimits:
        """The default limits, with messages of up to `max_message` bytes."""
        return cls(max_message=max_message, max_buffered=max_message + (64 << 20))

    def __post_init__(self) -> None:
        check_memory_limits(self.max_message, self.max_buffered)
        for name in ("messages_per_s", "burst", "stream_bytes"):
            if not getattr(self, name) > 0:
                raise SpecError(f"TransportLimits.{name} is {getattr(self, name)!r}; it must be positive")
        for name in ("lost_after_s", "recheck_s", "keep_bytes"):
            if not getattr(self, name) >= 0:
                raise SpecError(f"TransportLimits.{name} is {getattr(self, name)!r}; it must not be negative")


@dataclass(frozen=True)
class SessionEnd:
    """How a session, or an attempt to enter, ended: the gRPC status that the client receives."""

    code: grpc.StatusCode
    why: str

    @classmethod
    def of(cls, error: WeightGradError) -> SessionEnd:
        """The status for an error: refusals that are final, and LinkError, which asks the site to try again."""
        code = grpc.StatusCode.FAILED_PRECONDITION
        if isinstance(error, RefusedError):
            code = grpc.StatusCode.PERMISSION_DENIED
        elif isinstance(error, CredentialsError):
            code = grpc.StatusCode.UNAUTHENTICATED
        elif isinstance(error, LinkError):
            code = grpc.StatusCode.ABORTED
        return cls(code, str(error))

    def abort(self, context: Any) -> NoReturn:
        """End the call with this status, by the exception that gRPC expects."""
        context.abort(self.code, self.why[:_MAX_REASON_CHARACTERS])
        raise AssertionError("abort raises")


class TokenBucket:
    """A token bucket: `rate` tokens a second, at most `burst` saved up."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._at = float(burst), clock()
        self._lock = threading.Lock()

    def try_take(self) -> bool:
        """Take a token; False if there was none."""
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
            self._at = now
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


class KnownSite:
    """What the server remembers of a site across its sessions.

    `callback_lock` is held while the application is called about the site.
    """

    def __init__(self, limits: TransportLimits) -> None:
        self.callback_lock = threading.RLock()
        self.rate_limit = TokenBucket(limits.messages_per_s, limits.burst)
        self.traffic = Traffic()
        self.replaced: deque[str] = deque(maxlen=64)  # incarnations that a later process has replaced


class Session:
    """The session of one incarnation of a site that was admitted."""

    def __init__(
        self, entry: EntryRequest, known_site: KnownSite, limits: TransportLimits, buffers: BufferPool
    ) -> None:
        self.site, self.incarnation, self.known_site = entry.site, entry.incarnation, known_site
        self.id = secrets.token_hex(16)
        self.ended: SessionEnd | None = None
        self.dropped = False  # no more of its messages are delivered
        self.loss_reported = False
        self._streams: dict[int, tuple[Stream, EntryRequest]] = {}  # by the client's number of the stream
        self._limits = limits
        self._lock = threading.Lock()
        self.messages = MessageStream(
            max_message=limits.max_message,
            max_buffered=limits.max_buffered,
            stream_bytes=limits.stream_bytes,
            buffers=buffers,
            admit=self._admit,
            traffic=known_site.traffic,
        )

    def open_stream(self, number: int, entry: EntryRequest) -> Stream:
        """Open a stream. It replaces an older one with this number, whose end was not noticed yet."""
        stream = self.messages.open_stream()
        with self._lock:
            old = self._streams.get(number)
            self._streams[number] = stream, entry
        if old:
            old[0].close()
        return stream

    def end(self, ending: SessionEnd, *, drop: bool = True) -> None:
        """Close all streams; the first reason counts. Whole messages are still delivered, unless `drop` is set."""
        with self._lock:
            self.ended = self.ended or ending
            self.dropped = self.dropped or drop
        self.messages.end(forget=drop)

    def entries(self) -> list[EntryRequest]:
        """The peers of the open streams."""
        with self._lock:
            return [entry for stream, entry in self._streams.values() if not stream.closed]

    def _admit(self, total: int) -> None:
        if not self.known_site.rate_limit.try_take():
            raise RefusedError(
                f"{self.site} sends more than {self._limits.messages_per_s:g} messages a second "
                f"(and {self._limits.burst} at once); raise TransportLimits.messages_per_s if that is legitimate"
            )


def read_entry_request(request: bytes, context: Any) -> EntryRequest:
    """Identify a caller by the metadata and the certificate of its call.

    Raises:
        ProtocolError: the metadata cannot be read, or the caller speaks another protocol.
        CredentialsError: the certificate cannot be read.
    """
    metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
    spoken = metadata.get(PROTOCOL_KEY)
    if spoken != TRANSPORT_VERSION:
        raise ProtocolError(
            f"the site speaks protocol {spoken}, the global server {TRANSPORT_VERSION}; run the same version everywhere"
        )
    site, incarnation = (unquote(metadata.get(key, "")) for key in (SITE_KEY, INCARNATION_KEY))
    if not (0 < len(site) <= _MAX_NAME and 0 < len(incarnation) <= _MAX_NAME):
        raise ProtocolError(f"site and incarnation must have 1 to {_MAX_NAME} characters")
    name, serial = _certificate(context)
    return EntryRequest(site, incarnation, request, name, serial, unquote(context.peer()))


def _certificate(context: Any) -> tuple[str | None, int | None]:
    found = context.auth_context()
    names, pems = found.get("x509_common_name", []), found.get("x509_pem_cert", [])
    name = names[0].decode(errors="replace") if names else None
    try:
        return name, x509.load_pem_x509_certificate(pems[0]).serial_number if pems else None
    except ValueError as error:
        raise CredentialsError(f"the certificate of {name!r} cannot be read ({error})") from None
