"""The two lanes of a session: control messages never wait behind bulk ones.

    control    short messages, on stream 0
    bulk       messages of any length, on streams 1, 2, ...

Each lane is a MessageStream of its own, with queues, a window and streams of its own. So a lane keeps the order of its
messages, there is no order between the lanes, and neither can fill the memory of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weightgrad.errors import SpecError
from weightgrad.runtime.transport.message_stream import HEARTBEAT_S, MessageStream, SessionLock, Stream
from weightgrad.runtime.transport.receive_queue import BufferPool, check_memory_limits
from weightgrad.runtime.transport.records import OVERHEAD_BYTES
from weightgrad.runtime.transport.transport import MAX_CONTROL_MESSAGE, Outgoing, Traffic

CONTROL_STREAM = 0

# How many of the longest control messages may wait for the application.
_CONTROL_MESSAGES_BUFFERED = 4


@dataclass(frozen=True, kw_only=True)
class LaneLimits:
    """What one end of a session receives.

    Attributes:
        max_message: the longest bulk message, in bytes.
        max_buffered: memory for bulk messages that were not taken yet, in bytes.
        max_control_message: the longest control message, in bytes; four of them are buffered.
        stream_bytes: how much may be under way on one stream without an acknowledgement.
    """

    max_message: int
    max_buffered: int
    max_control_message: int = MAX_CONTROL_MESSAGE
    stream_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        check_memory_limits(self.max_message, self.max_buffered)
        for name in ("max_control_message", "stream_bytes"):
            if not getattr(self, name) > 0:
                raise SpecError(f"{name} is {getattr(self, name)!r}; it must be positive")

    @property
    def max_control_buffered(self) -> int:
        """Memory for control messages that were not taken yet, in bytes."""
        return _CONTROL_MESSAGES_BUFFERED * (self.max_control_message + OVERHEAD_BYTES)


class Lanes:
    """The messages of one session, both ways, on both lanes. They outlive their streams, until `end`.

    Args:
        limits: what is received.
        buffers: where the memory of received messages comes from.
        admit: called with the length of a message of either lane before it is received; raises to refuse it.
        traffic: where the bytes of records are counted, repeated ones included.

    Attributes:
        control: the messages of the control lane.
        bulk: the messages of the bulk lane.
        received: notified when a message of either lane has come, or when none will come any more.
    """

    def __init__(
        self,
        limits: LaneLimits,
        *,
        buffers: BufferPool | None = None,
        admit: Callable[[int], None] | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        lock, traffic = SessionLock(), traffic or Traffic()
        self.received, self._acknowledged = lock.received, lock.acknowledged
        self.control = MessageStream(
            max_message=limits.max_control_message,
            max_buffered=limits.max_control_buffered,
            stream_bytes=limits.stream_bytes,
            admit=admit,
            traffic=traffic,
            lock=lock,
            limit_name="max_control_message",
            heartbeat_s=HEARTBEAT_S,
        )
        self.bulk = MessageStream(
            max_message=limits.max_message,
            max_buffered=limits.max_buffered,
            stream_bytes=limits.stream_bytes,
            buffers=buffers,
            admit=admit,
            traffic=traffic,
            lock=lock,
        )

    def put(self, data: Outgoing, *, control: bool = False) -> None:
        """Queue a message."""
        (self.control if control else self.bulk).put(data)

    def get(self, timeout: float | None = 0.0) -> memoryview | None:
        """Return the next message, control messages before bulk ones; see `ReceiveQueue.get`."""
        return self.get_with_lane(timeout)[0]

    def get_with_lane(self, timeout: float | None = 0.0) -> tuple[memoryview | None, bool]:
        """Return what `get` returns, and whether it came on the control lane."""
        with self.received:
            self.received.wait_for(lambda: self.whole or self.bulk.ended, timeout)
            control = self.control.incoming.whole
            return (self.control.get() if control else self.bulk.get()), bool(control)

    @property
    def whole(self) -> bool:
        """Whether `get` would return a message at once."""
        return self.control.incoming.whole or self.bulk.incoming.whole

    def open_stream(self, number: int) -> Stream:
        """Return a new stream of the lane that streams of this number belong to; see `MessageStream.open_stream`."""
        return (self.control if number == CONTROL_STREAM else self.bulk).open_stream()

    @property
    def open_streams(self) -> int:
        """How many streams are open."""
        return len(self.control.streams) + len(self.bulk.streams)

    @property
    def without_stream_since(self) -> float:
        """When the last stream was closed, on the clock of `time.monotonic`; meaningless while a stream is open."""
        return max(self.control.without_stream_since, self.bulk.without_stream_since)

    @property
    def heard_at(self) -> float:
        """When a record last came, on the clock of `time.monotonic`; a stream that is open is never silent for long."""
        return max(self.control.heard_at, self.bulk.heard_at)

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes of the messages that the peer does not have completely."""
        with self._acknowledged:
            return self.control.outgoing.unacknowledged_bytes + self.bulk.outgoing.unacknowledged_bytes

    @property
    def queued_bytes(self) -> int:
        """Memory of the messages that the peer does not have completely."""
        with self._acknowledged:
            return self.control.outgoing.queued_bytes + self.bulk.outgoing.queued_bytes

    def wait_sent(self, timeout: float) -> bool:
        """Wait until the peer has every message of both lanes; False if that takes longer than `timeout` seconds."""
        with self._acknowledged:
            return self._acknowledged.wait_for(
                lambda: self.control.outgoing.empty and self.bulk.outgoing.empty, timeout
            )

    def leave(self, why: str = "") -> None:
        """Let every stream send a goodbye and end once it has nothing else to send."""
        with self.received:
            self.control.leave(why)
            self.bulk.leave(why)

    @property
    def leaving(self) -> bool:
        """Whether `leave` was called."""
        return self.bulk.leaving is not None

    @property
    def peer_left(self) -> bool:
        """Whether the peer has said goodbye on any stream; it does so when both lanes have sent everything."""
        return self.control.peer_left or self.bulk.peer_left

    def end(self, *, forget: bool = True) -> None:
        """Close all streams of both lanes; see `MessageStream.end`."""
        with self.received:
            self.control.end(forget=forget)
            self.bulk.end(forget=forget)
