"""Checkpoints written beside the steps: the copies are made at once, the disk is waited for later."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Beside:
    """One piece of work at a time, in a thread of its own, which an ending process waits for."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work: Future[object] | None = None

    def begin(self, work: Callable[[], object]) -> None:
        """Start, once what was begun before is done."""
        self.wait()
        self._work = self._thread.submit(work)

    def look(self) -> None:
        """Raise what went wrong with what was begun, if it has ended."""
        if self._work is not None and self._work.done():
            self.wait()

    def wait(self) -> None:
        """Until what was begun is done; raises what went wrong."""
        work, self._work = self._work, None
        if work is not None:
            work.result()
