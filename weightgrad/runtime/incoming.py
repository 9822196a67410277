"""Messages on their way in, put together from chunks that come in any order and perhaps twice."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from weightgrad.errors import ProtocolError, RefusedError, SpecError
from weightgrad.runtime.chunks import DEFAULT_CUT, OVERHEAD_BYTES, Chunk, Cut
from weightgrad.runtime.lane_buffers import Buffers


def check_room(max_message: int, max_buffered: int) -> None:
    """SpecError if the longest message would not fit into the room for all."""
    if not 0 < max_message <= max_buffered - OVERHEAD_BYTES:
        raise SpecError(
            f"max_message is {max_message} and max_buffered {max_buffered}; a longest message and its overhead "
            f"of {OVERHEAD_BYTES} must fit; raise max_buffered"
        )


@dataclass
class _Arriving:
    buffer: memoryview
    seen: bytearray
    left: int


class Incoming:
    """Messages on their way in: whole, once, in order, within a bound of memory.

    `admit` is asked before memory is set aside for a message, with its length; it raises to refuse.
    """

    def __init__(
        self,
        *,
        max_message: int,
        max_buffered: int,
        cut: Cut = DEFAULT_CUT,
        buffers: Buffers | None = None,
        admit: Callable[[int], None] | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        check_room(max_message, max_buffered)
        self.changed = threading.Condition(lock)
        self.window = max_buffered
        self._max_message = max_message
        self._cut = cut
        self._buffers = buffers or Buffers(keep_bytes=0)
        self._admit = admit
        self._arriving: dict[int, _Arriving] = {}
        self._whole: deque[memoryview] = deque()
        self._expected = 1
        self._buffered = 0
        self._closed = False

    @property
    def released(self) -> int:
        """The number of the last message that `get` gave out."""
        with self.changed:
            return self._expected - 1 - len(self._whole)

    @property
    def buffered_bytes(self) -> int:
        """What the messages that `get` has not given out cost; never more than `max_buffered`."""
        return self._buffered

    @property
    def whole(self) -> bool:
        """Whether `get` has a message at once."""
        return bool(self._whole)

    def add(self, chunk: Chunk) -> None:
        """Take a chunk in. One that is here already is ignored; one that no honest end sends raises."""
        with self.changed:
            if self._closed or 1 <= chunk.message < self._expected:
                return
            size = self._cut.length
            index, rest = divmod(chunk.offset, size)
            wanted = min(size, chunk.total - chunk.offset)
            if chunk.message < 1 or rest or index >= self._cut.count(chunk.total) or len(chunk.data) != wanted:
                raise ProtocolError(
                    f"a chunk of {len(chunk.data)} bytes at {chunk.offset} of message {chunk.message} ({chunk.total} "
                    f"bytes), which is cut every {size}; use one release at both ends"
                )
            arriving = self._arriving.get(chunk.message) or self._start(chunk)
            if len(arriving.buffer) != chunk.total:
                raise ProtocolError(
                    f"message {chunk.message} has {chunk.total} bytes and had {len(arriving.buffer)} before"
                )
            if arriving.seen[index]:
                return
            arriving.buffer[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data
            arriving.seen[index] = 1
            arriving.left -= 1
            self._gather()

    def get(self, timeout: float | None = 0.0) -> memoryview | None:
        """The next message, or None if none is whole within `timeout` seconds, or ever (after `close`).

        The memory is the caller's for as long as it keeps the view or anything made from it.
        """
        with self.changed:
            if not self.changed.wait_for(lambda: self._whole or self._closed, timeout) or not self._whole:
                return None
            message = self._whole.popleft()
            self._buffered -= len(message) + OVERHEAD_BYTES
            return message

    def close(self, *, forget: bool = False) -> None:
        """Take no more in. What is whole can still be got, unless it is to be forgotten."""
        with self.changed:
            self._closed = True
            self._arriving.clear()
            if forget:
                self._whole.clear()
            self._buffered = sum(len(message) + OVERHEAD_BYTES for message in self._whole)
            self.changed.notify_all()

    def _start(self, chunk: Chunk) -> _Arriving:
        cost = chunk.total + OVERHEAD_BYTES
        if chunk.total > self._max_message:
            raise RefusedError(
                f"a message of {chunk.total} bytes; this end takes {self._max_message} at most; "
                "raise its limit if that is an honest message"
            )
        if self._buffered + cost > self.window:
            raise RefusedError(
                f"{self._buffered + cost} bytes of messages under way; this end had granted {self.window}; "
                "use one release at both ends"
            )
        if self._admit:
            self._admit(chunk.total)
        count = self._cut.count(chunk.total)
        self._arriving[chunk.message] = _Arriving(self._buffers.take(chunk.total), bytearray(count), count)
        self._buffered += cost
        return self._arriving[chunk.message]

    def _gather(self) -> None:
        while (first := self._arriving.get(self._expected)) and not first.left:
            del self._arriving[self._expected]
            self._whole.append(first.buffer)
            self._expected += 1
            self.changed.notify_all()
