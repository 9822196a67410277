"""The two lanes of the gRPC transport: slow lines, streams that break one by one, limits. See also test_lanes.py."""

from __future__ import annotations

import random
from typing import Any

import pytest

from weightgrad.errors import LinkError, RefusedError, SpecError
from weightgrad.runtime.transport.grpc_channels import GrpcChannels
from weightgrad.runtime.transport.grpc_client import GrpcClient
from weightgrad.runtime.transport.grpc_sessions import TransportLimits
from weightgrad.runtime.transport.grpc_settings import STREAM_KEY, Keepalive, channel_options

from .grpc_harness import Place, place, proxy, site
from .harness import OSLO, TIMEOUT_S, exchange, receive, until, wait_event

PATIENT = Keepalive(every_s=600, timeout_s=600)  # a ping waits behind the bulk messages of its connection
EVERY_STREAM = {"0", "1", "2", "3", "4"}


@pytest.fixture
def shut(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The numbers of streams that servers made from now on do not let open."""
    numbers: set[str] = set()
    make = Place.__init__

    def make_with_shutters(host: Place, *arguments: Any, **more: Any) -> None:
        make(host, *arguments, **more)
        open_stream = host.server._open_stream

        def open_unless_shut(context: Any) -> Any:
            if dict(context.invocation_metadata())[STREAM_KEY] in numbers:
                raise LinkError("not now")
            return open_stream(context)

        monkeypatch.setattr(host.server, "_open_stream", open_unless_shut)

    monkeypatch.setattr(Place, "__init__", make_with_shutters)
    return numbers


def break_streams(host: Place, *numbers: int) -> None:
    """End streams of oslo from the server's side; the client opens them again."""
    streams = host.server._sessions[OSLO]._streams
    for number in numbers:
        streams[number][0].close()


def all_open(host: Place, client: GrpcClient) -> bool:
    """Whether both ends of oslo's session see every stream open."""
    assert client._session is not None
    return host.server.sessions()[OSLO].streams == len(client._session.answered) == len(EVERY_STREAM)


# -- a slow line ------------------------------------------------------------------------------


def test_control_overtakes_bulk_on_a_slow_line() -> None:
    bulk = random.Random(31).randbytes(20_000_000)
    limits = TransportLimits(keepalive=PATIENT)
    with (
        place(limits=limits) as host,
        proxy(host.address, bit_s=10e6) as between,
        site(between.address, keepalive=PATIENT) as client,
    ):
        wait_event(client, "connected")
        client.send(bulk)
        client.send(b"control", control=True)
        until(lambda: host.got[OSLO])
        assert host.got[OSLO] == [b"control"]
        assert client.unacknowledged_bytes >= len(bulk), "and it is still under way"
        between.bit_s = 1e12
        until(lambda: len(host.got[OSLO]) == 2)
        assert host.got[OSLO][1] == bulk

        between.bit_s = 10e6
        assert host.server.send(OSLO, bulk)
        assert host.server.send(OSLO, b"control", control=True)
        assert receive(client) == b"control"
        assert host.server.sessions()[OSLO].unacknowledged_bytes >= len(bulk), "and it is still under way"
        between.bit_s = 1e12
        assert receive(client) == bulk
        assert client.events() == [], "no connection was lost"


# -- events -----------------------------------------------------------------------------------


@pytest.mark.parametrize("late_lane", ["control", "bulk"])
def test_connected_means_that_both_lanes_are_open(late_lane: str, shut: set[str]) -> None:
    late = {"0"} if late_lane == "control" else EVERY_STREAM - {"0"}
    shut |= late
    with place() as host, site(host.address) as client:
        exchange(host, host.server, client, [b"bulk" if late_lane == "control" else b"control"], [])
        client.send(b"waits for its lane", control=late_lane == "control")
        until(lambda: host.server.sessions()[OSLO].streams == len(EVERY_STREAM - late))
        assert client.receive(0.2) is None
        assert client.events() == []
        shut.clear()
        wait_event(client, "connected")
        until(lambda: host.got[OSLO][1:] == [b"waits for its lane"])


def test_streams_that_break_and_reopen_are_no_event() -> None:
    with place() as host, site(host.address) as client:
        wait_event(client, "connected")
        for numbers in ((0,), (1, 2, 3, 4), (0,), (2, 3)):
            until(lambda: all_open(host, client))
            break_streams(host, *numbers)
            client.send(b"bulk")
            client.send(b"control", control=True)
            assert client.wait_sent(TIMEOUT_S)
        until(lambda: all_open(host, client))
        assert client.events() == []
        until(lambda: len(host.got[OSLO]) == 8)
        assert sorted(host.got[OSLO]) == [b"bulk"] * 4 + [b"control"] * 4


def test_lost_means_that_nothing_is_open(shut: set[str]) -> None:
    with place(limits=TransportLimits(lost_after_s=0.1)) as host, site(host.address) as client:
        until(lambda: all_open(host, client))
        wait_event(client, "connected")
        shut |= EVERY_STREAM
        break_streams(host, 1, 2, 3, 4)
        assert client.receive(0.3) is None
        assert client.events() == []
        assert host.lost == [], "one lane is enough to be there"
        break_streams(host, 0)
        wait_event(client, "lost")
        until(lambda: host.lost == [(OSLO, False)])
        shut.discard("0")
        until(lambda: host.server.sessions()[OSLO].streams)
        assert client.receive(0.3) is None
        assert client.events() == []
        shut.clear()
        wait_event(client, "connected")
        assert client.events() == []


def test_lost_is_told_even_if_only_one_lane_was_ever_open(shut: set[str]) -> None:
    shut.add("0")
    with place() as host, site(host.address) as client:
        exchange(host, host.server, client, [b"bulk"], [])
        until(lambda: host.server.sessions()[OSLO].streams == 4)
        assert client.events() == []
        shut |= EVERY_STREAM
        break_streams(host, 1, 2, 3, 4)
        wait_event(client, "lost")


# -- limits -----------------------------------------------------------------------------------


def test_each_end_has_a_limit_of_its_own_for_control_messages() -> None:
    limits = TransportLimits(max_control_message=1000)
    with place(limits=limits) as host, site(host.address, max_control_message=100) as client:
        exchange(host, host.server, client, [b"control" + bytes(993)], [b"control" + bytes(93)])
        assert host.server.send(OSLO, bytes(101), control=True)
        wait_event(client, "refused")
        with pytest.raises(RefusedError, match="101 bytes; the receiver takes at most 100; raise max_control_message"):
            client.receive()
        client.enter(b"oslo", TIMEOUT_S)
        client.start()
        client.send(bytes(1001), control=True)
        wait_event(client, "refused")
        with pytest.raises(RefusedError, match="1001 bytes; the receiver takes at most 1000; raise max_control_mess"):
            client.receive()


def test_limits_that_cannot_be_are_refused() -> None:
    with pytest.raises(SpecError, match="max_control_message is 0"):
        TransportLimits(max_control_message=0)
    channels = GrpcChannels("127.0.0.1:1", credentials=None, options=channel_options())
    with pytest.raises(SpecError, match="max_control_message is -1"):
        GrpcClient(channels, site="oslo", incarnation=1, max_control_message=-1)


def test_many_control_messages_wait_for_room() -> None:
    limits = TransportLimits(max_control_message=100)
    with place(limits=limits) as host, site(host.address, max_control_message=100) as client:
        messages = [b"control %d" % number for number in range(200)]
        exchange(host, host.server, client, messages, messages)
