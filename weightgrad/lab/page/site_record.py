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
    removed: bool = False  # or its certificate revoked
    aside: bool = False
    cut: bool = False
    waiting_seconds: float = 0.0
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
    pushes: dict[int, tuple[float, int]] = field(default_factory=dict)  # by round: when it left, and its bytes
    encodes: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=KEPT)
    )  # when it ended, and seconds
    moved: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=KEPT))  # t, up, down

    def at(self, t: float) -> float:
        """A time of the site's clock by the server's."""
        return t + (self.offset or 0.0)
