"""Virtual time: events in the order of their time, and of their entry when times are equal."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """A queue of things to do."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._entered = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do it then; not before now."""
        heapq.heappush(self._queue, (max(time, self.now), self._entered, action))
        self._entered += 1

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do it so much later."""
        self.at(self.now + seconds, action)

    def step(self) -> bool:
        """Do the next thing; False when there is none."""
        if not self._queue:
            return False
        self.now, _, action = heapq.heappop(self._queue)
        action()
        return True
