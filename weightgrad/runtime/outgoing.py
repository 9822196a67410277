"""Messages on their way out, cut into chunks that any lane may take.

All lanes of a direction take from one queue, so that a slow lane carries less and a broken one
nothing: what it had taken and was not acknowledged goes back to the front. A message therefore
resumes where it was, however often its lanes break.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import Counter, deque
from dataclasses import dataclass

from weightgrad.errors import ProtocolError
from weightgrad.runtime.chunks import DEFAULT_CUT, OVERHEAD_BYTES, Chunk, Cut, Data


@dataclass
class _OnItsWay:
    data: memoryview
    size: int
    left: int

    def length(self, offset: int) -> int:
        return min(self.size, len(self.data) - offset)


class Outgoing:
    """Messages on their way out, shared by the lanes of one direction.

    A message is kept until the other end has it all; its memory must not be written until then.
    `lane_bytes` bounds what a lane may have taken and not had acknowledged.
    """

    def __init__(
        self, *, lane_bytes: int = 4 << 20, cut: Cut = DEFAULT_CUT, lock: threading.RLock | None = None
    ) -> None:
        self.changed = threading.Condition(lock)
        self._cut = cut
        self._lane_bytes = lane_bytes
        self._messages: dict[int, _OnItsWay] = {}
        self._last = 0
        self._fresh = (1, 0)  # the first chunk that no lane has ever taken
        self._again: list[tuple[int, int]] = []  # taken by a lane that broke; sorted
        self._holder: dict[tuple[int, int], int] = {}
        self._held: Counter[int] = Counter()  # bytes, by lane
        self._window = 0
        self._unreleased: deque[tuple[int, int]] = deque()  # message, cost
        self._unreleased_cost = 0

    def put(self, data: Data) -> int:
        """Queue a message; returns its number. The first is 1."""
        view = memoryview(data).cast("B")
        with self.changed:
            self._last += 1
            self._messages[self._last] = _OnItsWay(view, self._cut.length, self._cut.count(len(view)))
            self.changed.notify_all()
            return self._last

    def take(self, lane: int, timeout: float = 0.0) -> Chunk | None:
        """The next chunk for this lane to send, or None if there is none for it within `timeout` seconds."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.has_for(lane), timeout):
                return None
            key = self._next_for(lane)
            assert key is not None
            message, offset = key
            sent = self._messages[message]
            if self._again:
                self._again.pop(0)
            else:
                self._advance(message, offset, sent)
            length = sent.length(offset)
            self._holder[key] = lane
            self._held[lane] += length
            return Chunk(message, offset, len(sent.data), sent.data[offset : offset + length])

    def has_for(self, lane: int) -> bool:
        """Whether `take` would have a chunk for this lane at once."""
        with self.changed:
            return self._next_for(lane) is not None

    def acknowledged(self, message: int, offset: int) -> None:
        """The other end has this chunk. Hearing it twice does no harm."""
        key = message, offset
        with self.changed:
            if key >= self._fresh:
                raise ProtocolError(f"chunk {key} was acknowledged and never sent; one of the ends is broken")
            if key in self._holder or key in self._again:
                self._settle(key)
            self.changed.notify_all()

    def granted(self, window: int) -> None:
        """The other end has room for `window` bytes of messages that its application has not taken."""
        with self.changed:
            self._window = window
            self.changed.notify_all()

    def released(self, message: int) -> None:
        """The other end's application has taken this message and all before it."""
        with self.changed:
            if (message + 1, 0) > self._fresh:
                raise ProtocolError(f"message {message} was taken and never sent whole; one of the ends is broken")
            while self._unreleased and self._unreleased[0][0] <= message:
                number, cost = self._unreleased.popleft()
                self._unreleased_cost -= cost
                # Its acknowledgements may have been lost with a lane.
                if sent := self._messages.get(number):
                    for offset in range(0, max(1, len(sent.data)), sent.size):
                        if (number, offset) in self._holder or (number, offset) in self._again:
                            self._settle((number, offset))
            self.changed.notify_all()

    def lane_broke(self, lane: int) -> None:
        """What this lane took and was not acknowledged will be taken again, before anything else."""
        with self.changed:
            for key in [key for key, holder in self._holder.items() if holder == lane]:
                del self._holder[key]
                insort(self._again, key)
            self._held.pop(lane, None)
            self.changed.notify_all()

    def clear(self) -> None:
        """Forget every message; numbers go on."""
        with self.changed:
            self._messages.clear()
            self._again.clear()
            self._holder.clear()
            self._held.clear()
            self._unreleased.clear()
            self._unreleased_cost = 0
            self._fresh = (self._last + 1, 0)
            self.changed.notify_all()

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes of the messages that the other end has not yet all of."""
        with self.changed:
            return sum(len(sent.data) for sent in self._messages.values())

    def wait_empty(self, timeout: float) -> bool:
        """Wait until every chunk was acknowledged; False if that took longer than `timeout` seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: not self._messages, timeout)

    def _next_for(self, lane: int) -> tuple[int, int] | None:
        key = self._again[0] if self._again else self._fresh
        sent = self._messages.get(key[0])
        if sent is None:
            return None
        starts = not self._again and key[1] == 0
        # One message may always be under way: whether the other end takes its length is for it to say.
        if starts and self._unreleased and self._unreleased_cost + len(sent.data) + OVERHEAD_BYTES > self._window:
            return None
        held = self._held[lane]
        return None if held and held + sent.length(key[1]) > self._lane_bytes else key

    def _advance(self, message: int, offset: int, sent: _OnItsWay) -> None:
        if offset == 0:
            cost = len(sent.data) + OVERHEAD_BYTES
            self._unreleased.append((message, cost))
            self._unreleased_cost += cost
        offset += sent.size
        self._fresh = (message, offset) if offset < len(sent.data) else (message + 1, 0)

    def _settle(self, key: tuple[int, int]) -> None:
        message, offset = key
        sent = self._messages[message]
        lane = self._holder.pop(key, None)
        if lane is None:
            self._again.remove(key)
        else:
            self._held[lane] -= sent.length(offset)
        sent.left -= 1
        if not sent.left:
            del self._messages[message]
