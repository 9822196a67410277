"""When a site starts a round.

`every(H)` counts steps, so all sites start the same rounds without being asked. `significance` pushes when the update
since the last push has grown to G times the update of one step (the paper's |g_u / g| >= G), or when `at_most` steps
have gone by (the interval T, counted in steps). With `every=0` it is checked after each step, and the server requests
the push of the other sites; with `every=H` rounds are at multiples of H for all sites, and a site with nothing
significant sends an empty push, so that a run does not depend on how fast requests travel.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from weightgrad.core.parts.language import check, part
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

    @property
    def most_steps(self) -> float:
        """The most steps between two rounds of a site; what says it did more is refused."""
        return math.inf

    @abstractmethod
    def fires(self, moment: Moment) -> bool:
        """Whether a round starts now."""

    def next_step(self, moment: Moment) -> int:
        """The first step after this one at which a round may start."""
        return moment.step + 1

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

    @property
    def most_steps(self) -> float:
        """The number of steps."""
        return self.steps

    def fires(self, moment: Moment) -> bool:
        """True at multiples of `steps`."""
        return moment.step % self.steps == 0

    def next_step(self, moment: Moment) -> int:
        """The next multiple of `steps`."""
        return _next_multiple(moment.step, self.steps)


@part("trigger", "scheduled")
@dataclass(frozen=True)
class Scheduled(Trigger):
    """A round as often as the sync schedule says; every `steps` steps without one."""

    steps: int = 4

    def __post_init__(self) -> None:
        check("scheduled", "steps", self.steps, 1, 10**9, whole=True)

    @property
    def most_steps(self) -> float:
        """Without a sync schedule, which may say more."""
        return self.steps

    def fires(self, moment: Moment) -> bool:
        """True when so many steps have gone by since the last round began."""
        return moment.steps_since_round >= (moment.every or self.steps)

    def next_step(self, moment: Moment) -> int:
        """When so many steps will have gone by."""
        return moment.step + max(1, (moment.every or self.steps) - moment.steps_since_round)


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

    @property
    def most_steps(self) -> float:
        """From one fragment to the next."""
        return -(-self.steps // self.fragments)

    def fires(self, moment: Moment) -> bool:
        """True at the offset of a fragment."""
        return self._due(moment.step) is not None

    def next_step(self, moment: Moment) -> int:
        """The next offset of a fragment."""
        return next(
            step for step in range(moment.step + 1, moment.step + self.steps + 1) if self._due(step) is not None
        )

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

    @property
    def most_steps(self) -> float:
        """Those between two checks; with 0, those after which a round starts in any case."""
        return self.every or self.at_most

    def fires(self, moment: Moment) -> bool:
        """True at multiples of `every`; with 0, when the update is significant."""
        return moment.step % self.every == 0 if self.every else self._significant(moment)

    def next_step(self, moment: Moment) -> int:
        """The next multiple of `every`; with 0, the next step."""
        return _next_multiple(moment.step, max(1, self.every))

    def sends(self, moment: Moment) -> bool:
        """True if the update is significant; a site whose push was requested sends in any case."""
        return not self.every or self._significant(moment)

    def _significant(self, moment: Moment) -> bool:
        return (
            moment.steps_since_push >= self.at_most or moment.ratio() >= moment.threshold
        )  # T first: it costs nothing


def _next_multiple(step: int, of: int) -> int:
    return (step // of + 1) * of


class DynamicThreshold:
    """The paper's threshold G, which follows the learning rate and the momentum: G <- (change of both) * G, each epoch.

    The changes are ratios (as differences, a constant rate would give G = 0), so over several epochs their product is

        G = G0 * (rate * |v|) / (rate0 * |v0|) = G0 * |step| / |step0|

    with |step| the mean length of an epoch's steps, for rate * v is what a step moves the weights by. This holds for
    optimizers without a momentum term too. G is held within [low, high], but the product itself is not: a rate that
    rises and falls again leads back to the same G. The paper's own start, G0 = |g|_2 / |g|_max, is 8 for CifarNet's
    first gradient, but the square root of the number of nonzeros (900) for a ternary one, which no update reaches: so
    G0 is given.

    Args:
        start: the first value of G.
        low: the least value.
        high: the largest value.
    """

    def __init__(self, start: float, low: float, high: float) -> None:
        self._start, self._low, self._high = start, low, high
        self._first: float | None = None  # the mean length of a step in the first epoch
        self._sum, self._count = 0.0, 0
        self._last: float | None = None

    @property
    def value(self) -> float:
        """G now."""
        grown = 1.0 if self._first is None or self._last is None else self._last / self._first
        return min(max(self._start * grown, self._low), self._high)

    def measured(self, length: float) -> None:
        """A step has moved the weights by this much."""
        if math.isfinite(length) and length > 0:
            self._sum += length
            self._count += 1

    def epoch(self) -> None:
        """An epoch has ended; one without a measured step changes nothing."""
        if not self._count:
            return
        self._last, self._sum, self._count = self._sum / self._count, 0.0, 0
        if self._first is None:
            self._first = self._last

    def state(self) -> Tensor:
        """The mean lengths that it compares and the sum of this epoch, for a checkpoint."""
        return torch.tensor([self._first or 0.0, self._last or 0.0, self._sum, float(self._count)], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Restore what `state` returned."""
        first, last, self._sum, count = (float(number) for number in state)
        self._first, self._last, self._count = first or None, last or None, int(count)
