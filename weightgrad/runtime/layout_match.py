"""Whether two sites train the same model, and its parameters in the order of the run."""

from __future__ import annotations

from collections.abc import Sequence

from weightgrad.core.layout import Layout
from weightgrad.errors import ProtocolError


def first_difference(mine: Layout, theirs: Layout) -> str | None:
    """The first parameter in which two models differ, whatever the order, in words; None if they are alike."""
    own = {slot.name: slot.shape for slot in mine.slots}
    other = {slot.name: slot.shape for slot in theirs.slots}
    for slot in mine.slots:
        if slot.name not in other:
            return f"it has a parameter {slot.name} {list(slot.shape)}, which the others lack"
        if other[slot.name] != slot.shape:
            return f"{slot.name} is {list(slot.shape)}, the others have {list(other[slot.name])}"
    for slot in theirs.slots:
        if slot.name not in own:
            return f"it lacks the parameter {slot.name} {list(slot.shape)}"
    return None


def in_order(layout: Layout, names: Sequence[str]) -> Layout:
    """The same parameters in another order.

    Raises:
        ProtocolError: the names are those of another model.
    """
    shapes = {slot.name: slot.shape for slot in layout.slots}
    if sorted(shapes) != sorted(names):
        raise ProtocolError("the server has parameters of other names than this site; run the same release everywhere")
    return Layout.of_shapes((name, shapes[name]) for name in names)
