"""Parameters that share memory with one flat vector, so that an optimizer moves the vector in place.

Every slot of the layout is a parameter that shares memory with the flat weights, and its gradient is a view of the
flat gradient. So `optimizer.step()` does exactly what PyTorch does to the module, and the flat vector moves with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from weightgrad.core.layout import Layout
from weightgrad.core.vector_checks import require_flat
from weightgrad.wire.intervals import Intervals


def parameters_of(layout: Layout, flat: Tensor, held: Intervals | None = None) -> dict[int, nn.Parameter]:
    """A parameter for each held slot, in the memory of the vector: a step moves the vector itself.

    Args:
        layout: where the slots lie in the index space.
        flat: the weights.
        held: which elements `flat` stores; None: all.

    Returns:
        The parameters by the index of their slot. A slot of which only a part is held is a flat vector.
    """
    if held is None:
        require_flat(layout, flat, "flat weights")
    return {index: nn.Parameter(view) for index, view in _slot_views(layout, flat.detach(), held)}


def _slot_views(layout: Layout, flat: Tensor, held: Intervals | None) -> Iterator[tuple[int, Tensor]]:
    """The held part of each slot, in the slot's shape if it is all of it."""
    stored = Intervals.whole(layout.numel) if held is None else held
    for index, slot in enumerate(layout.slots):
        if held is None:
            yield index, slot.of(flat)
            continue
        own = stored & Intervals(((slot.start, slot.stop),) if slot.numel else ())
        place = stored.slice_of(own) if own else None
        if place is not None:
            yield index, flat[place].view(slot.shape) if own.numel == slot.numel else flat[place]


def attach(
    parameters: Mapping[int, nn.Parameter], layout: Layout, gradient: Tensor, held: Intervals | None = None
) -> None:
    """Make every parameter's gradient a view of the flat one; once is enough if the same vector is refilled."""
    if held is None:
        require_flat(layout, gradient, "flat gradient")
    for index, view in _slot_views(layout, gradient, held):
        parameters[index].grad = view
