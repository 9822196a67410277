"""The self-check's arithmetic; that it measures what is there is in test_links.py."""

from __future__ import annotations

import pytest

from weightgrad.errors import WeightGradError
from weightgrad.lab.emulate import LinkCheck, Verdict, WanLink
from weightgrad.lab.emulate.check import Flood, _groups, steady_bit_s
from weightgrad.lab.emulate.stats import Lateness, PairStats, WanStats

from .networks import pair


def test_the_steady_part_is_what_counts() -> None:
    rate = 1_000_000 * 1448 // 1514  # stream bytes a second
    slow_start = [(0.01 * i, 1000 * i) for i in range(50)]
    steady = [(0.5 + 0.01 * i, 50_000 + int(0.01 * i * rate)) for i in range(101)]
    draining = [(1.5 + 0.01 * i, steady[-1][1] + 10 * i) for i in range(1, 100)]
    assert steady_bit_s(slow_start + steady + draining, 0.5, 1.5) == pytest.approx(8e6, rel=0.01)
    assert steady_bit_s([], 0.0, 1.0) == 0.0
    assert steady_bit_s([(1.0, 5)], 0.0, 1.0) == 0.0


def test_bounds() -> None:
    good = LinkCheck("a", "b", 100e6, 98e6, 0.08, 0.0812)
    assert good.ok
    assert str(good) == "a → b: 98 Mbit/s of 100 Mbit/s (-2.0 %), round trip 81.2 ms of 80 ms: ok"
    assert not LinkCheck("a", "b", 100e6, 94e6, 0.08, 0.08).ok
    assert not LinkCheck("a", "b", 100e6, 106e6, 0.08, 0.08).ok
    assert not LinkCheck("a", "b", 100e6, 100e6, 0.08, 0.083).ok
    assert LinkCheck("a", "b", 100e6, 100e6, 0.08, 0.083, 0.002).ok  # jitter
    assert str(LinkCheck("a", "b", 100e6, 0.0, 0.0, 0.0)).endswith(": WRONG")


@pytest.mark.parametrize(("rate", "delay"), [(1e6, 0.001), (20e6, 0.22), (300e6, 0.1), (1e9, 0.005)])
def test_a_flood_fills_the_line_and_not_the_queue(rate: float, delay: float) -> None:
    link = WanLink(("a", "b"), rate, delay)
    flood = Flood.of(link, "a")
    line = flood.connections * flood.window_bytes * 1514 / 1448
    assert 1.02 * rate / 8 * 2 * delay < line < rate / 8 * 2 * delay + 0.9 * link.queue_bytes("a")
    assert 0.6 <= flood.steady_seconds < flood.seconds < 4.5
    assert flood.window_bytes <= 1 << 20


def test_no_more_than_400_mbit_at_a_time_and_no_link_both_ways() -> None:
    links = [WanLink(("hub", name), rate, 0.01) for name, rate in (("a", 300e6), ("b", 90e6), ("c", 90e6), ("d", 1e9))]
    groups = list(_groups(links))
    assert sorted((a, b) for group in groups for a, b, _ in group) == sorted(
        ends for link in links for ends in (link.between, link.between[::-1])
    )
    for group in groups:
        assert len({id(link) for _, _, link in group}) == len(group)
        assert len(group) == 1 or sum(link.rate_bit_s(a) for a, _, link in group) <= 400e6


def test_a_cut_link_is_found_wrong_and_the_verdict_says_so() -> None:
    with pair("modelled") as wan:
        assert wan.verdict().trusted  # nothing has happened yet
        wan._checked = (LinkCheck("hub", "east", 50e6, 0.0, 0.01, 0.0),)
        assert str(wan.verdict()).startswith("NOT to be trusted: before the run, hub → east: 0 bit/s of 50 Mbit/s")


def test_the_verdict_is_about_lateness_and_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair("modelled") as wan:
        pairs = {("hub", "east"): PairStats(1, 1, 0, 0)}
        for stats, said in (
            (
                WanStats(pairs, Lateness(1000, 1e-4, 1e-3, 2e-3)),
                "trusted: late by p50 100 µs, p99 1 ms, worst 2 ms of 1000",
            ),
            (WanStats(pairs, Lateness(1000, 1e-4, 0.02, 0.1)), "NOT to be trusted: too late, bound 8 ms: p50"),
            (
                WanStats(pairs, Lateness(1000, 1e-4, 1e-4, 1e-4), errors=3),
                "NOT to be trusted: the switch had to drop 3",
            ),
            (WanStats(pairs, None), "trusted: the kernel"),
        ):
            monkeypatch.setattr(wan, "stats", lambda stats=stats: stats)
            assert str(wan.verdict()).startswith(said)
    assert not issubclass(Verdict, WeightGradError)
