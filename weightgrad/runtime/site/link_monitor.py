"""Compares the link to the global server with the recipe: one warning when it is slower, one line when it recovers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from weightgrad.units import show_bit_s

log = logging.getLogger("weightgrad")

_SLOW = 0.7  # of what the recipe says
_SAMPLES = 3  # consecutive, before anything is logged


@dataclass
class LinkMonitor:
    """Watches the rate at which bytes leave the socket while the link is the bottleneck.

    The time between two samples counts if fewer bytes left in it than were waiting at its beginning: then the link was
    busy all the time. Small messages that are sent at once say nothing about the link.

    Args:
        site: The name of the site.
        promised_bit_s: The bandwidth that the recipe gives the link; None watches nothing.
    """

    site: str
    promised_bit_s: float | None
    _last: tuple[float, int, int] | None = field(default=None, init=False)
    _rates: list[float] = field(default_factory=list, init=False)
    slow: bool = field(default=False, init=False)

    def sample(self, now: float, sent_bytes: int, waiting_bytes: int) -> None:
        """Take a measurement.

        Args:
            now: Seconds on any clock.
            sent_bytes: All bytes that have left the socket so far.
            waiting_bytes: Bytes that have not been acknowledged yet.
        """
        last, self._last = self._last, (now, sent_bytes, waiting_bytes)
        if self.promised_bit_s is None or last is None or sent_bytes - last[1] >= last[2] or now <= last[0]:
            self._rates.clear()
            return
        self._rates = [*self._rates, 8 * (sent_bytes - last[1]) / (now - last[0])][-_SAMPLES:]
        if len(self._rates) < _SAMPLES:
            return
        best = max(self._rates)
        if best < _SLOW * self.promised_bit_s and not self.slow:
            self.slow = True
            log.warning(
                "%s: the link to the global server carries %s, the recipe says %s; rounds take longer than planned",
                self.site,
                show_bit_s(best),
                show_bit_s(self.promised_bit_s),
            )
        elif best >= _SLOW * self.promised_bit_s and self.slow:
            self.slow = False
            log.info("%s: the link to the global server is as fast as the recipe says again", self.site)
