"""A rank's connections to the server processes, with messages made by hand; and whole runs in one process."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from weightgrad.codecs import Fp32
from weightgrad.core.layout import Layout
from weightgrad.core.local_model import FlatModel
from weightgrad.core.site.shard_orders import LoadOrder
from weightgrad.core.site.update_shard import UpdateShard
from weightgrad.core.strategies import find
from weightgrad.errors import ProtocolError, RefusedError
from weightgrad.runtime.admission_messages import rank_reply
from weightgrad.runtime.join import join
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.server.global_server import GlobalServer, ServeOptions
from weightgrad.runtime.session import Site
from weightgrad.runtime.site.entry import Entry
from weightgrad.runtime.site.rank_connection import RankConnection
from weightgrad.runtime.site.server_entry import rank_request
from weightgrad.runtime.site.server_link import ServerLink
from weightgrad.runtime.telemetry import SiteTelemetry
from weightgrad.runtime.transport.in_memory import InMemoryNetwork
from weightgrad.runtime.transport.in_memory_client import InMemoryClient
from weightgrad.runtime.transport.in_memory_server import InMemoryServer
from weightgrad.runtime.transport.transport import ClientTransport, LinkEvent, Outgoing, Peer
from weightgrad.runtime.transport.transport import joined as one_buffer
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import (
    Holding,
    JoinReply,
    Message,
    ModelPart,
    PushPart,
    ResultPart,
    RoundRequest,
    RoundResult,
    Segment,
)

NUMEL = 8
LEFT, RIGHT = Intervals(((0, 4),)), Intervals(((4, 8),))


class Line:
    """A transport whose messages are made by hand."""

    address = "127.0.0.1:1"
    unacknowledged_bytes = 0
    round_trip_s = 0.0
    why = ""

    def __init__(self, *, init_model: bool = False) -> None:
        self.coming: deque[Message] = deque()
        self.sent: list[Message] = []
        self.happened: list[LinkEvent] = []
        self.entered: list[bytes] = []
        self._init_model = init_model

    def enter(self, request: bytes, timeout: float) -> bytes:
        del timeout
        self.entered.append(request)
        return rank_reply(init_model=self._init_model)

    def start(self) -> None:
        pass

    def events(self) -> list[LinkEvent]:
        found, self.happened = self.happened, []
        return found

    def socket_bytes(self) -> None:
        return None

    def send(self, data: Outgoing, *, control: bool = False) -> None:
        message = unpack(one_buffer(data))
        assert control is not isinstance(message, PushPart | Holding | ModelPart)
        self.sent.append(message)

    def receive(self, timeout: float) -> memoryview | None:
        assert self.coming or timeout < 1.0, "nothing will ever come"
        return memoryview(pack(self.coming.popleft())) if self.coming else None


def segment(start: int, *values: float) -> Segment:
    return Segment(start, Fp32().encode(torch.tensor(values), {}, 0)[0])


def part_of_model(version: int, piece: Segment, *, last: bool) -> ModelPart:
    return ModelPart(version=version, vector="weights", segments=(piece,), last=last)


def part_of_result(version: int, *pieces: Segment, last: bool = True) -> ResultPart:
    return ResultPart(version=version, segments=pieces, last=last)


def update_shard(held: Intervals) -> UpdateShard:
    """A shard whose local model is zero."""
    layout = Layout.of_shapes([("weight", (NUMEL,))])
    local = FlatModel(torch.zeros(NUMEL), Intervals.whole(NUMEL), held)
    return UpdateShard("west", layout, local, find("diloco", {}).for_site().for_shard, key=1)


def connected(
    *lines: Line, served: tuple[Intervals, ...] = (Intervals.whole(NUMEL),), rank: int = 0
) -> tuple[RankConnection, UpdateShard]:
    """A rank that holds everything, and has these lines to the server processes."""
    held = Intervals.whole(NUMEL)
    links = {
        number: ServerLink(cast(ClientTransport, line), own, rank_request("west", rank))
        for number, (line, own) in enumerate(zip(lines, served, strict=True))
    }
    connection = RankConnection("west", rank, [1] * len(lines), 5, held, links, SiteTelemetry("west", None))
    return connection, update_shard(held)


def no_model(served: Intervals) -> list[ModelPart]:
    raise AssertionError(f"nobody has asked for {served}")


def load(connection: RankConnection, shard: UpdateShard, version: int) -> bool:
    order = LoadOrder(version=version, step=4, included=0, discards=True)
    return connection.load(order, shard, JoinReply(version=version, round=1, step=4, included=0, downloads=True))


# -- results and downloads ----------------------------------------------------------------------


def test_a_rank_says_first_what_it_holds() -> None:
    """To every process that serves something of it; and to no other."""
    lines = [Line(), Line(), Line()]
    connection, shard = connected(*lines, served=(LEFT, RIGHT, Intervals(())))
    connection.begin(shard, no_model)
    for line in lines[:2]:
        (said,) = line.sent
        assert isinstance(said, Holding)
        assert (said.site, said.rank, said.ranks, said.epoch) == ("west", 0, 1, 5)
        assert said.held == Intervals.whole(NUMEL)
    assert not lines[2].sent


def test_a_rank_sends_the_pushes_that_a_checkpoint_has_left_in_flight() -> None:
    """They were in the checkpoint before they were on the line, so the server may not have them."""
    lines = [Line(), Line()]
    connection, shard = connected(*lines, served=(LEFT, RIGHT))
    shard.in_flight = {7: (segment(0, 1.0), segment(4, 2.0))}
    connection.begin(shard, no_model)
    for start, line in ((0, lines[0]), (4, lines[1])):
        held, part = line.sent
        assert isinstance(held, Holding)
        assert isinstance(part, PushPart)
        assert (part.round, [one.start for one in part.segments], part.last) == (7, [start], True)


def test_a_result_is_complete_when_every_process_has_sent_its_last_part() -> None:
    lines = [Line(), Line()]
    connection, _ = connected(*lines, served=(LEFT, RIGHT))
    lines[1].coming.append(part_of_result(1, segment(4, 5.0, 6.0, 7.0, 8.0)))
    lines[0].coming.append(part_of_result(1, segment(0, 1.0, 2.0), last=False))
    assert connection.poll()
    assert not connection.has_result(1)
    assert not connection.poll()
    lines[0].coming.append(part_of_result(1, segment(2, 3.0, 4.0)))
    connection.poll()
    assert connection.has_result(1)
    assert not connection.has_result(2)
    result = connection.take_result(RoundResult(version=1, round=1, step=4))
    assert [one.start for one in result.segments] == [0, 2, 4]
    found = torch.zeros(NUMEL)
    for one in result.segments:
        one.into(found, 0, Intervals.whole(NUMEL))
    assert torch.equal(found, torch.arange(1.0, 9.0))


def test_control_messages_keep_their_order_and_are_not_mixed_with_values() -> None:
    line = Line()
    connection, _ = connected(line)
    line.coming += [RoundRequest(round=3), part_of_result(1, segment(0, 1.0)), RoundResult(version=1, round=1, step=4)]
    connection.poll()
    first, none = connection.control(), connection.control()
    assert isinstance(first, RoundRequest)
    assert none is None, "a control message is handled before more is taken in"
    connection.poll()
    assert isinstance(connection.control(), RoundResult)
    assert connection.control() is None
    assert connection.has_result(1)


def test_a_download_and_the_rounds_that_closed_meanwhile_give_the_present_model() -> None:
    """A part has what closed before it was sent; a result in between moves only what was sent before it."""
    line = Line()
    connection, shard = connected(line)
    line.coming.append(part_of_model(3, segment(0, 1.0, 1.0, 1.0, 1.0), last=False))
    line.coming.append(part_of_result(4, segment(0, *[0.5] * 8)))
    connection.poll()
    assert not connection.has_download()
    line.coming.append(part_of_model(3, segment(4, 1.5, 1.5, 1.5, 1.5), last=True))
    line.coming.append(part_of_result(5, segment(0, *[0.25] * 8)))
    connection.poll()
    assert connection.has_download()
    load(connection, shard, 4)
    assert torch.equal(shard.global_model, torch.full((NUMEL,), 1.5))
    assert torch.equal(shard.local.read(shard.held, torch.empty(NUMEL)), shard.global_model)
    assert not connection.has_download()
    assert connection.has_result(4), "it is in what was loaded"
    assert connection.take_result(RoundResult(version=4, round=4, step=4)).segments == ()
    assert len(connection.take_result(RoundResult(version=5, round=5, step=5)).segments) == 1


def test_a_download_is_loaded_as_it_comes() -> None:
    """`load` waits for parts that are not here yet."""
    line = Line()
    connection, shard = connected(line)

    def receive(timeout: float) -> memoryview | None:
        parts = {0.0: None, 0.2: part_of_model(1, segment(4 * len(asked), *[2.0] * 4), last=bool(asked))}
        message = parts[timeout]
        asked.extend([timeout] if timeout else [])
        return None if message is None else memoryview(pack(message))

    asked: list[float] = []
    line.receive = receive  # type: ignore[method-assign]
    load(connection, shard, 1)
    assert torch.equal(shard.global_model, torch.full((NUMEL,), 2.0))
    assert asked == [0.2, 0.2]


def test_a_download_that_a_restart_interrupts_is_not_loaded() -> None:
    """Its rest would never come; the site asks for it again."""
    line = Line()
    connection, shard = connected(line)
    connection.begin(shard, no_model)
    told: list[bool] = []
    connection.rejoin = lambda: told.append(connection.loading)
    line.coming.append(part_of_model(1, segment(0, *[2.0] * 4), last=False))
    line.happened.append(LinkEvent.GONE)
    assert not load(connection, shard, 1)
    assert told == [True]
    line.coming.append(part_of_model(1, segment(0, *[3.0] * NUMEL), last=True))
    assert load(connection, shard, 1)
    assert torch.equal(shard.global_model, torch.full((NUMEL,), 3.0))
    assert torch.equal(shard.local.read(shard.held, torch.empty(NUMEL)), shard.global_model)


def test_a_holding_from_the_server_is_an_error() -> None:
    line = Line()
    connection, _ = connected(line)
    line.coming.append(Holding(site="west", rank=0, ranks=1, epoch=0, held=LEFT))
    with pytest.raises(ProtocolError, match="the server sent a Holding, which only ranks send"):
        connection.poll()


# -- pushes -------------------------------------------------------------------------------------


def test_a_push_goes_to_the_processes_that_serve_it() -> None:
    lines = [Line(), Line()]
    connection, _ = connected(*lines, served=(LEFT, RIGHT))
    size = connection.send_push(2, [segment(0, 1.0, 2.0), segment(5, 3.0)])
    (left,), (right,) = lines[0].sent, lines[1].sent
    assert isinstance(left, PushPart)
    assert isinstance(right, PushPart)
    assert [one.start for one in left.segments] == [0]
    assert [one.start for one in right.segments] == [5]
    assert left.last
    assert right.last
    assert size == nbytes(left) + nbytes(right) == connection.up_bytes


def test_an_empty_push_is_a_last_part_to_everybody() -> None:
    lines = [Line(), Line()]
    connection, _ = connected(*lines, served=(LEFT, RIGHT))
    connection.send_push(2, [])
    for line in lines:
        (part,) = line.sent
        assert isinstance(part, PushPart)
        assert part.last
        assert part.segments == ()


# -- a server process that was restarted ----------------------------------------------------------


def test_a_rank_says_everything_again_to_a_process_that_was_restarted() -> None:
    """And to no other; what had come of a download is worth nothing any more."""
    lines = [Line(), Line()]
    connection, shard = connected(*lines, served=(LEFT, RIGHT), rank=1)
    connection.begin(shard, no_model)
    shard.in_flight = {7: (segment(0, 1.0), segment(4, 2.0)), 8: ()}
    lines[1].coming.append(part_of_model(3, segment(4, 1.0, 1.0), last=False))
    connection.poll()
    for line in lines:
        line.sent.clear()
    lines[1].happened.append(LinkEvent.GONE)
    connection.poll()
    assert lines[1].entered == [rank_request("west", 1)]
    held, first, second = lines[1].sent
    assert isinstance(held, Holding)
    assert isinstance(first, PushPart)
    assert isinstance(second, PushPart)
    assert (first.round, [one.start for one in first.segments], first.last) == (7, [4], True)
    assert (second.round, second.segments, second.last) == (8, (), True)
    assert not connection.links[1].download
    assert not lines[0].sent
    assert not lines[0].entered


def test_what_other_processes_have_sent_stays_when_one_is_restarted() -> None:
    lines = [Line(), Line()]
    connection, shard = connected(*lines, served=(LEFT, RIGHT), rank=1)
    connection.begin(shard, no_model)
    lines[0].coming.append(part_of_result(1, segment(0, 1.0)))
    lines[1].coming.append(part_of_result(1, segment(4, 2.0)))
    connection.poll()
    lines[1].happened.append(LinkEvent.GONE)
    connection.poll()
    assert not connection.has_result(1)
    lines[1].coming.append(part_of_result(1, segment(4, 2.0)))
    connection.poll()
    assert connection.has_result(1)
    assert [one.start for one in connection.take_result(RoundResult(version=1, round=1, step=4)).segments] == [0, 4]


def test_a_rank_that_holds_nothing_waits_for_nothing() -> None:
    connection, shard = connected(served=(), rank=1)
    connection.begin(shard, no_model)
    assert not connection.poll(1.0)
    assert connection.has_result(1)
    assert connection.send_push(1, []) == 0
    assert connection.socket_bytes() is None
    connection.close()


def test_a_process_without_a_model_is_sent_the_first_one_again() -> None:
    lines = [Line(), Line(init_model=True)]
    connection, shard = connected(*lines, served=(LEFT, RIGHT), rank=1)
    connection.begin(shard, lambda served: [part_of_model(0, segment(served.spans[0][0], 1.0), last=True)])
    lines[1].happened.append(LinkEvent.GONE)
    connection.poll()
    *_, model, held = lines[1].sent
    assert isinstance(model, ModelPart)
    assert [one.start for one in model.segments] == [4]
    assert isinstance(held, Holding)
    assert len(lines[0].sent) == 1


def test_rank_0_enters_for_the_whole_site() -> None:
    line = Line()
    connection, shard = connected(line)
    connection.begin(shard, no_model)
    asked: list[str] = []
    connection.rejoin = lambda: asked.append("again")
    line.happened.append(LinkEvent.GONE)
    connection.poll()
    assert asked == ["again"]
    assert not line.entered
    assert [type(message) for message in line.sent] == [Holding, Holding]


# -- a whole run over the in-memory transport -----------------------------------------------------

WEIGHTS = torch.arange(NUMEL, dtype=torch.float32)


class Vector(nn.Module):
    """A model of one vector, whose gradient is 1 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(WEIGHTS.clone())

    def forward(self) -> Tensor:
        return self.weight.sum()


