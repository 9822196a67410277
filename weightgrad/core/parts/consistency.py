"""How far the sites may run apart.

- `sync`: a round closes when every site has pushed; a site waits for the result.
- `bounded(s)`: the same rounds, but a site may be up to s of them ahead of the results it has. The model it computes on
  in round c contains every site's updates of rounds <= c-s-1, and its own. bounded(0) is sync.
- `backup(b)`: a round closes when all but b sites have pushed for it. A late push goes into the next round, which waits
  for as many pushes of its own all the same (Chen et al. drop it), and the late site goes on at the others' step.
- `async_`: each push is a round of its own and nobody waits. Plainly, a push moves the global model by its share 1/n of
  a step, whatever its staleness tau: the versions that the global model has moved since the push was computed on it.
  `staleness="inverse"` is the staleness-aware rate of Zhang et al. (2016): eta/tau, with tau at least 1. Their rate has
  no 1/n, because n sites of equal speed have a tau of about n. `staleness="inverse_share"` weights the share down as
  well, eta/(n (1 + tau)), which is about eta/n^2. Stale pushes can be compensated, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from weightgrad.core.parts.language import check, part
from weightgrad.errors import StrategyError

_STALENESS = ("none", "inverse", "inverse_share")


@dataclass(frozen=True)
class Consistency:
    """The interface of the four kinds of consistency."""

    word: ClassVar[str]

    @property
    def ahead(self) -> float:
        """How many rounds a site may be ahead of the results it has."""
        return 0

    @property
    def steady(self) -> bool:
        """Whether results are applied at steps that are known beforehand, however fast messages are."""
        return False

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

    def divisor(self, sites: int) -> float:
        """What a push that is a round of its own is divided by.

        Args:
            sites: how many sites take part.
        """
        return float(max(1, sites))

    @property
    def compensation(self) -> float:
        """Lambda of delay compensation (`core/server/delay_compensation.py`); 0: none."""
        return 0.0


@part("consistency", "sync")
@dataclass(frozen=True)
class Sync(Consistency):
    """Every site pushes in every round and waits for its result."""

    @property
    def steady(self) -> bool:
        """A site waits for the result of its push."""
        return True


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
        staleness: How a push of staleness tau, from one of n sites, is weighted: "none", by 1/n; "inverse", by
            1/max(1, tau), the staleness-aware rate as published; "inverse_share", by 1/(n (1 + tau)).
        compensate: lambda of delay compensation.
    """

    staleness: str = "none"
    compensate: float = 0.0

    def __post_init__(self) -> None:
        if self.staleness not in _STALENESS:
            raise StrategyError(f"async_: staleness = {self.staleness!r}; it is one of {', '.join(_STALENESS)}")
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
        """1, 1 / max(1, staleness) or 1 / (1 + staleness)."""
        if self.staleness == "inverse":
            return 1.0 / max(1, staleness)
        return 1.0 / (1 + staleness) if self.staleness == "inverse_share" else 1.0

    def divisor(self, sites: int) -> float:
        """The number of sites; 1 with "inverse", in which the staleness stands for it."""
        return 1.0 if self.staleness == "inverse" else super().divisor(sites)

    @property
    def compensation(self) -> float:
        """The strength of the delay compensation (lambda of DC-ASGD)."""
        return self.compensate
