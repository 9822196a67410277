"""When a site starts a round.

`every(H)` counts steps, so all sites start the same rounds without being asked. `significance` pushes when the update
since the last push has grown to G times the update of one step (the paper's |g_u / g| >= G), or when `at_most` steps
have gone by (the interval T, counted in steps). With `every=0` it is checked after each step, and the server requests
the push of the other sites; with `every=H` rounds are at multiples of H for all sites, and a site with nothing
significant sends an empty push, so that a run does not depend on how fast requests travel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from weightgrad.core.parts import check, part
from weightgrad.errors import StrategyError


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What a trigger may look at after a step."""

    step: int  # local steps done
    steps_since_push: int  # steps since the last push with anything in it
    ratio: Callable[[], float]  # |update since that push| / |update of the last step|; costs a pass over the model
    threshold: float  # the significance threshold G now
    steps_since_round: int = 0  # steps since the last round began
    every: int = 0  # steps between rounds by the sync schedule; 0: no schedule


class Trigger(ABC):
    """Decides after each step whether a round starts."""

    word: ClassVar[str]

    @property
    def calls(self) -> bool:
        """Whether the server must request the push of the other sites."""
        return False

    @abstractmethod
    def fires(self, moment: Moment) -> bool:
        """Whether a round starts now."""

    def sends(self, moment: Moment) -> bool:
        """Whether there is something to send in the round that starts now."""
        del moment
        return True

    def fragment(self, moment: Moment) -> int:
        """Which fragment of the model the round is about, for selectors that send one at a time."""
        del moment
        return 0


@part("trigger", "every")
@dataclass(frozen=True)
class Every(Trigger):
    """A round every `steps` steps."""

    steps: int = 1

    def __post_init__(self) -> None:
        check("every", "steps", self.steps, 1, 10**9, whole=True)

    def fires(self, moment: Moment) -> bool:
        """True at multiples of `steps`."""
        return moment.step % self.steps == 0


@part("trigger", "scheduled")
@dataclass(frozen=True)
class Scheduled(Trigger):
    """A round as often as the sync schedule says; every `steps` steps without one."""

    steps: int = 4

    def __post_init__(self) -> None:
        check("scheduled", "steps", self.steps, 1, 10**9, whole=True)

    def fires(self, moment: Moment) -> bool:
        """True when so many steps have gone by since the last round began."""
        return moment.steps_since_round >= (moment.every or self.steps)


@part("trigger", "staggered")
@dataclass(frozen=True)
class Staggered(Trigger):
    """Each of `fragments` every `steps` steps, evenly staggered (Streaming DiLoCo)."""

    steps: int
    fragments: int

    def __post_init__(self) -> None:
        check("staggered", "steps", self.steps, 1, 10**9, whole=True)
        check("staggered", "fragments", self.fragments, 1, 10**6, whole=True)
        if self.fragments > self.steps:
            raise StrategyError(f"staggered: {self.fragments} fragments in {self.steps} steps; at most one a step")

    def fires(self, moment: Moment) -> bool:
        """True at the offset of a fragment."""
        return self._due(moment.step) is not None

    def fragment(self, moment: Moment) -> int:
        """The fragment that is due."""
        return self._due(moment.step) or 0

    def _due(self, step: int) -> int | None:
        offset = step % self.steps
        for p in range(self.fragments):
            if (p * self.steps) // self.fragments == offset:
                return p
        return None


@part("trigger", "significance")
@dataclass(frozen=True)
class Significance(Trigger):
    """A round when the update since the last push is significant.

    Attributes:
        threshold: G, how many times the update of one step.
        at_most: T, the steps after which a round starts in any case.
        low: the least that G may become.
        high: the most that G may become.
        every: check at multiples of so many steps; 0: after each step.
    """

    threshold: float = 4.0
    at_most: int = 8
    low: float = 1.0
    high: float = 64.0
    every: int = 0

    def __post_init__(self) -> None:
        check("significance", "threshold", self.threshold, 0, 1e9)
        check("significance", "at_most", self.at_most, 1, 10**9, whole=True)
        check("significance", "low", self.low, 0, 1e9)
        check("significance", "high", self.high, self.low, 1e9)
        check("significance", "every", self.every, 0, 10**9, whole=True)

    @property
    def calls(self) -> bool:
        """True where rounds are not at fixed steps."""
        return self.every == 0

    def fires(self, moment: Moment) -> bool:
        """True at multiples of `every`; with 0, when the update is significant."""
        return moment.step % self.every == 0 if self.every else self._significant(moment)

    def sends(self, moment: Moment) -> bool:
        """True if the update is significant; a site whose push was requested sends in any case."""
        return not self.every or self._significant(moment)

    def _significant(self, moment: Moment) -> bool:
        return (
            moment.steps_since_push >= self.at_most or moment.ratio() >= moment.threshold
        )  # T first: it costs nothing


class DynamicThreshold:
    """The paper's threshold G, which each epoch multiplies by the change of the learning rate and of the update's norm.

    Both changes are ratios: as differences, a constant rate would give G = 0. G stays within [low, high]: the paper's
    own start, the square root of the number of nonzeros, would never be reached with ternary gradients.

    Args:
        start: the first value of G.
        low: the least value.
        high: the largest value.
    """

    def __init__(self, start: float, low: float, high: float) -> None:
        self.value = min(max(start, low), high)
        self._low, self._high = low, high
        self._rate: float | None = None
        self._norm: float | None = None

    def epoch(self, rate: float, norm: float) -> None:
        """An epoch has ended.

        Args:
            rate: its learning rate.
            norm: the norm of its last update, divided by the rate.
        """
        if self._rate and self._norm and rate > 0 and norm > 0:
            grown = self.value * (rate / self._rate) * (norm / self._norm)
            self.value = min(max(grown, self._low), self._high)
        self._rate, self._norm = rate, norm

    def state(self) -> Tensor:
        """The threshold and what the last epoch ended with, for a checkpoint."""
        return torch.tensor([self.value, self._rate or 0.0, self._norm or 0.0], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Restore what `state` returned."""
        self.value, rate, norm = (float(number) for number in state)
        self._rate, self._norm = rate or None, norm or None
