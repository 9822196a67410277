"""The gRPC transport on the loopback interface: lost connections, limits, strangers, TLS. See also test_contract.py."""

from __future__ import annotations

import datetime
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from weightgrad.errors import CredentialsError, LinkError, RefusedError
from weightgrad.runtime.server.peer_check import PeerCheck
from weightgrad.runtime.server.roster import Roster
from weightgrad.runtime.transport.channels import STREAM
from weightgrad.runtime.transport.grpc_sessions import TokenBucket, TransportLimits
from weightgrad.runtime.transport.grpc_settings import (
    INCARNATION_KEY,
    PROTOCOL_KEY,
    RANK_KEY,
    SESSION_KEY,
    SITE_KEY,
    STREAM_KEY,
)
from weightgrad.runtime.transport.records import Ack, Chunk, Hello, to_bytes
from weightgrad.runtime.transport.socket_bytes import SocketBytes, host_of
from weightgrad.runtime.transport.transport import EntryRequest
from weightgrad.wire.versions import TRANSPORT_VERSION

from .grpc_harness import QUICK, Place, place, proxy, site
from .harness import (
    LIMA,
    OSLO,
    TIMEOUT_S,
    by_lane,
    exchange,
    is_control,
    receive,
    some_lane_messages,
    some_messages,
    until,
    wait_event,
)

# -- messages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("silently", [False, True])
def test_messages_arrive_through_cuts(silently: bool) -> None:
    chance = random.Random(3)
    up, down = some_lane_messages(200, 4), some_lane_messages(200, 5)
    limits = TransportLimits(keepalive=QUICK, lost_after_s=0.0)
    with place(limits=limits) as host, proxy(host.address) as between, site(between.address) as client:

        def disturb() -> None:
            for part in range(0, 200, 50):
                for number in range(part, part + 50):
                    client.send(up[number], control=is_control(up[number]))
                    assert host.server.send(OSLO, down[number], control=is_control(down[number]))
                    if number % 50 == 25:
                        time.sleep(chance.uniform(0.0, 0.3))
                        between.cut(silently=silently)
                time.sleep(chance.uniform(0.1, 3.0 if silently else 0.5))
                between.heal()

        thread = threading.Thread(target=disturb, daemon=True)
        thread.start()
        assert by_lane([receive(client) for _ in down]) == by_lane(down)
        thread.join()
        assert client.wait_sent(TIMEOUT_S)
        until(lambda: len(host.got[OSLO]) >= len(up))
        assert by_lane(host.got[OSLO]) == by_lane(up)
        assert client.receive() is None
        events = client.events()
        assert silently or "lost" in events
        assert not {"gone", "refused"} & set(events)


def test_what_is_sent_while_cut_arrives_later() -> None:
    limits = TransportLimits(lost_after_s=0.0)
    with place(limits=limits) as host, proxy(host.address) as between, site(between.address) as client:
        wait_event(client, "connected")
        host.lost.clear()
        between.cut()
        wait_event(client, "lost")
        until(lambda: host.lost == [(OSLO, False)])
        for control in (False, True):
            client.send(b"from the cut site", control=control)
            assert host.server.send(OSLO, b"to the cut site", control=control)
        assert not client.wait_sent(0.1)
        assert client.unacknowledged_bytes == 2 * len(b"from the cut site")
        between.heal()
        wait_event(client, "connected")
        assert [receive(client) for _ in range(2)] == [b"to the cut site"] * 2
        until(lambda: host.got[OSLO] == [b"from the cut site"] * 2)


def test_large_messages_wait_for_room() -> None:
    limits = TransportLimits(max_message=3_000_000, max_buffered=4_000_000)
    with place(limits=limits) as host, site(host.address, max_message=3_000_000, max_buffered=4_000_000) as client:
        messages = [bytes([n]) * 3_000_000 for n in range(10)]
        exchange(host, host.server, client, messages, messages)


def test_bytes_on_sockets() -> None:
    with place() as host:
        ours = SocketBytes(host.server.port, side="client", owner=host_of)
        theirs = SocketBytes(host.server.port, side="server", owner=host_of)
        if ours.why_not:
            assert ours.sample() is None
            assert ours.total() is None
            pytest.skip(ours.why_not)
        with site(host.address, here=True) as client:
            payload = 40_000_000
            client.send(random.Random(1).randbytes(payload))
            assert client.wait_sent(TIMEOUT_S)
            sent, received = ours.sample(), theirs.sample()
        assert sent is not None
        assert received is not None
        assert payload <= sent["127.0.0.1"].sent < 1.1 * payload
        assert payload <= received["127.0.0.1"].received < 1.1 * payload
        assert ours.round_trip_s > 0, "TCP has seen segments acknowledged"
        host.server.stop(0.0)
        gone = ours.total()  # the connections have gone, their bytes have not
        assert gone is not None
        assert gone.sent >= sent["127.0.0.1"].sent


