"""Limits how often each site may do what costs the server much and a site need not do often, such as joining."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable


class RateLimiter:
    """A token bucket for each peer.

    Args:
        per_s: how often in the long run.
        burst: how often at once, after a quiet time.
        clock: the seconds, for tests.
    """

    def __init__(self, *, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._left: dict[Hashable, tuple[float, float]] = {}  # tokens, and when they were counted

    def try_take(self, peer: Hashable, cost: float = 1.0) -> bool:
        """Count an action of a peer; False, and nothing is counted, if it has had its share.

        Args:
            peer: who acts.
            cost: as how many actions it counts.
        """
        now = self._clock()
        tokens, at = self._left.get(peer, (float(self._burst), now))
        tokens = min(self._burst, tokens + (now - at) * self._per_s)
        enough = tokens >= cost
        self._left[peer] = tokens - cost if enough else tokens, now
        return enough

    def forget(self) -> None:
        """Everybody has all of its share again."""
        self._left.clear()
