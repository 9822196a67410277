"""Messages over real gRPC on the loopback interface, through cuts, restarts and refusals."""

from __future__ import annotations

import datetime
import random
import select
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from weightgrad.errors import CredentialsError, LinkError, ProtocolError, RefusedError
from weightgrad.runtime.chunks import Ack, Chunk, Hello, to_bytes
from weightgrad.runtime.lane_service import (
    INCARNATION_KEY,
    LANE,
    LANE_KEY,
    PROTOCOL,
    PROTOCOL_KEY,
    SESSION_KEY,
    SITE_KEY,
    Keepalive,
)
from weightgrad.runtime.lane_sessions import Bucket
from weightgrad.runtime.lanes_client import LanesClient
from weightgrad.runtime.lanes_server import Entry, LaneLimits, LanesServer
from weightgrad.runtime.socket_bytes import SocketBytes

PATIENCE_S = 120.0  # for a busy machine; nothing here should need it
QUICK = Keepalive(every_s=1.0, timeout_s=1.0)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


class Place:
    """A global server that keeps what it gets."""

    def __init__(self, listen: str = "127.0.0.1:0", **more: Any) -> None:
        self.got: dict[str, list[bytes]] = defaultdict(list)
        self.entries: list[Entry] = []
        self.lost: list[str] = []
        calls: dict[str, Any] = {"enter": self.enter, "on_message": self.on_message, "on_lost": self.lost.append}
        self.server = LanesServer(listen, **{"credentials": None, **calls, **more})
        self.server.start()
        self.address = f"127.0.0.1:{self.server.port}"

    def enter(self, entry: Entry) -> bytes:
        self.entries.append(entry)
        return b"welcome " + entry.request

    def on_message(self, site: str, data: memoryview) -> None:
        self.got[site].append(bytes(data))


@contextmanager
def place(listen: str = "127.0.0.1:0", **more: Any) -> Iterator[Place]:
    made = Place(listen, **more)
    try:
        yield made
    finally:
        made.server.stop(0.0)


@contextmanager
def site(
    address: str, name: str = "oslo", incarnation: str | int = 1, *, start: bool = True, **more: Any
) -> Iterator[LanesClient]:
    client = LanesClient(
        address, site=name, incarnation=incarnation, **{"credentials": None, "keepalive": QUICK, **more}
    )
    try:
        if start:
            assert client.enter(b"oslo", PATIENCE_S) == b"welcome oslo"
            client.start()
        yield client
    finally:
        client.close(0.0)


def receive(client: LanesClient) -> bytes:
    end = time.monotonic() + PATIENCE_S
    while (message := client.receive(1.0)) is None:
        assert time.monotonic() < end, "waited too long"
    return bytes(message)


def wait_event(client: LanesClient, wanted: str) -> None:
    until(lambda: wanted in client.events())


