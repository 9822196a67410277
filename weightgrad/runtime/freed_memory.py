"""Memory that a process has freed and still has: the C library keeps it where live pieces lie between.

A server that replays a long log makes a large vector and a small result in turn, and keeps the results. 1,400 rounds of
a model of 100,000 parameters left 110 MB that nothing used, behind 10 MB of results.
"""

from __future__ import annotations

import ctypes


def return_freed_memory() -> bool:
    """Give memory that is not used back to the system; False where the C library (not glibc) has no call for it."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    return bool(trim(0))
