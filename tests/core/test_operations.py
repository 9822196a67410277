"""What the operator of a run may do to its server, message by message."""

from __future__ import annotations

import pytest
import torch

from weightgrad.core.server.operation import Action, Operation
from weightgrad.core.server.state import Outbox
from weightgrad.core.site.coordinator import SiteCoordinator
from weightgrad.core.strategies import find
from weightgrad.errors import ProtocolError
from weightgrad.wire.messages import Join, Pause, RoundResult

from .harness import noise
from .test_server_state import push, server, to


def pauses(out: Outbox) -> list[tuple[str, bool]]:
    return [(name, message.paused) for name, message in out.messages if isinstance(message, Pause)]


def test_no_round_closes_during_a_pause_and_nothing_is_lost() -> None:
    one = server(sites="ab")
    assert pauses(one.operate(Operation(Action.PAUSE), 1.0)) == [("a", True), ("b", True)]
    assert pauses(one.operate(Operation(Action.PAUSE), 2.0)) == []  # it is paused already
    for site in "ab":
        assert not one.receive(push(site, 1, noise(1)), 3.0).closed
    out = one.operate(Operation(Action.RESUME), 9.0)
    assert [closed.senders for closed in out.closed] == [["a", "b"]]
    assert pauses(out) == [("a", False), ("b", False)]
    assert len(to(out, "a", RoundResult)) == 1
    assert pauses(one.operate(Operation(Action.RESUME), 10.0)) == []


def test_no_deadline_expires_during_a_pause() -> None:
    one = server(sites="ab", t_global=5.0)
    one.receive(push("a", 1, noise(1)), 0.0)
    assert one.next_wake() == 5.0
    one.operate(Operation(Action.PAUSE), 3.0)
    assert one.next_wake() is None
    assert not one.wake(100.0).lost
    one.operate(Operation(Action.RESUME), 103.0)
    assert one.next_wake() == 105.0
    assert not one.wake(104.9).lost
    assert one.wake(105.0).lost == ["b"]


def test_a_site_that_joins_during_a_pause_is_told() -> None:
    one = server(sites="a")
    one.operate(Operation(Action.PAUSE), 1.0)
    assert pauses(one.receive(Join(site="b", version=0), 2.0)) == [("b", True)]


def test_a_pause_survives_a_checkpoint() -> None:
    one = server(sites="ab")
    one.operate(Operation(Action.PAUSE), 1.0)
    again = server(sites="")
    again.restore(one.checkpoint())
    assert again.coordinator.pause.on
    again.operate(Operation(Action.RESUME), 2.0)
    plain = server(sites="")
    plain.restore(again.checkpoint())
    assert not plain.coordinator.pause.on


def test_a_site_waits_while_it_is_paused() -> None:
    site = SiteCoordinator("a", find("diloco").for_site(), 4)
    site.joining.joined = True
    assert site.blocked(0.0) is None
    site.receive(Pause(paused=True), 1.0)
    assert site.blocked(1.0) == "paused"
    site.receive(Pause(paused=False), 2.0)
    assert site.blocked(2.0) is None
    site.receive(Pause(paused=True), 3.0)
    site.join()  # to a server that was started again: it tells of a pause that still lasts
    site.joining.joined = True
    assert site.blocked(4.0) is None


def test_rounds_do_not_wait_for_a_site_that_is_set_aside_until_it_is_taken_back() -> None:
    one = server(sites="abc")
    one.receive(push("a", 1, noise(1)), 0.0)
    assert not one.receive(push("b", 1, noise(2)), 0.0).closed
    out = one.operate(Operation(Action.SET_ASIDE, "c"), 1.0)
    assert [closed.senders for closed in out.closed] == [["a", "b"]]
    assert to(out, "c", RoundResult), "it is sent the results"
    one.receive(push("c", 1, noise(3)), 1.0)  # late, and counts
    one.receive(push("a", 2, noise(1)), 2.0)
    (closed,) = one.receive(push("b", 2, noise(2)), 2.0).closed
    assert closed.senders == ["a", "b", "c"]
    again = server(sites="")
    again.restore(one.checkpoint())
    assert again.members.awaited == ["a", "b"]
    one.operate(Operation(Action.TAKE_BACK, "c"), 3.0)
    assert one.members.awaited == ["a", "b", "c"]
    one.receive(push("a", 3, noise(1)), 4.0)
    assert not one.receive(push("b", 3, noise(1)), 4.0).closed


def test_a_site_that_is_removed_is_not_waited_for_and_may_join_again() -> None:
    one = server(sites="ab")
    one.receive(push("a", 1, noise(1)), 0.0)
    out = one.operate(Operation(Action.REMOVE, "b"), 1.0)
    assert [closed.senders for closed in out.closed] == [["a"]]
    assert not to(out, "b", RoundResult)
    assert one.members.listening == ["a"]
    one.receive(Join(site="b", version=1), 2.0)
    assert one.members.awaited == ["a", "b"]


def test_what_a_removed_site_has_pushed_counts() -> None:
    one, other = server(sites="ab"), server(sites="ab")
    for made in (one, other):
        made.receive(push("b", 1, noise(2)), 0.0)
    one.operate(Operation(Action.REMOVE, "b"), 0.5)
    for made in (one, other):
        made.receive(push("a", 1, noise(1)), 1.0)
    assert one.coordinator.version == other.coordinator.version == 1
    assert torch.equal(one.global_model.vector, other.global_model.vector)


@pytest.mark.parametrize("action", [Action.REMOVE, Action.SET_ASIDE, Action.TAKE_BACK])
def test_a_site_that_never_joined(action: Action) -> None:
    with pytest.raises(ProtocolError, match="'z' has not joined"):
        server().operate(Operation(action, "z"), 0.0)


def test_operations_as_records() -> None:
    for operation in (Operation(Action.PAUSE), Operation(Action.SET_ASIDE, "ohio")):
        assert Operation.parse(operation.to_bytes()) == operation
    for damaged in (b"", b"[]", b'{"action": "burn", "site": "x"}', b'{"site": "x"}'):
        with pytest.raises(ProtocolError):
            Operation.parse(damaged)
