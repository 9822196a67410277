"""Messages being received: reassembled from chunks that come in any order and perhaps twice."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from weightgrad.errors import ProtocolError, RefusedError, SpecError
from weightgrad.runtime.transport.records import DEFAULT_CHUNKING, OVERHEAD_BYTES, Chunk, Chunking

# Smaller buffers are left to the allocator, which reuses their memory itself.
_MIN_POOLED_BYTES = 1 << 20


def check_memory_limits(max_message: int, max_buffered: int) -> None:
    """Raise SpecError unless the longest allowed message fits into the memory for all messages."""
    if not 0 < max_message <= max_buffered - OVERHEAD_BYTES:
        raise SpecError(
            f"max_message is {max_message} and max_buffered {max_buffered}; the longest message and its "
            f"overhead of {OVERHEAD_BYTES} must fit; raise max_buffered"
        )


@dataclass
class _PartialMessage:
    buffer: memoryview
    received: bytearray  # one flag a chunk
    chunks_left: int


class ReceiveQueue:
    """Messages being received: whole, once, in order, within a bound of memory. Safe to use from several threads.

    Args:
        max_message: the longest message that is taken, in bytes.
        max_buffered: memory for all messages that the application has not taken, in bytes.
        chunking: how messages are cut; the sender must cut alike.
        buffers: where the memory comes from.
        admit: called with the length of a message before memory is set aside for it; raises to refuse it.
        changed: the condition to use, where several queues share one.
        limit_name: what the sender of a message that is too long is told to raise.
    """

    def __init__(
        self,
        *,
        max_message: int,
        max_buffered: int,
        chunking: Chunking = DEFAULT_CHUNKING,
        buffers: BufferPool | None = None,
        admit: Callable[[int], None] | None = None,
        changed: threading.Condition | None = None,
        limit_name: str = "max_message",
    ) -> None:
        check_memory_limits(max_message, max_buffered)
        self.changed = changed or threading.Condition()
        self._limit_name = limit_name
        self.window = max_buffered
        self._max_message = max_message
        self._chunking = chunking
        self._buffers = buffers or BufferPool(keep_bytes=0)
        self._admit = admit
        self._partial: dict[int, _PartialMessage] = {}
        self._whole: deque[memoryview] = deque()
        self._expected = 1
        self._buffered = 0
        self._closed = False

    @property
    def released(self) -> int:
        """The number of the last message that `get` returned."""
        with self.changed:
            return self._expected - 1 - len(self._whole)

    @property
    def buffered_bytes(self) -> int:
        """Memory of the messages that `get` has not returned; never more than `max_buffered`."""
        return self._buffered

    @property
    def whole(self) -> bool:
        """Whether `get` would return a message at once."""
        return bool(self._whole)

    def add(self, chunk: Chunk) -> None:
        """Take a chunk. One that came before is ignored.

        Raises:
            ProtocolError: no correct sender sends this chunk.
            RefusedError: the message is too long, or more than the sender was granted.
        """
        with self.changed:
            if self._closed or 1 <= chunk.message < self._expected:
                return
            size = self._chunking.chunk_bytes(chunk.total)
            index, rest = divmod(chunk.offset, size)
            wanted = min(size, chunk.total - chunk.offset)
            if chunk.message < 1 or rest or index >= self._chunking.count(chunk.total) or len(chunk.data) != wanted:
                raise ProtocolError(
                    f"a chunk of {len(chunk.data)} bytes at {chunk.offset} of message {chunk.message} ({chunk.total} "
                    f"bytes), which is cut every {size}; run the same release on both ends"
                )
            partial = self._partial.get(chunk.message) or self._start(chunk)
            if len(partial.buffer) != chunk.total:
                raise ProtocolError(
                    f"message {chunk.message} has {chunk.total} bytes and had {len(partial.buffer)} before"
                )
            if partial.received[index]:
                return
            partial.buffer[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data
            partial.received[index] = 1
            partial.chunks_left -= 1
            self._collect_whole()

    def get(self, timeout: float | None = 0.0) -> memoryview | None:
        """Return the next message; its memory is the caller's for as long as a view of it exists.

        Args:
            timeout: seconds to wait; None waits until a message comes or the queue is closed.

        Returns:
            The message; None if none came in time, or if the queue is closed and empty.
        """
        with self.changed:
            if not self.changed.wait_for(lambda: self._whole or self._closed, timeout) or not self._whole:
                return None
            message = self._whole.popleft()
            self._buffered -= len(message) + OVERHEAD_BYTES
            return message

    def close(self, *, forget: bool = False) -> None:
        """Take no more chunks. Whole messages can still be taken, unless `forget` drops them too."""
        with self.changed:
            self._closed = True
            self._partial.clear()
            if forget:
                self._whole.clear()
            self._buffered = sum(len(message) + OVERHEAD_BYTES for message in self._whole)
            self.changed.notify_all()

    def _start(self, chunk: Chunk) -> _PartialMessage:
        cost = chunk.total + OVERHEAD_BYTES
        if chunk.total > self._max_message:
            raise RefusedError(
                f"a message of {chunk.total} bytes; the receiver takes at most {self._max_message}; "
                f"raise {self._limit_name} there if the message is legitimate"
            )
        if self._buffered + cost > self.window:
            raise RefusedError(
                f"{self._buffered + cost} bytes of messages under way; the receiver had granted {self.window}; "
                "run the same release on both ends"
            )
        if self._admit:
            self._admit(chunk.total)
        count = self._chunking.count(chunk.total)
        self._partial[chunk.message] = _PartialMessage(self._buffers.take(chunk.total), bytearray(count), count)
        self._buffered += cost
        return self._partial[chunk.message]

    def _collect_whole(self) -> None:
        while (first := self._partial.get(self._expected)) and not first.chunks_left:
            del self._partial[self._expected]
            self._whole.append(first.buffer)
            self._expected += 1
            self.changed.notify_all()


class BufferPool:
    """Memory for messages that is used again once nobody holds a view of it.

    Touching fresh memory takes longer than receiving into it. The pool keeps at most `keep_bytes`, in use or
    not; what a request needs beyond that is ordinary memory.
    """

    def __init__(self, *, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._kept: list[bytearray] = []  # the one used last comes last
        self._lock = threading.Lock()

    def take(self, length: int) -> memoryview:
        """Return a writable view of `length` bytes with arbitrary content."""
        if not _MIN_POOLED_BYTES <= length <= self._keep_bytes:
            return memoryview(bytearray(length))
        with self._lock:
            free = [kept for kept in self._kept if not _in_use(kept)]
            fits = [kept for kept in free if length <= len(kept) <= 2 * length]
            if fits:
                best = min(fits, key=len)
                self._forget(best)
            else:
                # A little longer, for messages whose length varies.
                best = bytearray(min(length + length // 8, self._keep_bytes))
                excess = len(best) + sum(map(len, self._kept)) - self._keep_bytes
                for kept in free:
                    if excess > 0:
                        self._forget(kept)
                        excess -= len(kept)
                if excess > 0:
                    return memoryview(best)[:length]
            self._kept.append(best)
            return memoryview(best)[:length]

    def _forget(self, one: bytearray) -> None:
        # By identity: `remove` would compare contents.
        self._kept = [kept for kept in self._kept if kept is not one]


def _in_use(buffer: bytearray) -> bool:
    # The pool hands out views only, and Python does not let a bytearray with a view change its length.
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return True
    return False
