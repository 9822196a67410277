"""What `auto` makes of measured links: the sync schedule it sets, why, and that it does not swing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weightgrad.core import strategies
from weightgrad.core.controller.agreement import Signs
from weightgrad.core.controller.encodings import sparse, sparse_bits
from weightgrad.core.controller.link_fit import LinkFit
from weightgrad.core.controller.update_controller import Auto, Controller
from weightgrad.core.saved_schedule import schedule_from_tensor, schedule_to_tensor
from weightgrad.core.site.schedule import StepTimer
from weightgrad.core.strategies import find
from weightgrad.errors import ProtocolError, StrategyError
from weightgrad.units import bytes_s
from weightgrad.wire.sync_schedule import Report, SyncSchedule

NUMEL = 1_000_000
SITES = ["east", "west"]


def drive(
    controller: Controller, bit_s: float, delay: float, step: float, rounds: int = 12, trip: float = 0.0
) -> list[str]:
    """Rounds over a link of that speed; the reasons it gave."""
    why = []
    for _ in range(rounds):
        nbytes = int(NUMEL * (controller.encoding.up_bits + controller.encoding.down_bits) / 8)
        for name in SITES:
            controller.observe(name, Report(step, trip_seconds=trip), 2 * delay + 8 * nbytes / bit_s, nbytes)
        decision = controller.decide(SITES)
        if decision is not None:
            why.append(decision.why)
    return why


def rate(controller: Controller) -> float:
    """Bits of a push by element and step."""
    return controller.encoding.up_bits / controller.now.schedule.every


def controller() -> Controller:
    return Controller(Auto(), NUMEL)


def test_first_two_rounds_differ_in_size() -> None:
    fresh = controller()
    first = fresh.now.schedule.up
    decision = fresh.decide(SITES)
    assert decision is not None
    assert decision.schedule.up != first
    assert fresh.decide(SITES) is None, "then it waits for reports"


def test_usual_link() -> None:
    found = controller()
    drive(found, 100e6, 0.02, 0.03)
    assert (found.now.schedule.every, found.now.schedule.up) == (Auto().every, Auto().usual.up)
    assert 0 < found.now.schedule.overlap <= Auto().reach


def test_pushes_that_are_handed_on_are_counted_as_often_as_they_come_down() -> None:
    found, sites = controller(), ["east", "north", "west"]
    drive(found, 100e6, 0.02, 0.03)
    put_together = found._nbytes(Auto().usual)
    for present, relayed, expected in (
        (sites[:2], True, 2 * sparse_bits(0.01)),
        (sites, True, 3 * sparse_bits(0.01)),
        (sites[:2], False, sparse_bits(0.01) + sparse_bits(0.02)),
    ):
        found.decide(present, relayed=relayed)
        assert found._nbytes(Auto().usual) == pytest.approx(NUMEL * expected / 8)
    assert found._nbytes(Auto().usual) == put_together


def test_rounds_are_twice_as_often_while_the_sites_contradict_each_other() -> None:
    found = controller()
    drive(found, 100e6, 0.02, 0.03)
    usual = found.now.schedule
    found.compare(Signs(1000, 490))
    assert found.decide(SITES) is None, "that may be chance"
    found.compare(Signs(1000, 430))
    decision = found.decide(SITES)
    assert decision is not None
    assert (decision.schedule.every, decision.schedule.up) == (Auto().every // 2, usual.up)
    assert decision.why.startswith(
        "the sites contradict each other, 46 % of the signs that two of them sent are the same"
    )
    found.compare(Signs(1000, 700))
    assert found.decide(SITES) is None, "54 %: it does not swing"
    back = controller()
    back.load(found.state())
    for one in (found, back):
        one.compare(Signs(4000, 3000))
        decision = one.decide(SITES)
        assert decision is not None, "a restarted server goes on where it was"
        assert decision.schedule == usual
        assert "contradict" not in decision.why


def test_a_few_signs_and_none_say_nothing() -> None:
    found = controller()
    drive(found, 100e6, 0.02, 0.03)
    for signs in (Signs(0, 0), Signs(100, 0), Signs(0, 0), Signs(99, 0)):
        found.compare(signs)
        assert found.decide(SITES) is None
    found.compare(Signs(1, 0))
    assert found.decide(SITES) is not None


def test_sites_that_contradict_each_other_speak_no_more_often_than_their_link_carries() -> None:
    found = controller()
    found.compare(Signs(1000, 0))
    drive(found, 1e6, 0.02, 0.03)
    slow = controller()
    drive(slow, 1e6, 0.02, 0.03)
    assert found.now == slow.now


def test_what_comes_down_is_said() -> None:
    found = controller()
    drive(found, 100e6, 0.02, 0.03)
    assert found.now.to_dict()["down"] == found.now.down
    decision = found.decide(SITES, relayed=True)
    assert decision is not None, "another kind of result is a decision of its own"
    assert decision.to_dict()["down"] == "the others' pushes"
    other = controller()
    other.load(found.state())
    assert other.now == found.now
    assert found.decide(SITES, relayed=True) is None


def test_a_link_faster_than_the_codec() -> None:
    found = controller()
    why = drive(found, 200e9, 1e-5, 0.03)
    assert found.now.schedule.every == 1
    assert found.now.schedule.up == found.now.down == "fp32"
    assert "no compression: the link of east carries 200 Gbit/s, faster than the codec (24 Gbit/s)" in why[-1]


@pytest.mark.parametrize(("codec_bit_s", "up"), [(1e12, "sparse"), (1e10, "fp32")])
def test_a_link_is_fast_by_what_the_codec_does_here(codec_bit_s: float, up: str) -> None:
    found = controller()
    found.codec_bytes_s = codec_bit_s / 8
    drive(found, 200e9, 1e-5, 0.03)
    assert found.now.schedule.up == ("fp32" if up == "fp32" else Auto().usual.up)


@pytest.mark.parametrize(("bit_s", "delay"), [(1e6, 0.01), (20e6, 0.5), (2e6, 0.2)])
@pytest.mark.parametrize("known", [False, True])
def test_slow_links_get_sparser_or_fewer_rounds(bit_s: float, delay: float, known: bool) -> None:
    found = controller()
    drive(found, bit_s, delay, 0.03, trip=2 * delay if known else 0.0)
    schedule = found.now.schedule
    assert schedule.every > Auto().every or schedule.up != Auto().usual.up
    bits = NUMEL * (found.encoding.up_bits + found.encoding.down_bits)
    assert bits / bit_s <= schedule.every * 0.03, "its bytes hide"
    assert 2 * delay <= 1.3 * schedule.overlap * 0.03, "and so does its result"


def test_a_long_link_gets_overlap_and_not_fewer_rounds() -> None:
    found = controller()
    drive(found, 100e6, 0.1, 0.03)
    assert (found.now.schedule.every, found.now.schedule.up) == (Auto().every, Auto().usual.up)
    assert 7 <= found.now.schedule.overlap <= Auto().reach


@pytest.mark.parametrize("trip", [0.0, 0.04])
def test_it_follows_a_link_that_slows_and_recovers_and_does_not_swing(trip: float) -> None:
    found = controller()
    drive(found, 100e6, 0.02, 0.03, trip=trip)
    before = found.now.schedule
    drive(found, 1e6, 0.02, 0.03, rounds=60, trip=trip)
    assert found.now.schedule != before
    settled = found.now.schedule
    assert drive(found, 1e6, 0.02, 0.03, rounds=30, trip=trip) == []
    assert found.now.schedule == settled
    drive(found, 100e6, 0.02, 0.03, rounds=120, trip=trip)
    assert (found.now.schedule.every, found.now.schedule.up) == (before.every, before.up)


@pytest.mark.parametrize("seconds", [0.5, 5.0, 500.0])
@pytest.mark.parametrize("before", [1, 2, 6])
def test_one_disturbed_round_does_not_starve_it(before: int, seconds: float) -> None:
    """As in a run of 24 steps where one late round left the global model where it was."""
    found = controller()
    drive(found, 100e6, 0.02, 0.03, rounds=before)
    for name in SITES:
        found.observe(name, Report(0.03), seconds, 60_000)
    found.decide(SITES)
    assert rate(found) >= Auto().usual.up_bits / 4 / 4
    drive(found, 100e6, 0.02, 0.03, rounds=4)
    assert (found.now.schedule.every, found.encoding) == (4, Auto().usual)


def test_it_slows_by_steps() -> None:
    found = controller()
    drive(found, 100e6, 0.02, 0.03)
    for _ in range(12):
        before = rate(found)
        drive(found, 1e5, 0.02, 0.03, rounds=1)
        assert rate(found) >= before / 4
    assert found.now.schedule.every > 4


def test_speed_and_delay_keep_their_proportion_while_sizes_stay_the_same() -> None:
    fit = LinkFit()
    for size in [100_000, *[40_000] * 20]:
        fit.add(size, 0.1 + size / 1e6)
    assert fit.line() == pytest.approx((0.1, 1e-6))
    for _ in range(9):
        fit.add(40_000, 1.4)
    assert fit.line() == pytest.approx((1.0, 1e-5))


# Bytes and seconds of a site's first rounds, 100 Mbit/s and 80 ms away: the larger one needed one round trip more,
# and a line through so similar sizes is far too steep.
SLOW_START = [(50_000, 0.3), (32_000, 0.16), (31_900, 0.15), (32_100, 0.155)]


def test_the_lines_own_round_trip_is_not_taken_for_the_time_of_bytes() -> None:
    known, unknown = LinkFit(), LinkFit()
    for size, seconds in SLOW_START:
        known.add(size, seconds, trip=0.08)
        unknown.add(size, seconds)
    delay, slope = known.line()
    assert delay >= 0.08
    assert 32_000 * slope <= 0.15 - 0.08 + 0.01
    assert 32_000 * unknown.line()[1] >= 0.15, "else the trip would not be needed"


def test_a_first_impression_does_not_halve_the_share() -> None:
    known, unknown = controller(), controller()
    for size, seconds in SLOW_START:
        for one, trip in ((known, 0.08), (unknown, 0.0)):
            for name in SITES:
                one.observe(name, Report(0.042, trip_seconds=trip), seconds, size)
            one.decide(SITES)
    assert known.encoding == Auto().usual
    assert unknown.encoding.up_bits < Auto().usual.up_bits, "else the trip would not be needed"


def test_a_trip_longer_than_a_round_is_possible_and_leaves_nothing_for_the_bytes() -> None:
    fit = LinkFit()
    fit.add(50_000, 0.1, trip=0.2)
    fit.add(20_000, 0.09, trip=0.2)
    assert fit.line() == (0.2, 0.0)


def test_the_slowest_site_sets_the_step() -> None:
    found = controller()
    for name, step in (("east", 0.01), ("west", 0.3)):
        found.observe(name, Report(step), 0.5, 100_000)
    found.decide(SITES)
    assert found.now.schedule.overlap <= 3, "half a second is two steps of the slow one"


@pytest.mark.parametrize("budget", ["20 GB/day", "5 GB/day", "100 MB/h", "1 GB/day"])
def test_a_budget_is_kept(budget: str) -> None:
    """The densest and most frequent of the schedules that keep it; over lines that would carry far more."""
    free, thrifty = controller(), Controller(Auto(budget=budget), NUMEL)
    drive(free, 1e9, 0.02, 0.03)
    why = drive(thrifty, 1e9, 0.02, 0.03)

    def spent(of: Controller) -> float:
        bits = of.encoding.up_bits + of.encoding.down_bits
        return len(SITES) * NUMEL * bits / 8 / (0.03 * of.now.schedule.every)

    assert spent(thrifty) <= bytes_s(budget) < spent(free)
    assert budget in why[-1]
    assert "more than that" not in why[-1]


def test_a_budget_that_cannot_be_kept_is_said() -> None:
    found = Controller(Auto(budget="1 kB/day"), NUMEL)
    assert "the least of the schedules" in drive(found, 1e9, 0.02, 0.03)[-1]
    assert found.now.schedule.every == Auto().at_most


@pytest.mark.parametrize("budget", ["5 GB", "0 B/day", "5 apples/day", "-1 GB/day", "1 GB/fortnight"])
def test_what_is_no_budget(budget: str) -> None:
    with pytest.raises(StrategyError, match="budget"):
        Auto(budget=budget)


def test_state_survives() -> None:
    found = controller()
    drive(found, 3e6, 0.05, 0.03, trip=0.07)
    again = controller()
    again.load(found.state())
    assert again.now == found.now
    assert again.measured.steps == found.measured.steps
    assert again.measured.lines(SITES) == found.measured.lines(SITES)


@settings(max_examples=60)
@given(st.floats(0, 2), st.floats(1e-10, 1e-5), st.lists(st.integers(100, 10**7), min_size=2, max_size=30, unique=True))
def test_the_fit_finds_delay_and_speed(delay: float, slope: float, sizes: list[int]) -> None:
    sizes = sizes[:9]
    assume(max(sizes) > 1.2 * min(sizes))
    fit = LinkFit()
    for size in sizes:
        fit.add(size, delay + slope * size)
    found = fit.line()
    for size in sizes:
        assert found[0] + found[1] * size == pytest.approx(delay + slope * size, rel=1e-3, abs=1e-6)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e6)), max_size=20))
def test_no_measurement_breaks_it(found: list[tuple[float, float]]) -> None:
    one = controller()
    for step, network in found:
        for name in SITES:
            one.observe(name, Report(step), network, 1000)
        decision = one.decide(SITES)
        if decision is not None:
            assert 0 <= decision.schedule.overlap <= max(Auto().reach, decision.schedule.every)


def test_stopwatch_counts_steps_and_not_waiting() -> None:
    watch = StepTimer()
    watch.begins(0.0)
    watch.ends(1.0)
    watch.begins(5.0)
    watch.ends(6.0)
    watch.result_received(3, 0.5)
    report = watch.report()
    assert (report.step_seconds, report.round, report.round_seconds) == (1.0, 3, 0.5)
    assert watch.report().round == 0, "reported once"


def test_schedule_as_a_tensor() -> None:
    schedule = SyncSchedule(8, 2, "ef(topk(0.02) > sign())")
    assert schedule_from_tensor(schedule_to_tensor(schedule)) == schedule
    assert schedule_to_tensor(schedule).dtype == torch.uint8


@pytest.mark.parametrize(("every", "overlap", "up"), [(0, 0, "fp32"), (1, -1, "fp32"), (1, 0, "nope"), (1, 0, "")])
def test_bad_schedules(every: int, overlap: int, up: str) -> None:
    with pytest.raises(ProtocolError, match="schedule"):
        SyncSchedule(every, overlap, up)


def test_a_strategy_needs_both() -> None:
    with pytest.raises(StrategyError, match="a controller and scheduled go together"):
        strategies.find("auto", {"trigger": "every(4)"})
    with pytest.raises(StrategyError, match="needs shares"):
        strategies.find("baseline", {"controller": "auto()", "trigger": "scheduled(8)"})


# -- lines without distance -------------------------------------------------------------------------


def drive_near(found: Controller, trip: float, round_s: float, step: float, rounds: int) -> None:
    """Rounds of a fixed length over lines of that round trip."""
    for _ in range(rounds):
        nbytes = int(found._nbytes(found.encoding))
        for name in ("east", "west"):
            found.observe(name, Report(step, trip_seconds=trip), round_s, nbytes)
        found.decide(["east", "west"])


def test_lines_without_distance_carry_everything_from_the_second_round_on() -> None:
    found = Auto().controller(100_000)
    for name in ("east", "west"):
        found.observe(name, Report(0.001, trip_seconds=5e-5), None, 0)
    decision = found.decide(["east", "west"])
    assert decision is not None
    assert (decision.schedule.every, decision.schedule.overlap, decision.schedule.up) == (1, 0, "fp32")
    assert decision.down == "fp32"
    drive_near(found, 5e-5, 0.015, 0.001, 100)
    assert found.now.schedule == decision.schedule, "a short run waits, however short its steps"


def test_a_long_run_waits_for_half_of_its_time_at_most() -> None:
    found = Auto().controller(100_000)
    drive_near(found, 5e-5, 0.015, 0.001, 2000)
    schedule = found.now.schedule
    assert (schedule.every, schedule.overlap, schedule.up) == (16, 0, "fp32")
    drive_near(found, 5e-5, 0.011, 0.001, 50)
    assert found.now.schedule == schedule, "it does not swing"
    again = Auto().controller(100_000)
    again.load(found.state())
    assert again.measured.waited == found.measured.waited
    assert again.measured.trips == found.measured.trips


def test_one_far_site_is_enough_for_the_usual_schedules() -> None:
    found = Auto().controller(100_000)
    drive_near(found, 5e-5, 0.015, 0.03, 5)
    assert found.encoding.exact
    for _ in range(40):
        for name, trip in (("east", 5e-5), ("west", 0.08)):
            found.observe(name, Report(0.03, trip_seconds=trip), trip + 0.02, int(found._nbytes(found.encoding)))
        found.decide(["east", "west"])
    assert not found.encoding.exact


def test_a_tunnel_is_no_near_line() -> None:
    """Its connection ends on the site's machine and has no round trip; its rounds have that of the real line."""
    found = Auto().controller(10_000)
    drive_near(found, 5e-5, 0.2, 0.1, 98)
    assert "no distance" in found.now.why, "a busy machine has slow rounds, too, and a short run must not pay for them"
    drive_near(found, 5e-5, 0.2, 0.1, 4)
    assert "no distance" not in found.now.why