class Proxy:
    """A TCP proxy that can be cut: it hangs up on everybody, or falls silent."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = threading.Event()
        self._open.set()
        self._hung_up = 0
        self._closed = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self, *, silently: bool = False) -> None:
        self._open.clear()
        if not silently:
            self._hung_up += 1

    def heal(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._closed = True
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            ours, _ = self._listener.accept()
            if not self._open.is_set():
                ours.close()
                continue
            theirs = socket.create_connection(self._target)
            self._threads.append(threading.Thread(target=self._carry, args=(ours, theirs), daemon=True))
            self._threads[-1].start()

    def _carry(self, ours: socket.socket, theirs: socket.socket) -> None:
        hung_up = self._hung_up
        with ours, theirs:
            while hung_up == self._hung_up and not self._closed:
                for source in select.select([ours, theirs], [], [], 0.05)[0]:
                    while not self._open.wait(0.05):
                        if hung_up != self._hung_up or self._closed:
                            return
                    try:
                        data = source.recv(1 << 18)
                        (theirs if source is ours else ours).sendall(data)
                    except OSError:
                        return
                    if not data:
                        return


@contextmanager
def proxy(address: str) -> Iterator[Proxy]:
    made = Proxy(address)
    try:
        yield made
    finally:
        made.close()


def some_messages(count: int, seed: int) -> list[bytes]:
    chance = random.Random(seed)
    edges = [0, 1, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 5_000_000]
    return [chance.randbytes(edges[n] if n < len(edges) else int(5e6 ** chance.random())) for n in range(count)]


def exchange(host: Place, client: LanesClient, up: list[bytes], down: list[bytes]) -> None:
    for message in up:
        client.send(message)
    for message in down:
        assert host.server.send("oslo", message)
    for message in down:
        assert receive(client) == message
    assert client.wait_sent(PATIENCE_S)
    until(lambda: len(host.got["oslo"]) >= len(up))
    assert host.got["oslo"] == up


# -- messages ---------------------------------------------------------------------------------


def test_messages_arrive_whole_once_and_in_order() -> None:
    with place() as host, site(host.address) as client:
        exchange(host, client, some_messages(200, 1), some_messages(200, 2))
        assert client.receive() is None
        assert client.events() == ["connected"]
        assert list(host.server.sessions()) == ["oslo"]
        assert host.server.sessions()["oslo"].lanes == 4
        traffic = host.server.bytes_of("oslo")
        assert traffic.received >= sum(map(len, host.got["oslo"]))
        assert host.lost == []


@pytest.mark.parametrize("silently", [False, True])
def test_messages_arrive_through_cuts(silently: bool) -> None:
    chance = random.Random(3)
    up, down = some_messages(200, 4), some_messages(200, 5)
    limits = LaneLimits(keepalive=QUICK, lost_after_s=0.0)
    with place(limits=limits) as host, proxy(host.address) as between, site(between.address) as client:

        def disturb() -> None:
            for part in range(0, 200, 50):
                for number in range(part, part + 50):
                    client.send(up[number])
                    assert host.server.send("oslo", down[number])
                    if number % 50 == 25:
                        time.sleep(chance.uniform(0.0, 0.3))
                        between.cut(silently=silently)
                time.sleep(chance.uniform(0.1, 3.0 if silently else 0.5))
                between.heal()

        thread = threading.Thread(target=disturb, daemon=True)
        thread.start()
        for message in down:
            assert receive(client) == message
        thread.join()
        assert client.wait_sent(PATIENCE_S)
        until(lambda: len(host.got["oslo"]) >= len(up))
        assert host.got["oslo"] == up
        events = client.events()
        assert silently or "lost" in events
        assert not {"gone", "refused"} & set(events)


def test_what_is_sent_while_cut_arrives_later() -> None:
    limits = LaneLimits(lost_after_s=0.0)
    with place(limits=limits) as host, proxy(host.address) as between, site(between.address) as client:
        wait_event(client, "connected")
        host.lost.clear()
        between.cut()
        wait_event(client, "lost")
        until(lambda: host.lost == ["oslo"])
        client.send(b"from the cut site")
        assert host.server.send("oslo", b"to the cut site")
        assert not client.wait_sent(0.1)
        between.heal()
        wait_event(client, "connected")
        assert receive(client) == b"to the cut site"
        until(lambda: host.got["oslo"] == [b"from the cut site"])


def test_large_messages_wait_for_room() -> None:
    limits = LaneLimits(max_message=3_000_000, max_buffered=4_000_000)
    with place(limits=limits) as host, site(host.address, max_message=3_000_000, max_buffered=4_000_000) as client:
        messages = [bytes([n]) * 3_000_000 for n in range(10)]
        exchange(host, client, messages, messages)


def test_messages_between_several_sites_do_not_mix() -> None:
    with place() as host, site(host.address, "oslo") as oslo, site(host.address, "lima", lanes=1) as lima:
        for number in range(20):
            oslo.send(b"oslo %d" % number)
            lima.send(b"lima %d" % number)
            host.server.send("oslo", b"to oslo %d" % number)
            host.server.send("lima", b"to lima %d" % number)
        assert [receive(oslo) for _ in range(20)] == [b"to oslo %d" % n for n in range(20)]
        assert [receive(lima) for _ in range(20)] == [b"to lima %d" % n for n in range(20)]
        until(lambda: len(host.got["oslo"]) == len(host.got["lima"]) == 20)
        assert host.got == {name: [b"%s %d" % (name.encode(), n) for n in range(20)] for name in ("oslo", "lima")}


def test_bytes_on_sockets() -> None:
    with place() as host:
        ours = SocketBytes(host.server.port, side="client")
        theirs = SocketBytes(host.server.port, side="server")
        if ours.why_not:
            assert ours.sample() is None
            assert ours.total() is None
            pytest.skip(ours.why_not)
        with site(host.address) as client:
            payload = 40_000_000
            client.send(random.Random(1).randbytes(payload))
            assert client.wait_sent(PATIENCE_S)
            sent, received = ours.sample(), theirs.sample()
        assert sent is not None
        assert received is not None
        assert payload <= sent["127.0.0.1"].sent < 1.1 * payload
        assert payload <= received["127.0.0.1"].received < 1.1 * payload
        assert ours.trip > 0, "TCP has seen segments acknowledged"
        host.server.stop(0.0)
        gone = ours.total()  # the connections have gone, their bytes have not
        assert gone is not None
        assert gone.sent >= sent["127.0.0.1"].sent


# -- sessions ---------------------------------------------------------------------------------


def test_a_server_that_restarts_knows_no_sessions() -> None:
    with place() as first:
        address = first.address
        with site(address) as client:
            client.send(b"one")
            assert client.wait_sent(PATIENCE_S)
            until(lambda: first.got["oslo"] == [b"one"])
            first.server.stop(0.0)
            client.send(b"void")
            with place(address) as second:
                wait_event(client, "gone")
                assert not client.wait_sent(0.0)
                client.send(b"void, too")
                assert client.receive() is None
                assert client.enter(b"again", PATIENCE_S) == b"welcome again"
                client.start()
                exchange(second, client, [b"two"], [b"three"])


def test_a_new_incarnation_replaces_the_old() -> None:
    with place() as host, site(host.address) as old:
        wait_event(old, "connected")
        with site(host.address, incarnation=2) as new:
            wait_event(old, "gone")
            assert "entered again" in old.why
            exchange(host, new, [b"new"], [b"to new"])
            assert host.server.sessions()["oslo"].incarnation == "2"
            with pytest.raises(RefusedError, match="started twice"):
                old.enter(b"", PATIENCE_S)
            assert new.events() == ["connected"]
    assert host.lost in ([], ["oslo"])  # of the new one, which said goodbye


def test_the_same_incarnation_may_enter_again() -> None:
    with place() as host, site(host.address) as client:
        client.send(b"first session")
        assert client.wait_sent(PATIENCE_S)
        until(lambda: host.got["oslo"])
        assert client.enter(b"oslo", PATIENCE_S) == b"welcome oslo"
        client.start()
        host.got.clear()
        exchange(host, client, [b"second session"], [b"hello"])


def test_goodbye_delivers_everything_and_tells_at_once() -> None:
    with place(limits=LaneLimits(lost_after_s=1e9)) as host:
        messages = some_messages(20, 7)
        with site(host.address) as client:
            for message in messages:
                client.send(message)
            client.close(PATIENCE_S)
            client.close(PATIENCE_S)
            with pytest.raises(LinkError, match="enter first"):
                client.send(b"")
        until(lambda: host.lost == ["oslo"])
        assert host.got["oslo"] == messages
        assert host.server.sessions() == {}
        assert not host.server.send("oslo", b"nobody is there")


def test_stop_lets_what_is_queued_arrive() -> None:
    with place() as host, site(host.address) as client:
        wait_event(client, "connected")
        for number in range(50):
            host.server.send("oslo", b"%d" % number)
        host.server.stop(PATIENCE_S)
        assert [receive(client) for _ in range(50)] == [b"%d" % number for number in range(50)]
        wait_event(client, "lost")


def test_what_is_sent_while_a_site_enters_goes_to_its_new_session() -> None:
    with place() as host:

        def enter(entry: Entry) -> bytes:
            if entry.request == b"no":
                raise RefusedError("no")
            assert host.server.send(entry.site, entry.request)
            return b"welcome oslo"

        host.server._enter = enter
        with site(host.address) as client:
            assert receive(client) == b"oslo"
        with site(host.address, incarnation=2, start=False) as client, pytest.raises(RefusedError):
            client.enter(b"no", PATIENCE_S)


# -- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RefusedError, CredentialsError, ProtocolError])
def test_the_reason_reaches_the_site(error: type[Exception]) -> None:
    def enter(entry: Entry) -> bytes:
        raise error(f"we do not know {entry.site}: ask Zoë")

    with place(enter=enter) as host, site(host.address, start=False) as client:
        with pytest.raises(RefusedError, match="we do not know oslo: ask Zoë"):
            client.enter(b"", PATIENCE_S)
        assert host.server.sessions() == {}


def test_a_refused_enter_leaves_the_old_session_alone() -> None:
    with place() as host, site(host.address) as client:
        host.server._enter = lambda entry: (_ for _ in ()).throw(RefusedError("not you"))
        with site(host.address, incarnation=2, start=False) as other, pytest.raises(RefusedError, match="not you"):
            other.enter(b"", PATIENCE_S)
        exchange(host, client, [b"still here"], [b"good"])


def test_a_failing_server_is_not_a_refusal() -> None:
    def enter(entry: Entry) -> bytes:
        raise ZeroDivisionError("by zero")

    with place(enter=enter) as host, site(host.address, start=False) as client:
        failed = pytest.raises(LinkError, match=r"the global server failed .*by zero")
        with failed:
            client.enter(b"", 0.5)


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LinkError, match="is another server there"):
            Place(address)
    with site(address, start=False) as client:
        with pytest.raises(LinkError, match=f"{address} did not let oslo in .* check the address"):
            client.enter(b"", 0.5)
        with pytest.raises(LinkError, match="enter first"):
            client.start()


def test_another_protocol_is_refused() -> None:
    with place() as host, site(host.address, start=False) as client:
        client._metadata = tuple((k, "99" if k == PROTOCOL_KEY else v) for k, v in client._metadata)
        with pytest.raises(RefusedError, match="speaks protocol 99"):
            client.enter(b"", PATIENCE_S)


def test_messages_too_long_end_the_session_with_the_reason() -> None:
    limits = LaneLimits(max_message=1000, max_buffered=1 << 20)
    with place(limits=limits) as host, site(host.address) as client, site(host.address, "lima") as other:
        client.send(bytes(1001))
        wait_event(client, "refused")
        with pytest.raises(RefusedError, match="1001 bytes; this end takes 1000 at most"):
            client.receive()
        with pytest.raises(RefusedError, match="1001 bytes"):
            client.send(b"")
        until(lambda: host.lost == ["oslo"])
        other.send(b"the server is well")
        until(lambda: host.got["lima"] == [b"the server is well"])
        # It may come back, and behave.
        client.enter(b"oslo", PATIENCE_S)
        client.start()
        exchange(host, client, [bytes(1000)], [b"fine"])


def test_too_many_messages_end_the_session_with_the_reason() -> None:
    limits = LaneLimits(messages_per_s=0.01, burst=5)
    with place(limits=limits) as host, site(host.address) as client:
        for _ in range(6):
            client.send(b"x")
        wait_event(client, "refused")
        with pytest.raises(RefusedError, match=r"oslo sends more than 0\.01 messages"):
            client.receive()
        client.enter(b"oslo", PATIENCE_S)  # which does not fill the bucket
        client.start()
        client.send(b"x")
        wait_event(client, "refused")


def test_the_bucket_fills_again() -> None:
    now = 0.0
    bucket = Bucket(2.0, 3, lambda: now)
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]
    now = 0.5
    assert [bucket.take() for _ in range(2)] == [True, False]
    now = 100.0
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]


def test_a_message_the_application_refuses_ends_the_session() -> None:
    def on_message(site: str, data: memoryview) -> None:
        raise (ProtocolError if len(data) == 3 else ZeroDivisionError)(f"{bytes(data)!r} is not a message")

    with place(on_message=on_message) as host, site(host.address) as client:
        client.send(b"bad")
        wait_event(client, "refused")
        with pytest.raises(RefusedError, match="b'bad' is not a message"):
            client.receive()
        client.enter(b"oslo", PATIENCE_S)
        client.start()
        client.send(b"worse")
        until(lambda: "oslo" not in host.server.sessions())


def test_drop_tells_the_site_why() -> None:
    with place() as host, site(host.address) as client:
        wait_event(client, "connected")
        host.server.drop("oslo", "the run is over")
        host.server.drop("nobody", "")
        wait_event(client, "refused")
        assert client.why == "the run is over"


def test_the_peer_is_checked_again() -> None:
    revoked: set[str] = set()

    def check(entry: Entry) -> None:
        if entry.site in revoked:
            raise CredentialsError(f"{entry.site} was revoked")

    limits = LaneLimits(recheck_s=0.0)
    with place(peer_check=check, limits=limits) as host, site(host.address) as client:
        exchange(host, client, [b"a"], [b"b"])
        revoked.add("oslo")
        wait_event(client, "refused")
        assert client.why == "oslo was revoked"
        with pytest.raises(RefusedError, match="oslo was revoked"):
            client.enter(b"", PATIENCE_S)


# -- strangers --------------------------------------------------------------------------------


def lane_status(address: str, records: list[bytes], **metadata: str) -> tuple[grpc.StatusCode, str]:
    """What a lane opened by hand ends with."""
    keys = {"site": SITE_KEY, "incarnation": INCARNATION_KEY, "protocol": PROTOCOL_KEY, "session": SESSION_KEY}
    keys["lane"] = LANE_KEY
    named = {"site": "oslo", "incarnation": "1", "protocol": PROTOCOL, "session": "", "lane": "0"} | metadata
    hold = threading.Event()

    def requests() -> Iterator[bytes]:
        yield from records
        hold.wait(PATIENCE_S)

    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(LANE)(requests(), metadata=[(keys[k], v) for k, v in named.items()])
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            pass
        hold.set()
        return call.code(), call.details()


def test_lanes_of_strangers_are_refused() -> None:
    with place() as host, site(host.address) as client:
        wait_event(client, "connected")
        key = host.server._sessions["oslo"].id
        code, why = lane_status(host.address, [])
        assert (code, why) == (grpc.StatusCode.NOT_FOUND, "the global server does not know this session")
        assert lane_status(host.address, [], session=key, incarnation="2")[0] is grpc.StatusCode.NOT_FOUND
        for lane in ("-1", "64", "x", "9" * 5000):
            assert lane_status(host.address, [], session=key, lane=lane)[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert lane_status(host.address, [], site="x" * 300)[0] is grpc.StatusCode.FAILED_PRECONDITION
        exchange(host, client, [b"unharmed"], [b"indeed"])


@pytest.mark.parametrize(
    "records",
    [
        [b""],
        [b"rubbish"],
        [to_bytes(Ack(0))],
        [to_bytes(Hello(0, 5))],
        [to_bytes(Hello(0, 0)), to_bytes(Ack(0, ((1, 0),)))],
        [to_bytes(Hello(0, 0)), to_bytes(Chunk(1, 0, 1 << 29, bytes(100)))],
    ],
)
def test_records_of_a_broken_site_end_its_session(records: list[bytes]) -> None:
    with place() as host, site(host.address, start=False) as client:
        client.enter(b"oslo", PATIENCE_S)
        session = host.server._sessions["oslo"]
        code, why = lane_status(host.address, records, session=session.id)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert why
        until(lambda: host.server.sessions() == {})
        assert session.talk.incoming.buffered_bytes == 0


# -- TLS --------------------------------------------------------------------------------------


class Authority:
    """Certificates for the length of a test."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self.pem = self._sign(self._name, self._key, x509.BasicConstraints(ca=True, path_length=None))

    def issue(self, name: str) -> tuple[bytes, bytes]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        form = serialization.PrivateFormat.PKCS8
        private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        return private, self._sign(subject, key, x509.SubjectAlternativeName([x509.DNSName(name)]))

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType) -> bytes:
        now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - day)
        made = builder.not_valid_after(now + day).add_extension(extension, critical=True)
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def test_mutual_tls_tells_who_it_is() -> None:
    authority = Authority()
    server = grpc.ssl_server_credentials([authority.issue("server")], authority.pem, True)
    key, certificate = authority.issue("oslo")
    serial = x509.load_pem_x509_certificate(certificate).serial_number
    known = {"credentials": grpc.ssl_channel_credentials(authority.pem, key, certificate)}
    checked: list[Entry] = []
    with place(credentials=server, peer_check=checked.append) as host:
        with site(host.address, server_name_override="server", **known) as client:
            exchange(host, client, some_messages(20, 8), some_messages(20, 9))
        (entry,) = host.entries
        assert (entry.site, entry.incarnation, entry.request) == ("oslo", "1", b"oslo")
        assert (entry.peer_name, entry.peer_serial) == ("oslo", serial)
        assert entry.peer_address.startswith("ipv4:127.0.0.1:")
        assert len(checked) >= 5
        assert {(seen.peer_name, seen.peer_serial) for seen in checked} == {("oslo", serial)}
        for wrong in (None, grpc.ssl_channel_credentials(authority.pem)):
            stranger = site(host.address, start=False, server_name_override="server", credentials=wrong)
            with stranger as client, pytest.raises(LinkError, match="certificates"):
                client.enter(b"", 0.5)


# -- the end ----------------------------------------------------------------------------------


def test_the_interpreter_exits_whatever_is_open() -> None:
    script = """
from weightgrad.runtime.lanes_client import LanesClient
from weightgrad.runtime.lanes_server import LanesServer
server = LanesServer("127.0.0.1:0", credentials=None, enter=lambda e: b"", on_message=lambda *a: None, on_lost=print)
server.start()
client = LanesClient(f"127.0.0.1:{server.port}", site="oslo", incarnation=1, credentials=None)
client.enter(b"", 60)
client.start()
client.send(bytes(10_000_000))
client.wait_sent(60)
client.send(bytes(10_000_000))
print("done")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stdout.strip()) == (0, "done"), ran.stderr
