"""The stall rule: how long the server may be silent."""

from __future__ import annotations

from weightgrad.core.site.stall_rule import StallRule


def test_silence_counts_from_the_push_or_the_last_message() -> None:
    rule = StallRule(10.0, adapts=False)
    rule.message_received(5.0)
    assert not rule.stalls(owed_since=0.0, now=15.0)
    assert rule.stalls(owed_since=0.0, now=15.1)
    assert not rule.stalls(owed_since=8.0, now=15.1)


def test_without_t_a_site_never_stalls() -> None:
    assert not StallRule(None, adapts=True).stalls(owed_since=0.0, now=1e9)


def test_an_adaptive_t_grows_to_five_times_a_round() -> None:
    for adapts, limit in ((True, 100.0), (False, 10.0)):
        rule = StallRule(10.0, adapts=adapts)
        for seconds in (1.0, 20.0, 60.0):
            rule.result_received(seconds)
        assert not rule.stalls(owed_since=0.0, now=limit)
        assert rule.stalls(owed_since=0.0, now=limit + 0.1)
