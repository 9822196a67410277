"""The speed and delay of a link, fitted to the rounds that crossed it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from statistics import median

WINDOW = 9  # the last rounds of a site, which are fitted
_APART = 1.2  # times as large must a round be to tell speed from delay
_LEAST_S = 1e-9  # a shorter time on the link says nothing


@dataclass
class LinkFit:
    """A link as seconds = trip + delay + bytes * slope, by the median of slopes between rounds (Theil and Sen).

    The round trip is known, or 0; the rest is fitted to rounds of different size. Where the last rounds are all of one
    size, delay and slope keep their proportion and scale with the time of the rounds.

    Attributes:
        rounds: (bytes, seconds beyond the round trip) of the last rounds.
        delay: seconds beyond the round trip that do not depend on bytes.
        slope: seconds per byte.
        trip: the round trip time that the site reports, or 0.
    """

    rounds: list[tuple[float, float]] = field(default_factory=list)
    delay: float = 0.0
    slope: float = 0.0
    trip: float = 0.0

    def add(self, nbytes: float, seconds: float, trip: float = 0.0) -> None:
        """Fit one more round.

        Args:
            nbytes: the bytes of push and result.
            seconds: the time on the link.
            trip: the round trip time of the link, or 0.
        """
        self.trip = trip
        self.rounds = [*self.rounds, (nbytes, max(0.0, seconds - trip))][-WINDOW:]
        slopes = [
            (y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.permutations(self.rounds, 2) if x2 > _APART * x1
        ]
        if slopes:
            self.slope = max(0.0, median(slopes))
            self.delay = median(y - self.slope * x for x, y in self.rounds)
            if self.delay < 0:
                self.delay, self.slope = 0.0, median(y / x for x, y in self.rounds if x > 0)
            return
        expected = [self.delay + self.slope * x for x, _ in self.rounds]
        if min(expected) > _LEAST_S:
            factor = median(y / wanted for (_, y), wanted in zip(self.rounds, expected, strict=True))
            self.delay, self.slope = factor * self.delay, factor * self.slope
        else:  # all of one size so far: count all of it as delay until the size changes
            self.delay = median(y for _, y in self.rounds)

    def line(self) -> tuple[float, float]:
        """(delay, seconds per byte)."""
        return self.trip + self.delay, self.slope
