"""Statistics of an emulated network: what has passed, how punctual it was, and whether to trust it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weightgrad.units import show_seconds


@dataclass(frozen=True)
class PairStats:
    """One direction of a link: line bytes and packets that passed, drops at the full queue, and losses on the way."""

    bytes: int
    packets: int
    queue_drops: int
    lost: int


@dataclass(frozen=True)
class Lateness:
    """How many seconds after their due time packets left."""

    packets: int
    p50: float
    p99: float
    worst: float

    def __str__(self) -> str:
        shown = (f"{name} {show_seconds(getattr(self, name))}" for name in ("p50", "p99", "worst"))
        return f"{', '.join(shown)} of {self.packets} packets"


@dataclass(frozen=True)
class WanStats:
    """Statistics of all links.

    Attributes:
        pairs: By (from, to), what has passed since the start.
        lateness: Since the last check; None where the kernel delays the packets.
        errors: Packets that the switch dropped since the last check.
    """

    pairs: dict[tuple[str, str], PairStats]
    lateness: Lateness | None
    errors: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The statistics as plain values, for the event log."""
        pairs = [{"from": a, "to": b, **asdict(pair)} for (a, b), pair in self.pairs.items()]
        late = asdict(self.lateness) if self.lateness is not None else None
        return {"pairs": pairs, "lateness": late, "errors": self.errors}


@dataclass(frozen=True)
class Verdict:
    """Whether a run over this network can be trusted, and why."""

    trusted: bool
    reason: str

    def __str__(self) -> str:
        return f"{'trusted' if self.trusted else 'NOT to be trusted'}: {self.reason}"
