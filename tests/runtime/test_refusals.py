"""Who and what is refused, with which words on both sides, over real TLS; and that everybody else goes on."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from weightgrad.cli import app
from weightgrad.codecs import Fp32
from weightgrad.core.global_model import digest_of
from weightgrad.core.optimizers.spec import OptimizerSpec
from weightgrad.core.strategies import find
from weightgrad.errors import CredentialsError, LinkError, RefusedError, StrategyError
from weightgrad.lab.run.launch import free_port
from weightgrad.runtime.admission_messages import AdmissionRequest, RankRequest
from weightgrad.runtime.join import join
from weightgrad.runtime.join_options import JoinOptions
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.security import certificates
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.security.tls_check import ProblemKind, TlsProblem
from weightgrad.runtime.session import Site
from weightgrad.runtime.site import present_sites
from weightgrad.runtime.transport.grpc_channels import GrpcChannels
from weightgrad.runtime.transport.grpc_client import GrpcClient
from weightgrad.runtime.transport.grpc_server import GrpcServer
from weightgrad.runtime.transport.grpc_settings import channel_options
from weightgrad.runtime.transport.transport import Peer
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.messages import (
    Holding,
    Join,
    JoinReply,
    Leave,
    Message,
    ModelPart,
    Push,
    PushPart,
    ResultPart,
    RoundResult,
    Segment,
    Waiting,
)

from .certificates import DAY, now, reissue, unchecked
from .deployment import PATIENCE_S, Hub

SITES = ("east", "west")
NUMEL = 15


def rules(name: str = "diloco", **changes: Any) -> RunConfig:
    """For small models; rounds are single steps, and what they move is the mean."""
    strategy = {"every": 1, "aggregator": "mean"} if name == "diloco" else {}
    return RunConfig(sites=SITES, fit=lambda numel: find(name, {"t_global": 600, **strategy, **changes}), seed=3)


def model(*sizes: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes or (4, 3))))


@pytest.fixture(name="made", scope="module")
def fixture_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "all"
    certificates.create(directory, [], SITES)
    return directory


@pytest.fixture(name="own")
def fixture_own(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(made, tmp_path / "certs"))


@pytest.fixture(autouse=True)
def _log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@contextmanager
def entered(
    address: str,
    name: str,
    credentials: Credentials | Path | None,
    module: nn.Module | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **asked: Any,
) -> Iterator[tuple[Site, Callable[[], None]]]:
    """A site that is in, and what makes it take a step; it hangs up at the end."""
    if isinstance(credentials, Credentials):
        # `join` would have looked at them.
        site = Site(JoinOptions(address=address, site=name, credentials=credentials, timeout=1.0))
    else:
        site = join(address, site=name, credentials=credentials, insecure=credentials is None, timeout=1.0)
    trained = model() if module is None else module
    chosen = optimizer(trained.parameters(), lr=0.1)

    def step() -> None:
        trained(torch.ones(2, 4)).square().sum().backward()
        chosen.step()

    try:
        site.prepare(trained, chosen, **asked)
        yield site, step
    finally:
        if site._entry is not None and site._entry._coordinator_client is not None:
            site._entry._coordinator_client.close(0.0)


def refused_with(words: str, *arguments: Any, **more: Any) -> None:
    """It is not let in, and this is what it is told."""
    with pytest.raises(RefusedError, match=words), entered(*arguments, **more):
        pass


def weights() -> Tensor:
    """Of the model that all sites begin with."""
    return torch.cat([p.detach().flatten() for p in model().parameters()])


LAYOUT = [(name, list(parameter.shape)) for name, parameter in model().named_parameters()]


def first_model(vector: Tensor, start: int = 0) -> ModelPart:
    """A model in one part."""
    piece = Segment(start, Fp32().encode(vector, {}, 0)[0])
    return ModelPart(version=0, vector="weights", segments=(piece,), last=True)


def holding(site: str, **changes: Any) -> Holding:
    """A rank that holds everything."""
    whole = Holding(site=site, rank=0, ranks=1, epoch=0, held=Intervals.whole(NUMEL))
    return dataclasses.replace(whole, **changes)


def part_of(push: Push, **changes: Any) -> PushPart:
    """The values of a push in one part."""
    whole = PushPart(site=push.site, round=push.round, rank=0, segments=push.segments, last=True)
    return dataclasses.replace(whole, **changes)


class Hand:
    """A site whose messages are made by hand."""

    def __init__(self, hub: Hub, name: str, credentials: Path) -> None:
        self.name = name
        own = Credentials.load(credentials, site=name).for_client()
        channels = GrpcChannels(hub.address, credentials=own, options=channel_options(streams=2))
        self.client = GrpcClient(channels, site=name, incarnation=f"{name} 1")
        self.round = self.version = 0

    def enter(self, optimizer: torch.optim.Optimizer | None = None) -> Hand:
        """In, and welcomed; with the same model as others have."""
        told = None if optimizer is None else OptimizerSpec.of(optimizer, optimizer.param_groups[0]["params"]).dump()
        request = AdmissionRequest(self.name, LAYOUT, -1, optimizer=told)
        asked = self.client.enter(request.pack(), PATIENCE_S)
        self.client.start()
        if json.loads(asked)["init_model"]:
            self.send(first_model(weights()))
        self.send(holding(self.name))
        self.send(Join(site=self.name, version=0, digest=digest_of(weights(), Intervals.whole(NUMEL))))
        reply = self.receive()
        assert isinstance(reply, JoinReply)
        self.version, self.round = reply.version, reply.pushed
        return self

    def send(self, message: Message | bytes, *, control: bool | None = None) -> None:
        """On its own lane, or on the other one."""
        data = message if isinstance(message, bytes) else pack(message)
        own = not isinstance(message, bytes | PushPart | Holding | ModelPart)
        self.client.send(data, control=own if control is None else control)

    def flood(self, messages: Iterable[Message]) -> None:
        """Send until all is sent, or the server has ended the session; `refused` tells why."""
        with suppress(RefusedError):
            for message in messages:
                self.send(message)

    def push(self, update: Tensor | None = None, **changes: Any) -> Push:
        """The next one; its values follow as a part."""
        parts = () if update is None else (Segment(0, Fp32().encode(update, {}, 0)[0]),)
        self.round += 1
        push = Push(
            site=self.name,
            round=self.round,
            after=self.round - 1,
            step=self.round,
            seen=self.version,
            samples=1,
            segments=parts,
        )
        return dataclasses.replace(push, **changes)

    def send_push(self, push: Push) -> None:
        """The control message, and the values on the bulk lane."""
        self.send(dataclasses.replace(push, segments=()))
        self.send(part_of(push))

    def receive(self) -> Message:
        until = time.monotonic() + PATIENCE_S
        while (data := self.client.receive(0.5)) is None:
            assert time.monotonic() < until, "waited too long"
        message = unpack(data)
        if isinstance(message, ResultPart | ModelPart | Waiting):
            return self.receive()
        if isinstance(message, RoundResult):
            self.version = message.version
        return message

    def heard(self) -> list[Message]:
        """What has come, of any kind."""
        found = []
        while (data := self.client.receive(0.0)) is not None:
            found.append(unpack(data))
        return found

    def refused(self) -> str:
        """Until its session is ended; why."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            try:
                self.receive()
            except RefusedError as error:
                return str(error)
        raise AssertionError("it was not refused")


