"""One server process and the ranks it hears from: holdings, parts of pushes, results, downloads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from weightgrad.codecs import Fp32, decode
from weightgrad.core import pieces
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.layout import Layout
from weightgrad.core.local_model import FlatModel
from weightgrad.core.server.close_order import ClosedPush, CloseOrder
from weightgrad.core.server.result_log import MemoryResultLog
from weightgrad.core.server.shard import ServerShard
from weightgrad.core.site.shard_orders import LoadOrder
from weightgrad.core.site.update_shard import UpdateShard
from weightgrad.core.strategies import find
from weightgrad.errors import ProtocolError
from weightgrad.runtime.server import shard_server
from weightgrad.runtime.server.shard_server import Provision, ShardServer
from weightgrad.runtime.transport.transport import Peer
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import Bulk, Holding, ModelPart, PushPart, ResultPart, RoundResult, Segment

NUMEL = 8
LEFT, RIGHT, WHOLE = Intervals(((0, 4),)), Intervals(((4, 8),)), Intervals.whole(NUMEL)
STRATEGY = find("diloco", {"aggregator": "mean"})
EAST, WEST_0, WEST_1 = Peer("east", 0), Peer("west", 0), Peer("west", 1)


class Process:
    """A server process whose messages are collected."""

    def __init__(
        self,
        served: Intervals = WHOLE,
        kept_bytes: int = 1 << 20,
        *,
        elsewhere: bool = False,
        optimizer: tuple[str, dict[str, float]] | None = None,
    ) -> None:
        layout = Layout.of_shapes([("weight", (NUMEL,))])
        first = torch.zeros(served.numel)
        model = GlobalModel(layout, first, optimizer=optimizer, rate=lambda _: 0.1, held=served, elsewhere=elsewhere)
        shard = ServerShard(model, STRATEGY.for_server().for_shard, 1, MemoryResultLog(kept_bytes))
        self.sent: list[tuple[Peer, Bulk]] = []
        self.waiting: dict[Peer, int | None] = {}
        self.server = ShardServer(
            shard, lambda peer, message: self.sent.append((peer, message)), lambda peer: self.waiting.get(peer, 0)
        )

    @property
    def vector(self) -> Tensor:
        return self.server.shard.global_model.vector

    def hold(self, peer: Peer, held: Intervals, *, ranks: int = 1, epoch: int = 1) -> None:
        self.server.hold(Holding(site=peer.site, rank=peer.rank, ranks=ranks, epoch=epoch, held=held))

    def hold_all(self) -> None:
        """East has one rank, west two."""
        self.hold(EAST, WHOLE)
        self.hold(WEST_0, LEFT, ranks=2)
        self.hold(WEST_1, RIGHT, ranks=2)

    def close(self, *sites: str, receivers: tuple[str, ...] = ("east", "west"), version: int = 1) -> None:
        pushes = tuple(ClosedPush(site=name, round=version, weight=1.0, seen=0) for name in sites)
        result = RoundResult(version=version, round=version, step=version)
        told = dict.fromkeys(receivers, False)
        self.server.close(CloseOrder(result=result, pushes=pushes, weight=float(len(sites)), receivers=told))

    def taken(self) -> list[tuple[Peer, Bulk]]:
        found, self.sent = self.sent, []
        return found


def segment(start: int, *values: float) -> Segment:
    return Segment(start, Fp32().encode(torch.tensor(values), {}, 0)[0])


def part(peer: Peer, *segments: Segment, round_: int = 1, last: bool = True) -> PushPart:
    return PushPart(site=peer.site, rank=peer.rank, round=round_, segments=segments, last=last)


# -- holdings -------------------------------------------------------------------------------------


def test_a_rank_that_has_not_said_what_it_holds_may_not_push() -> None:
    process = Process()
    process.hold(WEST_0, LEFT, ranks=2)
    with pytest.raises(ProtocolError, match="rank 1 of west pushes before it has said what it holds"):
        process.server.push_part(part(WEST_1, segment(4, 1.0)))
    with pytest.raises(ProtocolError, match="rank 0 of east pushes before it has said what it holds"):
        process.server.push_part(part(EAST))


def test_ranks_that_contradict_each_other_are_refused() -> None:
    process = Process()
    process.hold(WEST_0, LEFT, ranks=2)
    with pytest.raises(ProtocolError, match=r"rank 1 of west says that 3 ranks hold something .* another rank said 2"):
        process.hold(WEST_1, RIGHT, ranks=3)
    with pytest.raises(ProtocolError, match="rank 1 of west holds elements that another rank holds"):
        process.hold(WEST_1, Intervals(((3, 8),)), ranks=2)
    with pytest.raises(ProtocolError, match="no rank of west holds some of the elements that are served here"):
        process.hold(WEST_1, Intervals(((5, 8),)), ranks=2)
    process.hold(WEST_0, LEFT, ranks=2, epoch=2)  # they are started again, and do better
    process.hold(WEST_1, RIGHT, ranks=2, epoch=2)
    assert process.server.holdings() == {"west": (2, {0: LEFT, 1: RIGHT})}


def test_only_what_is_served_here_must_be_held() -> None:
    process = Process(served=LEFT)
    process.hold(WEST_0, Intervals(((0, 6),)))
    assert process.server.holdings() == {"west": (1, {0: Intervals(((0, 6),))})}


# -- pushes ---------------------------------------------------------------------------------------


def test_a_push_is_complete_when_every_rank_has_sent_its_last_part() -> None:
    process = Process()
    process.hold_all()
    first = part(WEST_0, segment(0, 1.0, 1.0), last=False)
    assert process.server.push_part(first) is None
    other = part(WEST_1, segment(4, 2.0))
    assert process.server.push_part(other) is None
    assert process.server.incomplete == {("west", 1): 0}
    last = part(WEST_0, segment(2, 3.0))
    complete = process.server.push_part(last)
    assert complete is not None
    assert (complete.site, complete.round) == ("west", 1)
    whole = PushPart(
        site="west", round=1, rank=0, segments=(*first.segments, *last.segments, *other.segments), last=True
    )
    assert complete.size == nbytes(whole), "as one rank that holds everything would send it"
    assert complete.facts.squares == 1 + 1 + 4 + 9
    assert complete.facts.numel == 4
    assert complete.facts.problem is None
    assert [one.start for one in process.server.shard.pushes["west", 1]] == [0, 2, 4]
    assert not process.server.incomplete


def test_a_part_that_is_sent_again_counts_once() -> None:
    """A rank whose connection was lost says again what it holds, and sends from the beginning."""
    process = Process()
    process.hold_all()
    process.server.push_part(part(WEST_0, segment(0, 1.0), last=False))
    process.hold(WEST_0, LEFT, ranks=2)
    process.server.push_part(part(WEST_0, segment(0, 1.0), last=False))
    process.server.push_part(part(WEST_0, segment(1, 1.0)))
    process.server.push_part(part(WEST_0, segment(0, 1.0), last=False))  # all of it once more
    process.server.push_part(part(WEST_0, segment(1, 1.0)))
    complete = process.server.push_part(part(WEST_1))
    assert complete is not None
    assert complete.facts.squares == 2


def test_parts_of_processes_that_were_started_anew_are_forgotten() -> None:
    process = Process()
    process.hold_all()
    process.server.push_part(part(WEST_0, segment(0, 7.0)))
    process.hold(WEST_0, WHOLE, ranks=1, epoch=2)  # it comes back with one rank
    assert not process.server.incomplete
    complete = process.server.push_part(part(WEST_0, segment(0, 1.0)))
    assert complete is not None
    assert complete.facts.squares == 1


def test_values_outside_of_what_is_served_are_a_problem() -> None:
    process = Process(served=LEFT)
    process.hold(EAST, WHOLE)
    complete = process.server.push_part(part(EAST, segment(6, 1.0)))
    assert complete is not None
    assert complete.facts.problem is not None


def test_a_push_that_no_round_takes_is_forgotten() -> None:
    process = Process()
    process.hold_all()
    process.server.push_part(part(EAST, segment(0, 1.0)))
    process.server.drop("east", 1)
    process.server.drop("east", 1)
    assert not process.server.shard.pushes


# -- results --------------------------------------------------------------------------------------


def test_every_rank_is_sent_what_it_holds_of_a_result() -> None:
    process = Process()
    process.hold_all()
    process.server.push_part(part(EAST, segment(0, *[2.0] * NUMEL)))
    process.close("east")
    assert torch.equal(process.vector, torch.full((NUMEL,), 2.0))
    found = dict(process.taken())
    assert found.keys() == {EAST, WEST_0, WEST_1}
    for message in found.values():
        assert isinstance(message, ResultPart)
        assert message.last
        assert message.version == 1
    starts = {peer: [one.intervals for one in message.segments] for peer, message in found.items()}  # type: ignore[union-attr]
    assert starts == {EAST: [LEFT, RIGHT], WEST_0: [LEFT], WEST_1: [RIGHT]}, "cut where no two ranks share a piece"


def test_a_site_that_is_not_ready_or_not_told_is_sent_nothing() -> None:
    process = Process()
    process.hold(EAST, WHOLE)
    process.hold(WEST_0, LEFT, ranks=2)
    process.server.push_part(part(EAST, segment(0, 1.0)))
    process.close("east")
    assert [peer for peer, _ in process.taken()] == [EAST]
    process.server.push_part(part(EAST, segment(0, 1.0), round_=2))
    process.close("east", receivers=("west",), version=2)
    assert process.taken() == []


# -- joining --------------------------------------------------------------------------------------


def provision(site: str, since: int | None, epoch: int | None = 1) -> Provision:
    return Provision(site=site, epoch=epoch, since=since)


def test_a_site_gets_the_results_it_has_missed_when_all_ranks_are_there() -> None:
    process = Process()
    process.hold(EAST, WHOLE)
    for version in (1, 2, 3):
        process.server.push_part(part(EAST, segment(0, *[1.0] * NUMEL), round_=version))
        process.close("east", version=version)
    process.taken()
    process.server.provide(provision("west", since=1))
    process.hold(WEST_0, LEFT, ranks=2)
    assert process.taken() == []
    process.hold(WEST_1, RIGHT, ranks=2)
    found = [(peer, message.version) for peer, message in process.taken() if isinstance(message, ResultPart)]
    assert sorted(found) == [(WEST_0, 2), (WEST_0, 3), (WEST_1, 2), (WEST_1, 3)]


@pytest.mark.parametrize("elsewhere", [True, False])
def test_where_gradients_are_shared_a_download_is_of_the_version_that_was_told_and_rounds_follow(
    elsewhere: bool,
) -> None:
    """The optimizer's scalars went with the reply; vectors of a later version would not fit them."""
    process = Process(elsewhere=elsewhere, optimizer=None if elsewhere else ("adam", {"lr": 0.1}))
    process.hold(EAST, WHOLE)
    process.server.provide(Provision(site="west", epoch=1, since=None, whole=True, codec=None))
    process.server.push_part(part(EAST, segment(0, *[1.0] * NUMEL)))
    process.close("east")  # before the rank of west has said what it holds
    process.taken()
    process.hold(WEST_0, WHOLE)
    model, result = (message for peer, message in process.taken() if peer == WEST_0)
    assert isinstance(model, ModelPart)
    assert model.version == 0
    assert isinstance(result, ResultPart)
    assert result.version == 1
    assert result.segments
    assert torch.equal(decode(model.segments[0].payload), torch.zeros(NUMEL))


