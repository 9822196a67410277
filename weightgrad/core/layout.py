"""A model's parameters as one flat vector, and where each tensor lies in it.

Only a site's flat float32 update crosses the WAN; codecs that depend on layers (ternary, low rank, adaptive) see its
shaped views. The order is the same everywhere: that of the module's `named_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """One tensor of the model: elements start .. stop-1 of the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements of this tensor."""
        return self.stop - self.start

    def of(self, flat: Tensor) -> Tensor:
        """This tensor's elements, as a view of the flat vector in its own shape."""
        return flat[self.start : self.stop].view(self.shape)

    def of_part(self, part: Tensor, start: int) -> Tensor:
        """This tensor's elements in a stretch of the flat vector that begins at `start`, in its own shape."""
        return part[self.start - start : self.stop - start].view(self.shape)


@dataclass(frozen=True)
class Layout:
    """All slots of a model, one after the other without gaps."""

    slots: tuple[Slot, ...]

    @staticmethod
    def of_shapes(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Layout:
        """A layout from names and shapes, in order."""
        slots, end = [], 0
        for name, shape in shapes:
            slots.append(Slot(name, tuple(shape), end, end + math.prod(shape)))
            end += math.prod(shape)
        return Layout(tuple(slots))

    @staticmethod
    def of(module: nn.Module) -> Layout:
        """The layout of a module's parameters."""
        return Layout.of_shapes((name, tuple(p.shape)) for name, p in module.named_parameters())

    def of_slots(self, places: Iterable[int]) -> Layout:
        """A layout of some of the tensors, one after the other."""
        return Layout.of_shapes((self.slots[place].name, self.slots[place].shape) for place in places)

    @property
    def numel(self) -> int:
        """Elements of the whole model."""
        return self.slots[-1].stop if self.slots else 0

    def views(self, flat: Tensor) -> list[Tensor]:
        """Every tensor as a shaped view of the flat vector."""
        return [slot.of(flat) for slot in self.slots]

    @torch.no_grad()
    def gather(self, module: nn.Module, out: Tensor | None = None) -> Tensor:
        """Copy the module's parameters into one flat float32 vector.

        Args:
            module: a module of this layout.
            out: the vector to fill; None allocates one on the device of the first parameter.

        Returns:
            The vector.
        """
        parameters = list(module.parameters())
        if out is None:
            device = parameters[0].device if parameters else torch.device("cpu")
            out = torch.empty(self.numel, dtype=torch.float32, device=device)
        for view, parameter in zip(self.views(out), parameters, strict=True):
            view.copy_(parameter)
        return out

    @torch.no_grad()
    def scatter(self, flat: Tensor, module: nn.Module) -> None:
        """Copy the values of a flat vector into the module's parameters."""
        for view, parameter in zip(self.views(flat), module.parameters(), strict=True):
            parameter.copy_(view)