def test_the_server_counts_the_bytes_on_the_sockets_of_each_site() -> None:
    with place() as host:
        if host.server._sockets.why_not:
            assert host.server.socket_bytes() == {}
            pytest.skip(host.server._sockets.why_not)
        sizes = {OSLO: 3_000_000, LIMA: 9_000_000}
        with site(host.address, "oslo") as oslo, site(host.address, "lima") as lima:
            for client, size in zip((oslo, lima), sizes.values(), strict=True):
                client.send(bytes(size - 500_000))
                client.send(bytes(500_000), control=True)
                assert client.wait_sent(TIMEOUT_S)
            assert host.server.send(OSLO, bytes(2_000_000))
            assert receive(oslo)
            until(lambda: host.server.sessions()[OSLO].unacknowledged_bytes == 0)  # or TCP may not know it yet
            counted = host.server.socket_bytes()
        for peer, size in sizes.items():
            assert size <= counted[peer].received < 1.1 * size, peer
        assert 2_000_000 <= counted[OSLO].sent < 2_300_000
        assert counted[LIMA].sent < 300_000
        until(lambda: host.server.sessions() == {})
        later = host.server.socket_bytes()  # the connections are closed, their bytes still count
        assert later[OSLO].received >= counted[OSLO].received


# -- refusals ---------------------------------------------------------------------------------


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LinkError, match="is another server there"):
            Place(address)
    with site(address, start=False) as client:
        with pytest.raises(LinkError, match=f"{address} did not admit oslo .* check the address"):
            client.enter(b"", 0.5)
        with pytest.raises(LinkError, match="enter first"):
            client.start()


def test_another_protocol_is_refused() -> None:
    with place() as host, site(host.address, start=False) as client:
        client._metadata = tuple((k, "99" if k == PROTOCOL_KEY else v) for k, v in client._metadata)
        with pytest.raises(RefusedError, match="speaks protocol 99"):
            client.enter(b"", TIMEOUT_S)


def test_messages_too_long_end_the_session_with_the_reason() -> None:
    limits = TransportLimits(max_message=1000, max_buffered=1 << 20)
    with place(limits=limits) as host, site(host.address) as client, site(host.address, "lima") as other:
        client.send(bytes(1001))
        wait_event(client, "refused")
        with pytest.raises(RefusedError, match="1001 bytes; the receiver takes at most 1000"):
            client.receive()
        with pytest.raises(RefusedError, match="1001 bytes"):
            client.send(b"")
        until(lambda: host.lost == [(OSLO, False)])
        other.send(b"the server is well")
        until(lambda: host.got[LIMA] == [b"the server is well"])
        # It may come back, and behave.
        client.enter(b"oslo", TIMEOUT_S)
        client.start()
        exchange(host, host.server, client, [bytes(1000)], [b"fine"])


@pytest.mark.parametrize("lanes", [(False, False), (True, True), (False, True)])
def test_too_many_messages_end_the_session_with_the_reason(lanes: tuple[bool, bool]) -> None:
    limits = TransportLimits(messages_per_s=0.01, burst=5)
    with place(limits=limits) as host, site(host.address) as client:
        for control in 3 * lanes:
            client.send(b"x", control=control)
        wait_event(client, "refused")
        with pytest.raises(RefusedError, match=r"oslo sends more than 0\.01 messages"):
            client.receive()
        client.enter(b"oslo", TIMEOUT_S)  # which does not fill the bucket
        client.start()
        client.send(b"x")
        wait_event(client, "refused")


def test_the_bucket_fills_again() -> None:
    now = 0.0
    bucket = TokenBucket(2.0, 3, lambda: now)
    assert [bucket.try_take() for _ in range(4)] == [True, True, True, False]
    now = 0.5
    assert [bucket.try_take() for _ in range(2)] == [True, False]
    now = 100.0
    assert [bucket.try_take() for _ in range(4)] == [True, True, True, False]


def test_the_peer_is_checked_again() -> None:
    revoked: set[str] = set()

    def check(entry: EntryRequest) -> None:
        if entry.site in revoked:
            raise CredentialsError(f"{entry.site} was revoked")

    limits = TransportLimits(recheck_s=0.0)
    with place(limits=limits) as host, site(host.address) as client:
        host.check = check
        exchange(host, host.server, client, [b"a"], [b"b"])
        revoked.add("oslo")
        wait_event(client, "refused")
        assert client.why == "oslo was revoked"
        with pytest.raises(RefusedError, match="oslo was revoked"):
            client.enter(b"", TIMEOUT_S)


# -- strangers --------------------------------------------------------------------------------


def stream_status(address: str, records: list[bytes], **metadata: str) -> tuple[grpc.StatusCode, str]:
    """What a stream opened by hand ends with."""
    keys = {"site": SITE_KEY, "rank": RANK_KEY, "incarnation": INCARNATION_KEY, "protocol": PROTOCOL_KEY}
    keys |= {"session": SESSION_KEY, "stream": STREAM_KEY}
    named = {"site": "oslo", "rank": "0", "incarnation": "1", "protocol": TRANSPORT_VERSION} | metadata
    named = {"session": "", "stream": "0"} | named
    hold = threading.Event()

    def requests() -> Iterator[bytes]:
        yield from records
        hold.wait(TIMEOUT_S)

    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(STREAM)(requests(), metadata=[(keys[k], v) for k, v in named.items()])
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            pass
        hold.set()
        return call.code(), call.details()


