"""The sessions of a gRPC server: who the peer is, what it may send, and how a session ended."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc

from weightgrad.errors import CredentialsError, LinkError, ProtocolError, RefusedError, SpecError, WeightGradError
from weightgrad.runtime.security.credentials import common_name
from weightgrad.runtime.transport.connection_gate import GateLimits
from weightgrad.runtime.transport.grpc_settings import INCARNATION_KEY, PROTOCOL_KEY, RANK_KEY, SITE_KEY, Keepalive
from weightgrad.runtime.transport.lanes import LaneLimits, Lanes
from weightgrad.runtime.transport.message_stream import Stream
from weightgrad.runtime.transport.peer_certificate import certificate_of
from weightgrad.runtime.transport.receive_queue import BufferPool
from weightgrad.runtime.transport.records import OVERHEAD_BYTES
from weightgrad.runtime.transport.transport import MAX_CONTROL_MESSAGE, MAX_RANKS, EntryRequest, Traffic
from weightgrad.wire.versions import TRANSPORT_VERSION

_MAX_NAME = 200
_MAX_REASON_CHARACTERS = 1000  # the reason travels in a header, whose length gRPC bounds


@dataclass(frozen=True, kw_only=True)
class TransportLimits:
    """What the global server accepts from one peer, and its timeouts.

    Attributes:
        max_message: the longest bulk message, in bytes.
        max_buffered: memory for bulk messages that the application has not taken, in bytes.
        max_control_message: the longest control message, in bytes; there is memory for four that were not taken.
        messages_per_s: how many messages a peer may send in the long run, on both lanes together.
        burst: how many messages may come at once after a quiet time.
        streams_per_rank: of all streams of a site, beside 64; each costs the server two threads.
        stream_bytes: how much is sent on one stream without an acknowledgement.
        keep_bytes: memory kept for further messages, for all peers together.
        lost_after_s: seconds without a stream after which a peer is reported as lost.
        silent_s: seconds without a word on open streams after which a peer is reported as lost: its connections live,
            and its process does not.
        recheck_s: seconds between two checks of the peers that are connected.
        gate: how many connections of strangers stay open.
        keepalive: how a connection that falls silent is noticed.
    """

    max_message: int = 256 << 20
    max_buffered: int = (256 << 20) + (64 << 20)
    max_control_message: int = MAX_CONTROL_MESSAGE
    messages_per_s: float = 2000.0
    burst: int = 10_000
    streams_per_rank: int = 8
    stream_bytes: int = 4 << 20
    keep_bytes: int = 4 << 20
    lost_after_s: float = 5.0
    silent_s: float = 8.0
    recheck_s: float = 3.0
    gate: GateLimits = field(default_factory=GateLimits)
    keepalive: Keepalive = field(default_factory=Keepalive)

    @classmethod
    def for_messages_of(cls, max_message: int) -> TransportLimits:
        """The default limits, with messages of up to `max_message` bytes."""
        return cls(max_message=max_message, max_buffered=max_message + (64 << 20))

    def at_most(self, max_message: int | None) -> TransportLimits:
        """These limits, for a peer whose bulk messages have at most `max_message` bytes: two of them are buffered."""
        if max_message is None or max_message >= self.max_message:
            return self
        return replace(self, max_message=max_message, max_buffered=2 * (max_message + OVERHEAD_BYTES))

    @property
    def lanes(self) -> LaneLimits:
        """The limits of the two lanes of a session."""
        return LaneLimits(
            max_message=self.max_message,
            max_buffered=self.max_buffered,
            max_control_message=self.max_control_message,
            stream_bytes=self.stream_bytes,
        )

    def __post_init__(self) -> None:
        _ = self.lanes  # LaneLimits checks these
        for name in ("messages_per_s", "burst", "streams_per_rank"):
            if not getattr(self, name) > 0:
                raise SpecError(f"TransportLimits.{name} is {getattr(self, name)!r}; it must be positive")
        for name in ("lost_after_s", "silent_s", "recheck_s", "keep_bytes"):
            if not getattr(self, name) >= 0:
                raise SpecError(f"TransportLimits.{name} is {getattr(self, name)!r}; it must not be negative")


@dataclass(frozen=True)
class SessionEnd:
    """How a session, or an attempt to enter, ended: the gRPC status that the client receives."""

    code: grpc.StatusCode
    why: str

    @classmethod
    def of(cls, error: WeightGradError) -> SessionEnd:
        """The status for an error: refusals that are final, and LinkError, which asks the peer to try again."""
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


class KnownPeer:
    """What the server remembers of a peer across its sessions.

    `callback_lock` is held while the application is called about the peer.
    """

    def __init__(self, limits: TransportLimits) -> None:
        self.callback_lock = threading.RLock()
        self.rate_limit = TokenBucket(limits.messages_per_s, limits.burst)
        self.traffic = Traffic()
        self.replaced: deque[str] = deque(maxlen=64)  # incarnations that a later process has replaced


class Session:
    """The session of one incarnation of a peer that was admitted."""

    def __init__(
        self, entry: EntryRequest, known_peer: KnownPeer, limits: TransportLimits, buffers: BufferPool
    ) -> None:
        self.peer, self.incarnation, self.known_peer = entry.peer, entry.incarnation, known_peer
        self.id = secrets.token_hex(16)
        self.ended: SessionEnd | None = None
        self.dropped = False  # no more of its messages are delivered
        self.loss_reported = False
        self._streams: dict[int, tuple[Stream, EntryRequest]] = {}  # by the client's number of the stream
        self._limits = limits
        self._lock = threading.Lock()
        self.messages = Lanes(limits.lanes, buffers=buffers, admit=self._admit, traffic=known_peer.traffic)

    def open_stream(self, number: int, entry: EntryRequest) -> Stream:
        """Open a stream. It replaces an older one with this number, whose end was not noticed yet."""
        stream = self.messages.open_stream(number)
        with self._lock:
            old = self._streams.get(number)
            self._streams[number] = stream, entry
        if old:
            old[0].close()
        return stream

    def has_stream(self, number: int) -> bool:
        """Whether a stream has this number, which a new one would replace."""
        with self._lock:
            return number in self._streams and not self._streams[number][0].closed

    def end(self, ending: SessionEnd, *, drop: bool = True) -> None:
        """Close all streams; the first reason counts. Whole messages are still delivered, unless `drop` is set."""
        with self._lock:
            self.ended = self.ended or ending
            self.dropped = self.dropped or drop
        self.messages.end(forget=drop)

    def entries(self) -> list[EntryRequest]:
        """Who opened the streams that are open."""
        with self._lock:
            return [entry for stream, entry in self._streams.values() if not stream.closed]

    def _admit(self, total: int) -> None:
        if not self.known_peer.rate_limit.try_take():
            raise RefusedError(
                f"{self.peer} sends more than {self._limits.messages_per_s:g} messages a second "
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
    rank = metadata.get(RANK_KEY, "")
    if not (rank.isascii() and rank.isdecimal() and len(rank) <= 5 and int(rank) < MAX_RANKS):
        raise ProtocolError(f"rank {rank[:20]!r}; it must be 0 to {MAX_RANKS - 1}")
    certificate = certificate_of(context)
    name, serial = (None, None) if certificate is None else (common_name(certificate), certificate.serial_number)
    return EntryRequest(site, int(rank), incarnation, request, name, serial, unquote(context.peer()))
