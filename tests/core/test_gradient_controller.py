"""What `auto` makes of measured links where gradients are shared: codec and overlap, why, and that it settles."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightgrad import codecs
from weightgrad.core.controller.gradient_controller import CHOICES, GradientController, Gradients
from weightgrad.core.strategies import find
from weightgrad.errors import StrategyError
from weightgrad.wire.sync_schedule import Report

NUMEL = 167_552
SITES = ["east", "west"]
BITS = {choice.codec: choice.bits for choice in CHOICES}


def drive(
    found: GradientController, bit_s: float, delay: float, step: float, rounds: int = 12, rate: float = 0.002
) -> list[str]:
    """Rounds over links of that speed, the other link ten times as fast; the reasons it gave."""
    why = []
    for _ in range(rounds):
        nbytes = int(2 * NUMEL * BITS[found.now.schedule.up] / 8)
        for place, name in enumerate(SITES):
            seconds = 2 * delay + 8 * nbytes / (bit_s * 10**place)
            found.observe(name, Report(step, trip_seconds=2 * delay), seconds, nbytes)
        decision = found.decide(SITES, rate=rate)
        if decision is not None:
            why.append(decision.why)
    return why


def controller(**options: float) -> GradientController:
    return Gradients(**options).controller(NUMEL)  # type: ignore[arg-type]


def test_the_lines_of_the_gpt_recipe() -> None:
    """A round of 4 bits takes 0.2 s and a step 0.1 s: one step late is worth it, two are not yet."""
    found = controller()
    why = drive(found, 20e6, 0.065, 0.1)
    assert (found.now.schedule.overlap, BITS[found.now.schedule.up]) == (1, 4.5)
    assert "20 Mbit/s" in why[-1]
    assert "1 steps late" in why[-1]


def test_results_may_be_later_as_the_learning_rate_falls() -> None:
    found = controller()
    drive(found, 20e6, 0.065, 0.1)
    before = found.now.schedule.overlap
    drive(found, 20e6, 0.065, 0.1, rate=0.0002)
    assert found.now.schedule.overlap > before
    drive(found, 20e6, 0.065, 0.1, rate=0.002)
    assert found.now.schedule.overlap == before, "a schedule that restarts"


def test_a_fast_line_is_waited_for_and_carries_everything() -> None:
    found = controller()
    drive(found, 100e9, 1e-5, 0.1)
    assert (found.now.schedule.overlap, found.now.schedule.up, found.now.down) == (0, "fp32", "fp32")


def test_a_thin_line_carries_fewer_bits() -> None:
    found = controller()
    why = drive(found, 1e6, 0.15, 0.1)
    assert BITS[found.now.schedule.up] == min(BITS.values())
    assert "1 Mbit/s" in why[-1]


def test_a_long_line_is_not_waited_for() -> None:
    found = controller()
    why = drive(found, 1e9, 0.3, 0.1)
    assert 1 <= found.now.schedule.overlap <= Gradients().reach
    assert "late" in why[-1]


def test_the_first_two_rounds_differ_in_size_and_then_it_waits_for_reports() -> None:
    found = controller()
    first = found.now.schedule.up
    decision = found.decide(SITES)
    assert decision is not None
    assert decision.schedule.up != first
    assert found.decide(SITES) is None
    for name in SITES:
        found.observe(name, Report(0.1), 1.0, 1000)
    assert found.decide(SITES) is None, "one round may be a bad impression"


@settings(max_examples=60)
@given(
    st.floats(1e5, 1e12), st.floats(0, 1), st.floats(1e-4, 10), st.integers(0, 6), st.floats(0, 2), st.floats(0.8, 1.25)
)
def test_it_settles(bit_s: float, delay: float, step: float, reach: int, late: float, jitter: float) -> None:
    """Within what is allowed; and a little faster or slower line makes it change its mind once at most."""
    found = controller(reach=reach, late=late)
    drive(found, bit_s, delay, step)
    assert 0 <= found.now.schedule.overlap <= reach
    assert found.now.schedule.every == 1
    assert codecs.parse(found.now.schedule.up) == codecs.parse(found.now.down)
    assert not drive(found, bit_s, delay, step), "nothing has changed"
    assert len(drive(found, bit_s * jitter, delay, step, rounds=30)) <= 3


def test_state_survives() -> None:
    found = controller()
    drive(found, 3e6, 0.05, 0.03, rate=0.1)
    drive(found, 3e6, 0.05, 0.03, rate=0.01)
    again = controller()
    again.load(found.state())
    assert again.now == found.now
    assert again.measured.lines(SITES) == found.measured.lines(SITES)
    assert (again.peak, again.share) == (found.peak, found.share)
    assert found.share == pytest.approx(0.1)
    assert drive(again, 1e9, 0.001, 0.03) == drive(found, 1e9, 0.001, 0.03)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"controller": "gradients(reach=-1)"}, "reach"),
        ({"controller": "gradients(late=-1)"}, "late"),
        ({"controller": "gradients()", "trigger": "scheduled(1)", "shares": "updates"}, "shares = 'gradients'"),
        ({"controller": "gradients()", "trigger": "every(1)"}, "scheduled"),
        ({"controller": "gradients()", "trigger": "scheduled(1)", "resume": "global_model", "hide": 0}, "ahead"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        find("ahead", changes)
