"""What leaves the residual in a round: intervals of the vector, or single entries.

A codec such as topk selects by itself; then the selector is `all`. If a selector returns entries, the codec encodes
only their values.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from weightgrad.core.layout import Layout
from weightgrad.core.parts import check, part
from weightgrad.errors import StrategyError


@dataclass(frozen=True)
class Interval:
    """Elements start .. start + prod(shape) - 1 of the flat vector, viewed in this shape."""

    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + math.prod(self.shape)

    def flat(self) -> Interval:
        """The same elements as one dimension."""
        return Interval(self.start, (self.stop - self.start,))


@dataclass(frozen=True)
class Entries:
    """Single entries of the flat vector, sorted."""

    indices: Tensor  # int64


@dataclass(frozen=True)
class View:
    """What a selector may look at."""

    residual: Tensor  # flat
    global_model: Tensor  # flat
    step_update: Tensor | None  # flat: the update of the last step
    layout: Layout
    step: int
    fragment: int
    per_tensor: bool
    threshold: float


class Selector(ABC):
    """Chooses what leaves the residual."""

    word: ClassVar[str]
    needs_residual: ClassVar[bool] = False  # looks at values: the fresh update must be added first
    needs_step: ClassVar[bool] = False  # compares with the update of the last step

    @property
    def single(self) -> bool:
        """Whether it chooses single entries instead of intervals."""
        return False

    @abstractmethod
    def choose(self, view: View) -> list[Interval] | Entries:
        """What leaves the residual.

        Args:
            view: what the selector may look at.

        Returns:
            Intervals in order, or entries.
        """


def intervals(layout: Layout, per_tensor: bool) -> list[Interval]:
    """The whole vector: one interval for each tensor, or one for all."""
    if per_tensor:
        return [Interval(slot.start, slot.shape) for slot in layout.slots if slot.numel]
    return [Interval(0, (layout.numel,))] if layout.numel else []


def fragments(layout: Layout, count: int) -> list[list[Interval]]:
    """The tensors split into `count` fragments of about equal size, in order."""
    fragments_: list[list[Interval]] = [[] for _ in range(count)]
    for slot in (slot for slot in layout.slots if slot.numel):
        middle = (slot.start + slot.stop) / 2
        fragments_[min(count - 1, int(middle * count / layout.numel))].append(Interval(slot.start, slot.shape))
    return fragments_


def merged(found: list[Interval]) -> list[Interval]:
    """Neighbouring intervals joined into flat ones."""
    joined: list[Interval] = []
    for interval in found:
        if joined and joined[-1].stop == interval.start:
            joined[-1] = Interval(joined[-1].start, (interval.stop - joined[-1].start,))
        else:
            joined.append(interval.flat())
    return joined


@part("selector", "all")
@dataclass(frozen=True)
class All(Selector):
    """Everything (the codec may choose further)."""

    def choose(self, view: View) -> list[Interval] | Entries:
        """The whole vector."""
        return intervals(view.layout, view.per_tensor)


@part("selector", "fragment")
@dataclass(frozen=True)
class Fragment(Selector):
    """One of `count` fragments of the model, in turn."""

    count: int

    def __post_init__(self) -> None:
        check("fragment", "count", self.count, 1, 10**6, whole=True)

    def choose(self, view: View) -> list[Interval] | Entries:
        """The tensors of the fragment that the round is about."""
        found = fragments(view.layout, self.count)[view.fragment % self.count]
        return found if view.per_tensor else merged(found)


@part("selector", "largest")
@dataclass(frozen=True)
class Largest(Selector):
    """The `fraction` of entries that are largest in magnitude, exactly."""

    fraction: float
    needs_residual = True

    def __post_init__(self) -> None:
        check("largest", "fraction", self.fraction, 1e-9, 1)

    @property
    def single(self) -> bool:
        """It chooses entries."""
        return True

    def choose(self, view: View) -> list[Interval] | Entries:
        """The largest entries by torch.topk; the codec topk(...) does the same faster."""
        count = max(1, round(self.fraction * view.residual.numel()))
        return Entries(view.residual.abs().topk(count, sorted=False).indices.sort().values)


@part("selector", "gaia")
@dataclass(frozen=True)
class Gaia(Selector):
    """Entries whose residual is more than threshold/sqrt(t) of the weight (Gaia)."""

    threshold: float = 0.01
    decay: bool = True
    needs_residual = True

    def __post_init__(self) -> None:
        check("gaia", "threshold", self.threshold, 0, 1e9)

    @property
    def single(self) -> bool:
        """It chooses entries."""
        return True

    def choose(self, view: View) -> list[Interval] | Entries:
        """Entries with |residual| > limit |weight|; where the weight is 0, every nonzero entry."""
        limit = self.threshold / math.sqrt(max(view.step, 1)) if self.decay else self.threshold
        chosen = view.residual.abs() > view.global_model.abs() * limit
        return Entries(chosen.nonzero().view(-1))


@part("selector", "significant")
@dataclass(frozen=True)
class Significant(Selector):
    """What has grown to G times the update of one step, by `granularity` "tensor" or "element" (WeightGrad)."""

    granularity: str = "tensor"
    needs_residual = True
    needs_step = True

    def __post_init__(self) -> None:
        if self.granularity not in ("tensor", "element"):
            raise StrategyError(f'significant: granularity = {self.granularity!r}; wanted "tensor" or "element"')

    @property
    def single(self) -> bool:
        """Whether the granularity is one element."""
        return self.granularity == "element"

    def choose(self, view: View) -> list[Interval] | Entries:
        """Tensors by the ratio of norms, or elements by their own ratio."""
        step = view.step_update if view.step_update is not None else torch.zeros_like(view.residual)
        if self.granularity == "element":
            chosen = (view.residual.abs() >= view.threshold * step.abs()) & (view.residual != 0)
            return Entries(chosen.nonzero().view(-1))
        found = []
        for slot in view.layout.slots:
            grown = float(slot.of(view.residual).norm())
            if grown > 0 and grown >= view.threshold * float(slot.of(step).norm()):
                found.append(Interval(slot.start, slot.shape))
        return found if view.per_tensor else merged(found)


@part("selector", "nonzero")
@dataclass(frozen=True)
class Nonzero(Selector):
    """Entries that are not zero: for results, the union of what the sites sent."""

    needs_residual = True

    @property
    def single(self) -> bool:
        """It chooses entries."""
        return True

    def choose(self, view: View) -> list[Interval] | Entries:
        """All nonzero entries."""
        return Entries(view.residual.nonzero().view(-1))
