"""How far sites may run apart.

`sync`: a round closes when every site has pushed; a site waits for the answer. `bounded(s)`: the same
rounds, but a site may be up to s of them ahead of the answers it has; so what it computes on at round
c contains every site's updates of rounds <= c-s-1, and its own. bounded(0) is sync. `backup(b)`: a round
closes when all but b have pushed for it; what comes late goes into the next one, which waits for as many of
its own all the same (Chen et al. drop it), and the late site goes on at the step where the others are.
`async_`: each push is a version of its own, nobody waits; stale pushes can be weighted down or compensated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from weightgrad.errors import StrategyError
from weightgrad.wan.parts import check, part


@dataclass(frozen=True)
class Consistency:
    """The common face of the four."""

    word: ClassVar[str]

    @property
    def ahead(self) -> float:
        """Rounds a site may be ahead of the answers it has."""
        return 0

    @property
    def missing(self) -> int:
        """Pushes a round may close without."""
        return 0

    @property
    def alone(self) -> bool:
        """Whether each push is a round of its own."""
        return False

    def weight(self, staleness: int) -> float:
        """Of a push computed on a base this many versions old."""
        del staleness
        return 1.0

    @property
    def compensation(self) -> float:
        """Lambda of the delay compensation g + lambda g g (w - w_seen); 0: none."""
        return 0.0


@part("consistency", "sync")
@dataclass(frozen=True)
class Sync(Consistency):
    """Every site, every round, everyone waits."""


@part("consistency", "bounded")
@dataclass(frozen=True)
class Bounded(Consistency):
    """Up to `rounds` ahead of the answers."""

    rounds: int = 1

    def __post_init__(self) -> None:
        check("bounded", "rounds", self.rounds, 0, 10**6, whole=True)

    @property
    def ahead(self) -> float:
        """As said."""
        return self.rounds


@part("consistency", "backup")
@dataclass(frozen=True)
class Backup(Consistency):
    """A round closes without its `late` slowest sites; what they send joins the next."""

    late: int = 1

    def __post_init__(self) -> None:
        check("backup", "late", self.late, 0, 10**6, whole=True)

    @property
    def missing(self) -> int:
        """As said."""
        return self.late


@part("consistency", "async_")
@dataclass(frozen=True)
class Async(Consistency):
    """Applied on arrival; staleness "none" or "inverse" (weight 1/(1+age)); `compensate` is DC-ASGD's lambda."""

    staleness: str = "none"
    compensate: float = 0.0

    def __post_init__(self) -> None:
        if self.staleness not in ("none", "inverse"):
            raise StrategyError(f'async_: staleness = {self.staleness!r}; it is "none" or "inverse"')
        check("async_", "compensate", self.compensate, 0, 1e9)

    @property
    def ahead(self) -> float:
        """No bound."""
        return math.inf

    @property
    def alone(self) -> bool:
        """Yes."""
        return True

    def weight(self, staleness: int) -> float:
        """1, or 1/(1+age)."""
        return 1.0 / (1 + staleness) if self.staleness == "inverse" else 1.0

    @property
    def compensation(self) -> float:
        """As said."""
        return self.compensate