def test_a_large_model_is_tried_on_a_near_line_in_parts_and_a_thin_one_is_noticed() -> None:
    numel, slope = 100_000_000, 8 / 100e6
    found = Auto().controller(numel)
    bits = []
    for _ in range(12):
        nbytes = int(found._nbytes(found.encoding))
        for name in ("east", "west"):
            found.observe(name, Report(0.1, trip_seconds=1e-3), 1e-3 + slope * nbytes, nbytes)
        found.decide(["east", "west"])
        bits.append(found.encoding.up_bits)
    assert max(bits) < sparse_bits(0.5), "all of it would take 16 s"
    assert found.now.schedule.up.startswith("ef(topk(")


def test_a_budget_holds_on_near_lines_too() -> None:
    found = Auto(budget="1 GB/day").controller(100_000)
    drive_near(found, 5e-5, 0.015, 0.03, 20)
    assert not found.encoding.exact


# -- where entries all move alike -------------------------------------------------------------------

ADAM = find("auto").with_optimizer("adamw", near=False).auto


@pytest.mark.parametrize(
    ("bit_s", "every", "density"),
    [(100e6, 10, 0.1), (4e6, 10, 0.1), (2e6, 10, 0.025), (1e6, 10, 0.0125), (0.1e6, 40, 0.0125)],
)
def test_a_line_carries_what_hides(bit_s: float, every: int, density: float) -> None:
    assert isinstance(ADAM, Auto)
    found = ADAM.controller(NUMEL)
    drive(found, bit_s, 0.02, 0.1, rounds=ADAM.young_rounds + 12)
    assert (found.now.schedule.every, found.encoding) == (every, sparse(density, "codebook(bits=2)"))


