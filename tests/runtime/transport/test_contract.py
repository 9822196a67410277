"""The contract of `transport.py`, checked for every implementation: gRPC and in memory."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from weightgrad.errors import CredentialsError, LinkError, ProtocolError, RefusedError
from weightgrad.runtime.transport.transport import (
    EntryRequest,
    LinkEvent,
    Peer,
    ServerTransport,
    Traffic,
)

from .harness import LIMA, OSLO, TIMEOUT_S, RecordingApplication, exchange, receive, some_messages, until, wait_event
from .implementations import Implementation

# -- messages ---------------------------------------------------------------------------------


def test_messages_arrive_whole_once_and_in_order(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client() as client:
        up, down = some_messages(100, 1), some_messages(100, 2)
        exchange(application, server, client, up, down)
        assert client.receive() is None
        assert client.events() == [LinkEvent.CONNECTED]
        assert list(server.sessions()) == [OSLO]
        assert server.sessions()[OSLO].streams >= 1
        assert client.unacknowledged_bytes == 0
        assert server.traffic_of(OSLO).received >= sum(map(len, up))
        assert server.traffic_of(OSLO).sent >= sum(map(len, down))
        assert client.traffic.sent >= sum(map(len, up))
        assert client.traffic.received >= sum(map(len, down))
        assert server.traffic_of(LIMA) == Traffic()
        assert application.lost == []


def test_messages_of_several_sites_do_not_mix(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client() as oslo, transport.client(LIMA) as lima:
        for number in range(20):
            oslo.send(b"oslo %d" % number)
            lima.send(b"lima %d" % number)
            server.send(OSLO, b"to oslo %d" % number)
            server.send(LIMA, b"to lima %d" % number)
        assert [receive(oslo) for _ in range(20)] == [b"to oslo %d" % n for n in range(20)]
        assert [receive(lima) for _ in range(20)] == [b"to lima %d" % n for n in range(20)]
        until(lambda: len(application.got[OSLO]) == len(application.got[LIMA]) == 20)
        wanted = {peer: [b"%s %d" % (peer.site.encode(), n) for n in range(20)] for peer in (OSLO, LIMA)}
        assert application.got == wanted


def test_what_was_received_is_the_receivers_own(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    kept: list[memoryview] = []
    application.take = lambda peer, data: kept.append(data)
    with transport.client() as client:
        for number in range(3):
            client.send(bytes([number]) * 100)
        until(lambda: len(kept) == 3)
        kept[0][:] = bytes(100)  # writable, and nobody else's
        assert [bytes(view) for view in kept] == [bytes([number]) * 100 for number in range(3)]


def test_receive_waits_no_longer_than_it_is_told(transport: Implementation, server: ServerTransport) -> None:
    with transport.client() as client:
        wait_event(client, "connected")
        began = time.monotonic()
        assert client.receive(0.2) is None
        assert 0.1 < time.monotonic() - began < 5.0


# -- entering ---------------------------------------------------------------------------------


def test_the_application_sees_who_enters(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    checked: list[str] = []
    application.check = lambda entry: checked.append(entry.site)
    with transport.client(incarnation=7):
        (entry,) = application.entries
        assert (entry.site, entry.incarnation, entry.request) == ("oslo", "7", b"oslo")
        assert (entry.peer_name, entry.peer_serial) == (None, None), "there are no certificates"
        assert entry.peer_address
        assert "oslo" in checked


@pytest.mark.parametrize("error", [RefusedError, CredentialsError, ProtocolError])
@pytest.mark.parametrize("where", ["check", "admit"])
def test_the_reason_of_a_refusal_reaches_the_site(
    transport: Implementation,
    application: RecordingApplication,
    server: ServerTransport,
    error: type[Exception],
    where: str,
) -> None:
    def refuse(entry: EntryRequest) -> bytes:
        raise error(f"we do not know {entry.site}: ask Zoë")

    setattr(application, where, refuse)
    with transport.client(start=False) as client:
        with pytest.raises(RefusedError, match="we do not know oslo: ask Zoë"):
            client.enter(b"", TIMEOUT_S)
        assert server.sessions() == {}
        assert not server.send(OSLO, b"nobody is there")


def test_a_refused_entry_leaves_the_old_session_alone(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    def refuse(entry: EntryRequest) -> bytes:
        raise RefusedError("not you")

    with transport.client() as client:
        application.admit = refuse
        with transport.client(incarnation=2, start=False) as other, pytest.raises(RefusedError, match="not you"):
            other.enter(b"", TIMEOUT_S)
        exchange(application, server, client, [b"still here"], [b"good"])


def test_a_failing_server_is_not_a_refusal(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    def fail(entry: EntryRequest) -> bytes:
        raise ZeroDivisionError("by zero")

    application.admit = fail
    failed = pytest.raises(LinkError, match=r"the global server failed .*by zero")
    with transport.client(start=False) as client, failed:
        client.enter(b"", 0.5)


def test_nobody_answers(transport: Implementation) -> None:
    with transport.client(start=False) as client:
        with pytest.raises(LinkError, match=f"{transport.address} did not admit oslo .* check the address"):
            client.enter(b"", 0.5)
        for call in (client.start, lambda: client.send(b""), client.receive):
            with pytest.raises(LinkError, match="enter first"):
                call()


def test_what_is_sent_while_a_site_enters_goes_to_its_new_session(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    def admit(entry: EntryRequest) -> bytes:
        assert server.send(entry.peer, entry.request)
        return b"welcome oslo"

    application.admit = admit
    with transport.client() as client:
        assert receive(client) == b"oslo"


# -- the end of a session ---------------------------------------------------------------------


def test_a_new_incarnation_replaces_the_old_one(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client() as old:
        wait_event(old, "connected")
        with transport.client(incarnation=2) as new:
            wait_event(old, "gone")
            assert "entered again" in old.why
            exchange(application, server, new, [b"new"], [b"to new"])
            assert server.sessions()[OSLO].incarnation == "2"
            with pytest.raises(RefusedError, match="started twice"):
                old.enter(b"", TIMEOUT_S)
            assert application.refused == ["started twice"]
            assert new.events() == [LinkEvent.CONNECTED]


def test_the_same_incarnation_may_enter_again(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client() as client:
        client.send(b"first session")
        assert client.wait_sent(TIMEOUT_S)
        until(lambda: application.got[OSLO])
        server.send(OSLO, b"dropped with the first session")
        assert client.enter(b"oslo", TIMEOUT_S) == b"welcome oslo"
        client.start()
        application.got.clear()
        exchange(application, server, client, [b"second session"], [b"hello"])


def test_closing_delivers_everything_and_is_seen(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    messages = some_messages(20, 7)
    with transport.client() as client:
        for message in messages:
            client.send(message)
        client.close(TIMEOUT_S)
        client.close(TIMEOUT_S)
        for call in (lambda: client.send(b""), client.receive, client.start):
            with pytest.raises(LinkError, match="enter first"):
                call()
        with pytest.raises(LinkError, match="was closed"):
            client.enter(b"", 0.5)
    until(lambda: application.lost)
    assert application.lost == [(OSLO, True)]
    assert application.got[OSLO] == messages
    assert server.sessions() == {}
    assert not server.send(OSLO, b"nobody is there")


def test_a_site_that_vanishes_is_seen_as_lost(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client() as client:
        exchange(application, server, client, [b"one"], [b"two"])
        client.abort()
        client.abort()
        until(lambda: application.lost)
        assert application.lost == [(OSLO, False)]
    with transport.client(incarnation=2) as again:
        application.got.clear()
        exchange(application, server, again, [b"three"], [b"four"])


def test_drop_tells_the_site_why(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client() as client, transport.client(LIMA) as other:
        wait_event(client, "connected")
        server.drop(OSLO, "the run is over")
        server.drop(Peer("nobody", 0), "")
        wait_event(client, "refused")
        assert client.why == "the run is over"
        for call in (client.receive, lambda: client.send(b"")):
            with pytest.raises(RefusedError, match="the run is over"):
                call()
        until(lambda: application.lost)
        assert application.lost == [(OSLO, False)]
        other.send(b"the server is well")
        until(lambda: application.got[LIMA] == [b"the server is well"])
        client.enter(b"oslo", TIMEOUT_S)
        client.start()
        exchange(application, server, client, [b"back"], [b"again"])


def test_a_message_that_the_application_refuses_ends_the_session(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    def take(peer: Peer, data: memoryview) -> None:
        raise (ProtocolError if len(data) == 3 else ZeroDivisionError)(f"{bytes(data)!r} is not a message")

    application.take = take
    with transport.client() as client:
        client.send(b"bad")
        wait_event(client, "refused")
        with pytest.raises(RefusedError, match="b'bad' is not a message"):
            client.receive()
        client.enter(b"oslo", TIMEOUT_S)
        client.start()
        client.send(b"worse")
        until(lambda: OSLO not in server.sessions())
        wait_event(client, "lost")


def test_stopping_delivers_what_is_queued(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client() as client:
        wait_event(client, "connected")
        for number in range(50):
            server.send(OSLO, b"%d" % number)
        server.stop(TIMEOUT_S)
        server.stop(0.0)
        assert [receive(client) for _ in range(50)] == [b"%d" % number for number in range(50)]
        wait_event(client, "lost")
        assert application.lost == [], "a server that stops has lost nobody"


def test_a_restarted_server_knows_no_sessions(transport: Implementation) -> None:
    first, second = RecordingApplication(), RecordingApplication()
    with transport.server(first) as before, transport.client() as client:
        client.send(b"one")
        assert client.wait_sent(TIMEOUT_S)
        until(lambda: first.got[OSLO] == [b"one"])
        before.stop(0.0)
        client.send(b"dropped")
        with transport.server(second) as after:
            wait_event(client, "gone")
            assert not client.wait_sent(0.0)
            client.send(b"dropped, too")
            assert client.receive() is None
            assert client.enter(b"again", TIMEOUT_S) == b"welcome again"
            client.start()
            exchange(second, after, client, [b"two"], [b"three"])


def test_what_the_ranks_of_a_site_do_not_take_has_one_bound(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    """With a bound for each rank, a site with many ranks could make the server hold as many times as much."""
    del application
    ranks = [Peer(OSLO.site, rank) for rank in range(4)]
    server.max_queued = 50_000
    with ExitStack() as made:
        for rank in ranks:
            made.enter_context(transport.client(rank, start=False)).enter(b"oslo", TIMEOUT_S)
        taken = [rank for rank in 15 * ranks if server.send(rank, bytes(2000))]
        left = server.sessions()
        assert sum(one.unacknowledged_bytes for one in left.values()) <= 52_000
        assert len(left) < len(ranks)
        assert taken
    with transport.client(LIMA) as lima:
        assert server.send(LIMA, b"another site")
        assert receive(lima) == b"another site"
