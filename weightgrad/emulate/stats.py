"""What a network tells about itself: what has passed, how punctual it was, and whether to believe it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weightgrad.units import show_seconds


@dataclass(frozen=True)
class PairStats:
    """One direction of a link: line bytes and packets that passed, dropped at the full queue, lost on the way."""

    bytes: int
    packets: int
    queue_drops: int
    lost: int


@dataclass(frozen=True)
class Lateness:
    """By how many seconds packets left later than they were due."""

    packets: int
    p50: float
    p99: float
    worst: float

    def __str__(self) -> str:
        shown = (f"{name} {show_seconds(getattr(self, name))}" for name in ("p50", "p99", "worst"))
        return f"{', '.join(shown)} of {self.packets} packets"


@dataclass(frozen=True)
class WanStats:
    """What has passed since the start by (from, to); since the last check, how late it was and what the switch dropped.

    `lateness` is None where the kernel does the delay.
    """

    pairs: dict[tuple[str, str], PairStats]
    lateness: Lateness | None
    errors: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For the ledger."""
        pairs = [{"from": a, "to": b, **asdict(pair)} for (a, b), pair in self.pairs.items()]
        late = asdict(self.lateness) if self.lateness is not None else None
        return {"pairs": pairs, "lateness": late, "errors": self.errors}


@dataclass(frozen=True)
class Verdict:
    """Whether what ran over this network can be believed, and why."""

    trusted: bool
    reason: str

    def __str__(self) -> str:
        return f"{'trusted' if self.trusted else 'NOT to be trusted'}: {self.reason}"
