"""The simulated network: a virtual clock, and messages that travel over modelled links on it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import partial

from weightgrad.lab.sim.links import Links


class Clock:
    """Virtual time: a queue of actions in the order of their time; actions of equal time run in order of entry."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._entered = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Run an action at a time; a time in the past means now."""
        heapq.heappush(self._queue, (max(time, self.now), self._entered, action))
        self._entered += 1

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Run an action so many seconds from now."""
        self.at(self.now + seconds, action)

    def clear(self) -> None:
        """Drop what has not run yet."""
        self._queue.clear()

    def step(self) -> bool:
        """Move to the next action and run it.

        Returns:
            False if the queue is empty.
        """
        if not self._queue:
            return False
        self.now, _, action = heapq.heappop(self._queue)
        action()
        return True


class SimulatedNetwork:
    """Runs the links on the clock: a message that is sent arrives after transfer and delay."""

    def __init__(self, clock: Clock, links: Links) -> None:
        self._clock, self.links = clock, links
        self._next_event = math.inf

    def send(self, sender: str, receiver: str, nbytes: int, arrive: Callable[[], None]) -> None:
        """Send a message.

        Args:
            sender: Name of a site or of the server.
            receiver: The other end of the link.
            nbytes: Size of the message.
            arrive: Called when the last byte has arrived; never called if the message is lost.
        """
        self.links.send(self._clock.now, sender, receiver, nbytes, arrive)
        self._schedule()

    def scale_link(self, ends: tuple[str, ...], factor: float, cause: object) -> None:
        """Change what a link carries, because of a fault: 0 is a cut, 1 ends the fault of this cause."""
        self.links.scale(self._clock.now, self.links.place(*ends), factor, cause)
        self._reschedule()

    def drop(self, *ends: str) -> None:
        """Lose every message that is on its way from or to these sites."""
        for end in ends:
            self.links.drop(self._clock.now, end)
        self._reschedule()

    @property
    def wan_bytes(self) -> int:
        """Bytes over all links, both directions together."""
        return sum(sum(both) for both in self.links.bytes)

    def _schedule(self) -> None:
        due = self.links.next_event(self._clock.now)
        if due < self._next_event or self._next_event <= self._clock.now:
            self._next_event = due
            if due < math.inf:
                self._clock.at(due, partial(self._run, due))

    def _run(self, due: float) -> None:
        if due != self._next_event:
            return  # an earlier event was scheduled in the meantime
        for delay, arrive in self.links.run(self._clock.now):
            self._clock.after(delay, arrive)
        self._reschedule()

    def _reschedule(self) -> None:
        self._next_event = math.inf
        self._schedule()