def test_what_is_owed_to_processes_that_are_gone_is_not_sent_to_the_next() -> None:
    process = Process()
    process.hold(EAST, WHOLE, epoch=4)
    process.server.provide(provision("east", since=None, epoch=5))
    assert process.taken() == []
    process.hold(EAST, WHOLE, epoch=5)
    assert [type(message) for _, message in process.taken()] == [ModelPart]


def test_a_download_is_sent_as_the_link_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 2)
    process = Process()
    process.hold_all()
    process.waiting = {WEST_0: 0, WEST_1: shard_server._AHEAD_BYTES}
    process.server.provide(provision("west", since=None))
    found = process.taken()
    assert [peer for peer, _ in found] == [WEST_0, WEST_0]
    assert [message.last for _, message in found if isinstance(message, ModelPart)] == [False, True]
    assert process.server.feed(), "the other link takes no more"
    assert process.taken() == []
    process.waiting[WEST_1] = 0
    assert not process.server.feed()
    assert [peer for peer, _ in process.taken()] == [WEST_1, WEST_1]


def test_a_download_to_a_rank_that_is_gone_ends() -> None:
    process = Process()
    process.hold_all()
    process.waiting[EAST] = None
    process.server.provide(provision("east", since=None))
    assert not process.server.feed()
    assert process.taken() == []


