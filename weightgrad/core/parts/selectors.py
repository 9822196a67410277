"""What leaves the residual in a round: whole pieces, or single entries of them.

A codec such as topk selects by itself; then the selector is `all`. If a selector returns entries, the codec encodes
only their values. A selector decides piece by piece (`core/pieces.py`).
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from weightgrad.core import pieces
from weightgrad.core.layout import Layout
from weightgrad.core.parts.language import check, part
from weightgrad.core.pieces import Piece
from weightgrad.errors import StrategyError
from weightgrad.wire.intervals import Intervals


@dataclass(frozen=True)
class Entries:
    """Single entries of a piece, sorted."""

    indices: Tensor  # int64


@dataclass(frozen=True, kw_only=True)
class View:
    """What a selector may look at: one piece, flat."""

    residual: Tensor
    global_model: Callable[[], Tensor]
    last_norm: Callable[[], float] = lambda: 0.0  # of the update of the last step
    last_update: Callable[[], Tensor | None] = lambda: None  # the update of the last step
    step: int = 0
    threshold: float = 0.0


class Selector(ABC):
    """Chooses what leaves the residual."""

    word: ClassVar[str]
    needs_residual: ClassVar[bool] = False  # looks at values: the fresh update must be added first

    @property
    def single(self) -> bool:
        """Whether it chooses single entries instead of whole pieces."""
        return False

    @property
    def needs_step(self) -> str | None:
        """What it must know of the last step's update: its "norm" by tensor, its "elements", or nothing."""
        return None

    def pieces(self, held: Intervals, layout: Layout, *, per_tensor: bool, fragment: int) -> tuple[Piece, ...]:
        """The pieces of what is held that a round is about.

        Args:
            held: the elements.
            layout: where the tensors lie.
            per_tensor: whether each tensor is a piece of its own.
            fragment: which fragment of the model the round is about.
        """
        del fragment
        return pieces.cut(held, layout, per_tensor=per_tensor)

    def choose(self, view: View) -> bool | Entries:
        """What of a piece leaves the residual.

        Args:
            view: what the selector may look at.

        Returns:
            True for the whole piece, False for nothing, or single entries.
        """
        del view
        return True


@part("selector", "all")
@dataclass(frozen=True)
class All(Selector):
    """Everything (the codec may choose further)."""


@part("selector", "fragment")
@dataclass(frozen=True)
class Fragment(Selector):
    """One of `count` fragments of the model, in turn."""

    count: int

    def __post_init__(self) -> None:
        check("fragment", "count", self.count, 1, 10**6, whole=True)

    def pieces(self, held: Intervals, layout: Layout, *, per_tensor: bool, fragment: int) -> tuple[Piece, ...]:
        """The pieces of the tensors of one fragment."""
        own = pieces.fragments(layout, self.count)[fragment % self.count]
        return pieces.cut(held & own, layout, per_tensor=per_tensor)


@part("selector", "largest")
@dataclass(frozen=True)
class Largest(Selector):
    """The `fraction` of entries of each piece that are largest in magnitude, exactly."""

    fraction: float
    needs_residual = True

    def __post_init__(self) -> None:
        check("largest", "fraction", self.fraction, 1e-9, 1)

    @property
    def single(self) -> bool:
        """It chooses entries."""
        return True

    def choose(self, view: View) -> bool | Entries:
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

    def choose(self, view: View) -> bool | Entries:
        """Entries with |residual| > limit |weight|; where the weight is 0, every nonzero entry."""
        limit = self.threshold / math.sqrt(max(view.step, 1)) if self.decay else self.threshold
        chosen = view.residual.abs() > view.global_model().abs() * limit
        return Entries(chosen.nonzero().view(-1))


@part("selector", "significant")
@dataclass(frozen=True)
class Significant(Selector):
    """What has grown to G times the update of one step, by `granularity` "tensor" or "element" (WeightGrad)."""

    granularity: str = "tensor"
    needs_residual = True

    def __post_init__(self) -> None:
        if self.granularity not in ("tensor", "element"):
            raise StrategyError(f'significant: granularity = {self.granularity!r}; wanted "tensor" or "element"')

    @property
    def single(self) -> bool:
        """Whether the granularity is one element."""
        return self.granularity == "element"

    @property
    def needs_step(self) -> str | None:
        """It compares with the norm of the last step's update, or with its elements."""
        return "elements" if self.single else "norm"

    def pieces(self, held: Intervals, layout: Layout, *, per_tensor: bool, fragment: int) -> tuple[Piece, ...]:
        """A piece for each tensor; elements are compared in pieces of any kind."""
        del fragment
        return pieces.cut(held, layout, per_tensor=per_tensor or not self.single, flat=not per_tensor)

    def choose(self, view: View) -> bool | Entries:
        """Tensors by the ratio of norms, or elements by their own ratio."""
        if not self.single:
            grown = float(view.residual.norm())
            return grown > 0 and grown >= view.threshold * view.last_norm()
        last = view.last_update()
        chosen = view.residual != 0
        if last is not None:
            chosen &= view.residual.abs() >= view.threshold * last.abs()
        return Entries(chosen.nonzero().view(-1))


@part("selector", "nonzero")
@dataclass(frozen=True)
class Nonzero(Selector):
    """Entries that are not zero: for results, the union of what the sites sent."""

    needs_residual = True

    @property
    def single(self) -> bool:
        """It chooses entries."""
        return True

    def choose(self, view: View) -> bool | Entries:
        """All nonzero entries."""
        return Entries(view.residual.nonzero().view(-1))
