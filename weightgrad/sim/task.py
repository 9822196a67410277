"""What the simulator trains: anything that gives gradients for a flat vector of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from weightgrad.site.layout import Layout


class Gradient(NamedTuple):
    """A flat gradient, valid until the next is asked for, and the mean loss it is of."""

    vector: Tensor
    loss: float


class Score(NamedTuple):
    """How good a model is on the test data."""

    accuracy: float
    loss: float


class Task(Protocol):
    """A model, its data dealt to sites and workers, and its test."""

    layout: Layout
    epoch_steps: int

    def initial(self) -> Tensor:
        """The first weights, flat; a function of the seed."""
        ...

    def samples(self, site: int) -> int:
        """How many a site looks at in a step."""
        ...

    def gradients(self, site: int, weights: Tensor, step: int) -> Iterator[Gradient]:
        """One a worker, in order."""
        ...

    def evaluate(self, weights: Tensor) -> Score:
        """On the test data."""
        ...
