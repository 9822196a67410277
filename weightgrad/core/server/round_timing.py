"""Time at the global server: the deadlines of open rounds, and the time that rounds spend on the links."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping

from weightgrad.core.controller.gradient_controller import GradientController
from weightgrad.core.controller.update_controller import Controller
from weightgrad.core.server.open_round import OpenRound
from weightgrad.wire.messages import Push

_TIMEOUT_ROUNDS = 10  # an adaptive timeout is this many times as long as a round usually takes
_OVERDUE_ROUNDS = 5


class RoundDeadlines:
    """When the oldest open round stops waiting.

    Args:
        t_local: seconds after which a missing site is reported as holding the others back; None: never.
        t_global: seconds after which a missing site is lost; None: never.
        adapts: whether `t_global` is only the least, and grows with the length of rounds.
    """

    def __init__(self, *, t_local: float | None, t_global: float | None, adapts: bool) -> None:
        self._t_local = t_local
        self._t_global = t_global
        self._adapts = adapts
        self._durations: deque[float] = deque(maxlen=20)  # seconds from a round's first push to its end

    def round_closed(self, seconds: float) -> None:
        """A round has closed, so many seconds after it opened."""
        self._durations.append(seconds)

    def durations(self) -> list[float]:
        """How long the last rounds took, oldest first: after a restart, the same deadlines must expire."""
        return list(self._durations)

    def load(self, durations: Iterable[float]) -> None:
        """Restore what `durations` returned."""
        self._durations.clear()
        self._durations.extend(durations)

    def timeout(self) -> float | None:
        """Seconds after which a missing site is lost: fixed, or grown to ten times what rounds take."""
        if self._t_global is None or not self._adapts or not self._durations:
            return self._t_global
        return max(self._t_global, _TIMEOUT_ROUNDS * statistics.median(self._durations))

    def holds_back(self, opened: OpenRound, now: float) -> bool:
        """Whether the sites that this round misses are to be reported now, for the first time."""
        expired = self._t_local is not None and now >= opened.opened_at + self._t_local
        return expired and not opened.overdue_reported

    def is_lost(self, opened: OpenRound, now: float) -> bool:
        """Whether the sites that this round misses are lost now."""
        timeout = self.timeout()
        return timeout is not None and now >= opened.opened_at + timeout

    def next_wake(self, opened: OpenRound) -> float | None:
        """When the next deadline of this round expires."""
        due = []
        if self._t_local is not None and not opened.overdue_reported:
            due.append(opened.opened_at + self._t_local)
        if (timeout := self.timeout()) is not None:
            due.append(opened.opened_at + timeout)
        return min(due, default=None)

    def is_overdue(self, opened: OpenRound, now: float) -> bool:
        """Whether this round has been open five times as long as rounds usually are."""
        usual = statistics.median(self._durations) if self._durations else 0.0
        return now - opened.opened_at >= _OVERDUE_ROUNDS * usual


class LinkObserver:
    """Tells the controller of `auto` how long the sites' links take.

    A site measures the seconds from its push to the result. Less the time that the server held the push until its
    round closed, that is the time on the link. Without a controller, nothing is remembered.
    """

    def __init__(self, controller: Controller | GradientController | None) -> None:
        self._controller = controller
        self._held: dict[tuple[str, int], tuple[float, int]] = {}  # (site, round) -> (seconds held, bytes both ways)

    def receive(self, push: Push) -> None:
        """Pass on what the site of this push has measured."""
        if self._controller is not None and push.report is not None:
            held_seconds, size = self._held.pop((push.site, push.report.round), (0.0, 0))
            network_seconds = push.report.round_seconds - held_seconds if size else None
            self._controller.observe(push.site, push.report, network_seconds, size)

    def round_closed(self, closed: OpenRound, sizes: Mapping[str, int], now: float, *, sites: int) -> None:
        """Remember how long each push of a round was held, and the bytes of push and result.

        Args:
            closed: the round.
            sizes: the bytes of its result as it is sent to each site.
            now: the time.
            sites: how many sites there are; the last four pushes of each are remembered.
        """
        if self._controller is None:
            return
        for site, (arrived_at, size) in closed.arrivals.items():
            total = size + sizes.get(site, max(sizes.values(), default=0))
            self._held[site, closed.included[site]] = (now - arrived_at, total)
        while len(self._held) > 4 * sites:
            del self._held[next(iter(self._held))]

    def clear(self) -> None:
        """Forget all pushes."""
        self._held = {}