@contextmanager
def hand(hub: Hub, name: str, credentials: Path, *, enter: bool = True, **more: Any) -> Iterator[Hand]:
    made = Hand(hub, name, credentials)
    try:
        yield made.enter(**more) if enter else made
    finally:
        made.client.close(0.0)


def outside() -> Segment:
    """A segment that reaches beyond the model."""
    return Segment(9, Fp32().encode(torch.ones(9), {}, 0)[0])


def with_values(*values: float) -> Segment:
    """A part that no encoder makes."""
    payload, _ = Fp32().encode(torch.zeros(NUMEL), {}, 0)
    body = torch.zeros(NUMEL)
    body[: len(values)] = torch.tensor(values)
    return Segment(0, dataclasses.replace(payload, body=body.view(torch.uint8)))


# -- certificates -------------------------------------------------------------------------------


def test_without_a_certificate(made: Path) -> None:
    with Hub(rules(), certs=made) as hub:
        refused_with("demands a certificate and we have none", hub.address, "east", None)
        with entered(hub.address, "east", made):
            assert Peer("east", 0) in hub.transport.sessions(), "the server goes on"


def test_with_certificates_of_another_ca(made: Path, tmp_path: Path) -> None:
    certificates.create(tmp_path / "other", [], SITES)
    with Hub(rules(), certs=made) as hub:
        refused_with(r"is signed by CN=weightgrad CA .*, not by our CA", hub.address, "east", tmp_path / "other")
        shutil.copy(made / "ca.pem", tmp_path / "other/sites/east/ca.pem")
        words = r"does not accept our certificate of 'east'.*the server trusts another CA"
        refused_with(words, hub.address, "east", unchecked(tmp_path / "other/sites/east"))
        with entered(hub.address, "east", made):
            pass


