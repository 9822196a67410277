"""How long a worker's step takes: a mean, jitter, and stragglers. A pure function of the seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weightgrad.core.random_streams import ComputeStream
from weightgrad.kernels.noise import derive


@dataclass(frozen=True)
class Straggler:
    """A slow worker, or with a probability below 1 a step that is slow now and then.

    Attributes:
        factor: How many times slower.
        site: The site; None means every site.
        worker: The rank within the site; None means every worker of the site.
        probability: The probability that a step is slow.
    """

    factor: float
    site: str | None = None
    worker: int | None = None
    probability: float = 1.0


@dataclass(frozen=True)
class Compute:
    """The duration of one worker's forward and backward pass.

    Attributes:
        seconds_per_step: The mean.
        jitter: Standard deviation as a fraction of the mean; the distribution is log-normal.
        stragglers: What makes some workers or steps slower.
    """

    seconds_per_step: float
    jitter: float = 0.0
    stragglers: tuple[Straggler, ...] = ()

    def seconds(self, seed: int, site: str, site_number: int, worker: int, step: int) -> float:
        """The duration of one worker's pass at one step."""
        found = self.seconds_per_step
        if self.jitter:
            spread = math.sqrt(math.log1p(self.jitter**2))
            key = derive(seed, ComputeStream.JITTER, site_number, worker, step)
            found *= math.exp(spread * _normal(key) - spread * spread / 2)
        for place, slow in enumerate(self.stragglers):
            if slow.site not in (None, site) or slow.worker not in (None, worker):
                continue
            key = derive(seed, ComputeStream.STRAGGLER, place, site_number, worker, step)
            if slow.probability >= 1 or _uniform(key) < slow.probability:
                found *= slow.factor
        return found


def _uniform(key: int) -> float:
    return ((key >> 11) + 0.5) / (1 << 53)


def _normal(key: int) -> float:
    """A standard normal number by the Box-Muller transform."""
    return math.sqrt(-2 * math.log(_uniform(key))) * math.cos(2 * math.pi * _uniform(derive(key, ComputeStream.ANGLE)))
