"""A push that is encoded and sent in a thread of its own, while the user's next passes run.

One push at a time. Whoever is about to use what a rank holds, or its connections, calls `finish` first: so only one
thread ever does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundPush:
    """Encodes a push beside the training. A process that ends waits for the push."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: Callable[[], object] | None = None  # not begun: the round goes on
        self._under_way: Future[object] | None = None

    @property
    def pending(self) -> bool:
        """Whether a push has been left to this object whose end nobody has waited for."""
        return self._waiting is not None or self._under_way is not None

    def leave(self, work: Callable[[], object]) -> None:
        """Take over a push, which begins with `start`, or with `finish`."""
        self.finish()
        self._waiting = work

    def start(self) -> None:
        """Begin with what was left here, and return."""
        work, self._waiting = self._waiting, None
        if work is not None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="push") if self._thread is None else self._thread
            self._under_way = self._thread.submit(work)

    def finish(self) -> None:
        """Wait until the push is encoded and queued; raises what went wrong."""
        work, self._waiting = self._waiting, None
        under_way, self._under_way = self._under_way, None
        if work is not None:
            work()
        if under_way is not None:
            under_way.result()
