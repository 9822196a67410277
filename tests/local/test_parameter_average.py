"""The moving average is its formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightgrad.errors import StateError, StrategyError
from weightgrad.local import ParameterAverage


@given(decay=st.floats(0, 0.9999), values=st.lists(st.floats(-100, 100), min_size=1, max_size=30))
def test_it_is_the_formula(decay: float, values: list[float]) -> None:
    average, wanted = ParameterAverage(torch.tensor([1.0, -2.0]), decay), [1.0, -2.0]
    for t, value in enumerate(values):
        d = min(decay, (1 + t) / (10 + t))
        wanted = [d * wanted[0] + (1 - d) * value, d * wanted[1] + (1 - d) * -value]
        average.update(torch.tensor([value, -value]))
    torch.testing.assert_close(average.value(), torch.tensor(wanted), rtol=1e-4, atol=1e-4)


def test_the_start_is_forgotten_soon() -> None:
    average = ParameterAverage(torch.tensor([100.0]))
    for _ in range(50):
        average.update(torch.tensor([1.0]))
    assert abs(float(average.value()) - 1.0) < 1e-3


def test_the_weights_it_started_from_stay() -> None:
    weights = torch.ones(3)
    ParameterAverage(weights).update(torch.zeros(3))
    assert torch.equal(weights, torch.ones(3))


def test_a_saved_state_continues_the_same() -> None:
    through, again = ParameterAverage(torch.zeros(4)), ParameterAverage(torch.ones(4))
    for t in range(10):
        through.update(torch.full((4,), float(t)))
    again.load(through.state())
    for t in range(10):
        through.update(torch.full((4,), float(-t)))
        again.update(torch.full((4,), float(-t)))
    assert torch.equal(again.value(), through.value())
    with pytest.raises(StateError, match="value should be"):
        ParameterAverage(torch.zeros(5)).load(through.state())


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_that_makes_no_sense_is_refused(decay: float) -> None:
    with pytest.raises(StrategyError, match="ema="):
        ParameterAverage(torch.zeros(1), decay)
