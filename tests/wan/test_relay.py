"""Answers that are the pushes as they came: fewer bytes, nothing lost on the way back, the same bits everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from weightgrad.codecs import Fp32
from weightgrad.errors import ProtocolError
from weightgrad.kernels import fixed
from weightgrad.site.layout import Layout
from weightgrad.wan.base import Base
from weightgrad.wan.global_server import GlobalServer, Outbox
from weightgrad.wan.guard import Guard
from weightgrad.wan.messages import Answer, Join, Message, Part, Push, Share, Welcome, nbytes
from weightgrad.wan.site_end import SiteEnd
from weightgrad.wan.strategies import find

LAYOUT = Layout.of_shapes([("w", (4000,))])  # large enough for entries to be most of a message
ROW = {"aggregator": "mean", "up": "ef(topk(0.2) > sign())", "down": "ef(topk(0.4) > sign())", "flush": "none"}


def noise(*key: int) -> Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(hash(key) % 2**31))


def base() -> Base:
    return Base(LAYOUT, noise(99), optimizer=None, rate=lambda step: 0.1)


class Few:
    """A server and some sites; every step is a round, and messages come at once."""

    def __init__(self, sites: str = "ab", *, relay: int = 3, guard: Guard | None = None, **changes: Any) -> None:
        row = find("diloco", {**ROW, "every": 1, "relay": relay, **changes})
        self.server = GlobalServer(base(), row.for_server(), 1, guard=guard)
        self.ends = {name: SiteEnd(name, base(), row.for_site(), 4, ord(name)) for name in sites}
        self.sent: list[tuple[str, Message]] = []
        for name, end in self.ends.items():
            self.deliver(self.server.receive(Join(name, 0), 0.0))
            assert end.blocked(0.0) is None

    def deliver(self, out: Outbox) -> None:
        self.sent += out.messages
        for name, message in out.messages:
            for reply in self.ends[name].receive(message, 0.0):
                self.deliver(self.server.receive(reply, 0.0))

    def push(self, name: str, update: Tensor) -> Push:
        self.ends[name].model += update
        (push,) = self.ends[name].stepped(0.0)
        assert isinstance(push, Push)
        return push

    def round(self, number: int, names: str = "") -> list[Push]:
        pushes = [self.push(name, noise(ord(name), number)) for name in names or self.ends]
        for push in pushes:
            self.deliver(self.server.receive(push, 0.0))
        for end in self.ends.values():
            end.settle()
        return pushes

    def answers(self, name: str) -> list[Answer]:
        return [message for to, message in self.sent if to == name and isinstance(message, Answer)]


def decoded(push: Push) -> Tensor:
    found = torch.zeros(LAYOUT.numel)
    for part in push.parts:
        part.into(found, fixed.ADD)
    return found


def test_a_site_gets_the_others_pushes_and_puts_its_own_in() -> None:
    few, expected = Few(), noise(99)
    for number in range(1, 6):
        pushes = few.round(number)
        expected += (decoded(pushes[0]) + decoded(pushes[1])) / 2
    assert {end.base.digest() for end in few.ends.values()} == {few.server.base.digest()}
    torch.testing.assert_close(few.server.base.vector, expected)
    assert not few.server.checkpoint()["out.held"].any(), "nothing is lost by encoding twice"
    for name in few.ends:
        for answer in few.answers(name):
            assert not answer.parts
            assert [share.site for share in answer.shares if share.parts is None] == [name]


def test_two_sites_are_told_less_than_with_a_mean() -> None:
    def told(relay: int) -> int:
        few = Few(relay=relay)
        few.round(1)
        return nbytes(few.answers("a")[-1])

    assert told(2) < told(0)


@pytest.mark.parametrize(("sites", "shared"), [("ab", True), ("abc", True), ("abcd", False)])
def test_only_few_sites_are_handed_pushes_on(sites: str, shared: bool) -> None:
    few = Few(sites)
    few.round(1)
    for name in sites:
        assert bool(few.answers(name)[-1].shares) is shared
    assert {end.base.digest() for end in few.ends.values()} == {few.server.base.digest()}


def test_once_an_answer_has_held_something_back_answers_stay_of_that_kind() -> None:
    """Or what the server holds would wait until a fourth site came again."""
    few = Few("abcd")
    few.round(1)
    few.server.members.by_name.pop("d")
    few.ends.pop("d")
    few.round(2)
    assert few.answers("a")[-1].parts
    again = GlobalServer(base(), find("diloco", {**ROW, "relay": 3}).for_server(), 1)
    again.restore(few.server.checkpoint())
    assert not again._relays


def test_who_joined_since_it_pushed_is_sent_its_own_push_too() -> None:
    few = Few()
    first = few.push("a", noise(1))
    few.deliver(few.server.receive(first, 0.0))
    few.server.receive(Join("a", 0), 0.0)  # a new life, which knows nothing of that push
    few.deliver(few.server.receive(few.push("b", noise(2)), 0.0))
    assert all(share.parts for share in few.answers("a")[-1].shares)
    assert [share.site for share in few.answers("b")[-1].shares if share.parts is None] == ["b"]


def test_a_site_that_has_forgotten_its_push_asks_again_and_is_told_all() -> None:
    few = Few()
    few.deliver(few.server.receive(few.push("a", noise(1)), 0.0))
    few.ends["a"] = forgetful = SiteEnd("a", base(), find("diloco", {**ROW, "every": 1}).for_site(), 4, 1)
    forgetful.receive(Welcome(0, 1, 0, 0), 0.0)
    few.deliver(few.server.receive(few.push("b", noise(2)), 0.0))
    (welcome,) = [m for to, m in few.sent if to == "a" and isinstance(m, Welcome) and m.answers]
    assert all(share.parts for share in welcome.answers[0].shares)
    few.ends["b"].settle()
    assert forgetful._inbox[1].shares[0].parts
    assert few.ends["b"].base.digest() == few.server.base.digest()


def test_a_push_that_the_guard_refuses_is_empty_for_everybody() -> None:
    """Not left out: its own site must not add what the others do not."""
    few = Few(guard=Guard())
    few.round(1)
    before = few.server.base.vector.clone()
    bad = few.push("a", noise(1))
    broken = Part(0, Fp32().encode(torch.full((LAYOUT.numel,), 1e30), {}, 0)[0])
    few.ends["a"]._flights[-1].push = bad = Push(**{**vars(bad), "parts": (broken,)})
    out = few.server.receive(bad, 0.0)
    assert out.refused
    few.deliver(out)
    few.deliver(few.server.receive(good := few.push("b", noise(2)), 0.0))
    for end in few.ends.values():
        end.settle()
    assert [share.parts for share in few.answers("a")[-1].shares if share.site == "a"] == [()]
    assert {end.base.digest() for end in few.ends.values()} == {few.server.base.digest()}
    torch.testing.assert_close(few.server.base.vector, before + decoded(good) / 2)


def test_sites_count_by_their_samples() -> None:
    few = Few()
    few.ends["b"]._samples = 12
    one, other = few.round(1)
    torch.testing.assert_close(few.server.base.vector, noise(99) + (decoded(one) + 3 * decoded(other)) / 4)
    assert {end.base.digest() for end in few.ends.values()} == {few.server.base.digest()}


def test_everything_as_it_is_goes_as_a_mean() -> None:
    """Nothing is lost by it, and with three sites it is half the bytes."""
    few = Few("abc", up="fp32", down="fp32")
    few.round(1)
    assert few.answers("a")[-1].parts
    assert not few.answers("a")[-1].shares


def test_a_round_of_nothing_is_an_empty_answer() -> None:
    few = Few()
    for name in few.ends:
        few.deliver(few.server.receive(Push(name, 1, 0, 1, 0, 4), 0.0))
    assert not few.answers("a")[-1].shares
    assert few.server.base.version == 1


def test_a_base_refuses_an_answer_that_leaves_out_a_push_nobody_has() -> None:
    with pytest.raises(ProtocolError, match="leaves out 'b'"):
        base().apply(Answer(1, 1, 1, (), shares=(Share("b", 1, 1.0, None),)))
