"""A line slower than the recipe says is told once, and only when it was really used."""

from __future__ import annotations

import logging

import pytest

from weightgrad.runtime.link_watch import LinkWatch


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


def test_a_slow_line_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightgrad")
    watch = LinkWatch("east", 100e6)
    for second in range(10):
        watch.sample(float(second), second * 1_000_000, busy=True)  # 8 Mbit/s
    assert len(told(caplog)) == 1
    assert "8 Mbit/s" in told(caplog)[0]
    assert "100 Mbit/s" in told(caplog)[0]
    for second in range(10, 20):
        watch.sample(float(second), 10_000_000 + (second - 9) * 12_000_000, busy=True)
    assert "again" in told(caplog)[1]


@pytest.mark.parametrize("promised", [None, 100e6])
def test_an_idle_line_tells_nothing(promised: float | None, caplog: pytest.LogCaptureFixture) -> None:
    watch = LinkWatch("east", promised)
    for second in range(20):
        watch.sample(float(second), second * 100, busy=bool(second % 2) or promised is None)
    assert not told(caplog)