def test_a_budget_makes_pushes_sparser() -> None:
    assert isinstance(ADAM, Auto)
    found = dataclasses.replace(ADAM, budget="5 GB/day").controller(NUMEL)
    drive(found, 100e6, 0.02, 0.1)
    spent = len(SITES) * found._nbytes(found.encoding) / (found.now.schedule.every * 0.1)
    assert spent <= bytes_s("5 GB/day")
    assert found.encoding.up_bits < ADAM.usual.up_bits / 4


# -- sites that agree -----------------------------------------------------------------------------


def test_pushes_are_denser_while_the_sites_agree() -> None:
    found = controller()
    drive(found, 100e6, 0.02, 0.03)
    usual = found.now.schedule
    found.compare(Signs(1000, 850))
    assert found.decide(SITES) is None, "that much agreement is not enough"
    found.compare(Signs(1000, 970))
    decision = found.decide(SITES)
    assert decision is not None
    assert (decision.schedule.every, found.encoding) == (usual.every, sparse(Auto().alike, Auto().values))
    assert decision.why.startswith("the sites agree on 91 % of the signs that two of them sent: denser")
    found.compare(Signs(1000, 700))
    assert found.decide(SITES) is None, "84 %: it does not swing"
    back = controller()
    back.load(found.state())
    for one in (found, back):
        one.compare(Signs(4000, 2000))
        decision = one.decide(SITES)
        assert decision is not None, "a restarted server goes on where it was"
        assert decision.schedule.up == usual.up


