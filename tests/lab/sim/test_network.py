"""Virtual time."""

from __future__ import annotations

from weightgrad.lab.sim.network import Clock


def test_events_come_in_order_of_time_and_then_of_entry() -> None:
    clock, seen = Clock(), []
    for name, time in (("c", 2.0), ("a", 1.0), ("b", 1.0), ("d", 2.0)):
        clock.at(time, lambda name=name: seen.append((name, clock.now)))  # type: ignore[misc]
    while clock.step():
        pass
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 2.0)]


def test_time_never_goes_back() -> None:
    clock, seen = Clock(), []
    clock.at(5.0, lambda: clock.at(1.0, lambda: seen.append(clock.now)))
    while clock.step():
        pass
    assert seen == [5.0]


def test_after_counts_from_now() -> None:
    clock, seen = Clock(), []
    clock.at(2.0, lambda: clock.after(0.5, lambda: seen.append(clock.now)))
    while clock.step():
        pass
    assert seen == [2.5]
    assert not clock.step()
    assert clock.now == 2.5
