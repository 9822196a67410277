"""What has come for a server process: control messages first, and of bulk only so many bytes at a time.

While a peer has too many bytes waiting, `put` blocks the transport's thread of that peer, and the transport lets the
peer wait. Other peers and control messages are not held up.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")

_BULK_BYTES = 64 << 20  # of one peer


@dataclass(frozen=True)
class _Waiting(Generic[Item]):
    item: Item
    peer: object
    size: int


class Inbox(Generic[Item]):
    """Two queues between the threads of a transport and the thread of a state machine.

    Args:
        bulk_bytes: the bytes of bulk messages of one peer that may wait.
    """

    def __init__(self, bulk_bytes: int = _BULK_BYTES) -> None:
        self._limit = bulk_bytes
        self._changed = threading.Condition()
        self._control: deque[Item] = deque()
        self._bulk: deque[_Waiting[Item]] = deque()
        self._bytes: Counter[object] = Counter()
        self._closed = False

    def put_control(self, item: Item) -> None:
        """Queue a control message."""
        with self._changed:
            self._control.append(item)
            self._changed.notify_all()

    def put_bulk(self, item: Item, peer: object, size: int) -> None:
        """Queue a bulk message; waits while the peer has too much in the queue. One message is always taken."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not self._bytes[peer] or self._bytes[peer] + size <= self._limit
            )
            self._bulk.append(_Waiting(item, peer, size))
            self._bytes[peer] += size
            self._changed.notify_all()

    def get(self, timeout: float) -> Item | None:
        """The next item, control before bulk; None if nothing came within so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._control or self._bulk, timeout)
            if self._control:
                return self._control.popleft()
            if not self._bulk:
                return None
            found = self._bulk.popleft()
            self._bytes[found.peer] -= found.size
            if not self._bytes[found.peer]:
                del self._bytes[found.peer]
            self._changed.notify_all()
            return found.item

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
