"""A link that is slower than the recipe says is reported once, and only if it was the bottleneck."""

from __future__ import annotations

import logging

import pytest

from weightgrad.runtime.site.link_monitor import LinkMonitor


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


def test_a_slow_link_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightgrad")
    watch = LinkMonitor("east", 100e6)
    for second in range(10):
        watch.sample(float(second), second * 1_000_000, waiting_bytes=20_000_000)  # 8 Mbit/s
    assert len(logged(caplog)) == 1
    assert "8 Mbit/s" in logged(caplog)[0]
    assert "100 Mbit/s" in logged(caplog)[0]
    for second in range(10, 20):
        watch.sample(float(second), 10_000_000 + (second - 9) * 12_000_000, waiting_bytes=20_000_000)
    assert "again" in logged(caplog)[1]


@pytest.mark.parametrize("promised", [None, 100e6])
def test_an_idle_link_is_not_reported(promised: float | None, caplog: pytest.LogCaptureFixture) -> None:
    watch = LinkMonitor("east", promised)
    for second in range(20):
        watch.sample(float(second), second * 100, waiting_bytes=1000 * (second % 2))
    assert not logged(caplog)


def test_small_messages_that_leave_at_once_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    watch = LinkMonitor("east", 20e6)
    for look in range(20):  # one of 4 kB is always on its way, and 50 kB leave between two looks
        watch.sample(2.0 * look, 50_000 * look, waiting_bytes=4_000)
    assert not logged(caplog)
