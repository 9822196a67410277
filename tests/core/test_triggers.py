"""When rounds start."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightgrad.core.parts.triggers import DynamicThreshold, Every, Moment, Significance, Staggered


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


def after(g: DynamicThreshold, *epochs: float | tuple[float, ...]) -> float:
    """The threshold after epochs with steps of these lengths, rate times momentum."""
    for lengths in epochs:
        for length in lengths if isinstance(lengths, tuple) else (lengths,):
            g.measured(length)
        g.epoch()
    return g.value


def test_the_threshold_follows_the_ratios_of_rate_and_momentum() -> None:
    g = DynamicThreshold(4.0, 1.0, 64.0)
    assert after(g, 0.1 * 2.0) == 4.0  # nothing to compare with yet
    assert after(g, 0.1 * 2.0) == 4.0  # a constant rate does not make it zero
    assert after(g, 0.05 * 2.0) == pytest.approx(2.0)
    assert after(g, 0.05 * 5.0) == pytest.approx(5.0)


def test_the_threshold_compares_the_mean_step_of_an_epoch() -> None:
    g = DynamicThreshold(4.0, 1.0, 64.0)
    assert after(g, (1.0, 2.0, 3.0), (0.5, 1.5)) == pytest.approx(2.0)


def test_bounds_do_not_make_the_threshold_forget() -> None:
    """A warm-up of the learning rate lifts G to its bound and past it; afterwards it is where it began."""
    g = DynamicThreshold(4.0, 1.0, 64.0)
    assert after(g, 1.0, 100.0) == 64.0
    assert after(g, 1.0) == pytest.approx(4.0)
    assert after(g, 0.01) == 1.0
    assert after(g, 0.5) == pytest.approx(2.0)


def test_the_threshold_goes_on_from_a_checkpoint() -> None:
    g, copy = DynamicThreshold(4.0, 1.0, 64.0), DynamicThreshold(4.0, 1.0, 64.0)
    after(g, 1.0, 0.5)
    g.measured(0.25)
    copy.load(g.state())
    assert copy.value == g.value == pytest.approx(2.0)
    assert after(copy, 0.75) == after(g, 0.75) == pytest.approx(2.0)


def test_the_threshold_stays_within_its_bounds() -> None:
    assert DynamicThreshold(1000.0, 1.0, 64.0).value == 64.0
    assert DynamicThreshold(0.1, 1.0, 64.0).value == 1.0
    g = DynamicThreshold(4.0, 1.0, 64.0)
    assert after(g, 1.0, 1e6) == 64.0
    assert after(g, 1e-9) == 1.0


@pytest.mark.parametrize("length", [0.0, float("inf"), float("nan")])
def test_a_step_without_a_length_changes_nothing(length: float) -> None:
    g = DynamicThreshold(4.0, 1.0, 64.0)
    assert after(g, 1.0, length, ()) == 4.0