def test_with_an_expired_certificate(own: Path) -> None:
    reissue(own, "sites/east", "east", now() - 9 * DAY, now() - 2 * DAY)
    with Hub(rules(), certs=own) as hub:
        with pytest.raises(CredentialsError, match=r"expired on .*add-site DIR east --renew"):
            join(hub.address, site="east", credentials=own)
        words = r"does not accept our certificate.*: it expired on"
        refused_with(words, hub.address, "east", unchecked(own / "sites/east"))


def test_a_server_that_is_going_away_is_not_a_refusal(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs up after the handshake, as one that does not accept our certificate does; a moment later it is gone."""
    refused = TlsProblem(ProblemKind.CERTIFICATE, "gs:1 does not accept our certificate of 'east'")
    said = [refused, *[TlsProblem(ProblemKind.UNREACHABLE, "gs:1 refuses connections: nothing listens there")] * 9]
    monkeypatch.setattr("weightgrad.runtime.site.entry.diagnose", lambda *_: said.pop(0))
    with pytest.raises(LinkError, match="nothing listens there"), entered(f"127.0.0.1:{free_port()}", "east", made):
        pass


SERVER = """
import sys
from pathlib import Path
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.transport.grpc_server import GrpcServer
own = Credentials.load(Path(sys.argv[1]), server=True).for_server()
class Open:
    def check_peer(self, entry): pass
    def enter(self, entry): return b""
    def on_message(self, peer, data): pass
    def on_lost(self, peer, left): pass
    def on_refused(self, reason): pass
server = GrpcServer(sys.argv[2], credentials=own)
server.start(Open())
sys.stdin.read()
"""


def test_a_handshake_that_fails_is_on_the_servers_stderr_if_asked_for(own: Path, tmp_path: Path) -> None:
    """gRPC refuses these by itself, and nothing of ours is told. It prints why with GRPC_VERBOSITY=INFO, not ERROR."""
    certificates.create(tmp_path / "other", [], SITES)
    good, nobody = unchecked(own / "sites/east"), grpc.ssl_channel_credentials((own / "ca.pem").read_bytes())
    shutil.copy(own / "ca.pem", tmp_path / "other/sites/east/ca.pem")
    shutil.copytree(own, tmp_path / "late")
    reissue(tmp_path / "late", "sites/east", "east", now() - 9 * DAY, now() - 2 * DAY)
    others = (unchecked(tmp_path / "other/sites/east"), unchecked(tmp_path / "late/sites/east"))
    address, environment = f"127.0.0.1:{free_port()}", {**os.environ, "GRPC_VERBOSITY": "INFO"}
    with open(tmp_path / "stderr", "wb") as printed:
        command = [sys.executable, "-c", SERVER, str(own), address]
        server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=printed)
    timeout = PATIENCE_S
    try:
        for credentials in (good.for_client(), nobody, *(one.for_client() for one in others)):
            channels = GrpcChannels(address, credentials=credentials, options=channel_options())
            client = GrpcClient(channels, site="east", incarnation=1)
            with suppress(LinkError):
                client.enter(b"", timeout)
            client.close(0.0)
            timeout = 0.5  # the server is there
    finally:
        server.communicate(timeout=PATIENCE_S)
    text = (tmp_path / "stderr").read_text()
    for words in (
        "PEER_DID_NOT_RETURN_A_CERTIFICATE",
        "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate",
        "CERTIFICATE_VERIFY_FAILED: certificate has expired",
    ):
        assert words in text


def test_handshakes_that_fail_fill_no_log_unless_it_is_asked_for(own: Path, tmp_path: Path) -> None:
    """gRPC has no limit for its lines about them, and strangers may have millions fail."""
    address = f"127.0.0.1:{free_port()}"
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    with open(tmp_path / "stderr", "wb") as printed:
        command = [sys.executable, "-c", SERVER, str(own), address]
        server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=printed)
    try:
        channels = GrpcChannels(
            address, credentials=unchecked(own / "sites/east").for_client(), options=channel_options()
        )
        client = GrpcClient(channels, site="east", incarnation=1)
        with suppress(LinkError):
            client.enter(b"", PATIENCE_S)  # it is there
        client.close(0.0)
        host, port = address.split(":")
        for _ in range(20):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
                stranger.recv(100)
    finally:
        server.communicate(timeout=PATIENCE_S)
    assert "Handshake failed" not in (tmp_path / "stderr").read_text()


def test_with_a_revoked_certificate(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    serial = certificates.revoke(own, "east")
    with Hub(rules(), certs=own) as hub:
        words = rf"the certificate of east \(serial {serial:x}\) is revoked; ask the operator for a new one"
        refused_with(words, hub.address, "east", own)
        assert hub.refused("revoked certificate") == 1
        assert "a connection was refused: revoked certificate" in caplog.text
        assert "was not admitted: the certificate of east" in caplog.text
        certificates.add_site(own, "east", renew=True)
        with entered(hub.address, "east", own):
            pass


def test_a_certificate_that_is_revoked_while_connected(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Hub(rules(), certs=own) as hub, hand(hub, "west", own) as west, entered(hub.address, "east", own) as east:
        hub.until(lambda: len(hub.transport.sessions()) == 2)
        certificates.revoke(own, "west")
        began = time.monotonic()
        assert "the certificate of west" in west.refused()
        assert time.monotonic() - began < 30.0, "within seconds; on a busy machine some more"
        assert hub.refused("revoked certificate") >= 1
        assert "west: session ended by the global server: the certificate of west" in caplog.text
        refused_with("is revoked", hub.address, "west", own)
        assert Peer("east", 0) in hub.transport.sessions()
        del east


def test_a_running_site_says_that_it_was_revoked(own: Path) -> None:
    with Hub(rules(), certs=own) as hub, entered(hub.address, "east", own) as (_, step):
        certificates.revoke(own, "east")
        with pytest.raises(RefusedError, match=r"the certificate of east .* is revoked"):
            step()  # and waits for west, which never comes


# -- names --------------------------------------------------------------------------------------


def test_with_the_certificate_of_another_site(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Hub(rules(), certs=made) as hub:
        with pytest.raises(CredentialsError, match="is of 'west'; wanted that of site east"):
            join(hub.address, site="east", credentials=made / "sites/west")
        words = "the certificate is of 'west', not of 'east'; use the directory of that site"
        refused_with(words, hub.address, "east", unchecked(made / "sites/west"))
        assert hub.refused("another site's certificate") == 1
        assert words in caplog.text


def test_an_unknown_site(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificates.add_site(own, "north")
    with Hub(rules(), certs=own) as hub:
        words = "no site 'north' in the recipe of this server; it has east, west"
        refused_with(words, hub.address, "north", own)
        assert hub.refused("unknown site") == 1
        assert words in caplog.text


@contextmanager
def as_another_process(site: Site) -> Iterator[None]:
    """What joins from here on does not find a site of this process."""
    present_sites.remove(site._options.address, site.name, site)
    yield


def test_the_same_site_started_twice(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The later one is in; the earlier one is told."""
    with (
        Hub(rules(), certs=made) as hub,
        entered(hub.address, "east", made) as (site, first),
        as_another_process(site),
        entered(hub.address, "east", made),
    ):
        with pytest.raises(RefusedError, match="another process has entered as east since this one; is the site"):
            first()
        assert hub.refused("started twice") == 1
        assert "is the site started twice?" in caplog.text
        assert list(hub.transport.sessions()) == [Peer("east", 0)]


def test_ranks_that_rank_0_has_not_spoken_for(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Hub(rules(), certs=made) as hub:
        own = Credentials.load(made, site="east").for_client()
        channels = GrpcChannels(hub.address, credentials=own, options=channel_options())
        client = GrpcClient(channels, site="east", rank=1, incarnation=1)
        request = RankRequest("east", 1).pack()
        with pytest.raises(LinkError, match="rank 0 of east has not entered; east rank 1 is to try again"):
            client.enter(request, 1.0)
        with hand(hub, "east", made):  # a site of one rank
            words = "east has 1 ranks, and east rank 1 wants to enter"
            with pytest.raises(RefusedError, match=words):
                client.enter(request, PATIENCE_S)
            assert hub.refused("a rank too many") == 1
            assert words in caplog.text
            with pytest.raises(RefusedError, match="the request of a rank that is not JSON"):
                client.enter(b"", PATIENCE_S)
            assert list(hub.transport.sessions()) == [Peer("east", 0)]
        client.close(0.0)


# -- what they want -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((4, 2), r"0\.weight is \[2, 4\], the others have \[3, 4\]"),
        ((4, 3, 3), r"it has a parameter 1\.weight \[3, 3\], which the others lack"),
    ],
)
def test_another_model(sizes: tuple[int, ...], words: str, made: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Hub(rules(), certs=made) as hub, entered(hub.address, "east", made):
        words = f"the model of west is not the one that is being trained: {words}"
        refused_with(words, hub.address, "west", made, model(*sizes))
        assert hub.refused("another model") == 1
        assert "the model of west is not the one" in caplog.text
        with entered(hub.address, "west", made):
            pass


def test_another_strategy(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Hub(rules(), certs=made) as hub, entered(hub.address, "east", made):
        refused_with(
            r"west asks for another strategy: trigger is 'every\(8\)' here and 'every\(1\)' there",
            hub.address, "west", made, strategy="diloco", every=8, aggregator="mean", t_global=600,
        )  # fmt: skip
        assert hub.refused("another strategy") == 1
        assert "west asks for another strategy" in caplog.text
        with entered(hub.address, "west", made, strategy="diloco", every=1, aggregator="mean", t_global=600):
            pass


def test_another_optimizer_where_gradients_are_shared(made: Path) -> None:
    def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.5)

    def faster(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=2 * lr)

    with Hub(rules("baseline"), certs=made) as hub, entered(hub.address, "east", made):
        words = "west has another optimizer: it is Adam, the others have SGD; baseline shares gradients"
        refused_with(words, hub.address, "west", made, optimizer=torch.optim.Adam)
        words = r"west has another optimizer: momentum of group 0 is 0\.5, the others have 0"
        refused_with(words, hub.address, "west", made, optimizer=momentum)
        assert hub.refused("another optimizer") == 2
        with entered(hub.address, "west", made, optimizer=faster):
            pass  # the rate is told with every step
    with (
        Hub(rules(), certs=made) as hub,
        entered(hub.address, "east", made),
        entered(hub.address, "west", made, optimizer=torch.optim.Adam),
    ):
        pass  # where updates are shared it is each site's own


@pytest.mark.parametrize(
    "request_",
    [
        b"", b"\xff\xfe", b"rubbish", b"[]", b"{}", b'{"protocol": 1}', b'{"protocol": 3}',
        b'{"protocol": 3, "layout": 5}', b'{"protocol": 3, "layout": [["a", [-1]]], "site": "east"}',
        b'{"protocol": 3, "layout": [["a", [-1]]], "site": "east", "version": 0}',
        b'{"protocol": 3, "layout": [["a", [1]]], "site": "east", "version": 0, "strategy": 7}',
        b'{"protocol": 3, "layout": [["a", [1]]], "site": "east", "version": "x"}',
        b'{"protocol": 3, "layout": [["a", [1]]], "site": "east", "version": 0, "workers": "two"}',
        b'{"protocol": 3, "layout": [["a", [1]]], "site": "east", "version": 0, "workers": 0}',
        b'{"protocol": 3, "layout": [], "site": "east", "version": 0, "more": 1}',
    ],
)  # fmt: skip
def test_a_request_that_is_none(request_: bytes, made: Path) -> None:
    with Hub(rules(), certs=made) as hub:
        with hand(hub, "east", made, enter=False) as east, pytest.raises(RefusedError, match="an admission request"):
            east.client.enter(request_, PATIENCE_S)
        assert hub.refused("another protocol") == 1
        with hand(hub, "east", made):
            pass


def test_a_request_in_the_name_of_another_site(made: Path) -> None:
    with Hub(rules(), certs=made) as hub, hand(hub, "east", made, enter=False) as east:
        with pytest.raises(RefusedError, match="the request is of 'west', the connection of 'east'"):
            east.client.enter(AdmissionRequest("west", [("a", [1])], -1).pack(), PATIENCE_S)
        assert hub.refused("another site's name") == 1


# -- messages -----------------------------------------------------------------------------------


def healthy(hub: Hub, east: Hand) -> bool:
    """The server is well, and east gets an answer."""
    hub.until(lambda: hub.server.status()["healthy"])
    east.send(Join(site="east", version=0))
    return isinstance(east.receive(), JoinReply)


def takes_part(west: Hand, east: Hand) -> bool:
    """A round of both closes."""
    for site in (west, east):
        site.send_push(site.push(torch.ones(NUMEL)))
    return isinstance(west.receive(), RoundResult) and isinstance(east.receive(), RoundResult)


def test_a_message_too_large(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Hub(rules(), certs=made) as hub, hand(hub, "east", made) as east:
        hub.transport.limits = dataclasses.replace(hub.transport.limits, max_message=2000)
        with hand(hub, "west", made) as west:
            west.send(bytes(2001))
            assert "a message of 2001 bytes; the receiver takes at most 2000" in west.refused()
        assert "west: session ended by the global server: a message of 2001 bytes" in caplog.text
        assert healthy(hub, east)
        with hand(hub, "west", made):
            pass


def test_too_many_messages(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Hub(rules(), certs=made) as hub, hand(hub, "east", made) as east:
        hub.transport.limits = dataclasses.replace(hub.transport.limits, messages_per_s=0.01, burst=20)
        with hand(hub, "west", made) as west:
            west.flood(Join(site="west", version=0) for _ in range(20))
            assert "west sends more than 0.01 messages a second" in west.refused()
        assert "west: session ended by the global server: west sends more than" in caplog.text
        assert healthy(hub, east)


@pytest.mark.parametrize(
    ("values", "why", "options"),
    [
        ((math.nan,), "is not finite", {}),
        ((1.0, -math.inf), "is not finite", {"guard": None}),  # as by --refuse-norm 0
        ((1e13,), "has norm 1e+13, more than any", {}),
    ],
)
def test_an_update_that_is_not_finite(
    values: tuple[float, ...], why: str, options: dict[str, Any], made: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts as nothing, and does not weigh: the round closes, and the others' updates are in it."""
    with Hub(rules(), certs=made, **options) as hub, hand(hub, "east", made) as east, hand(hub, "west", made) as west:
        before = hub.global_model.vector.clone()
        west.send_push(west.push(None, segments=(with_values(*values),)))
        east.send_push(east.push(torch.ones(NUMEL)))
        for site in (east, west):
            result = site.receive()
            assert isinstance(result, RoundResult)
            assert result.included == {"east": 1, "west": 1}
        torch.testing.assert_close(hub.global_model.vector, before + 1.0)
        assert f"an update of west was refused: update of west at round 1 {why}" in caplog.text
        assert hub.counted("refused_updates_total", site="west") == 1
        assert b'weightgrad_refused_updates_total{site="west"} 1.0' in hub.server.metrics.text()
        assert takes_part(west, east)
        torch.testing.assert_close(hub.global_model.vector, before + 2.0)


def test_an_update_that_is_much_larger_than_usual(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Hub(rules(), certs=made) as hub, hand(hub, "east", made) as east, hand(hub, "west", made) as west:
        for scale in (1.0, 2.0, 1.0, 1.0, 1.5, 1000.0, 1.0):
            west.send_push(west.push(torch.full((NUMEL,), scale)))
            east.send_push(east.push(torch.zeros(NUMEL)))
            for site in (east, west):
                assert isinstance(site.receive(), RoundResult)
        assert "an update of west was refused: update of west at round 6 has norm" in caplog.text
        assert "more than 20 times the largest of its last 5" in caplog.text
        assert hub.counted("refused_updates_total", site="west") == 1
        torch.testing.assert_close(hub.global_model.vector, weights() + (1 + 2 + 1 + 1 + 1.5 + 1) / 2)


def push_part(west: Hand, **changes: Any) -> PushPart:
    return part_of(west.push(torch.ones(NUMEL)), **changes)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda west: west.push(site="east"), "west sent a Push in the name of 'east'"),
        (lambda west: push_part(west, site="east"), "west sent a PushPart in the name of east"),
        (lambda west: push_part(west, rank=1), "west sent a PushPart in the name of west rank 1"),
        (lambda west: holding("east"), "west sent a Holding in the name of east"),
        (
            lambda west: holding("west", ranks=2),
            "says that 2 ranks hold something of this process, another rank said 1",
        ),
        (
            lambda west: holding("west", epoch=9, held=Intervals(((0, 9),))),
            "no rank of west holds some of the elements that are served here",
        ),
        (lambda west: Leave(site="east"), "west sent a Leave in the name of 'east'"),
        (lambda west: RoundResult(version=1, round=1, step=1), "west sent a RoundResult in the name of None"),
        (lambda west: part_of(west.push(torch.ones(NUMEL + 1))), "max_elements is 15|both ends must train the same"),
        (lambda west: part_of(west.push(None, segments=(outside(),))), "from 9 up to 18"),
        (lambda west: west.push(seen=7), "pushes on global model version 7, the server has 0"),
        (lambda west: Join(site="west", version=9), "'west' has global model version 9, the server only 0"),
        (
            lambda west: pack(Join(site="west", version=-1, download_codec="bf16")).replace(b"bf16", b"zf16"),
            "a download that cannot be made: no",
        ),
        (lambda west: b"", "TruncatedError|header"),
        (lambda west: b"garbage" * 100, "MagicError|WGMS"),
        (lambda west: pack(push_part(west))[:-1], "99 bytes came; the frame has 100"),
        (lambda west: pack(push_part(west)) + b"x", "wanted none"),
        (lambda west: bytes(pack(push_part(west))[:-1]) + b"\x00", "damaged|checksum"),
    ],
)
def test_messages_that_no_honest_site_sends(
    make: Callable[[Hand], Message | bytes], why: str, made: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The site is told, and may come back; the server and the others go on."""
    with Hub(rules(), certs=made) as hub, hand(hub, "east", made) as east:
        with hand(hub, "west", made) as west:
            before = hub.global_model.digest()
            message = make(west)
            west.send(message, control=message[5:6] == b"\4" if isinstance(message, bytes) else None)
            assert west.refused()
        assert hub.global_model.digest() == before
        (line,) = [r.getMessage() for r in caplog.records if "was refused" in r.getMessage()]
        assert line.startswith("an update of west was refused: ")
        assert any(word in line for word in why.split("|")), line
        assert hub.counted("refused_updates_total", site="west") == 1
        assert healthy(hub, east)
        with hand(hub, "west", made) as west:
            assert takes_part(west, east)


@pytest.mark.parametrize("control", [True, False])
def test_messages_on_the_wrong_lane(control: bool, made: Path) -> None:
    """Bulk may not overtake what it waits behind, and control may not wait."""
    with Hub(rules(), certs=made) as hub, hand(hub, "east", made) as east:
        with hand(hub, "west", made) as west:
            west.send(push_part(west) if control else west.push(), control=control)
            assert "west sent a message on the wrong lane" in west.refused()
        assert healthy(hub, east)
        with hand(hub, "west", made) as west:
            assert takes_part(west, east)


def test_a_push_whose_values_were_never_announced(made: Path) -> None:
    """Parts alone make no push, and neither does a control message."""
    with Hub(rules(), certs=made) as hub, hand(hub, "east", made) as east, hand(hub, "west", made) as west:
        push = west.push(torch.ones(NUMEL))
        west.send(part_of(push))
        east.send(east.push())
        hub.until(lambda: ("west", 1) in hub.shard.pushes)
        assert hub.version == 0
        assert hub.server.status()["waiting_for"] == []
        east.send(PushPart(site="east", round=1, rank=0, segments=(), last=True))
        hub.until(lambda: hub.server.status()["waiting_for"] == ["west"])
        west.send(dataclasses.replace(push, segments=()))
        assert isinstance(west.receive(), RoundResult)


def test_messages_before_there_is_a_global_model(made: Path) -> None:
    with Hub(rules(), certs=made) as hub, hand(hub, "east", made, enter=False) as east:
        for message, why in (
            (Leave(site="east"), "east sent a Leave before there was a global model"),
            (part_of(east.push(torch.ones(NUMEL))), "east sent a PushPart before there was a global model"),
            (first_model(torch.zeros(NUMEL + 1)), "max_elements is 15"),
            (first_model(torch.zeros(1), start=NUMEL), "from 15 up to 16"),
            (
                dataclasses.replace(first_model(weights()), vector="exp_avg"),
                "east sent the vector 'exp_avg' for the first global model",
            ),
        ):
            east.client.enter(AdmissionRequest("east", LAYOUT, -1).pack(), PATIENCE_S)
            east.client.start()
            east.send(message)
            assert why in east.refused()
        east.round = 0
        east.enter()
        with hand(hub, "west", made) as west:
            west.send(first_model(torch.zeros(NUMEL)))  # too late: nothing happens
            assert takes_part(west, east)
            torch.testing.assert_close(hub.global_model.vector, weights() + 1.0)


def test_a_first_global_model_is_complete_only_when_every_element_has_come(made: Path) -> None:
    """A part that comes twice does not stand for another one."""
    with Hub(rules(), certs=made) as hub, hand(hub, "east", made, enter=False) as east:
        east.client.enter(AdmissionRequest("east", LAYOUT, -1).pack(), PATIENCE_S)
        east.client.start()
        half = dataclasses.replace(first_model(weights()[:8]), last=False)
        for part in (half, half):
            east.send(part)
        east.send(holding("east"))
        hub.until(lambda: Peer("east", 0) in hub.server.process._early)
        assert hub.server.coordinator is None
        east.send(first_model(weights()[8:], start=8))
        hub.until(lambda: hub.server.coordinator is not None)
        assert torch.equal(hub.global_model.vector, weights())


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (holding("west", held=Intervals(((0, 9),))), "no rank of west holds some of the elements"),
        (Join(site="west", version=4), "'west' has global model version 4, the server only 0"),
    ],
)
def test_what_a_site_said_before_there_was_a_global_model_is_held_against_that_site(
    message: Message, why: str, made: Path
) -> None:
    with Hub(rules(), certs=made) as hub, hand(hub, "east", made, enter=False) as east:
        east.client.enter(AdmissionRequest("east", LAYOUT, -1).pack(), PATIENCE_S)
        east.client.start()
        with hand(hub, "west", made, enter=False) as west:
            west.client.enter(AdmissionRequest("west", LAYOUT, -1).pack(), PATIENCE_S)
            west.client.start()
            west.send(message)
            hub.until(lambda: hub.server.process._early or hub.server.inputs.first_model._joins)
            east.send(first_model(weights()))
            assert why in west.refused()
        east.send(holding("east"))
        assert healthy(hub, east)
        with hand(hub, "west", made) as west:
            assert takes_part(west, east)


def test_gradients_without_a_rate(made: Path) -> None:
    with Hub(rules("baseline"), certs=made) as hub, entered(hub.address, "east", made):
        with hand(hub, "west", made, optimizer=torch.optim.SGD(model().parameters(), lr=0.1)) as west:
            west.send_push(west.push(torch.ones(NUMEL)))
            assert "west sent gradients without the learning rate to step with" in west.refused()
        assert hub.version == 0


# -- without certificates -----------------------------------------------------------------------

ELSEWHERE = ["0.0.0.0:7443", "10.1.2.3:7443", "[::]:7443", "localhost.example.org:7443", "127.0.0.1.example.org:7443"]


@pytest.mark.parametrize("address", ELSEWHERE)
def test_insecure_is_for_this_machine_only(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StrategyError, match="insecure is for a server on this machine"):
        join(address, site="east", insecure=True)
    with pytest.raises(StrategyError, match="a server without certificates is for this machine only"):
        GrpcServer(address, credentials=None)
    ran = CliRunner().invoke(app, ["serve", "laptop", "--insecure", "--listen", address])
    assert ran.exit_code != 0
    assert "this machine only" in f"{ran.output} {ran.exception}"


def test_a_directory_of_that_name_does_not_make_a_host_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "global").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StrategyError, match="insecure is for a server on this machine"):
        join("global:7443", site="east", insecure=True)


def test_without_certificates_and_without_saying_so() -> None:
    with pytest.raises(StrategyError, match="join needs credentials=DIRECTORY"):
        join("127.0.0.1:7443", site="east")
    ran = CliRunner().invoke(app, ["serve", "laptop"])
    assert "serve needs --credentials DIR" in f"{ran.output} {ran.exception}"


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", "127.0.0.1:x", "127.0.0.1:99999"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(LinkError, match=r"is not an address; write HOST:PORT"):
        join(address, site="east", insecure=True)
