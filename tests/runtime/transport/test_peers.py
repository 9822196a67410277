"""The contract of `transport.py` for the ranks of one site: each has a session of its own."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from weightgrad.errors import RefusedError, SpecError
from weightgrad.runtime.transport.grpc_channels import GrpcChannels
from weightgrad.runtime.transport.grpc_client import GrpcClient
from weightgrad.runtime.transport.grpc_settings import channel_options
from weightgrad.runtime.transport.in_memory import InMemoryNetwork
from weightgrad.runtime.transport.in_memory_client import InMemoryClient
from weightgrad.runtime.transport.transport import EntryRequest, LinkEvent, Peer, ServerTransport

from .harness import LIMA, OSLO, TIMEOUT_S, RecordingApplication, exchange, receive, until, wait_event
from .implementations import Implementation

OSLO_1, OSLO_2 = Peer("oslo", 1), Peer("oslo", 2)


def test_a_peer_is_written_as_people_say_it() -> None:
    assert str(Peer("virginia", 0)) == "virginia"
    assert f"{Peer('virginia', 3)}" == "virginia rank 3"
    entry = EntryRequest("virginia", 3, "1", b"", None, None, "memory")
    assert entry.peer == Peer("virginia", 3)


@pytest.mark.parametrize("rank", [-1, 65536])
def test_a_rank_that_cannot_be_is_refused(rank: int) -> None:
    more: dict[str, Any] = {"site": "oslo", "rank": rank, "incarnation": 1}
    with pytest.raises(SpecError, match=f"rank is {rank}; it must be 0 to 65535"):
        InMemoryClient(InMemoryNetwork(), "hub", **more)
    with pytest.raises(SpecError, match=f"rank is {rank}; it must be 0 to 65535"):
        GrpcClient(GrpcChannels("127.0.0.1:1", credentials=None, options=channel_options()), **more)


def test_the_application_sees_which_rank_enters(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client(Peer("oslo", 65535), incarnation=7):
        (entry,) = application.entries
        assert (entry.site, entry.rank, entry.incarnation) == ("oslo", 65535, "7")
        assert list(server.sessions()) == [entry.peer]


def test_ranks_of_a_site_have_sessions_side_by_side(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    peers = (OSLO, OSLO_1, LIMA)
    with transport.client() as first, transport.client(OSLO_1) as second, transport.client(LIMA) as other:
        clients = dict(zip(peers, (first, second, other), strict=True))
        for number in range(20):
            for peer, client in clients.items():
                client.send(b"%d of %s" % (number, str(peer).encode()))
                assert server.send(peer, b"%d to %s" % (number, str(peer).encode()))
        assert not server.send(OSLO_2, b"nobody is there")
        for peer, client in clients.items():
            assert [receive(client) for _ in range(20)] == [b"%d to %s" % (n, str(peer).encode()) for n in range(20)]
        until(lambda: all(len(application.got[peer]) == 20 for peer in peers))
        assert application.got == {peer: [b"%d of %s" % (n, str(peer).encode()) for n in range(20)] for peer in peers}
        assert set(server.sessions()) == set(peers)
        assert server.traffic_of(OSLO_1).received >= sum(map(len, application.got[OSLO_1]))
        assert server.traffic_of(OSLO_2).received == 0


def test_a_new_incarnation_of_one_rank_leaves_the_others_alone(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client() as first, transport.client(OSLO_1) as old:
        wait_event(first, "connected")
        with transport.client(OSLO_1, incarnation=2) as new:
            wait_event(old, "gone")
            assert "oslo rank 1 has entered again" in old.why
            with pytest.raises(RefusedError, match="entered as oslo rank 1 since this one"):
                old.enter(b"", TIMEOUT_S)
            exchange(application, server, first, [b"untouched"], [b"to the first"])
            exchange(application, server, new, [b"new"], [b"to the new"], OSLO_1)
            assert (server.sessions()[OSLO].incarnation, server.sessions()[OSLO_1].incarnation) == ("1", "2")
            assert first.events() == []
            # The incarnation that rank 1 has worn out is not worn out for rank 2.
            with transport.client(OSLO_2, incarnation=1) as third:
                exchange(application, server, third, [b"third"], [b"to the third"], OSLO_2)
    assert (OSLO, False) not in application.lost


def test_dropping_one_rank_leaves_the_others_alone(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client() as first, transport.client(OSLO_1) as second:
        wait_event(first, "connected")
        wait_event(second, "connected")
        server.drop(OSLO_1, "rank 1 is not needed")
        wait_event(second, "refused")
        assert second.why == "rank 1 is not needed"
        until(lambda: application.lost)
        assert application.lost == [(OSLO_1, False)]
        exchange(application, server, first, [b"still here"], [b"good"])
        assert first.events() == []
        assert list(server.sessions()) == [OSLO]


def test_who_is_lost_is_named(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client() as first, transport.client(OSLO_1) as second, transport.client(OSLO_2) as third:
        for client in (first, second, third):
            wait_event(client, "connected")
        second.close(TIMEOUT_S)
        until(lambda: application.lost == [(OSLO_1, True)])
        third.abort()
        until(lambda: application.lost == [(OSLO_1, True), (OSLO_2, False)])
        exchange(application, server, first, [b"still here"], [b"good"])
        assert LinkEvent.LOST not in first.events()


def test_a_rank_whose_message_is_not_taken_does_not_hold_up_the_others(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    go_on = threading.Event()

    def take(peer: Peer, data: memoryview) -> None:
        assert peer == OSLO or go_on.wait(TIMEOUT_S)
        application.got[peer].append(bytes(data))

    application.take = take
    with transport.client() as first, transport.client(OSLO_1) as second:
        second.send(b"held up")
        exchange(application, server, first, [b"one", b"two"], [])
        assert application.got[OSLO_1] == []
        go_on.set()
        until(lambda: application.got[OSLO_1] == [b"held up"])
