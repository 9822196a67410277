"""What the controller of `auto` sets and what it sets it from.

A sync schedule goes to the sites with a round result, a report goes to the server with a push. A sync schedule takes
effect at every site with the result that carries it, so that all sites start the same rounds at the same steps,
however fast their links are.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightgrad import codecs
from weightgrad.errors import ProtocolError, SpecError

MAX_TEXT_BYTES = 255
SCHEDULE_FIXED_BYTES = 9  # every (4), overlap (4), length of the text (1)
REPORT_BYTES = 28  # step_seconds (8), round (4), round_seconds (8), trip_seconds (8)
MOST_SECONDS = 1e9
"""No step, round or round trip takes 30 years. Sums and ratios of shorter times stay finite."""


@dataclass(frozen=True)
class SyncSchedule:
    """How the sites synchronise.

    Attributes:
        every: steps between two rounds.
        overlap: steps a site goes on while a round is under way.
        up: the codec of pushes.

    Raises:
        ProtocolError: a value is out of range, or the codec cannot be read.
    """

    every: int
    overlap: int
    up: str

    def __post_init__(self) -> None:
        if not 1 <= self.every < 2**32 or not 0 <= self.overlap < 2**32:
            raise ProtocolError(
                f"a sync schedule with every = {self.every} and overlap = {self.overlap}; wanted every from 1 and "
                "overlap from 0; its sender is wrong"
            )
        if not self.up.isascii() or not 1 <= len(self.up) <= MAX_TEXT_BYTES:
            raise ProtocolError(
                f"a sync schedule with the codec {self.up[:40]!r}; wanted 1 to {MAX_TEXT_BYTES} ASCII characters"
            )
        try:
            codecs.parse(self.up)
        except SpecError as error:
            raise ProtocolError(f"a sync schedule with the codec {self.up!r}: {error}") from None

    @property
    def nbytes(self) -> int:
        """The size of the schedule on the wire."""
        return SCHEDULE_FIXED_BYTES + len(self.up)


@dataclass(frozen=True)
class Report:
    """What a site has measured.

    Attributes:
        step_seconds: the time of one local step.
        round: the round of the push that `round_seconds` is about; 0: no result has come since the last report.
        round_seconds: the time from that push to its result.
        trip_seconds: the round trip time of the link for a message without bytes; 0: not known.

    Raises:
        ProtocolError: a time is negative, not finite or more than `MOST_SECONDS`.
    """

    step_seconds: float
    round: int = 0
    round_seconds: float = 0.0
    trip_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("step_seconds", "round_seconds", "trip_seconds"):
            value = getattr(self, name)
            if not 0 <= value <= MOST_SECONDS:
                raise ProtocolError(f"a report with {name} = {value}; wanted seconds from 0 to {MOST_SECONDS:g}")
