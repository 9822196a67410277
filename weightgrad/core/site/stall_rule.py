"""T, the stall rule of a site: how long the global server may be silent while it owes a result."""

from __future__ import annotations

import math
import statistics
from collections import deque

_STALL_ROUNDS = 5  # an adaptive T is this many times as long as a round usually takes


class StallRule:
    """When a site waits because the global server is silent.

    Args:
        t: seconds without a message after which the site waits; None: it never does.
        adapts: whether `t` is only the least, and grows with the length of rounds.
    """

    def __init__(self, t: float | None, *, adapts: bool) -> None:
        self._t = t
        self._adapts = adapts
        self._last_message_at = 0.0
        self._round_seconds: deque[float] = deque(maxlen=20)  # from a push to its result

    def message_received(self, now: float) -> None:
        """The server has been heard."""
        self._last_message_at = now

    def result_received(self, seconds: float) -> None:
        """A result has come, so many seconds after its push was sent."""
        self._round_seconds.append(seconds)

    def stalls(self, owed_since: float, now: float) -> bool:
        """Whether the server has been silent for too long.

        Args:
            owed_since: when the oldest push without a result was sent.
            now: the time.
        """
        return now - max(self._last_message_at, owed_since) > self._seconds

    @property
    def _seconds(self) -> float:
        """Seconds without a message after which the site waits: fixed, or grown to five times what rounds take."""
        if self._t is None:
            return math.inf
        if not self._adapts or not self._round_seconds:
            return self._t
        return max(self._t, _STALL_ROUNDS * statistics.median(self._round_seconds))