def test_rounds_that_close_during_a_download_are_in_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was sent before a round closed is moved by its result, and what is sent after has it already."""
    monkeypatch.setattr(pieces, "PIECE", 2)
    monkeypatch.setattr(shard_server, "_AHEAD_BYTES", 1)
    process = Process()
    process.hold_all()
    process.waiting[EAST] = 0

    def send(peer: Peer, message: Bulk) -> None:
        process.sent.append((peer, message))
        process.waiting[peer] = 1  # the link takes one part at a time

    process.server._send = send
    process.server.provide(provision("east", since=None))
    for version in (1, 2):
        process.server.push_part(part(WEST_0, segment(0, *[1.0] * 4), round_=version))
        process.server.push_part(part(WEST_1, segment(4, *[1.0] * 4), round_=version))
        process.close("west", version=version)
        process.waiting[EAST] = 0
        process.server.feed()
    while process.server.feed():
        process.waiting[EAST] = 0
    own = [message for peer, message in process.taken() if peer == EAST]
    assert [type(message) for message in own].count(ResultPart) == 2
    layout = Layout.of_shapes([("weight", (NUMEL,))])
    plan = STRATEGY.for_site().for_shard
    shard = UpdateShard("east", layout, FlatModel(torch.zeros(NUMEL), WHOLE, WHOLE), plan, key=1)
    shard.begin_load(discards=True)
    for message in own:
        if isinstance(message, ModelPart):
            for one in message.segments:
                shard.load(message.vector, one)
        elif isinstance(message, ResultPart):
            shard.load_result(RoundResult(version=message.version, round=0, step=0, segments=message.segments))
    shard.end_load(LoadOrder(version=2, step=2, included=0, discards=True), {})
    assert torch.equal(shard.global_model, process.vector)
    assert torch.equal(process.vector, torch.full((NUMEL,), 2.0))


# -- a restart ------------------------------------------------------------------------------------


def test_after_a_restart_ranks_say_again_what_they_hold() -> None:
    """Until then nobody is sent anything; but results are cut in the same places."""
    process = Process()
    process.hold_all()
    again = Process()
    again.server.restore_holdings(process.server.holdings())
    again.server.forget_connections()
    assert again.server.shard.holdings == process.server.shard.holdings
    again.hold(EAST, WHOLE)
    again.server.push_part(part(EAST, segment(0, *[2.0] * NUMEL)))
    again.close("east")
    ((peer, message),) = again.taken()
    assert peer == EAST
    assert isinstance(message, ResultPart)
    assert [one.intervals for one in message.segments] == [LEFT, RIGHT]
    again.hold(WEST_0, LEFT, ranks=2)
    again.hold(WEST_1, RIGHT, ranks=2)
    assert again.server.holdings() == process.server.holdings()


def test_a_result_leaves_out_the_own_push_of_a_site_that_has_it() -> None:
    process = Process()
    process.hold_all()
    process.server.push_part(part(EAST, segment(0, *[2.0] * NUMEL)))
    push = ClosedPush(site="east", round=1, weight=1.0, seen=0)
    result = RoundResult(version=1, round=1, step=1)
    order = CloseOrder(result=result, pushes=(push,), weight=1.0, relays=True, receivers={"east": True, "west": False})
    process.server.close(replace(order, sites=2))
    found = {peer: message for peer, message in process.taken() if isinstance(message, ResultPart)}
    assert found[EAST].relayed[0].segments is None
    assert found[WEST_0].relayed[0].segments


def test_results_that_were_promised_are_sent_even_if_the_log_has_forgotten_them() -> None:
    process = Process(kept_bytes=150)  # of one result
    process.hold(EAST, WHOLE)

    def round_of(version: int) -> None:
        process.server.push_part(part(EAST, segment(0, *[1.0] * NUMEL), round_=version))
        process.close("east", version=version)

    round_of(1)
    process.taken()
    process.server.provide(provision("west", since=0))
    process.hold(WEST_0, LEFT, ranks=2)
    for version in (2, 3):
        round_of(version)
    assert process.server.shard.log.since(0, 3) is None
    process.taken()
    process.hold(WEST_1, RIGHT, ranks=2)
    found = [(peer, message.version) for peer, message in process.taken() if isinstance(message, ResultPart)]
    assert found == [(peer, version) for version in (1, 2, 3) for peer in (WEST_0, WEST_1)]


def test_a_push_that_is_not_the_one_that_was_judged_is_empty() -> None:
    """A process may get other values while the word of the coordinator to close the round is on its way to it."""
    process = Process()
    process.hold_all()
    judged = process.server.push_part(part(EAST, segment(0, *[2.0] * NUMEL)))
    assert judged is not None
    process.server.push_part(part(EAST, segment(0, *[1e6] * NUMEL)))
    push = ClosedPush(site="east", round=1, weight=1.0, seen=0, squares=(judged.facts.squares,))
    order = CloseOrder(result=RoundResult(version=1, round=1, step=1), pushes=(push,), weight=1.0)
    process.server.close(order)
    assert not process.vector.any()
    process.server.push_part(part(EAST, segment(0, *[2.0] * NUMEL), round_=2))
    result = RoundResult(version=2, round=2, step=2)
    process.server.close(replace(order, result=result, pushes=(replace(push, round=2),)))
    assert torch.equal(process.vector, torch.full((NUMEL,), 2.0))
