"""When rounds start."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightgrad.core.triggers import DynamicThreshold, Every, Moment, Significance, Staggered


def moment(step: int, since: int = 1, ratio: Callable[[], float] = lambda: 0.0, threshold: float = 4.0) -> Moment:
    return Moment(step=step, steps_since_push=since, ratio=ratio, threshold=threshold)


def test_every_fires_at_multiples_only() -> None:
    assert [s for s in range(1, 13) if Every(4).fires(moment(s))] == [4, 8, 12]


@given(steps=st.integers(1, 60), fragments=st.integers(1, 60), period=st.integers(0, 3))
def test_each_fragment_has_one_turn_a_period_evenly_spread(steps: int, fragments: int, period: int) -> None:
    fragments = min(fragments, steps)
    trigger = Staggered(steps, fragments)
    window = range(period * steps, (period + 1) * steps)
    due = [(s, trigger.fragment(moment(s))) for s in window if trigger.fires(moment(s))]
    assert [p for _, p in due] == list(range(fragments))
    places = [s for s, _ in due] + [window[0] + steps]
    gaps = [b - a for a, b in pairwise(places)]
    assert max(gaps) - min(gaps) <= 1


def test_significance_fires_at_the_threshold_and_not_below() -> None:
    trigger = Significance(threshold=4.0, at_most=8)
    assert trigger.fires(moment(3, 3, lambda: 4.0))
    assert not trigger.fires(moment(3, 3, lambda: 3.999))
    assert not trigger.fires(moment(3, 3, lambda: 4.0, threshold=5.0)), (
        "the dynamic threshold counts, not the first one"
    )


def test_the_interval_fires_without_looking_at_the_vector() -> None:
    def never() -> float:
        raise AssertionError("the ratio costs a pass over the model")

    assert Significance(at_most=8).fires(moment(8, 8, never))


def test_only_significance_makes_the_server_call_the_others() -> None:
    assert Significance().calls
    assert not Every(2).calls
    assert not Staggered(4, 2).calls


def test_the_threshold_follows_the_ratios_of_rate_and_norm() -> None:
    g = DynamicThreshold(4.0, 1.0, 64.0)
    g.epoch(0.1, 2.0)
    assert g.value == 4.0  # nothing to compare with yet
    g.epoch(0.1, 2.0)
    assert g.value == 4.0  # a constant rate does not make it zero
    g.epoch(0.05, 2.0)
    assert g.value == pytest.approx(2.0)
    g.epoch(0.05, 5.0)
    assert g.value == pytest.approx(5.0)


def test_the_threshold_stays_within_its_bounds() -> None:
    assert DynamicThreshold(1000.0, 1.0, 64.0).value == 64.0
    assert DynamicThreshold(0.1, 1.0, 64.0).value == 1.0
    g = DynamicThreshold(4.0, 1.0, 64.0)
    g.epoch(1.0, 1.0)
    g.epoch(1e6, 1.0)
    assert g.value == 64.0
    g.epoch(1e-9, 1.0)
    assert g.value == 1.0


@pytest.mark.parametrize(("rate", "norm"), [(0.0, 1.0), (1.0, 0.0)])
def test_an_epoch_without_rate_or_norm_changes_nothing(rate: float, norm: float) -> None:
    g = DynamicThreshold(4.0, 1.0, 64.0)
    g.epoch(1.0, 1.0)
    g.epoch(rate, norm)
    g.epoch(8.0, 8.0)
    assert g.value == 4.0
