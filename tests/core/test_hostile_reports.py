"""Times that nobody has measured, reported to steer `auto`: the server goes on, and schedules stay within bounds."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from weightgrad import codecs
from weightgrad.core.controller.gradient_controller import Gradients
from weightgrad.core.controller.measurements import MOST_STEP, Measurements
from weightgrad.core.controller.update_controller import Auto
from weightgrad.errors import ProtocolError
from weightgrad.wire.sync_schedule import MOST_SECONDS, Report

SITES = ["east", "mallory", "west"]
HONEST = Report(0.05, 1, 0.3, 0.02)
EXTREMES = [0.0, 5e-324, 1e-300, 1e-12, 1e-9, 1e-3, 0.05, 1.0, 1e6, MOST_SECONDS]


@pytest.mark.parametrize("name", ["step_seconds", "round_seconds", "trip_seconds"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 1.7e308, 1e30, 2 * MOST_SECONDS])
def test_times_beyond_all_reason_are_refused_when_they_come(name: str, value: float) -> None:
    given: dict[str, Any] = {"step_seconds": 1.0, name: value}
    with pytest.raises(ProtocolError, match=name):
        Report(**given)


@pytest.mark.parametrize("options", [Auto(), Auto(budget="5 GB/day"), Gradients()], ids=["auto", "budget", "gradients"])
def test_no_report_stops_the_controller(options: Auto | Gradients) -> None:
    """What raises here ends the server, and again at every start: reports are in its log."""
    for seed in range(300):
        draw = random.Random(seed)
        one = options.controller(draw.choice([10, 10**4, 10**7, 10**9]))
        for number in range(15):
            for site in SITES:
                lie = Report(draw.choice(EXTREMES), number, draw.choice(EXTREMES), draw.choice(EXTREMES))
                report = lie if site == "mallory" else HONEST
                one.observe(site, report, report.round_seconds - draw.choice([0.0, 0.1]), draw.choice([0, 100, 10**6]))
            one.decide(SITES, rate=draw.choice([None, 0.1, 0.0, 1e-300]))
            one.load(one.state())
            schedule = one.now.schedule
            assert 1 <= schedule.every <= options.at_most
            assert 0 <= schedule.overlap <= max(options.reach, options.at_most)
            codecs.parse(schedule.up)


def test_one_site_cannot_say_that_steps_are_long() -> None:
    """Of a budget that would let the others spend what it does not allow."""
    measured = Measurements()
    for site in SITES:
        measured.observe(site, Report(1e8) if site == "mallory" else HONEST, 0.1, 1000)
    assert measured.step(SITES) == MOST_STEP * HONEST.step_seconds
    assert measured.step(["east", "mallory"]) == 1e8, "of two sites nobody knows which is right"
    measured.observe("mallory", Report(8 * HONEST.step_seconds), 0.1, 1000)
    assert measured.step(SITES) == 8 * HONEST.step_seconds, "a slow site is believed"


def test_a_step_that_was_not_measured_is_not_known() -> None:
    measured = Measurements()
    measured.observe("a", Report(5e-324), 0.1, 1000)
    assert not measured.has_all(["a"])


def test_the_budget_holds_whatever_one_site_says_of_its_steps() -> None:
    def bytes_a_second(lie: float) -> float:
        one = Auto(budget="5 GB/day").controller(10**7)
        for _ in range(30):
            for site in SITES:
                step = lie if site == "mallory" else HONEST.step_seconds
                one.observe(site, Report(step, trip_seconds=0.02), 0.3, 10**5)
            one.decide(SITES)
        return len(SITES) * one._nbytes(one.encoding) / (one.now.schedule.every * HONEST.step_seconds)

    assert bytes_a_second(1e8) <= MOST_STEP * bytes_a_second(HONEST.step_seconds)
