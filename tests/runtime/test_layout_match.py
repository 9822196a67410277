"""Two models compared by the names and shapes of their parameters."""

from __future__ import annotations

import pytest

from weightgrad.core.layout import Layout
from weightgrad.errors import ProtocolError
from weightgrad.runtime.layout_match import first_difference, in_order


def layout(**shapes: tuple[int, ...]) -> Layout:
    return Layout.of_shapes(shapes.items())


def test_the_first_difference_is_named() -> None:
    mine = layout(a=(2, 3), b=(4,))
    assert first_difference(mine, layout(b=(4,), a=(2, 3))) is None, "the order is no difference"
    assert first_difference(mine, layout(b=(4,))) == "it has a parameter a [2, 3], which the others lack"
    assert first_difference(mine, layout(a=(3, 2), b=(4,))) == "a is [2, 3], the others have [3, 2]"
    assert first_difference(mine, layout(a=(2, 3), b=(4,), c=(1,))) == "it lacks the parameter c [1]"


def test_parameters_take_the_order_of_the_run() -> None:
    found = in_order(layout(a=(2, 3), b=(4,)), ["b", "a"])
    assert [(slot.name, slot.shape) for slot in found.slots] == [("b", (4,)), ("a", (2, 3))]
    with pytest.raises(ProtocolError, match="parameters of other names"):
        in_order(layout(a=(2, 3)), ["b"])