def test_streams_of_strangers_are_refused() -> None:
    with place() as host, site(host.address) as client:
        wait_event(client, "connected")
        key = host.server._sessions[OSLO].id
        code, why = stream_status(host.address, [])
        assert (code, why) == (grpc.StatusCode.NOT_FOUND, "the global server does not know this session")
        assert stream_status(host.address, [], session=key, incarnation="2")[0] is grpc.StatusCode.NOT_FOUND
        for stream in ("", "-1", "65", "x", "9" * 5000):
            assert stream_status(host.address, [], session=key, stream=stream)[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert stream_status(host.address, [], site="x" * 300)[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert stream_status(host.address, [], session=key, rank="1")[0] is grpc.StatusCode.NOT_FOUND
        for rank in ("", "-1", "1.0", "0x1", "65536", "9" * 5000):
            code, why = stream_status(host.address, [], session=key, rank=rank)
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "it must be 0 to 65535" in why
        exchange(host, host.server, client, [b"unharmed"], [b"indeed"])


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
@pytest.mark.parametrize("stream", ["0", "1"])
def test_records_of_a_broken_site_end_its_session(records: list[bytes], stream: str) -> None:
    with place() as host, site(host.address, start=False) as client:
        client.enter(b"oslo", TIMEOUT_S)
        session = host.server._sessions[OSLO]
        code, why = stream_status(host.address, records, session=session.id, stream=stream)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert why
        until(lambda: host.server.sessions() == {})
        assert session.messages.control.incoming.buffered_bytes == session.messages.bulk.incoming.buffered_bytes == 0


# -- TLS --------------------------------------------------------------------------------------


class Authority:
    """Certificates for the length of a test."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self.pem = self._sign(self._name, self._key, x509.BasicConstraints(ca=True, path_length=None))

    def issue(self, *names: str) -> tuple[bytes, bytes]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
        form = serialization.PrivateFormat.PKCS8
        private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        return private, self._sign(subject, key, x509.SubjectAlternativeName([x509.DNSName("server")]))

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
    checked: list[EntryRequest] = []
    with place(credentials=server) as host:
        host.check = checked.append
        with site(host.address, server_name_override="server", **known) as client:
            exchange(host, host.server, client, some_messages(20, 8), some_messages(20, 9))
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


@pytest.mark.parametrize(
    "names", [("oslo\0lima",), ("oslo", "lima"), ("lima", "oslo"), (), ("Oslo",), ("oslo ",)], ids=str
)
def test_a_certificate_whose_name_only_looks_like_a_site(names: tuple[str, ...]) -> None:
    """gRPC cuts a name at a zero byte, and takes the first of several."""
    authority = Authority()
    server = grpc.ssl_server_credentials([authority.issue("server")], authority.pem, True)
    key, certificate = authority.issue(*names)
    strange = grpc.ssl_channel_credentials(authority.pem, key, certificate)
    peers = PeerCheck(Roster(["oslo", "lima"]), secure=True)
    with place(credentials=server) as host:
        host.check = peers.check
        with (
            site(host.address, start=False, server_name_override="server", credentials=strange) as client,
            pytest.raises(RefusedError, match=r"not of 'oslo'|common names"),
        ):
            client.enter(b"", TIMEOUT_S)
        assert host.entries == []


# -- the end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", ["GrpcChannels", "ProcessChannels"])
def test_the_interpreter_exits_whatever_is_open(channels: str) -> None:
    script = """
from weightgrad.runtime.transport.grpc_channels import GrpcChannels
from weightgrad.runtime.transport.grpc_client import GrpcClient
from weightgrad.runtime.transport.grpc_server import GrpcServer
from weightgrad.runtime.transport.grpc_settings import channel_options
from weightgrad.runtime.transport.process_channels import ProcessChannels
class Open:
    def check_peer(self, entry): pass
    def enter(self, entry): return b""
    def on_message(self, peer, data, control): pass
    def on_lost(self, peer, left): pass
    def on_refused(self, reason): pass
server = GrpcServer("127.0.0.1:0", credentials=None)
server.start(Open())
channels = CHANNELS(f"127.0.0.1:{server.port}", credentials=None, options=channel_options())
client = GrpcClient(channels, site="oslo", incarnation=1)
client.enter(b"", 60)
client.start()
client.send(bytes(10_000_000))
client.wait_sent(60)
client.send(bytes(10_000_000))
print("done")
"""
    ran = subprocess.run(
        [sys.executable, "-c", script.replace("CHANNELS", channels)], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "done"), ran.stderr
