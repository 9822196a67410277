"""When a result is due at a site."""

from __future__ import annotations

from weightgrad.codecs import Fp32
from weightgrad.core.site.progress import SiteProgress
from weightgrad.core.site.pushes_in_flight import PushesInFlight
from weightgrad.core.site.replay import Replay
from weightgrad.core.site.result_inbox import ResultInbox
from weightgrad.core.site.schedule import SiteSchedule
from weightgrad.wire.messages import Push, RelayedPush, RoundResult


class Inbox:
    """The inbox of site a, whose results are applied two steps after their push."""

    def __init__(self) -> None:
        self.progress, self.in_flight = SiteProgress(), PushesInFlight()
        self.replay = Replay(self.progress)
        schedule = SiteSchedule(None, up=Fp32(), overlap=2)
        self.results = ResultInbox("a", self.progress, schedule, self.in_flight, self.replay)

    def push(self, round_: int, step: int) -> None:
        push = Push(site="a", round=round_, after=round_ - 1, step=step, seen=0, samples=1, segments=())
        self.in_flight.add(push, 0.0)
        self.progress.step, self.progress.pushed_round = step, round_


def result(version: int, **included: int) -> RoundResult:
    return RoundResult(version=version, round=version, step=version, included=included)


def test_a_result_is_due_a_fixed_number_of_steps_after_its_push() -> None:
    inbox = Inbox()
    inbox.push(1, step=4)
    own = result(1, a=1)
    assert not inbox.results.is_due(own)
    inbox.progress.step = 6
    assert inbox.results.is_due(own)
    assert inbox.results.is_due(result(1, b=1))


def test_a_result_waits_for_the_push_that_is_replayed() -> None:
    inbox = Inbox()
    inbox.replay.begin(until=3, catch_up_to=(9, 7))
    assert not inbox.results.is_due(result(1, a=3))
    inbox.replay.catch_up()
    assert inbox.progress.step == 0
    inbox.progress.pushed_round = 3
    assert inbox.results.is_due(result(1, a=3))
    inbox.replay.catch_up()
    assert (inbox.progress.step, inbox.progress.round) == (9, 7)


def test_results_wait_by_version_and_tell_what_is_answered() -> None:
    inbox = Inbox()
    first, second = result(1), result(2, a=5)
    assert inbox.results.answered_through == -1
    seen = []
    for one in (second, result(0, a=9), first):  # that of version 0 is applied already
        inbox.results.add(one)
        seen.append((inbox.results.following, inbox.results.answered_through))
    assert seen == [(None, 5), (None, 5), (first, 5)]
    inbox.results.remove_through(1)
    assert inbox.results.following is None
    inbox.progress.version = 1
    assert inbox.results[2] is second


def test_a_push_that_was_left_out_must_be_in_flight_or_replayed() -> None:
    inbox = Inbox()
    left_out = RelayedPush(site="a", round=2, weight=1.0, segments=None)
    relayed = RoundResult(version=1, round=2, step=1, included={}, relayed=(left_out,))
    assert inbox.results.misses_own_push(relayed)
    inbox.replay.begin(until=2, catch_up_to=None)
    assert not inbox.results.misses_own_push(relayed)
    inbox.replay.begin(until=0, catch_up_to=None)
    inbox.push(2, step=1)
    assert not inbox.results.misses_own_push(relayed)
