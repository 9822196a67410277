"""Messages to be sent, cut into chunks that any stream may carry.

All streams of one direction take chunks from one queue, so a slow stream carries fewer chunks and a broken one
none. When a stream breaks, the chunks it had taken and that were not acknowledged return to the front of the
queue. A message therefore continues where it was, however often its streams break.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import Counter, deque
from dataclasses import dataclass
from itertools import accumulate

from weightgrad.errors import ProtocolError
from weightgrad.runtime.transport.records import DEFAULT_CHUNKING, OVERHEAD_BYTES, Chunk, Chunking
from weightgrad.runtime.transport.transport import Data, Outgoing


class _Buffers:
    """Several buffers as one message; a part of it is copied only if it lies in more than one of them."""

    def __init__(self, data: Outgoing) -> None:
        parts = [data] if isinstance(data, (bytes, bytearray, memoryview)) else data
        self._parts = [memoryview(part).cast("B") for part in parts if len(memoryview(part).cast("B"))]
        self._starts = [0, *accumulate(len(part) for part in self._parts)]

    def __len__(self) -> int:
        return self._starts[-1]

    def part(self, start: int, stop: int) -> Data:
        """The bytes from start to stop."""
        found: list[Data] = []
        place = bisect_right(self._starts, start) - 1
        while start < stop:
            within = start - self._starts[place]
            piece = self._parts[place][within : within + stop - start]
            found.append(piece)
            start, place = start + len(piece), place + 1
        return found[0] if len(found) == 1 else b"".join(found)


@dataclass
class _QueuedMessage:
    data: _Buffers
    chunk_bytes: int
    chunks_left: int

    def length(self, offset: int) -> int:
        return min(self.chunk_bytes, len(self.data) - offset)


class SendQueue:
    """The messages of one direction, shared by its streams. Safe to use from several threads.

    A message is kept until the receiver has all of it; its memory must not be written to before that.

    Args:
        stream_bytes: how much one stream may have taken without an acknowledgement.
        chunking: how messages are cut; the receiver must cut alike.
        changed: the condition to use, where several queues share one.
    """

    def __init__(
        self,
        *,
        stream_bytes: int = 4 << 20,
        chunking: Chunking = DEFAULT_CHUNKING,
        changed: threading.Condition | None = None,
    ) -> None:
        self.changed = changed or threading.Condition()
        self._chunking = chunking
        self._stream_bytes = stream_bytes
        self._messages: dict[int, _QueuedMessage] = {}
        self._last = 0
        self._next_new = (1, 0)  # the first chunk that no stream has ever taken
        self._returned: list[tuple[int, int]] = []  # taken by a stream that broke; sorted
        self._carrier: dict[tuple[int, int], int] = {}  # the stream that took a chunk
        self._taken_bytes: Counter[int] = Counter()  # not yet acknowledged, by stream
        self._window = 0
        self._unreleased: deque[tuple[int, int]] = deque()  # message, cost
        self._unreleased_cost = 0
        self._queued_bytes = 0

    def put(self, data: Outgoing) -> int:
        """Queue a message and return its number; the first message is 1."""
        whole = _Buffers(data)
        with self.changed:
            self._last += 1
            self._messages[self._last] = _QueuedMessage(
                whole, self._chunking.chunk_bytes(len(whole)), self._chunking.count(len(whole))
            )
            self._queued_bytes += len(whole) + OVERHEAD_BYTES
            self.changed.notify_all()
            return self._last

    def take(self, stream: int, timeout: float = 0.0) -> Chunk | None:
        """Return the next chunk for this stream to send, or None if there is none within `timeout` seconds."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.has_for(stream), timeout):
                return None
            key = self._next_for(stream)
            assert key is not None
            message, offset = key
            sent = self._messages[message]
            if self._returned:
                self._returned.pop(0)
            else:
                self._advance(message, offset, sent)
            length = sent.length(offset)
            self._carrier[key] = stream
            self._taken_bytes[stream] += length
            return Chunk(message, offset, len(sent.data), sent.data.part(offset, offset + length))

    def has_for(self, stream: int) -> bool:
        """Whether `take` would return a chunk for this stream at once."""
        with self.changed:
            return self._next_for(stream) is not None

    def carries(self, stream: int) -> bool:
        """Whether this stream has taken something that is not acknowledged."""
        with self.changed:
            return self._taken_bytes[stream] > 0

    def acknowledged(self, message: int, offset: int) -> None:
        """Note that the receiver has this chunk. A repeated acknowledgement does no harm."""
        key = message, offset
        with self.changed:
            if key >= self._next_new:
                raise ProtocolError(f"chunk {key} was acknowledged and never sent; the receiver is at fault")
            if key in self._carrier or key in self._returned:
                self._settle(key)
            self.changed.notify_all()

    def granted(self, window: int) -> None:
        """Note that the receiver can hold `window` bytes of messages that its application has not taken."""
        with self.changed:
            self._window = window
            self.changed.notify_all()

    def released(self, message: int) -> None:
        """Note that the receiver's application has taken this message and all messages before it."""
        with self.changed:
            if (message + 1, 0) > self._next_new:
                raise ProtocolError(f"message {message} was released and never sent whole; the receiver is at fault")
            while self._unreleased and self._unreleased[0][0] <= message:
                number, cost = self._unreleased.popleft()
                self._unreleased_cost -= cost
                # Its acknowledgements may have been lost with a broken stream.
                if sent := self._messages.get(number):
                    for offset in range(0, max(1, len(sent.data)), sent.chunk_bytes):
                        if (number, offset) in self._carrier or (number, offset) in self._returned:
                            self._settle((number, offset))
            self.changed.notify_all()

    def stream_broke(self, stream: int) -> None:
        """Return the unacknowledged chunks of a broken stream to the front of the queue."""
        with self.changed:
            for key in [key for key, carrier in self._carrier.items() if carrier == stream]:
                del self._carrier[key]
                insort(self._returned, key)
            self._taken_bytes.pop(stream, None)
            self.changed.notify_all()

    def clear(self) -> None:
        """Drop every message. Numbering continues."""
        with self.changed:
            self._messages.clear()
            self._returned.clear()
            self._carrier.clear()
            self._taken_bytes.clear()
            self._unreleased.clear()
            self._unreleased_cost = self._queued_bytes = 0
            self._next_new = (self._last + 1, 0)
            self.changed.notify_all()

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes of the messages that the receiver does not have completely."""
        with self.changed:
            return self._queued_bytes - OVERHEAD_BYTES * len(self._messages)

    @property
    def queued_bytes(self) -> int:
        """Memory of the messages that the receiver does not have completely, with what each costs beside its bytes."""
        with self.changed:
            return self._queued_bytes

    @property
    def empty(self) -> bool:
        """Whether every chunk is acknowledged."""
        return not self._messages

    def wait_empty(self, timeout: float) -> bool:
        """Wait until every chunk is acknowledged; False if that takes longer than `timeout` seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: self.empty, timeout)

    def _next_for(self, stream: int) -> tuple[int, int] | None:
        key = self._returned[0] if self._returned else self._next_new
        sent = self._messages.get(key[0])
        if sent is None:
            return None
        starts = not self._returned and key[1] == 0
        # One message may always be under way: the receiver itself decides whether it is too long.
        if starts and self._unreleased and self._unreleased_cost + len(sent.data) + OVERHEAD_BYTES > self._window:
            return None
        taken = self._taken_bytes[stream]
        return None if taken and taken + sent.length(key[1]) > self._stream_bytes else key

    def _advance(self, message: int, offset: int, sent: _QueuedMessage) -> None:
        if offset == 0:
            cost = len(sent.data) + OVERHEAD_BYTES
            self._unreleased.append((message, cost))
            self._unreleased_cost += cost
        offset += sent.chunk_bytes
        self._next_new = (message, offset) if offset < len(sent.data) else (message + 1, 0)

    def _settle(self, key: tuple[int, int]) -> None:
        message, offset = key
        sent = self._messages[message]
        stream = self._carrier.pop(key, None)
        if stream is None:
            self._returned.remove(key)
        else:
            self._taken_bytes[stream] -= sent.length(offset)
        sent.chunks_left -= 1
        if not sent.chunks_left:
            del self._messages[message]
            self._queued_bytes -= len(sent.data) + OVERHEAD_BYTES
