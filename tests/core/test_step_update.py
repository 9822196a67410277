"""How large the last step's update is: exact for small tensors, from a sample for large ones."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from weightgrad.core import pieces
from weightgrad.core.layout import Layout
from weightgrad.core.local_model import FlatModel
from weightgrad.core.site import step_update
from weightgrad.core.site.step_update import StepUpdate
from weightgrad.wire.intervals import Intervals

from .harness import LAYOUT, at, noise

N = LAYOUT.numel
WHOLE = Intervals.whole(N)
HELD = Intervals(((0, 10), (28, 40), (50, 64)))  # parts of all tensors


def model(vector: Tensor, held: Intervals = WHOLE) -> FlatModel:
    return FlatModel(vector, WHOLE, held)


def squared(values: Tensor) -> float:
    return float(values.double().square().sum())


@pytest.mark.parametrize("held", [WHOLE, HELD])
@pytest.mark.parametrize("elements", [False, True])
def test_small_tensors_are_measured_exactly(held: Intervals, elements: bool) -> None:
    weights = noise(1)
    update = StepUpdate(held, LAYOUT, elements=elements)
    local = model(weights, held)
    update.begin(local)
    for number in (2, 3):
        weights += noise(number)
        update.stepped(local)
    since, last = update.squares(gradients=False)
    assert since == pytest.approx(squared(at(noise(2) + noise(3), held)), rel=1e-5)
    assert last == pytest.approx(squared(at(noise(3), held)), rel=1e-5)
    for piece in pieces.cut(held, LAYOUT, per_tensor=True):
        assert update.last_norm(piece) == pytest.approx(math.sqrt(squared(at(noise(3), piece.intervals))), rel=1e-5)
    if elements:
        for piece in pieces.cut(held, LAYOUT, per_tensor=False, limit=7):
            torch.testing.assert_close(update.last_update(piece), at(noise(3), piece.intervals))


def test_what_is_no_step_is_not_counted() -> None:
    weights = noise(1)
    update, local = StepUpdate(WHOLE, LAYOUT), model(weights)
    update.begin(local)
    weights += noise(2)
    update.stepped(local)
    weights += 100 * noise(3)  # a round result
    update.moved(local)
    weights += noise(4)
    update.stepped(local)
    since, last = update.squares(gradients=False)
    assert since == pytest.approx(squared(noise(2) + noise(4)), rel=1e-3)
    assert last == pytest.approx(squared(noise(4)), rel=1e-3)
    update.pushed(local)
    assert update.squares(gradients=False)[0] == 0


def test_gradients_add_up_until_they_are_pushed() -> None:
    update = StepUpdate(WHOLE, LAYOUT)
    for number in (1, 2):
        update.made(model(noise(number)))
    since, last = update.squares(gradients=True)
    assert since == pytest.approx(squared(noise(1) + noise(2)), rel=1e-5)
    assert last == pytest.approx(squared(noise(2)), rel=1e-5)
    update.pushed(None)
    assert update.squares(gradients=True)[0] == 0


def test_a_large_tensor_is_measured_by_a_sample() -> None:
    layout = Layout.of_shapes([("w", (200, 100)), ("b", (50,))])
    whole, weights = Intervals.whole(layout.numel), torch.zeros(layout.numel)
    moved = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1))
    with mock.patch.object(step_update, "SAMPLE", 1000):
        update = StepUpdate(whole, layout)
    local = FlatModel(weights, whole)
    assert sum(tensor.numel() for tensor in update.state().values()) <= 4 * (1000 + 50)
    update.begin(local)
    weights += moved
    update.stepped(local)
    assert update.squares(gradients=False)[1] == pytest.approx(squared(moved), rel=0.1)
    half, _, bias = pieces.cut(whole, layout, per_tensor=True, limit=10_000)
    assert update.last_norm(half) == pytest.approx(math.sqrt(squared(moved[:10_000])), rel=0.1)
    assert update.last_norm(bias) == pytest.approx(math.sqrt(squared(moved[20_000:])), rel=1e-5)


def test_a_state_goes_on_where_it_was() -> None:
    weights = noise(1)
    first, again, local = StepUpdate(HELD, LAYOUT), StepUpdate(HELD, LAYOUT), model(weights, HELD)
    first.begin(local)
    weights += noise(2)
    first.stepped(local)
    again.load(first.state())
    weights += noise(3)
    for one in (first, again):
        one.stepped(local)
    assert again.squares(gradients=False) == first.squares(gradients=False)
    other = StepUpdate(WHOLE, LAYOUT)
    other.load(first.state())  # of a site that was sharded otherwise
    assert other.squares(gradients=False) == (0.0, 0.0)
