"""What is known of one site of a run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

KEPT = 4000
"""Lines of each kind and site that a timeline may need."""


@dataclass
class SiteRecord:
    """What is known of a site."""

    name: str
    step: int = 0
    loss: float | None = None
    connected: bool | None = None
    finished: bool = False
    removed: str = ""  # how an operator sent it away: "removed", or "revoked"
    aside: bool = False
    told: bool = False  # by its own log, or by what it said at its end: otherwise only rounds tell of it
    cut: bool = False
    cuts: int = 0  # that its link had, and connections that were lost without one
    waiting_seconds: float = 0.0
    counted: bool = False  # its bytes are those that it counted itself at its end
    up_bytes: float = 0.0
    down_bytes: float = 0.0
    rounds: int = 0
    last_of: int = 0  # rounds that waited for this site longest
    encode_seconds: float | None = None  # of the last push that was measured
    residual: float | None = None  # its norm, then
    norm: float | None = None  # of the last push
    trip_seconds: float | None = None
    margin_seconds: float = 0.0  # that the others have waited for this site, as far as pushes tell
    offset: float | None = None  # added to the site's clock, gives the server's
    steps: deque[tuple[float, int, float | None]] = field(default_factory=lambda: deque(maxlen=KEPT))
    waits: deque[tuple[float, float, str]] = field(default_factory=lambda: deque(maxlen=KEPT))
    pushes: dict[int, float] = field(default_factory=dict)  # by round: when it left
    sizes: dict[int, float] = field(default_factory=dict)  # by round: the bytes of its push, once the round has closed
    encodes: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=KEPT)
    )  # when it ended, and seconds
    moved: deque[tuple[float, float, float]] = field(
        default_factory=lambda: deque(maxlen=KEPT)
    )  # when, by the server, up and down

    def at(self, t: float) -> float:
        """A time of the site's clock by the server's."""
        return t + (self.offset or 0.0)

    def add_traffic(self, t: float, *, up: float = 0.0, down: float = 0.0) -> None:
        """Count bytes that the server received or sent at a time of its clock."""
        self.moved.append((t, up, down))
        if not self.counted:
            self.up_bytes += up
            self.down_bytes += down
        while len(self.sizes) > KEPT:
            del self.sizes[next(iter(self.sizes))]
