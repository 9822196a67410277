"""Memory that a process has freed and still has: the C library keeps it where live pieces lie between.

A server makes a large vector and a small result in turn, and keeps the results. 2,260 rounds of a model of 100,000
parameters left 220 MB that nothing used, behind 16 MB of results, while their log was replayed.
"""

from __future__ import annotations

import ctypes

_ROUNDS = 64  # from one call to the next: it takes some milliseconds


def return_freed_memory() -> bool:
    """Give memory that is not used back to the system; False where the C library (not glibc) has no call for it."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    return bool(trim(0))


class FreedMemory:
    """Gives the memory of a server process back once in so many rounds, in a replay as in a run."""

    def __init__(self) -> None:
        self._rounds = 0

    def round_closed(self) -> None:
        """Count a round, and give memory back when it is time."""
        self._rounds += 1
        if self._rounds % _ROUNDS == 0:
            return_freed_memory()
