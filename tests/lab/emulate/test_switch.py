"""The switch without its sockets: what comes in goes out in order, when it is due, or is counted as lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightgrad.lab.emulate.switch import Direction, Lateness, Schedule

THERE, BACK = (0, 1), (1, 0)
seconds = st.floats(0.0, 0.5)


@given(st.lists(st.tuples(st.floats(0.0, 0.02), st.sampled_from([THERE, BACK])), max_size=60), seconds, st.data())
def test_in_order_and_never_too_early(
    arrivals: list[tuple[float, tuple[int, int]]], delay: float, data: st.DataObject
) -> None:
    jitter = data.draw(st.floats(0.0, delay))
    schedule = Schedule({THERE: Direction(delay, jitter), BACK: Direction(delay / 2)}, random.Random(1))
    now, sent, came = 0.0, [], []
    for number, (pause, pair) in enumerate(arrivals):
        now += pause
        came += [(now, *one) for one in schedule.take(now)]
        schedule.accept(now, pair, bytes([number]))
        sent.append((pair[1], now, bytes([number])))
    while (due := schedule.next_due()) is not None:
        came += [(due, *one) for one in schedule.take(due)]
    for port, direction in ((1, schedule.directions[THERE]), (0, schedule.directions[BACK])):
        mine = [one for one in sent if one[0] == port]
        got = [(left, due, packet) for left, to, due, packet in came if to == port]
        assert [packet for _, _, packet in got] == [packet for _, _, packet in mine]
        last = 0.0
        for (_, arrived, _), (left, due, _) in zip(mine, got, strict=True):
            assert left >= due >= last
            assert due >= arrived + direction.delay - direction.jitter - 1e-9
            assert due <= max(arrived + direction.delay + direction.jitter, last) + 1e-9
            last = due
        assert (direction.packets, direction.bytes, direction.lost) == (len(mine), len(mine), 0)


def test_a_shorter_delay_does_not_overtake() -> None:
    schedule = Schedule({THERE: Direction(0.1)})
    schedule.accept(0.0, THERE, b"first")
    schedule.set(THERE, {"delay": 0.01})
    schedule.accept(0.0, THERE, b"second")
    assert schedule.take(0.05) == []
    assert [packet for _, _, packet in schedule.take(0.1)] == [b"first", b"second"]
    schedule.accept(0.2, THERE, b"third")
    assert schedule.next_due() == pytest.approx(0.21)


def test_a_cut_drops_what_is_on_its_way_and_what_comes() -> None:
    schedule = Schedule({THERE: Direction(0.1), BACK: Direction(0.1)})
    schedule.accept(0.0, THERE, b"a")
    schedule.accept(0.0, BACK, b"b")
    schedule.set(THERE, {"cut": True})
    schedule.accept(0.1, THERE, b"c")
    assert schedule.take(1.0) == [(0, 0.1, b"b")]
    assert schedule.directions[THERE].lost == 2
    schedule.set(THERE, {"cut": False})
    schedule.accept(2.0, THERE, b"d")
    assert [packet for _, _, packet in schedule.take(2.1)] == [b"d"]


def test_loss_is_the_share_that_was_asked_for() -> None:
    schedule = Schedule({THERE: Direction(0.0, loss=0.2)}, random.Random(7))
    for _ in range(5000):
        schedule.accept(0.0, THERE, b"x")
    direction = schedule.directions[THERE]
    assert len(schedule.take(0.0)) + direction.lost == 5000
    assert 850 < direction.lost < 1150


def test_hosts_without_a_link_have_no_lane() -> None:
    schedule = Schedule({THERE: Direction(0.0)})
    schedule.accept(0.0, (0, 2), b"x")
    assert schedule.take(1.0) == []
    assert schedule.next_due() is None


@given(st.lists(st.floats(-1e-4, 0.6), min_size=1, max_size=200), st.integers(1, 100))
def test_lateness_is_a_quantile_within_a_bin(late: list[float], percent: int) -> None:
    lateness = Lateness()
    for one in late:
        lateness.note(one)
    exact = sorted(late)[-(-percent * len(late) // 100) - 1]
    assert lateness.worst == max(0.0, *late)
    assert lateness.quantile(percent / 100) == pytest.approx(max(exact, 0.0), abs=1.1e-5)
    lateness.clear()
    assert lateness.summary() == {"packets": 0, "p50": 0.0, "p99": 0.0, "worst": 0.0}
