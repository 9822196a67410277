"""Whether the line is what the recipe says it is: one clear word when it is slower, and one when it is not any more."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from weightgrad.units import show_bit_s

log = logging.getLogger("weightgrad")

_SLOW = 0.7  # of what the recipe says
_SAMPLES = 3  # in a row, before anything is said


@dataclass
class LinkWatch:
    """Looks at how much left the socket while there was more to send."""

    site: str
    promised_bit_s: float | None
    _last: tuple[float, int, bool] | None = field(default=None, init=False)
    _rates: list[float] = field(default_factory=list, init=False)
    slow: bool = field(default=False, init=False)

    def sample(self, now: float, sent_bytes: int, busy: bool) -> None:
        """So many bytes have left by now, and there are more waiting, or not."""
        last, self._last = self._last, (now, sent_bytes, busy)
        if self.promised_bit_s is None or last is None or not (busy and last[2]) or now <= last[0]:
            self._rates.clear()
            return
        self._rates = [*self._rates, 8 * (sent_bytes - last[1]) / (now - last[0])][-_SAMPLES:]
        if len(self._rates) < _SAMPLES:
            return
        best = max(self._rates)
        if best < _SLOW * self.promised_bit_s and not self.slow:
            self.slow = True
            log.warning(
                "%s: the line to the global server carries %s, the recipe says %s; rounds take longer than foreseen",
                self.site,
                show_bit_s(best),
                show_bit_s(self.promised_bit_s),
            )
        elif best >= _SLOW * self.promised_bit_s and self.slow:
            self.slow = False
            log.info("%s: the line to the global server is as fast as the recipe says again", self.site)
