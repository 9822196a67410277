"""WAN links: sharing, delay, traces, faults."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightgrad.lab.sim.links import CONNECTIONS, MSS_BYTES, Link, Links
from weightgrad.lab.sim.network import Clock

MB = 8e6  # bit/s of a megabyte a second


class Net:
    """Links on a clock, as the simulator drives them."""

    def __init__(self, *links: Link, card: float | None = None, windows: bool = False) -> None:
        self.links = Links("hub", list(links), card, windows=windows)
        self.clock = Clock()
        self.arrived: dict[str, float] = {}
        self.order: list[str] = []

    def send(self, at: float, name: str, sender: str, receiver: str, nbytes: int) -> None:
        def put() -> None:
            self.links.send(self.clock.now, sender, receiver, nbytes, lambda: self._arrive(name))
            self._plan()

        self.clock.at(at, put)

    def _arrive(self, name: str) -> None:
        self.arrived[name] = self.clock.now
        self.order.append(name)

    def fault(self, at: float, place: int, factor: float, cause: object = None) -> None:
        def strike() -> None:
            self.links.scale(self.clock.now, place, factor, cause)
            self._plan()

        self.clock.at(at, strike)

    def drop(self, at: float, end: str) -> None:
        def strike() -> None:
            self.links.drop(self.clock.now, end)
            self._plan()

        self.clock.at(at, strike)

    def _plan(self) -> None:
        due = self.links.next_event(self.clock.now)
        if due < math.inf:
            self.clock.at(due, self._run)

    def _run(self) -> None:
        for delay, arrive in self.links.run(self.clock.now):
            self.clock.after(delay, arrive)
        self._plan()

    def go(self) -> dict[str, float]:
        while self.clock.step():
            pass
        return self.arrived


def link(site: str = "a", rate: float = MB, delay: float = 0.0, **more: object) -> Link:
    return Link(("hub", site), rate, delay, **more)  # type: ignore[arg-type]


def test_a_message_takes_its_bytes_and_the_delay() -> None:
    net = Net(link(delay=0.25))
    net.send(1.0, "x", "a", "hub", 2_000_000)
    assert net.go()["x"] == pytest.approx(3.25)
    assert net.links.bytes == [[2_000_000, 0]]


def test_directions_do_not_disturb_each_other() -> None:
    net = Net(link())
    net.send(0.0, "up", "a", "hub", 1_000_000)
    net.send(0.0, "down", "hub", "a", 1_000_000)
    assert net.go() == pytest.approx({"up": 1.0, "down": 1.0})
    assert net.links.bytes == [[1_000_000, 1_000_000]]


def test_flows_of_one_direction_share_fairly() -> None:
    net = Net(link())
    net.send(0.0, "first", "a", "hub", 1_000_000)
    net.send(0.5, "second", "a", "hub", 1_000_000)
    # alone half a second, then half of the rate each
    assert net.go() == pytest.approx({"first": 1.5, "second": 2.0})


def test_messages_arrive_in_the_order_in_which_they_were_sent() -> None:
    net = Net(link(delay=0.1), link("b"))
    net.send(0.0, "large", "a", "hub", 1_000_000)
    net.send(0.1, "small", "a", "hub", 1000)
    net.send(0.1, "elsewhere", "b", "hub", 1000)
    net.send(0.1, "back", "hub", "a", 1000)
    found = net.go()
    assert found["small"] == pytest.approx(found["large"]) == pytest.approx(1.101)
    assert net.order == ["elsewhere", "back", "large", "small"]


def test_the_servers_card_is_shared_max_min() -> None:
    net = Net(link("a", MB), link("b", 10 * MB), link("c", 10 * MB), card=5 * MB)
    for site, size in (("a", 1_000_000), ("b", 2_000_000), ("c", 2_000_000)):
        net.send(0.0, site, site, "hub", size)
    # a has its own 1 MB/s; b and c share the other 4
    assert net.go() == pytest.approx({"a": 1.0, "b": 1.0, "c": 1.0})


def test_what_a_finished_flow_leaves_goes_to_the_others() -> None:
    net = Net(link("a", 10 * MB), link("b", 10 * MB), card=2 * MB)
    net.send(0.0, "a", "a", "hub", 1_000_000)
    net.send(0.0, "b", "b", "hub", 3_000_000)
    assert net.go() == pytest.approx({"a": 1.0, "b": 2.0})


def test_a_trace_changes_the_rate_under_a_flow() -> None:
    net = Net(link(rate=MB, trace=((0.0, 2 * MB), (1.0, MB / 2))))
    net.send(0.0, "x", "a", "hub", 3_000_000)
    assert net.go()["x"] == pytest.approx(3.0)  # 2 MB in the first second, then half a MB a second


def test_a_cut_stalls_and_no_byte_is_lost() -> None:
    net = Net(link())
    net.send(0.0, "x", "a", "hub", 2_000_000)
    net.fault(0.5, 0, 0.0)
    net.send(1.0, "y", "a", "hub", 500_000)
    net.fault(10.0, 0, 1.0)
    assert net.go() == pytest.approx({"x": 12.0, "y": 12.0})  # y was through at 11, behind x
    assert net.links.bytes == [[2_500_000, 0]]


def test_slowness_is_a_share_and_faults_do_not_heal_each_other() -> None:
    net = Net(link())
    net.send(0.0, "x", "a", "hub", 2_000_000)
    net.fault(0.0, 0, 0.5, "slow")
    net.fault(1.0, 0, 0.0, "cut")
    net.fault(2.0, 0, 1.0, "cut")
    assert net.go()["x"] == pytest.approx(5.0)  # half a MB, a second of nothing, then half of the rate still


def test_dropped_messages_never_arrive_and_are_counted_as_far_as_they_got() -> None:
    net = Net(link(), link("b"))
    net.send(0.0, "up", "a", "hub", 1_000_000)
    net.send(0.0, "down", "hub", "a", 1_000_000)
    net.send(0.0, "other", "b", "hub", 1_000_000)
    net.drop(0.25, "a")
    net.send(0.5, "later", "a", "hub", 1_000_000)
    assert net.go() == pytest.approx({"other": 1.0, "later": 1.5})
    assert net.links.bytes[0] == [1_250_000, 250_000]
    assert net.links.bytes[1] == [1_000_000, 0]


def test_loss_caps_the_rate_as_mathis_says() -> None:
    lossy = link(rate=1e12, delay=0.05, loss=0.01)
    expected = CONNECTIONS * MSS_BYTES / 0.1 * math.sqrt(1.5 / 0.01) * 0.99
    assert lossy.rate_bytes(0.0) == pytest.approx(expected)
    assert link(rate=MB, delay=0.0001, loss=0.01).rate_bytes(0.0) == pytest.approx(0.99e6)
    assert link(rate=MB, delay=0.05).rate_bytes(0.0) == 1e6


def test_a_link_is_found_by_its_ends_in_any_order() -> None:
    net = Net(link(), link("b", delay=0.5))
    assert net.links.place("b", "hub") == net.links.place("hub", "b") == 1
    assert net.links.delay("b") == 0.5
    with pytest.raises(KeyError):
        net.links.place("a", "b")


sends = st.lists(
    st.tuples(st.floats(0, 5), st.sampled_from("abc"), st.booleans(), st.integers(1, 2_000_000)),
    min_size=1,
    max_size=12,
)
faults = st.lists(st.tuples(st.floats(0, 5), st.integers(0, 2), st.sampled_from([0.0, 0.1, 0.5])), max_size=4)


@settings(max_examples=60)
@given(sends=sends, faults=faults, card=st.sampled_from([None, MB, 3 * MB]))
def test_nothing_is_faster_than_the_links_and_everything_arrives(
    sends: list[tuple[float, str, bool, int]], faults: list[tuple[float, int, float]], card: float | None
) -> None:
    rates = {"a": MB, "b": 2 * MB, "c": 4 * MB}
    net = Net(*(link(site, rate) for site, rate in rates.items()), card=card)
    for number, (at, site, upward, size) in enumerate(sends):
        net.send(at, str(number), site if upward else "hub", "hub" if upward else site, size)
    for number, (at, place, factor) in enumerate(faults):
        net.fault(at, place, factor, number)
        net.fault(at + 2.0, place, 1.0, number)
    samples: list[tuple[float, dict[tuple[int, bool], float]]] = []
    while net.clock.step():
        left: dict[tuple[int, bool], float] = {}
        net.links._advance(net.clock.now)
        for flow in net.links._flows:
            direction = (flow.link, flow.upward)
            left[direction] = left.get(direction, 0.0) + flow.rate
        samples.append((net.clock.now, left))
    assert sorted(net.arrived) == sorted(str(i) for i in range(len(sends)))
    for (start, rate), (stop, _) in pairwise(samples):
        if stop == start:
            continue
        for (place, _), total in rate.items():
            assert total <= list(rates.values())[place] / 8 * (1 + 1e-9)
        for upward in (True, False):
            used = sum(total for (_, up), total in rate.items() if up == upward)
            assert card is None or used <= card / 8 * (1 + 1e-9)
    for upward in (True, False):
        for site, rate_bits in rates.items():
            mine = [(at, str(i)) for i, (at, s, up, _) in enumerate(sends) if s == site and up == upward]
            size = sum(n for _, s, up, n in sends if s == site and up == upward)
            if mine:
                took = max(net.arrived[name] for _, name in mine) - min(at for at, _ in mine)
                assert took >= size * 8 / rate_bits * (1 - 1e-9)
                order = [name for name in net.order if name in {n for _, n in mine}]
                assert order == [name for _, name in sorted(mine, key=lambda one: (one[0], int(one[1])))]
    assert sum(sum(both) for both in net.links.bytes) == sum(size for *_, size in sends)


# -- slow start ---------------------------------------------------------------------------------

FIRST = 4 * 14_480  # of the connections that a message is dealt among


def took(nbytes: int, at: tuple[float, ...] = (0.0,), rtt: float = 0.2, rate: float = 100 * MB) -> list[float]:
    """Seconds each message needs, sent at these times over a fast and long link."""
    net = Net(Link(("hub", "a"), rate, rtt / 2), windows=True)
    for number, when in enumerate(at):
        net.send(when, str(number), "a", "hub", nbytes)
    net.go()
    return [net.arrived[str(number)] - when for number, when in enumerate(at)]


def test_what_fits_the_first_window_starts_at_once() -> None:
    assert took(FIRST)[0] == pytest.approx(0.1 + FIRST / 100e6)


@pytest.mark.parametrize(("windows", "trips"), [(2, 1), (3, 1), (4, 2), (7, 2), (8, 3)])
def test_the_window_doubles_every_round_trip(windows: int, trips: int) -> None:
    """1 + 2 + 4 windows in three round trips."""
    rest = windows - (2**trips - 1)
    assert took(windows * FIRST)[0] == pytest.approx(trips * 0.2 + 0.1 + rest * FIRST / 100e6, rel=1e-6)


def test_a_message_is_dealt_among_connections_unless_it_is_short() -> None:
    short, all_four = 8 << 10, 40_000
    assert took(short)[0] == pytest.approx(0.1 + short / 100e6)  # one connection, one window
    assert took(all_four)[0] == pytest.approx(0.1 + all_four / 100e6)  # more than the window of one


def test_a_link_in_use_stays_open_and_an_idle_one_closes() -> None:
    first, soon, late = took(10 * FIRST, (0.0, 1.0, 60.0))
    assert soon < first
    assert late == pytest.approx(first)


@pytest.mark.parametrize(("pause", "windows"), [(0.3, 8), (0.6, 4), (1.2, 2), (9.0, 1)])
def test_silence_halves_the_window_for_every_time_out(pause: float, windows: int) -> None:
    """Seven windows leave it at eight; a time-out is a round trip and, after three of them, 0.28 s."""
    net = Net(Link(("hub", "a"), 100 * MB, 0.1), windows=True)
    net.send(0.0, "one", "a", "hub", 7 * FIRST)
    net.go()
    begins = net.arrived["one"] - 0.1 + pause
    net.send(begins, "two", "a", "hub", 8 * FIRST)
    net.go()
    trips = {8: 0, 4: 1, 2: 2, 1: 3}[windows]
    assert net.arrived["two"] - begins == pytest.approx(0.1 + 0.2 * trips, abs=0.01)


def test_who_acknowledges_has_spoken() -> None:
    """A message the other way arrives in the middle of the pause."""
    net = Net(Link(("hub", "a"), 100 * MB, 0.1), windows=True)
    net.send(0.0, "one", "a", "hub", 7 * FIRST)
    net.go()
    ended = net.arrived["one"] - 0.1
    net.send(ended + 0.2, "back", "hub", "a", 100)
    net.go()
    net.send(ended + 0.6, "two", "a", "hub", 8 * FIRST)
    net.go()
    assert net.arrived["two"] - ended - 0.6 == pytest.approx(0.1, abs=0.01)


def test_a_large_message_ends_at_full_speed() -> None:
    whole = took(400_000_000, rtt=0.02)[0]
    assert whole == pytest.approx(4.0, rel=0.05)


def test_a_cut_in_the_middle_of_a_slow_start() -> None:
    net = Net(Link(("hub", "a"), 100 * MB, 0.1), windows=True)
    net.send(0.0, "one", "a", "hub", 20 * FIRST)
    net.fault(0.3, 0, 0.0)
    net.fault(2.3, 0, 1.0)
    net.go()
    assert 2.3 < net.arrived["one"] < 4.0


def test_the_clock_moves_however_little_a_window_has_left() -> None:
    """Late in a run a few millionths of a byte take less time than a float of it can tell."""
    net = Links("hub", [link(rate=1000 * MB, delay=0.1)], None)
    now = 1e5
    net.send(now, "a", "hub", 10**9, lambda: None)
    window = net._windows[0, True]
    window.left = 2e-6
    assert now + window.left / (1000 * MB / 8) == now
    due = net.next_event(now)
    assert due > now
    net.run(due)
    assert window.is_used_up


@given(st.floats(0, 1e8), st.floats(1e6, 1e10), st.floats(1e-3, 0.5), st.integers(1, 10**8))
def test_a_message_arrives_after_a_few_events_whenever_it_is_sent(at: float, rate: float, delay: float, n: int) -> None:
    net = Net(link(rate=rate, delay=delay), windows=True)
    net.send(at, "one", "a", "hub", n)
    for _ in range(200):
        if not net.clock.step():
            break
    assert "one" in net.arrived