def test_agreement_sends_no_more_than_the_link_carries() -> None:
    found = controller()
    found.compare(Signs(1000, 1000))
    drive(found, 1e6, 0.02, 0.03)
    slow = controller()
    drive(slow, 1e6, 0.02, 0.03)
    assert found.encoding == slow.encoding


def test_a_young_run_sends_more_until_an_entry_waits_for_a_small_part_of_it() -> None:
    auto = dataclasses.replace(Auto(), every=10, density=0.1, lag=0.25)
    found = Controller(auto, NUMEL)
    densities, reasons = [], []
    for _ in range(auto.young_rounds + 5):
        reasons += drive(found, 1e9, 0.02, 0.5, rounds=1)
        densities.append(found.encoding.up_bits)
        back = Controller(auto, NUMEL)
        back.load(found.state())
        assert back.rounds == found.rounds, "a restarted server knows how old the run is"
    steps = [sparse(density, auto.values).up_bits for density in (0.4, 0.2, 0.1)]
    assert densities[4] == steps[0]
    assert densities[2:] == sorted(densities[2:], reverse=True), "it only ever gets sparser"
    assert set(densities[2:]) == set(steps)
    assert densities[auto.young_rounds :] == [steps[-1]] * 5
    assert sum(why.startswith("the run is young, with ") for why in reasons) == 2, reasons


def test_a_young_run_sends_no_more_than_its_lines_carry() -> None:
    young, usual = (Controller(dataclasses.replace(Auto(), every=10, lag=lag), NUMEL) for lag in (0.25, 0.0))
    for found in (young, usual):
        drive(found, 0.3e6, 0.02, 0.1, rounds=8)
    assert young.now.schedule == usual.now.schedule


@given(
    density=st.floats(1e-4, 0.5),
    lag=st.floats(0.01, 1),
    rounds=st.integers(0, 10**6),
)
def test_the_early_density_leaves_no_entry_waiting_for_longer_than_lag(density: float, lag: float, rounds: int) -> None:
    auto = Auto(density=density, lag=lag, least=1e-6, alike=0)
    early = auto.early_density(rounds)
    assert auto.density <= early <= 0.5
    assert early == auto.density or early * lag * max(1, rounds) <= 1
    assert 2 * early > 0.5 or 2 * early * lag * max(1, rounds) > 1, "it is the densest of those"
    if rounds > auto.young_rounds:
        assert early == auto.density
