"""The global server's side of a session: who it is, what it may do, how it ended."""

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
from weightgrad.runtime.conversation import Conversation, Lane, Traffic
from weightgrad.runtime.incoming import check_room
from weightgrad.runtime.lane_buffers import Buffers
from weightgrad.runtime.lane_service import INCARNATION_KEY, PROTOCOL, PROTOCOL_KEY, SITE_KEY, Keepalive

_MAX_NAME = 200
_MAX_WORDS = 1000  # they travel in a header, which gRPC bounds


@dataclass(frozen=True, kw_only=True)
class LaneLimits:
    """What the global server takes from one site, and how patient it is with it."""

    max_message: int = 1 << 30
    max_buffered: int = (1 << 30) + (64 << 20)
    messages_per_s: float = 2000.0
    burst: int = 10_000  # messages that may come at once after a quiet time
    lane_bytes: int = 4 << 20  # sent on one lane and not acknowledged
    keep_bytes: int = 512 << 20  # memory kept for messages to come, all sites together
    lost_after_s: float = 5.0
    recheck_s: float = 3.0
    keepalive: Keepalive = field(default_factory=Keepalive)

    def __post_init__(self) -> None:
        check_room(self.max_message, self.max_buffered)
        for name in ("messages_per_s", "burst", "lane_bytes"):
            if not getattr(self, name) > 0:
                raise SpecError(f"LaneLimits.{name} is {getattr(self, name)!r}; it must be positive")
        for name in ("lost_after_s", "recheck_s", "keep_bytes"):
            if not getattr(self, name) >= 0:
                raise SpecError(f"LaneLimits.{name} is {getattr(self, name)!r}; it must not be negative")


@dataclass(frozen=True)
class Entry:
    """Somebody at the door: who it says it is, and what its certificate says. A lane's `request` is empty."""

    site: str
    incarnation: str
    request: bytes
    peer_name: str | None  # None without TLS
    peer_serial: int | None
    peer_address: str


@dataclass(frozen=True)
class Ending:
    """How a session, or an attempt at one, ended: what gRPC tells the client."""

    code: grpc.StatusCode
    why: str

    @classmethod
    def of(cls, error: WeightGradError) -> Ending:
        """The ending that an error asks for."""
        code = grpc.StatusCode.FAILED_PRECONDITION
        if isinstance(error, RefusedError):
            code = grpc.StatusCode.PERMISSION_DENIED
        elif isinstance(error, CredentialsError):
            code = grpc.StatusCode.UNAUTHENTICATED
        elif isinstance(error, LinkError):
            code = grpc.StatusCode.ABORTED
        return cls(code, str(error))

    def abort(self, context: Any) -> NoReturn:
        """Tell the client, by an exception that gRPC expects."""
        context.abort(self.code, self.why[:_MAX_WORDS])
        raise AssertionError("abort raises")


class Bucket:
    """A token bucket: `rate` a second, `burst` at once."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._at = float(burst), clock()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Whether there was a token."""
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
            self._at = now
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


class SiteRecord:
    """What outlasts the sessions of a site. `gate` is held while the application is told of the site."""

    def __init__(self, limits: LaneLimits) -> None:
        self.gate = threading.RLock()
        self.bucket = Bucket(limits.messages_per_s, limits.burst)
        self.traffic = Traffic()
        self.replaced: deque[str] = deque(maxlen=64)  # incarnations


@dataclass(frozen=True)
class SessionView:
    """A session as it is at this moment."""

    incarnation: str
    lanes: int
    unacknowledged_bytes: int


class Session:
    """One incarnation of a site that was let in."""

    def __init__(self, entry: Entry, record: SiteRecord, limits: LaneLimits, buffers: Buffers) -> None:
        self.site, self.incarnation, self.record = entry.site, entry.incarnation, record
        self.id = secrets.token_hex(16)
        self.ending: Ending | None = None
        self.dropped = False  # nothing more of it is delivered
        self.told_lost = False
        self._streams: dict[int, tuple[Lane, Entry]] = {}  # by the client's number of the lane
        self._limits = limits
        self._lock = threading.Lock()
        self.talk = Conversation(
            max_message=limits.max_message,
            max_buffered=limits.max_buffered,
            lane_bytes=limits.lane_bytes,
            buffers=buffers,
            admit=self._admit,
            traffic=record.traffic,
        )

    def open_lane(self, number: int, entry: Entry) -> Lane:
        """A lane; it takes the place of an older one of that number, whose end was not noticed yet."""
        lane = self.talk.open_lane()
        with self._lock:
            old = self._streams.get(number)
            self._streams[number] = lane, entry
        if old:
            old[0].close()
        return lane

    def end(self, ending: Ending, *, drop: bool = True) -> None:
        """Close all lanes; the first ending counts. What has come whole is still delivered unless dropped."""
        with self._lock:
            self.ending = self.ending or ending
            self.dropped = self.dropped or drop
        self.talk.end(forget=drop)

    def entries(self) -> list[Entry]:
        """Who is at the other end of the open lanes."""
        with self._lock:
            return [entry for lane, entry in self._streams.values() if not lane.closed]

    def _admit(self, total: int) -> None:
        if not self.record.bucket.take():
            raise RefusedError(
                f"{self.site} sends more than {self._limits.messages_per_s:g} messages a second "
                f"(and {self._limits.burst} at once); raise LaneLimits.messages_per_s if that is honest"
            )


def read_entry(request: bytes, context: Any) -> Entry:
    """Who calls, from the call's metadata and certificate. ProtocolError if that cannot be read."""
    metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
    spoken = metadata.get(PROTOCOL_KEY)
    if spoken != PROTOCOL:
        raise ProtocolError(
            f"the site speaks protocol {spoken}, the global server {PROTOCOL}; run the same version everywhere"
        )
    site, incarnation = (unquote(metadata.get(key, "")) for key in (SITE_KEY, INCARNATION_KEY))
    if not (0 < len(site) <= _MAX_NAME and 0 < len(incarnation) <= _MAX_NAME):
        raise ProtocolError(f"site and incarnation must have 1 to {_MAX_NAME} characters; this call has others")
    name, serial = _certificate(context)
    return Entry(site, incarnation, request, name, serial, unquote(context.peer()))


def _certificate(context: Any) -> tuple[str | None, int | None]:
    found = context.auth_context()
    names, pems = found.get("x509_common_name", []), found.get("x509_pem_cert", [])
    name = names[0].decode(errors="replace") if names else None
    try:
        return name, x509.load_pem_x509_certificate(pems[0]).serial_number if pems else None
    except ValueError as error:
        raise CredentialsError(f"the certificate of {name!r} cannot be read ({error})") from None
