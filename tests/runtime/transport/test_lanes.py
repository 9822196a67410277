"""The contract of `transport.py` for its two lanes: control messages do not wait behind bulk ones."""

from __future__ import annotations

import threading
import time

import pytest

from weightgrad.errors import RefusedError
from weightgrad.runtime.transport.transport import MAX_CONTROL_MESSAGE, EntryRequest, Peer, ServerTransport

from .harness import (
    LIMA,
    OSLO,
    TIMEOUT_S,
    RecordingApplication,
    by_lane,
    exchange,
    is_control,
    receive,
    some_lane_messages,
    until,
    wait_event,
)
from .implementations import Implementation


def test_each_lane_keeps_its_order(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client() as client:
        exchange(application, server, client, some_lane_messages(100, 21), some_lane_messages(100, 22))
        assert client.receive() is None
        assert client.unacknowledged_bytes == 0


def test_control_overtakes_bulk_that_the_site_has_not_taken(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    bulk, control = [bytes([n]) * 3_000_000 for n in range(5)], [b"control 1", b"control 2"]
    with transport.client() as client:
        wait_event(client, "connected")
        for message in bulk + control:
            assert server.send(OSLO, message, control=is_control(message))
        until(lambda: server.sessions()[OSLO].unacknowledged_bytes == 0)
        assert [receive(client) for _ in range(7)] == control + bulk


def test_control_overtakes_bulk_that_the_application_has_not_taken(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    taking, go_on = threading.Event(), threading.Event()

    def take(peer: Peer, data: memoryview) -> None:
        taking.set()
        assert go_on.wait(TIMEOUT_S)
        application.got[peer].append(bytes(data))

    application.take = take
    bulk, control = [bytes([n]) * 3_000_000 for n in range(5)], [b"control 1", b"control 2"]
    with transport.client() as client:
        client.send(bulk[0])
        assert taking.wait(TIMEOUT_S)
        for message in bulk[1:] + control:
            client.send(message, control=is_control(message))
        transport.wait_queued(client)
        go_on.set()
        until(lambda: len(application.got[OSLO]) == 7)
        assert application.got[OSLO] == [bulk[0], *control, *bulk[1:]]


def test_one_callback_at_a_time_for_both_lanes(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    def take(peer: Peer, data: memoryview) -> None:
        time.sleep(0.001)
        application.got[peer].append(bytes(data))

    application.take = take  # whether two run at a time is seen by the fixture
    messages = [b"%s %d" % (lane, n) for n in range(50) for lane in (b"control", b"bulk")]
    with transport.client() as client:
        exchange(application, server, client, messages, [])


@pytest.mark.parametrize("control", [False, True])
def test_receive_wakes_for_either_lane(transport: Implementation, server: ServerTransport, control: bool) -> None:
    with transport.client() as client:
        wait_event(client, "connected")
        threading.Timer(0.1, lambda: server.send(OSLO, b"wake up", control=control)).start()
        began = time.monotonic()
        assert bytes(client.receive(TIMEOUT_S) or b"") == b"wake up"
        assert time.monotonic() - began < TIMEOUT_S / 2


def test_what_is_sent_while_a_peer_enters_keeps_its_lane(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    def admit(entry: EntryRequest) -> bytes:
        for message in (b"bulk", b"control"):
            assert server.send(entry.peer, message, control=is_control(message))
        return b"welcome oslo"

    application.admit = admit
    with transport.client(start=False) as client:
        client.enter(b"", TIMEOUT_S)
        assert server.sessions()[OSLO].unacknowledged_bytes == len(b"bulk" + b"control")
        client.start()
        until(lambda: server.sessions()[OSLO].unacknowledged_bytes == 0)
        assert [receive(client), receive(client)] == [b"control", b"bulk"]


def test_nothing_is_sent_before_start_and_both_lanes_are_counted(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client(start=False) as client:
        client.enter(b"", TIMEOUT_S)
        client.send(bytes(1000))
        assert client.unacknowledged_bytes == 1000
        client.send(bytes(30), control=True)
        assert client.unacknowledged_bytes == 1030
        assert not client.wait_sent(0.2)
        assert application.got[OSLO] == []
        client.start()
        assert client.wait_sent(TIMEOUT_S)
        assert client.unacknowledged_bytes == 0
        until(lambda: len(application.got[OSLO]) == 2)


def test_closing_delivers_both_lanes(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    messages = some_lane_messages(40, 23)
    with transport.client() as client:
        for message in messages:
            client.send(message, control=is_control(message))
        client.close(TIMEOUT_S)
    until(lambda: application.lost)
    assert application.lost == [(OSLO, True)]
    assert by_lane(application.got[OSLO]) == by_lane(messages)


def test_stopping_delivers_both_lanes(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    # All of them fit into the memory for messages that the site has not taken.
    messages = [b"%s %d" % (lane, n) * 10_000 for n in range(20) for lane in (b"bulk", b"control")]
    with transport.client() as client:
        wait_event(client, "connected")
        for message in messages:
            server.send(OSLO, message, control=is_control(message))
        server.stop(TIMEOUT_S)
        assert by_lane([receive(client) for _ in messages]) == by_lane(messages)


def test_a_new_session_drops_both_lanes_of_the_old_one(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client(start=False) as client:
        for _ in range(2):
            client.enter(b"", TIMEOUT_S)
            for control in (False, True):
                client.send(b"dropped with the first session", control=control)
                server.send(OSLO, b"dropped with the first session", control=control)
        client.enter(b"", TIMEOUT_S)
        client.start()
        exchange(application, server, client, [b"bulk", b"control"], [b"bulk", b"control"])
        assert client.receive(0.1) is None


# -- the length of control messages ---------------------------------------------------------------


def test_the_longest_control_message_arrives(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    longest = b"control".ljust(MAX_CONTROL_MESSAGE, b".")
    with transport.client() as client:
        exchange(application, server, client, [longest] * 10, [longest] * 10)


def test_a_control_message_that_is_too_long_ends_the_session_with_the_reason(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client() as client, transport.client(LIMA) as other:
        client.send(bytes(MAX_CONTROL_MESSAGE + 1))
        until(lambda: application.got.pop(OSLO, None))
        client.send(bytes(MAX_CONTROL_MESSAGE + 1), control=True)
        wait_event(client, "refused")
        with pytest.raises(RefusedError, match="1048577 bytes; the receiver takes at most 1048576"):
            client.receive()
        with pytest.raises(RefusedError, match="1048577 bytes"):
            client.send(b"", control=True)
        until(lambda: application.lost == [(OSLO, False)])
        exchange(application, server, other, [b"the server is well"], [b"indeed"], LIMA)
        # It may come back, and behave.
        client.enter(b"oslo", TIMEOUT_S)
        client.start()
        exchange(application, server, client, [b"control"], [b"control"])


def test_a_site_refuses_a_control_message_that_is_too_long(
    transport: Implementation, application: RecordingApplication, server: ServerTransport
) -> None:
    with transport.client() as client:
        wait_event(client, "connected")
        assert server.send(OSLO, bytes(MAX_CONTROL_MESSAGE + 1), control=True)
        wait_event(client, "refused")
        with pytest.raises(RefusedError, match="1048577 bytes; the receiver takes at most 1048576"):
            client.receive()
        until(lambda: application.lost == [(OSLO, False)])
