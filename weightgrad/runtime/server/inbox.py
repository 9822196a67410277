"""What has come for a server process: control messages first, and of each site only so many bytes at a time.

While bulk waits, one message of it comes after every `_IN_A_ROW` control messages: a site that sends control messages
as fast as they can be handled would otherwise keep the values of all others waiting.

While a site has too many bytes waiting, `put` blocks the transport's threads of that site, and the transport lets the
site wait. Other sites are not held up, and a site's control messages do not wait for its bulk.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")

_BULK_BYTES = 64 << 20  # of one site
_CONTROL_BYTES = 4 << 20
_IN_A_ROW = 64  # control messages, while bulk waits
_OVERHEAD_BYTES = 512  # of a message that waits, beside its own


@dataclass(frozen=True)
class _Waiting(Generic[Item]):
    item: Item
    site: str | None
    size: int


class Inbox(Generic[Item]):
    """Two queues between the threads of a transport and the thread of a state machine.

    Args:
        bulk_bytes: the bytes of bulk messages of one site that may wait.
        control_bytes: the bytes of its control messages.
    """

    def __init__(self, bulk_bytes: int = _BULK_BYTES, control_bytes: int = _CONTROL_BYTES) -> None:
        self._limit, self._control_limit = bulk_bytes, control_bytes
        self._changed = threading.Condition()
        self._control: deque[_Waiting[Item]] = deque()
        self._control_bytes: Counter[object] = Counter()
        self._bulk: deque[_Waiting[Item]] = deque()
        self._bytes: Counter[object] = Counter()
        self._in_a_row = 0
        self._closed = False

    def put_control(self, item: Item, site: str | None = None, size: int = 0) -> None:
        """Queue a control message; waits while its site has too much in the queue. One message is always taken.

        Args:
            item: the message.
            site: its sender; None is another process of the server, or the server itself, and never waits.
            size: its bytes.
        """
        self._put(self._control, self._control_bytes, self._control_limit, _Waiting(item, site, size + _OVERHEAD_BYTES))

    def put_bulk(self, item: Item, site: str, size: int) -> None:
        """Queue a bulk message; waits while the site has too much in the queue. One message is always taken."""
        self._put(self._bulk, self._bytes, self._limit, _Waiting(item, site, size + _OVERHEAD_BYTES))

    def _put(self, queue: deque[_Waiting[Item]], waiting: Counter[object], limit: int, one: _Waiting[Item]) -> None:
        with self._changed:
            if one.site is not None:
                self._changed.wait_for(
                    lambda: self._closed or not waiting[one.site] or waiting[one.site] + one.size <= limit
                )
                waiting[one.site] += one.size
            queue.append(one)
            self._changed.notify_all()

    def get(self, timeout: float, *, accepts: Callable[[Item], bool] = lambda item: True) -> Item | None:
        """The next item, control before bulk as a rule; None if nothing came within so many seconds.

        Args:
            timeout: the seconds.
            accepts: whether a control message may be taken now; those that may not keep their place, and count.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._bulk or any(accepts(one.item) for one in self._control), timeout)
            for place, one in enumerate(self._control) if not self._bulk or self._in_a_row < _IN_A_ROW else ():
                if accepts(one.item):
                    del self._control[place]
                    self._in_a_row += 1
                    return self._taken(one, self._control_bytes)
            self._in_a_row = 0
            return self._taken(self._bulk.popleft(), self._bytes) if self._bulk else None

    def _taken(self, one: _Waiting[Item], waiting: Counter[object]) -> Item:
        if one.site is not None:
            waiting[one.site] -= one.size
            if not waiting[one.site]:
                del waiting[one.site]
            self._changed.notify_all()
        return one.item

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
