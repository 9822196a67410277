"""How far the sites may run apart.

- `sync`: a round closes when every site has pushed; a site waits for the result.
- `bounded(s)`: the same rounds, but a site may be up to s of them ahead of the results it has. The model it computes on
  in round c contains every site's updates of rounds <= c-s-1, and its own. bounded(0) is sync.
- `backup(b)`: a round closes when all but b sites have pushed for it. A late push goes into the next round, which waits
  for as many pushes of its own all the same (Chen et al. drop it), and the late site goes on at the others' step.
- `async_`: each push is a round of its own and nobody waits; stale pushes can be weighted down or compensated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from weightgrad.core.parts import check, part
from weightgrad.errors import StrategyError


@dataclass(frozen=True)
class Consistency:
    """The interface of the four kinds of consistency."""

    word: ClassVar[str]

    @property
    def ahead(self) -> float:
        """How many rounds a site may be ahead of the results it has."""
        return 0

    @property
    def missing(self) -> int:
        """How many pushes a round may close without."""
        return 0

    @property
    def alone(self) -> bool:
        """Whether each push is a round of its own."""
        return False

    def weight(self, staleness: int) -> float:
        """The weight of a push.

        Args:
            staleness: how many versions the global model has moved since the push was computed on it.
        """
        del staleness
        return 1.0

    @property
    def compensation(self) -> float:
        """Lambda of delay compensation (`core/delay_compensation.py`); 0: none."""
        return 0.0


@part("consistency", "sync")
@dataclass(frozen=True)
class Sync(Consistency):
    """Every site pushes in every round and waits for its result."""


@part("consistency", "bounded")
@dataclass(frozen=True)
class Bounded(Consistency):
    """A site may be up to `rounds` rounds ahead of the results it has."""

    rounds: int = 1

    def __post_init__(self) -> None:
        check("bounded", "rounds", self.rounds, 0, 10**6, whole=True)

    @property
    def ahead(self) -> float:
        """The number of rounds."""
        return self.rounds


@part("consistency", "backup")
@dataclass(frozen=True)
class Backup(Consistency):
    """A round closes without its `late` slowest sites; what they push goes into the next round."""

    late: int = 1

    def __post_init__(self) -> None:
        check("backup", "late", self.late, 0, 10**6, whole=True)

    @property
    def missing(self) -> int:
        """The number of late sites."""
        return self.late


@part("consistency", "async_")
@dataclass(frozen=True)
class Async(Consistency):
    """A push is applied when it arrives.

    Attributes:
        staleness: "none", or "inverse" to weight a push by 1 / (1 + staleness).
        compensate: lambda of delay compensation.
    """

    staleness: str = "none"
    compensate: float = 0.0

    def __post_init__(self) -> None:
        if self.staleness not in ("none", "inverse"):
            raise StrategyError(f'async_: staleness = {self.staleness!r}; wanted "none" or "inverse"')
        check("async_", "compensate", self.compensate, 0, 1e9)

    @property
    def ahead(self) -> float:
        """Any number of rounds."""
        return math.inf

    @property
    def alone(self) -> bool:
        """Each push is a round of its own."""
        return True

    def weight(self, staleness: int) -> float:
        """1, or 1 / (1 + staleness)."""
        return 1.0 / (1 + staleness) if self.staleness == "inverse" else 1.0

    @property
    def compensation(self) -> float:
        """The strength of the delay compensation (lambda of DC-ASGD)."""
        return self.compensate
