"""What leaves pending in a round: stretches of the vector, or single entries.

A codec such as topk selects by itself; then the selector is `all`. A selector that returns entries
has the codec encode their values only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from weightgrad.errors import StrategyError
from weightgrad.site.layout import Layout
from weightgrad.wan.parts import check, part


@dataclass(frozen=True)
class Stretch:
    """Elements start .. start + prod(shape) - 1, seen in this shape."""

    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class Entries:
    """Single entries of the flat vector, sorted."""

    indices: Tensor  # int64


@dataclass(frozen=True)
class View:
    """What a selector may look at."""

    pending: Tensor  # flat
    base: Tensor  # flat
    step_update: Tensor | None  # flat: what the last step added
    layout: Layout
    step: int
    fragment: int
    per_tensor: bool
    threshold: float


class Selector(ABC):
    """Chooses what leaves pending."""

    word: ClassVar[str]
    needs_pending: ClassVar[bool] = False  # looks at the values: pending must be summed up first
    needs_step: ClassVar[bool] = False  # looks at the last step's update

    @property
    def single(self) -> bool:
        """Whether it chooses single entries."""
        return False

    @abstractmethod
    def choose(self, view: View) -> list[Stretch] | Entries:
        """Stretches, or entries."""


def stretches(layout: Layout, per_tensor: bool) -> list[Stretch]:
    """The whole vector: one stretch a tensor, or one for all."""
    if per_tensor:
        return [Stretch(slot.start, slot.shape) for slot in layout.slots if slot.numel]
    return [Stretch(0, (layout.numel,))] if layout.numel else []


def fragments(layout: Layout, count: int) -> list[list[Stretch]]:
    """The tensors dealt into `count` fragments of about equal size, in order."""
    dealt: list[list[Stretch]] = [[] for _ in range(count)]
    for slot in (slot for slot in layout.slots if slot.numel):
        middle = (slot.start + slot.stop) / 2
        dealt[min(count - 1, int(middle * count / layout.numel))].append(Stretch(slot.start, slot.shape))
    return dealt


def merged(found: list[Stretch]) -> list[Stretch]:
    """Neighbouring stretches joined into flat ones."""
    joined: list[Stretch] = []
    for stretch in found:
        if joined and joined[-1].stop == stretch.start:
            joined[-1] = Stretch(joined[-1].start, (stretch.stop - joined[-1].start,))
        else:
            joined.append(Stretch(stretch.start, (stretch.stop - stretch.start,)))
    return joined


@part("selector", "all")
@dataclass(frozen=True)
class All(Selector):
    """Everything (the codec may choose further)."""

    def choose(self, view: View) -> list[Stretch] | Entries:
        """All of it."""
        return stretches(view.layout, view.per_tensor)


@part("selector", "fragment")
@dataclass(frozen=True)
class Fragment(Selector):
    """One of `count` fragments of the model, the one whose turn it is."""

    count: int

    def __post_init__(self) -> None:
        check("fragment", "count", self.count, 1, 10**6, whole=True)

    def choose(self, view: View) -> list[Stretch] | Entries:
        """The tensors of that fragment."""
        found = fragments(view.layout, self.count)[view.fragment % self.count]
        return found if view.per_tensor else merged(found)


@part("selector", "largest")
@dataclass(frozen=True)
class Largest(Selector):
    """The `fraction` of entries that are largest in magnitude, exactly."""

    fraction: float
    needs_pending = True

    def __post_init__(self) -> None:
        check("largest", "fraction", self.fraction, 1e-9, 1)

    @property
    def single(self) -> bool:
        """Yes."""
        return True

    def choose(self, view: View) -> list[Stretch] | Entries:
        """By torch.topk; the codec topk(...) does the same faster."""
        count = max(1, round(self.fraction * view.pending.numel()))
        return Entries(view.pending.abs().topk(count, sorted=False).indices.sort().values)


@part("selector", "gaia")
@dataclass(frozen=True)
class Gaia(Selector):
    """Entries whose pending change is more than threshold/sqrt(t) of the weight (Gaia)."""

    threshold: float = 0.01
    decay: bool = True
    needs_pending = True

    def __post_init__(self) -> None:
        check("gaia", "threshold", self.threshold, 0, 1e9)

    @property
    def single(self) -> bool:
        """Yes."""
        return True

    def choose(self, view: View) -> list[Stretch] | Entries:
        """|p| > v |w|, or w = 0 and p is not."""
        limit = self.threshold / math.sqrt(max(view.step, 1)) if self.decay else self.threshold
        chosen = view.pending.abs() > view.base.abs() * limit
        return Entries(chosen.nonzero().view(-1))


@part("selector", "significant")
@dataclass(frozen=True)
class Significant(Selector):
    """What is G times one step's update, by `granularity` "tensor" or "element" (WeightGrad)."""

    granularity: str = "tensor"
    needs_pending = True
    needs_step = True

    def __post_init__(self) -> None:
        if self.granularity not in ("tensor", "element"):
            raise StrategyError(f'significant: granularity = {self.granularity!r}; it is "tensor" or "element"')

    @property
    def single(self) -> bool:
        """By element."""
        return self.granularity == "element"

    def choose(self, view: View) -> list[Stretch] | Entries:
        """Tensors by the ratio of norms; elements by their own ratio."""
        step = view.step_update if view.step_update is not None else torch.zeros_like(view.pending)
        if self.granularity == "element":
            chosen = (view.pending.abs() >= view.threshold * step.abs()) & (view.pending != 0)
            return Entries(chosen.nonzero().view(-1))
        found = []
        for slot in view.layout.slots:
            grown = float(slot.of(view.pending).norm())
            if grown > 0 and grown >= view.threshold * float(slot.of(step).norm()):
                found.append(Stretch(slot.start, slot.shape))
        return found if view.per_tensor else merged(found)


@part("selector", "nonzero")
@dataclass(frozen=True)
class Nonzero(Selector):
    """Entries that are not zero: the union of what the sites sent, for the way back."""

    needs_pending = True

    @property
    def single(self) -> bool:
        """Yes."""
        return True

    def choose(self, view: View) -> list[Stretch] | Entries:
        """Wherever anything is."""
        return Entries(view.pending.nonzero().view(-1))
