"""How far a simulation is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a run is; times are virtual, bytes are totals of all links."""

    step: int
    steps: int
    loss: float
    accuracy: float | None
    virtual_seconds: float
    wan_bytes: int
    lan_bytes: int