class InProcessSite:
    """A site of one rank in a thread of this process, over the in-memory transport."""

    def __init__(self, name: str, **options: Any) -> None:
        self.model = Vector()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.site: Site = join("127.0.0.1:1", site=name, insecure=True, **options)
        self.site.prepare(self.model, self.optimizer)

    @property
    def connection(self) -> RankConnection:
        assert self.site._training is not None
        return self.site._training.connection

    @property
    def entry(self) -> Entry:
        assert self.site._entry is not None
        return self.site._entry

    def step(self, update: float) -> None:
        """Train one step, which adds `update` to every weight."""
        (-update * self.model()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> InMemoryNetwork:
    """Sites that join reach this network, and no other."""
    made = InMemoryNetwork()

    def client(entry: Entry, address: str, numel: int) -> InMemoryClient:
        del address, numel
        options, rank = entry._options, entry._group.rank
        return InMemoryClient(made, "hub", site=options.site, rank=rank, incarnation=entry._incarnation)

    monkeypatch.setattr(Entry, "_client", client)
    return made


CONFIG = RunConfig(("east", "west"), lambda numel: find("diloco", {"every": 1, "aggregator": "mean"}), seed=3)


def until(happened: Callable[[], object], between: Callable[[], object] = lambda: time.sleep(0.01)) -> None:
    limit = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < limit, "waited too long"
        between()


def test_two_sites_train_with_a_server_in_one_process(
    network: InMemoryNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server = GlobalServer(CONFIG, ServeOptions(until_finished=True), InMemoryServer(network, "hub"))
    serving = threading.Thread(target=server.run, daemon=True)
    serving.start()

    def train(name: str, update: float) -> InProcessSite:
        site = InProcessSite(name)
        for _ in range(3):
            site.step(update)
        site.site.leave()
        return site

    with ThreadPoolExecutor(2) as pool:
        sites = list(pool.map(train, ("east", "west"), (1.0, 3.0)))
    serving.join(60)
    assert not serving.is_alive()
    assert server.process.serving is not None
    global_model = server.process.serving.shard.global_model
    assert torch.equal(global_model.vector, WEIGHTS + 3 * 2.0), "three rounds, each moves by the mean"
    assert {site.site.digest() for site in sites} == {global_model.digest()}
    for site in sites:
        assert torch.equal(site.model.weight, global_model.vector)
        name, registry = site.site.name, server.metrics.registry
        up = registry.get_sample_value("weightgrad_up_bytes_total", {"site": name})
        down = registry.get_sample_value("weightgrad_down_bytes_total", {"site": name})
        assert (up, down) == (site.connection.up_bytes, site.connection.down_bytes), "every message is counted"
        own = site.connection.telemetry.metrics.registry
        assert own.get_sample_value("weightgrad_step", {"site": name}) == 3
        assert own.get_sample_value("weightgrad_sent_bytes_total", {"site": name}) == up
    assert "west: connected to the global server" in caplog.text
    assert "west leaves" in caplog.text
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert all(line.startswith("INSECURE") for line in warned), "nothing went wrong"


def test_a_whole_global_model_in_the_middle_of_training_moves_the_model(
    network: InMemoryNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a site that was lost, and for which no results were kept."""
    caplog.set_level("INFO")
    transport = InMemoryServer(network, "hub")
    server = GlobalServer(CONFIG, ServeOptions(result_bytes=0), transport)
    serving = threading.Thread(target=server.run, daemon=True)
    serving.start()
    with ThreadPoolExecutor(2) as pool:
        east, west = pool.map(InProcessSite, ("east", "west"))
        assert server.coordinator is not None
        server.coordinator.members.lose("west")  # as if it had sent nothing for too long
        for _ in range(9):
            east.step(1.0)
        pushed = pool.submit(west.step, 0.0)  # it has missed everything
        until(lambda: "west joins with global model version 9" in caplog.text)
        east.step(0.0)
        pushed.result(60)
    assert "west: received the whole global model, version" in caplog.text
    assert "exact" in caplog.text
    assert torch.equal(west.model.weight.detach(), WEIGHTS + 9.0)
    for site in (east, west):
        site.entry.hang_up()
    server.stop()
    serving.join(60)


def test_a_site_serves_its_metrics_and_joins_a_restarted_server_again(
    network: InMemoryNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    servers = [GlobalServer(CONFIG, ServeOptions(), InMemoryServer(network, "hub")) for _ in range(2)]
    threads = [threading.Thread(target=server.run, daemon=True) for server in servers]
    threads[0].start()
    east = InProcessSite("east", metrics="127.0.0.1:0")
    page, training = east.entry._metrics_page, east.site._training
    assert page is not None
    assert training is not None
    assert training.leader is not None
    leader = training.leader

    def get(path: str) -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{page.port}{path}", timeout=10) as reply:
            return str(reply.read().decode())

    assert json.loads(get("/healthz"))["connected"] is True
    servers[0].stop()
    threads[0].join(60)
    threads[1].start()
    until(lambda: servers[1].coordinator is not None, lambda: leader.pump(0.1))
    leader.wait_until_unblocked()
    assert "east: connection to the global server lost; reconnecting" in caplog.text
    assert "east: the global server does not know this session" in caplog.text
    leader.pump(0.0)
    assert 'weightgrad_connected{site="east"} 1.0' in get("/metrics")
    assert json.loads(get("/healthz"))["healthy"] is True
    servers[1].transport.drop(Peer("east", 0), "the run is over")
    with pytest.raises(RefusedError, match="the run is over"):
        leader.pump(60.0)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        get("/healthz")
    east.entry.hang_up()
    servers[1].stop()
    threads[1].join(60)
