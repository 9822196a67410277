"""When a site starts a round.

`every(H)` counts steps, so all sites start the same rounds unasked. `significance` sends when what was
done since it last sent has grown to G times what one step adds (the paper's |g_u / g| >= G), or when
`at_most` steps have gone by (the interval T, counted in steps). With `every=0` it asks after each step, and
the server calls the others to the round; with `every=H` rounds are at multiples of H for all, and a site with
nothing significant says so: then a run does not depend on how fast the calls were.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from weightgrad.errors import StrategyError
from weightgrad.wan.parts import check, part


@dataclass(frozen=True)
class Moment:
    """What a trigger may look at, after a step."""

    step: int  # steps done
    since: int  # steps since something was last sent
    ratio: Callable[[], float]  # |done since then| / |one step|; costs a pass
    threshold: float  # G now
    round_since: int = 0  # steps since the last round began
    every: int = 0  # as the server's pace says


class Trigger(ABC):
    """Decides after each step whether a round starts."""

    word: ClassVar[str]

    @property
    def calls(self) -> bool:
        """Whether the server must call the other sites."""
        return False

    @abstractmethod
    def fires(self, moment: Moment) -> bool:
        """Whether a round starts now."""

    def sends(self, moment: Moment) -> bool:
        """Whether there is something to send in the round that starts now."""
        del moment
        return True

    def fragment(self, moment: Moment) -> int:
        """Which fragment the round is about, for selectors that send one at a time."""
        del moment
        return 0


@part("trigger", "every")
@dataclass(frozen=True)
class Every(Trigger):
    """Every `steps` steps."""

    steps: int = 1

    def __post_init__(self) -> None:
        check("every", "steps", self.steps, 1, 10**9, whole=True)

    def fires(self, moment: Moment) -> bool:
        """At multiples."""
        return moment.step % self.steps == 0


@part("trigger", "paced")
@dataclass(frozen=True)
class Paced(Trigger):
    """As often as the server says, every `steps` steps until it does."""

    steps: int = 4

    def __post_init__(self) -> None:
        check("paced", "steps", self.steps, 1, 10**9, whole=True)

    def fires(self, moment: Moment) -> bool:
        """So many steps after the last round began."""
        return moment.round_since >= (moment.every or self.steps)


@part("trigger", "staggered")
@dataclass(frozen=True)
class Staggered(Trigger):
    """Each of `fragments` every `steps` steps, evenly spread in between (streaming)."""

    steps: int
    fragments: int

    def __post_init__(self) -> None:
        check("staggered", "steps", self.steps, 1, 10**9, whole=True)
        check("staggered", "fragments", self.fragments, 1, 10**6, whole=True)
        if self.fragments > self.steps:
            raise StrategyError(f"staggered: {self.fragments} fragments in {self.steps} steps; at most one a step")

    def fires(self, moment: Moment) -> bool:
        """Fragment p at its own offset."""
        return self._due(moment.step) is not None

    def fragment(self, moment: Moment) -> int:
        """The one that is due."""
        return self._due(moment.step) or 0

    def _due(self, step: int) -> int | None:
        place = step % self.steps
        for p in range(self.fragments):
            if (p * self.steps) // self.fragments == place:
                return p
        return None


@part("trigger", "significance")
@dataclass(frozen=True)
class Significance(Trigger):
    """When pending is `threshold` times one step's update, or after `at_most` steps (T); asked `every` steps."""

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
        """When rounds are not at fixed steps."""
        return self.every == 0

    def fires(self, moment: Moment) -> bool:
        """At multiples of `every`, or as soon as something is significant."""
        return moment.step % self.every == 0 if self.every else self._significant(moment)

    def sends(self, moment: Moment) -> bool:
        """What is significant; a site that was called says all it has."""
        return not self.every or self._significant(moment)

    def _significant(self, moment: Moment) -> bool:
        return moment.since >= self.at_most or moment.ratio() >= moment.threshold  # T first: it is free


class DynamicThreshold:
    """The paper's G: per epoch multiplied by the change of the learning rate and of the momentum's norm.

    Both changes are ratios (as differences a constant rate would give G = 0), and G stays within
    [low, high]: for ternary gradients the paper's own start, the square root of the number of
    nonzeros, would never be reached.
    """

    def __init__(self, start: float, low: float, high: float) -> None:
        self.value = min(max(start, low), high)
        self._low, self._high = low, high
        self._rate: float | None = None
        self._norm: float | None = None

    def epoch(self, rate: float, norm: float) -> None:
        """An epoch has ended with this learning rate and this norm of the update."""
        if self._rate and self._norm and rate > 0 and norm > 0:
            grown = self.value * (rate / self._rate) * (norm / self._norm)
            self.value = min(max(grown, self._low), self._high)
        self._rate, self._norm = rate, norm

    def state(self) -> Tensor:
        """The threshold and what it was last compared with."""
        return torch.tensor([self.value, self._rate or 0.0, self._norm or 0.0], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Take back what `state` gave."""
        self.value, rate, norm = (float(number) for number in state)
        self._rate, self._norm = rate or None, norm or None
