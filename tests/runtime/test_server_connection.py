"""A site's connection to the global server, with messages made by hand; and whole runs in one process."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from weightgrad.core.global_model import GlobalModel
from weightgrad.core.layout import Layout
from weightgrad.core.site_state import SiteState
from weightgrad.core.strategies import Strategy, find
from weightgrad.errors import RefusedError
from weightgrad.runtime.admission import AdmissionRequest, RunConfig
from weightgrad.runtime.server import GlobalServer, ServeOptions
from weightgrad.runtime.server_connection import ServerConnection
from weightgrad.runtime.transport.in_memory import InMemoryClient, InMemoryNetwork, InMemoryServer
from weightgrad.runtime.transport.transport import ClientTransport, LinkEvent
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.messages import InitModel, Join, JoinReply, Leave, Message


class Line:
    """A transport whose messages are made by hand."""

    address = "127.0.0.1:1"
    unacknowledged_bytes = 0
    round_trip_s = 0.0
    why = ""

    def __init__(self) -> None:
        self.coming: deque[Message] = deque()
        self.sent: list[Message] = []

    def events(self) -> list[LinkEvent]:
        return []

    def socket_bytes(self) -> None:
        return None

    def send(self, data: bytes) -> None:
        self.sent.append(unpack(data))

    def receive(self, timeout: float) -> bytes | None:
        del timeout
        return pack(self.coming.popleft()) if self.coming else None


def test_a_whole_global_model_in_the_middle_of_training_moves_the_model(caplog: pytest.LogCaptureFixture) -> None:
    """Or the other ranks of the site would not be told, and train on with the old one."""
    caplog.set_level("INFO")
    layout, line = Layout.of_shapes([("weight", (8,))]), Line()
    global_model = GlobalModel(layout, torch.zeros(8), optimizer=None, rate=lambda step: 0.1)
    state = SiteState("west", global_model, find("diloco", {}).for_site(), samples=1, key=1)
    connection = ServerConnection(cast(ClientTransport, line), AdmissionRequest("west", [], "", -1), None, lambda: None)
    connection.attach(state)
    connection.send(state.join())
    line.coming.append(JoinReply(version=0, round=1, step=0, included=0))
    assert not connection.wait_until_unblocked(), "nothing to be told"
    line.coming.append(JoinReply(version=3, round=4, step=12, included=0, snapshot={"weights": torch.ones(8)}))
    assert connection.wait_until_unblocked()
    assert torch.equal(state.model, torch.ones(8))
    assert "west: received the whole global model, version 3, exact" in caplog.text
    assert not connection.wait_until_unblocked()
    assert [type(message) for message in line.sent] == [Join]


# -- a whole run over the in-memory transport -------------------------------------------------

NUMEL = 8
WEIGHTS = torch.arange(NUMEL, dtype=torch.float32)


class InProcessSite:
    """A site without ranks: its state machine, and its connection over the in-memory transport."""

    def __init__(self, network: InMemoryNetwork, name: str, **options: Any) -> None:
        layout = Layout.of_shapes([("weight", (NUMEL,))])
        global_model = GlobalModel(layout, WEIGHTS.clone(), optimizer=None, rate=lambda step: 0.1)
        request = AdmissionRequest(name, [("weight", [NUMEL])], global_model.digest(), -1)
        client = InMemoryClient(network, "hub", site=name, incarnation=1)
        self.connection = ServerConnection(client, request, None, lambda: None, **options)
        reply = self.connection.enter()
        strategy = Strategy(**reply.strategy)
        self.state = SiteState(name, global_model, strategy.for_site(), samples=1, key=reply.number)
        self.connection.attach(self.state)
        self.connection.start()
        if reply.init_model:
            self.connection.init_model(InitModel(site=name, snapshot={"weights": global_model.vector}))
        self.connection.send(self.state.join(same_start=reply.same_start))
        self.connection.wait_until_unblocked()

    def step(self, update: float) -> None:
        """Train one step, which adds `update` to every weight."""
        self.state.model.add_(update)
        self.connection.send(self.state.after_step(self.connection.now, None))
        self.connection.wait_until_unblocked()

    def leave(self) -> None:
        self.connection.send(self.state.finish(self.connection.now))
        self.connection.wait_until_unblocked()
        self.connection.send([Leave(site=self.state.name)])
        self.connection.close()


def test_two_sites_train_with_a_server_in_one_process(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = RunConfig(("east", "west"), lambda numel: find("diloco", {"every": 1, "aggregator": "mean"}), seed=3)
    network = InMemoryNetwork()
    server = GlobalServer(config, ServeOptions(until_finished=True), InMemoryServer(network, "hub"))
    serving = threading.Thread(target=server.run, daemon=True)
    serving.start()

    def train(name: str, update: float) -> InProcessSite:
        site = InProcessSite(network, name)
        for _ in range(3):
            site.step(update)
        site.leave()
        return site

    with ThreadPoolExecutor(2) as pool:
        sites = list(pool.map(train, ("east", "west"), (1.0, 3.0)))
    serving.join(60)
    assert not serving.is_alive()
    assert server.core is not None
    assert torch.equal(server.core.global_model.vector, WEIGHTS + 3 * 2.0), "three rounds, each moves by the mean"
    assert {site.state.global_model.digest() for site in sites} == {server.core.global_model.digest()}
    for site in sites:
        name, registry = site.state.name, server.metrics.registry
        up = registry.get_sample_value("weightgrad_up_bytes_total", {"site": name})
        down = registry.get_sample_value("weightgrad_down_bytes_total", {"site": name})
        assert (up, down) == (site.connection.up_bytes, site.connection.down_bytes), "every message is counted"
        own = site.connection.telemetry.metrics.registry
        assert own.get_sample_value("weightgrad_step", {"site": name}) == 3
        assert own.get_sample_value("weightgrad_sent_bytes_total", {"site": name}) == up
    assert "west: connected to the global server" in caplog.text
    assert "west leaves" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"], "nothing went wrong"


def test_a_site_serves_its_metrics_and_joins_a_restarted_server_again(caplog: pytest.LogCaptureFixture) -> None:
    config = RunConfig(("east", "west"), lambda numel: find("diloco", {"every": 1, "aggregator": "mean"}), seed=3)
    network = InMemoryNetwork()
    servers = [GlobalServer(config, ServeOptions(), InMemoryServer(network, "hub")) for _ in range(2)]
    threads = [threading.Thread(target=server.run, daemon=True) for server in servers]
    threads[0].start()
    east = InProcessSite(network, "east", metrics="127.0.0.1:0")
    page = east.connection._metrics_page
    assert page is not None

    def get(path: str) -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{page.port}{path}", timeout=10) as reply:
            return str(reply.read().decode())

    assert json.loads(get("/healthz"))["connected"] is True
    servers[0].stop()
    threads[0].join(60)
    threads[1].start()
    until = time.monotonic() + 60
    while servers[1].core is None and time.monotonic() < until:
        east.connection.pump(0.1)
    east.connection.wait_until_unblocked()
    assert "east: connection to the global server lost; reconnecting" in caplog.text
    assert "east: the global server does not know this session" in caplog.text
    east.connection.pump()
    assert 'weightgrad_connected{site="east"} 1.0' in get("/metrics")
    assert json.loads(get("/healthz"))["healthy"] is True
    servers[1].transport.drop("east", "the run is over")
    with pytest.raises(RefusedError, match="the run is over"):
        east.connection.pump(60.0)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        get("/healthz")
    east.connection.close()
    servers[1].stop()
    threads[1].join(60)
