"""Says for whom a round waits: in the server's log, and to every site, whose own log says it, too.

A round is late when it takes much longer than the rounds before, or when a site that it misses is not connected. It is
reported when it has been open for a few seconds, again when it waits for other sites, and then now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weightgrad.runtime.telemetry import Telemetry
from weightgrad.wire.messages import Waiting

AGAIN_S = 30.0


class WaitReport:
    """What was said about waiting, and when.

    Args:
        telemetry: the log.
        send: queues a message for a site.
        after_s: seconds after which a wait is worth a word.
    """

    def __init__(self, telemetry: Telemetry, send: Callable[[str, Waiting], None], after_s: float) -> None:
        self._telemetry, self._send, self._after_s = telemetry, send, after_s
        self._said: tuple[int, frozenset[str]] | None = None  # the round, and the sites that it missed
        self._said_at = 0.0

    def look(self, waiting: Waiting | None, now: float, sites: Iterable[str], *, late: bool) -> None:
        """Report a wait, if it is time.

        Args:
            waiting: for whom the oldest open round, or the first global model, waits; None for nobody.
            now: the time.
            sites: who is told.
            late: whether that takes longer than it should, or a site that is missing is not connected.
        """
        if waiting is None or waiting.seconds < self._after_s or not (late or self._is_known(waiting)):
            return
        if self._is_known(waiting) and now < self._said_at + AGAIN_S:
            return
        self._said, self._said_at = (waiting.round, frozenset(waiting.missing)), now
        self._telemetry.round_is_late(waiting)
        for site in sites:
            self._send(site, waiting)

    def _is_known(self, waiting: Waiting) -> bool:
        return self._said == (waiting.round, frozenset(waiting.missing))
