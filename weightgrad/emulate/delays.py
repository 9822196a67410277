"""The seam between the network and what makes it far: delay, jitter, loss and cuts, in the `wan` namespace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from weightgrad.emulate.stats import Lateness
from weightgrad.emulate.topology import WanLink


@dataclass(frozen=True)
class DelayStats:
    """Lost packets by (from, to) as places; lateness and own errors where they are known."""

    lost: dict[tuple[int, int], int]
    lateness: Lateness | None = None
    errors: int = 0


class Delay(ABC):
    """Opened once the interfaces w0, w1, ... are there; closed before they go."""

    name: str

    @abstractmethod
    def open(self) -> None:
        """Start to pass packets on."""

    @abstractmethod
    def set(self, link: WanLink, *, cut: bool) -> None:
        """Make both directions of a link as it says; a cut link passes nothing."""

    @abstractmethod
    def stats(self) -> DelayStats:
        """Losses since the start; lateness and errors since `fresh`."""

    @abstractmethod
    def fresh(self) -> None:
        """Lateness and errors count from here."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """For the ledger."""

    @abstractmethod
    def close(self) -> None:
        """Stop."""
