"""One log line now and then that says how a site is doing, in the words of the global server's log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from weightgrad.units import show_bytes, show_seconds
from weightgrad.wire.sync_schedule import SyncSchedule

log = logging.getLogger("weightgrad")

EVERY_S = 10.0
FLUSH_EVERY_S = 2.0


Tracker = Callable[[dict[str, Any], int], None]
"""Takes the numbers of a site, and the step."""


class Traffic(Protocol):
    """What a connection has counted so far."""

    @property
    def up_bytes(self) -> int:
        """Bytes of the messages to the global server."""

    @property
    def down_bytes(self) -> int:
        """Bytes of the messages from the global server."""

    @property
    def waited(self) -> float:
        """Seconds the site has waited for the global server."""

    @property
    def waits(self) -> Mapping[str, int]:
        """By name, how often it has waited long for other sites, or for the global server."""


@dataclass(frozen=True)
class _Mark:
    """The counters at a moment."""

    at: float
    step: int
    up_bytes: int
    down_bytes: int
    waited: float
    waits: Mapping[str, int]


class ProgressLog:
    """Logs a line at most every `EVERY_S` seconds and at most once a step; rank 0 has one.

    Args:
        site: The name of the site.
        traffic: The counters of its connection.
        step: The steps done before the first line.
        clock: Seconds; for tests.
    """

    def __init__(self, site: str, traffic: Traffic, step: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._site, self._traffic, self._clock = site, traffic, clock
        self._first = self._last = self._mark(step)
        self._rate = 0.0  # steps a second, when a line was last written
        self._trackers: list[Tracker] = []
        self._loss: float | Tensor | None = None

    @property
    def loss(self) -> float | None:
        """The loss that was noted last."""
        return None if self._loss is None else float(self._loss)

    def note(self, loss: float | Tensor) -> None:
        """Note a loss. A tensor is read when a line is written: reading one on a device waits for the device."""
        self._loss = loss.detach() if isinstance(loss, Tensor) else loss

    def _mark(self, step: int) -> _Mark:
        traffic = self._traffic
        return _Mark(self._clock(), step, traffic.up_bytes, traffic.down_bytes, traffic.waited, dict(traffic.waits))

    def track(self, tracker: Tracker) -> None:
        """Give a tracker the numbers, too, whenever a line is written."""
        self._trackers.append(tracker)

    def after_step(self, step: int, version: int, schedule: SyncSchedule | None) -> None:
        """Log a line if it is time for one.

        Args:
            step: The steps done.
            version: The version of the global model.
            schedule: The present sync schedule, where `auto` decides it.
        """
        if self._clock() - self._last.at < EVERY_S:
            return
        last, self._last = self._last, self._mark(step)
        now = self._last
        seconds = now.at - last.at
        self._rate = (step - last.step) / seconds
        loss = self.loss
        log.info(
            "%s: step %d%s, %.3g steps/s; %s up, %s down, %.0f %% of the time waiting%s%s",
            self._site,
            step,
            "" if loss is None else f", loss {loss:.4g}",
            self._rate,
            show_bytes(now.up_bytes - last.up_bytes),
            show_bytes(now.down_bytes - last.down_bytes),
            100 * (now.waited - last.waited) / seconds,
            "" if now.waits == last.waits else f", long for {', '.join(_more(now.waits, last.waits))}",
            "" if schedule is None else f"; {describe(schedule)}",
        )
        self.tell_trackers(step, version, schedule)

    def tell_trackers(self, step: int, version: int, schedule: SyncSchedule | None) -> None:
        """Give all trackers the present numbers; one that raises gets no more."""
        for tracker in list(self._trackers):
            try:
                tracker(self.stats(step, version, schedule), step)
            except Exception as error:  # whatever a logger does, training goes on
                self._trackers.remove(tracker)
                log.warning("%s: %r raised %r and gets no more numbers", self._site, tracker, error)

    def leaves(self, step: int) -> None:
        """Log how the site has done from the first step to the last.

        Args:
            step: The steps done.
        """
        now, first, loss = self._mark(step), self._first, self.loss
        seconds = max(now.at - first.at, 1e-9)
        log.info(
            "%s leaves after step %d%s; %s up, %s down in %s, %.0f %% of the time waiting",
            self._site,
            step,
            "" if loss is None else f", loss {loss:.4g}",
            show_bytes(now.up_bytes),
            show_bytes(now.down_bytes),
            show_seconds(seconds),
            100 * (now.waited - first.waited) / seconds,
        )

    def stats(self, step: int, version: int, schedule: SyncSchedule | None) -> dict[str, Any]:
        """The numbers of the line, since the site joined.

        Args:
            step: The steps done.
            version: The version of the global model.
            schedule: The present sync schedule, where `auto` decides it.
        """
        now, first, last = self._mark(step), self._first, self._last
        seconds = max(now.at - first.at, 1e-9)
        recent = (step - last.step) / (now.at - last.at) if step > last.step and now.at > last.at else self._rate
        found: dict[str, Any] = {
            "step": step,
            "version": version,
            "loss": self.loss,
            "steps_per_second": recent,
            "up_bytes": now.up_bytes,
            "down_bytes": now.down_bytes,
            "waiting_seconds": now.waited,
            "waiting_share": (now.waited - first.waited) / seconds,
        }
        if schedule is not None:
            found |= {"every": schedule.every, "overlap": schedule.overlap, "codec": schedule.up}
        return found


class FlushProgress:
    """Says how far the last push of a site has come, at most every `FLUSH_EVERY_S` seconds.

    Args:
        site: The name of the site.
        size: The bytes of the push.
        clock: Seconds; for tests.
    """

    def __init__(self, site: str, size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._site, self._size, self._clock = site, max(size, 1), clock
        self._said = clock()

    def look(self, left: int) -> None:
        """Log a line if it is time for one.

        Args:
            left: Bytes that the server has not got yet.
        """
        if self._clock() - self._said < FLUSH_EVERY_S:
            return
        self._said = self._clock()
        done = max(0.0, 1 - left / self._size)
        bar = "#" * int(20 * done)
        what = "the global server has it; waiting for the result" if not left else f"{show_bytes(left)} to go"
        log.info(
            "%s leaves: [%-20s] %3.0f %% of its last %s sent, %s",
            self._site,
            bar,
            100 * done,
            show_bytes(self._size),
            what,
        )


def _more(now: Mapping[str, int], before: Mapping[str, int]) -> list[str]:
    return sorted(name for name, count in now.items() if count > before.get(name, 0))


def describe(schedule: SyncSchedule) -> str:
    """A sync schedule in the words of the global server's log."""
    return f"a round every {schedule.every} steps, its result {schedule.overlap} steps later, {schedule.up} up"


def show_by_default() -> None:
    """Make the lines of the logger "weightgrad" visible on stderr, unless the user has set up logging."""
    if log.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
