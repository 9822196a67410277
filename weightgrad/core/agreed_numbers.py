"""Numbers that sites state about themselves, as far as the others bear them out: weights and learning rates.

A push states how many samples it stands for, which weighs it, and with shared gradients the learning rate of the step.
A site may be wrong about either. So the unit of weights is the lower median of what the sites last stated, no push
weighs more than `MOST_WEIGHT` units, and the rate of a round is a median too. A single site among three or more can
therefore not set either; where two sites disagree, the rate nearer to the last one that was agreed holds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from weightgrad.wire.messages import Push

MOST_WEIGHT = 10.0
"""A push weighs at most so many times as much as that of the median site."""
MOST_RATE = 1e6
"""No optimizer has a larger learning rate; what states one is refused."""
_MOST_RATE_ALONE = 2.0  # times the median, where each push is a round of its own


class AgreedNumbers:
    """What each site has last stated, and what follows for a round. Memory: two numbers a site."""

    def __init__(self) -> None:
        self._samples: dict[str, int] = {}
        self._rates: dict[str, float] = {}
        self._rate: float | None = None  # the last one that was agreed

    def take(self, pushes: Iterable[Push]) -> None:
        """Note what the pushes of a round that closes state."""
        for push in pushes:
            self._samples[push.site] = push.samples
            if push.rate is not None:
                self._rates[push.site] = push.rate

    def weight(self, push: Push) -> float:
        """The weight of a push by its samples, in units of the median site's."""
        unit = max(1, statistics.median_low(self._samples.values()))
        return min(push.samples / unit, MOST_WEIGHT)

    def rate(self, pushes: Sequence[Push], *, alone: bool) -> float | None:
        """The learning rate to step with; None if no push states one.

        Args:
            pushes: of the round that closes, in the order of their sites.
            alone: whether each push is a round of its own: then its own rate holds, unless it is out of line.
        """
        stated = {push.site: push.rate for push in pushes if push.rate is not None}
        if not stated:
            return None
        if alone:
            own, usual = max(stated.values()), statistics.median_low(self._rates.values())
            found = own if own <= _MOST_RATE_ALONE * usual else usual
        else:
            low, high = statistics.median_low(stated.values()), statistics.median_high(stated.values())
            found = high if _distance(high, self._rate) < _distance(low, self._rate) else low
        self._rate = found
        return found

    @staticmethod
    def options(pushes: Sequence[Push]) -> tuple[float, ...]:
        """The optimizer's options to step with: the median of each number; none if most pushes state none."""
        stating = [push.options for push in pushes if push.rate is not None]
        usual = statistics.median_low([len(options) for options in stating]) if stating else 0
        found = [options for options in stating if len(options) == usual]
        return tuple(statistics.median_low(numbers) for numbers in zip(*found, strict=True)) if usual else ()

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint: what each site has stated, and the last rate."""
        found = {
            f"site.{site}": torch.tensor([samples, self._rates.get(site, math.nan)], dtype=torch.float64)
            for site, samples in self._samples.items()
        }
        if self._rate is not None:
            found["rate"] = torch.tensor(self._rate, dtype=torch.float64)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._samples, self._rates = {}, {}
        for name, numbers in state.items():
            if name.startswith("site."):
                samples, rate = numbers.tolist()
                self._samples[name[5:]] = int(samples)
                if not math.isnan(rate):
                    self._rates[name[5:]] = rate
        self._rate = float(state["rate"]) if "rate" in state else None


def _distance(rate: float, last: float | None) -> float:
    """How far a rate is from the last one, as a ratio."""
    if last is None or rate == last:
        return 0.0
    return abs(math.log(rate / last)) if rate > 0 and last > 0 else math.inf
