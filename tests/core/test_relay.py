"""Answers that are the pushes as they came: fewer bytes, nothing lost on the way back, the same bits everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from weightgrad.codecs import Fp32
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.layout import Layout
from weightgrad.core.server.guard import Guard
from weightgrad.core.server.state import Outbox, ServerState
from weightgrad.core.site.state import SiteState
from weightgrad.core.strategies import find
from weightgrad.errors import ProtocolError
from weightgrad.kernels import fixed
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import Join, JoinReply, Message, Push, RelayedPush, RoundResult, Segment

LAYOUT = Layout.of_shapes([("w", (4000,))])  # large enough for entries to be most of a message
STRATEGY = {"aggregator": "mean", "up": "ef(topk(0.2) > sign())", "down": "ef(topk(0.4) > sign())", "flush": "none"}


def noise(*key: int) -> Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(hash(key) % 2**31))


def global_model() -> GlobalModel:
    return GlobalModel(LAYOUT, noise(99), optimizer=None, rate=lambda step: 0.1)


class Few:
    """A server and some sites; every step is a round, and messages come at once."""

    def __init__(self, sites: str = "ab", *, relay: int = 3, guard: Guard | None = None, **changes: Any) -> None:
        strategy = find("diloco", {**STRATEGY, "every": 1, "relay": relay, **changes})
        self.server = ServerState(global_model(), strategy.for_server(), 1, guard=guard)
        self.ends = {name: SiteState(name, global_model(), strategy.for_site(), 4, ord(name)) for name in sites}
        self.sent: list[tuple[str, Message]] = []
        for name, end in self.ends.items():
            self.deliver(self.server.receive(Join(site=name, version=0), 0.0))
            assert end.blocked(0.0) is None

    def deliver(self, out: Outbox) -> None:
        self.sent += out.messages
        for name, message in out.messages:
            for reply in self.ends[name].receive(message, 0.0):
                self.deliver(self.server.receive(reply, 0.0))

    def push(self, name: str, update: Tensor) -> Push:
        self.ends[name].model += update
        (push,) = self.ends[name].after_step(0.0)
        assert isinstance(push, Push)
        return push

    def round(self, number: int, names: str = "") -> list[Push]:
        pushes = [self.push(name, noise(ord(name), number)) for name in names or self.ends]
        for push in pushes:
            self.deliver(self.server.receive(push, 0.0))
        for end in self.ends.values():
            end.apply_results()
        return pushes

    def results(self, name: str) -> list[RoundResult]:
        return [message for to, message in self.sent if to == name and isinstance(message, RoundResult)]


def decoded(push: Push) -> Tensor:
    found = torch.zeros(LAYOUT.numel)
    for segment in push.segments:
        segment.into(found, fixed.ADD)
    return found


def test_a_site_gets_the_others_pushes_and_puts_its_own_in() -> None:
    few, expected = Few(), noise(99)
    for number in range(1, 6):
        pushes = few.round(number)
        expected += (decoded(pushes[0]) + decoded(pushes[1])) / 2
    assert {end.digest() for end in few.ends.values()} == {few.server.global_model.digest()}
    torch.testing.assert_close(few.server.global_model.vector, expected)
    assert few.server.shards[0].residual.vector is None, "nothing is lost by encoding twice"
    assert not [name for name in few.server.checkpoint() if "result_residual" in name]
    for name in few.ends:
        for result in few.results(name):
            assert not result.segments
            assert [push.site for push in result.relayed if push.segments is None] == [name]


def test_two_sites_are_told_less_than_with_a_mean() -> None:
    def result_bytes(relay: int) -> int:
        few = Few(relay=relay)
        few.round(1)
        return nbytes(few.results("a")[-1])

    assert result_bytes(2) < result_bytes(0)


@pytest.mark.parametrize(("sites", "shared"), [("ab", True), ("abc", True), ("abcd", False)])
def test_only_few_sites_are_handed_pushes_on(sites: str, shared: bool) -> None:
    few = Few(sites)
    few.round(1)
    for name in sites:
        assert bool(few.results(name)[-1].relayed) is shared
    assert {end.digest() for end in few.ends.values()} == {few.server.global_model.digest()}


def test_once_a_result_has_lost_something_results_stay_encoded() -> None:
    """Or what the server holds would wait until a fourth site came again."""
    few = Few("abcd")
    few.round(1)
    few.server.members.by_name.pop("d")
    few.ends.pop("d")
    few.round(2)
    assert few.results("a")[-1].segments
    again = ServerState(global_model(), find("diloco", {**STRATEGY, "relay": 3}).for_server(), 1)
    again.restore(few.server.checkpoint())
    again.members.by_name.pop("c")
    few.server = again
    few.round(3, "ab")
    assert again.global_model.version == 3
    assert few.results("a")[-1].segments


def test_who_joined_since_it_pushed_is_sent_its_own_push_too() -> None:
    few = Few()
    first = few.push("a", noise(1))
    few.deliver(few.server.receive(first, 0.0))
    few.server.receive(Join(site="a", version=0), 0.0)  # a new life, which knows nothing of that push
    few.deliver(few.server.receive(few.push("b", noise(2)), 0.0))
    assert all(push.segments for push in few.results("a")[-1].relayed)
    assert [push.site for push in few.results("b")[-1].relayed if push.segments is None] == ["b"]


def test_a_site_that_has_forgotten_its_push_asks_again_and_is_told_all() -> None:
    few = Few()
    few.deliver(few.server.receive(few.push("a", noise(1)), 0.0))
    few.ends["a"] = forgetful = SiteState(
        "a", global_model(), find("diloco", {**STRATEGY, "every": 1}).for_site(), 4, 1
    )
    forgetful.receive(JoinReply(version=0, round=1, step=0, included=0), 0.0)
    few.deliver(few.server.receive(few.push("b", noise(2)), 0.0))
    (reply,) = [m for to, m in few.sent if to == "a" and isinstance(m, JoinReply) and m.results]
    assert all(push.segments for push in reply.results[0].relayed)
    few.ends["b"].apply_results()
    assert forgetful.coordinator.inbox[1].relayed[0].segments
    assert few.ends["b"].digest() == few.server.global_model.digest()


def test_a_push_that_the_guard_refuses_is_empty_for_everybody() -> None:
    """Not left out: its own site must not add what the others do not."""
    few = Few(guard=Guard())
    few.round(1)
    before = few.server.global_model.vector.clone()
    bad = few.push("a", noise(1))
    broken = Segment(0, Fp32().encode(torch.full((LAYOUT.numel,), 1e30), {}, 0)[0])
    few.ends["a"].shards[0].in_flight[bad.round] = (broken,)
    bad = replace(bad, segments=(broken,))
    out = few.server.receive(bad, 0.0)
    assert out.refused
    few.deliver(out)
    few.deliver(few.server.receive(good := few.push("b", noise(2)), 0.0))
    for end in few.ends.values():
        end.apply_results()
    assert [push.segments for push in few.results("a")[-1].relayed if push.site == "a"] == [()]
    assert {end.digest() for end in few.ends.values()} == {few.server.global_model.digest()}
    torch.testing.assert_close(few.server.global_model.vector, before + decoded(good))  # what is refused weighs nothing


def test_sites_count_by_their_samples() -> None:
    few = Few()
    few.ends["b"].coordinator.samples = 12
    one, other = few.round(1)
    torch.testing.assert_close(few.server.global_model.vector, noise(99) + (decoded(one) + 3 * decoded(other)) / 4)
    assert {end.digest() for end in few.ends.values()} == {few.server.global_model.digest()}


def test_everything_as_it_is_goes_as_a_mean() -> None:
    """Nothing is lost by it, and with three sites it is half the bytes."""
    few = Few("abc", up="fp32", down="fp32")
    few.round(1)
    assert few.results("a")[-1].segments
    assert not few.results("a")[-1].relayed


def test_a_round_of_nothing_is_an_empty_result() -> None:
    few = Few()
    for name in few.ends:
        few.deliver(few.server.receive(Push(site=name, round=1, after=0, step=1, seen=0, samples=4), 0.0))
    assert not few.results("a")[-1].relayed
    assert few.server.global_model.version == 1


def test_a_global_model_refuses_a_result_that_leaves_out_a_push_nobody_has() -> None:
    with pytest.raises(ProtocolError, match="leaves out the push of 'b'"):
        global_model().apply(
            RoundResult(
                version=1,
                round=1,
                step=1,
                segments=(),
                relayed=(RelayedPush(site="b", round=1, weight=1.0, segments=None),),
            )
        )
