"""Memory for messages, used again: touching fresh memory takes longer than receiving into it."""

from __future__ import annotations

import threading

# Below this the allocator itself uses memory again.
_WORTH_KEEPING = 1 << 20


class Buffers:
    """Hands out memory, and hands it out again once nobody holds a view of it any more.

    At most `keep_bytes` are kept, in use or not; what is beyond is ordinary memory.
    """

    def __init__(self, *, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._kept: list[bytearray] = []  # the one used last comes last
        self._lock = threading.Lock()

    def take(self, length: int) -> memoryview:
        """A writable view of `length` bytes, of any content."""
        if not _WORTH_KEEPING <= length <= self._keep_bytes:
            return memoryview(bytearray(length))
        with self._lock:
            free = [kept for kept in self._kept if not _in_use(kept)]
            fits = [kept for kept in free if length <= len(kept) <= 2 * length]
            if fits:
                best = min(fits, key=len)
                self._forget(best)
            else:
                # A little more, for messages whose length varies.
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
    # Only views are handed out, and Python does not let a bytearray with a view change its length.
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return True
    return False
