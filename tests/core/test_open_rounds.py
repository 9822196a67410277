"""Open rounds by themselves: when they open, for whom they wait, when they may close."""

from __future__ import annotations

from typing import Any

from weightgrad.core.server.membership import Members
from weightgrad.core.server.open_rounds import OpenRounds
from weightgrad.core.server.operation import Pause
from weightgrad.core.server.outbox import Outbox
from weightgrad.core.server.push_facts import PushFacts
from weightgrad.core.strategies import find
from weightgrad.wire.messages import Push, RoundRequest


class Rounds:
    """The open rounds of three sites."""

    def __init__(self, name: str = "diloco", **settings: Any) -> None:
        self.members, self.pause = Members(), Pause()
        for site in "abc":
            self.members.join(site)
        self.open = OpenRounds(find(name, settings).for_server(), self.members, self.pause)

    def push(self, site: str, round_: int, now: float = 0.0) -> Outbox:
        out = Outbox()
        push = Push(site=site, round=round_, after=round_ - 1, step=round_, seen=round_ - 1, samples=1, segments=())
        opened = self.open.of(round_, site, now, out)
        opened.receive(push, now, nbytes=1, late=False, facts=PushFacts(squares=1.0, numel=1))
        return out


def test_rounds_close_in_order_and_when_all_have_pushed() -> None:
    rounds = Rounds("gaia")
    for site in "abc":
        rounds.push(site, 2)
    for site in "ab":
        rounds.push(site, 1)
        assert rounds.open.take_complete() is None
    rounds.push("c", 1)
    numbers = [found[0] for _ in range(3) if (found := rounds.open.take_complete()) is not None]
    assert numbers == [1, 2]


def test_who_is_waited_for_and_how_long() -> None:
    rounds = Rounds()
    assert rounds.open.waiting(5.0) is None
    rounds.push("b", 1, now=2.0)
    waiting = rounds.open.waiting(5.9)
    assert waiting is not None
    assert (waiting.round, waiting.seconds, waiting.missing) == (1, 3, {"a": 0, "c": 0})
    assert rounds.open.has("b", 1)
    assert not rounds.open.has("a", 1)


def test_the_missing_are_lost_after_t_global_but_not_for_the_time_of_a_pause() -> None:
    rounds = Rounds(t_local=1.0, t_global=10.0)
    rounds.push("a", 1, now=0.0)
    rounds.pause.begin(2.0)
    assert rounds.open.next_wake() is None
    out = Outbox()
    rounds.open.wake(20.0, out)
    assert not out.lost
    rounds.open.postpone(rounds.pause.end(20.0))
    rounds.open.wake(20.0, out)
    assert (out.held_back, out.lost) == (["b", "c"], [])
    assert rounds.open.next_wake() == 28.0
    rounds.open.wake(28.0, out)
    assert out.lost == ["b", "c"]
    assert rounds.open.take_complete() is not None


def test_the_others_are_requested_once_where_the_strategy_wants_it() -> None:
    rounds = Rounds("weightgrad-paper", trigger="significance(threshold=2.0)")
    asked = [(name, type(message)) for name, message in rounds.push("b", 1).messages]
    assert asked == [("a", RoundRequest), ("c", RoundRequest)]
    assert not rounds.push("a", 1).messages


def test_a_round_is_stuck_only_where_there_is_a_timeout() -> None:
    for t_global, stuck in ((10.0, True), (None, False)):
        rounds = Rounds(t_global=t_global)
        rounds.push("a", 1)
        assert not rounds.open.stuck(80.0)
        assert rounds.open.stuck(80.1) is stuck
