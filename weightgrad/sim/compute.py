"""How long a worker's step takes: a mean, some jitter, and stragglers. A pure function of the seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weightgrad.kernels.noise import derive


@dataclass(frozen=True)
class Straggler:
    """A slow worker (`worker` None: all of the site; `site` None: any), or a slow step now and then."""

    factor: float
    site: str | None = None
    worker: int | None = None
    probability: float = 1.0


@dataclass(frozen=True)
class Compute:
    """Seconds of one worker's forward and backward pass."""

    seconds_per_step: float
    jitter: float = 0.0  # standard deviation, as a share of the mean; log-normal
    stragglers: tuple[Straggler, ...] = ()

    def seconds(self, seed: int, site: str, site_number: int, worker: int, step: int) -> float:
        """Of that worker at that step."""
        found = self.seconds_per_step
        if self.jitter:
            spread = math.sqrt(math.log1p(self.jitter**2))
            found *= math.exp(spread * _normal(derive(seed, 1, site_number, worker, step)) - spread * spread / 2)
        for place, slow in enumerate(self.stragglers):
            if slow.site not in (None, site) or slow.worker not in (None, worker):
                continue
            if slow.probability >= 1 or _uniform(derive(seed, 2, place, site_number, worker, step)) < slow.probability:
                found *= slow.factor
        return found


def _uniform(key: int) -> float:
    return ((key >> 11) + 0.5) / (1 << 53)


def _normal(key: int) -> float:
    """Box and Muller."""
    return math.sqrt(-2 * math.log(_uniform(key))) * math.cos(2 * math.pi * _uniform(derive(key, 3)))
