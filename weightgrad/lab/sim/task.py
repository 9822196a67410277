"""The simulator's view of a training task: gradients of a flat vector of weights, and its test score."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from weightgrad.core.layout import Layout


class Gradient(NamedTuple):
    """One worker's flat gradient and its mean loss; the vector is valid until the next one is requested."""

    vector: Tensor
    loss: float


class Score(NamedTuple):
    """How well a model does on the test data.

    Attributes:
        accuracy: The share of samples whose class has the highest score (top-1).
        loss: The mean loss.
        top5: The share whose class is among the five with the highest scores; None where that is not usual.
    """

    accuracy: float
    loss: float
    top5: float | None = None


class Task(Protocol):
    """A model, its training data divided among sites and workers, and its test data.

    Attributes:
        layout: Where each parameter lies in the flat vector.
        epoch_steps: Steps of one pass over the training data.
    """

    layout: Layout
    epoch_steps: int

    def initial(self) -> Tensor:
        """The initial weights as a flat vector; a function of the seed."""
        ...

    def samples(self, site: int) -> int:
        """The number of samples that a site uses in a step, over all its workers."""
        ...

    def gradients(self, site: int, weights: Tensor, step: int) -> Iterator[Gradient]:
        """The gradients of a site's workers at a step, in the order of their ranks."""
        ...

    def evaluate(self, weights: Tensor) -> Score:
        """The score of these weights on the test data."""
        ...
