"""What the tests of transports share: an application that records its calls, and exchanges of messages."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from weightgrad.runtime.transport.transport import ClientTransport, EntryRequest, Peer, ServerTransport

T = TypeVar("T")

OSLO, LIMA = Peer("oslo", 0), Peer("lima", 0)
TIMEOUT_S = 120.0  # for a busy machine; nothing here should need it


class RecordingApplication:
    """Keeps what it gets; `check`, `admit` and `take` can be replaced."""

    def __init__(self) -> None:
        self.got: dict[Peer, list[bytes]] = defaultdict(list)
        self.entries: list[EntryRequest] = []
        self.lost: list[tuple[Peer, bool]] = []
        self.refused: list[str] = []
        self.check: Callable[[EntryRequest], object] = lambda entry: None
        self.admit: Callable[[EntryRequest], bytes] = lambda entry: b"welcome " + entry.request
        self.take: Callable[[Peer, memoryview], object] = lambda peer, data: self.got[peer].append(bytes(data))
        self.lanes: dict[Peer, list[bool]] = defaultdict(list)  # whether each message came on the control lane
        self.overlapping = False  # whether two callbacks about one peer ever ran at the same time
        self._busy: dict[Peer, threading.Lock] = defaultdict(threading.Lock)

    def check_peer(self, entry: EntryRequest) -> None:
        self.check(entry)

    def enter(self, entry: EntryRequest) -> bytes:
        self.entries.append(entry)
        return self._alone(entry.peer, lambda: self.admit(entry))

    def on_message(self, peer: Peer, data: memoryview, control: bool) -> None:
        self.lanes[peer].append(control)
        self._alone(peer, lambda: self.take(peer, data))

    def on_lost(self, peer: Peer, left: bool) -> None:
        self._alone(peer, lambda: self.lost.append((peer, left)))

    def on_refused(self, reason: str) -> None:
        self.refused.append(reason)

    def _alone(self, peer: Peer, call: Callable[[], T]) -> T:
        if not self._busy[peer].acquire(blocking=False):
            self.overlapping = True
            return call()
        try:
            return call()
        finally:
            self._busy[peer].release()


def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def receive(client: ClientTransport) -> bytes:
    """Wait for the next message."""
    end = time.monotonic() + TIMEOUT_S
    while (message := client.receive(1.0)) is None:
        assert time.monotonic() < end, "waited too long"
    return bytes(message)


def wait_event(client: ClientTransport, wanted: str) -> None:
    """Wait until the client has seen the event; earlier ones are dropped."""
    until(lambda: wanted in client.events())


def some_messages(count: int, seed: int) -> list[bytes]:
    """Messages of all lengths up to 5 MB, the edges of chunks among them."""
    chance = random.Random(seed)
    edges = [0, 1, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 5_000_000]
    return [chance.randbytes(edges[n] if n < len(edges) else int(5e6 ** chance.random())) for n in range(count)]


def some_lane_messages(count: int, seed: int) -> list[bytes]:
    """Messages for both lanes, as `is_control` tells them apart: all lengths up to 5 MB, or 1 MB for control ones."""
    chance = random.Random(seed)
    lanes = [chance.choice([b"bulk", b"control"]) for _ in range(count)]
    return [
        lane + message[: 1_000_000 if lane == b"control" else None]
        for lane, message in zip(lanes, some_messages(count, seed), strict=True)
    ]


def is_control(message: bytes) -> bool:
    """Whether a message was made for the control lane."""
    return message.startswith(b"control")


def by_lane(messages: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The control messages and the others, each in their order."""
    return [one for one in messages if is_control(one)], [one for one in messages if not is_control(one)]


def exchange(
    application: RecordingApplication,
    server: ServerTransport,
    client: ClientTransport,
    up: list[bytes],
    down: list[bytes],
    peer: Peer = OSLO,
) -> None:
    """Send messages both ways between the server and a peer that sent nothing yet; each lane keeps its order."""
    for message in up:
        client.send(message, control=is_control(message))
    for message in down:
        assert server.send(peer, message, control=is_control(message))
    assert by_lane([receive(client) for _ in down]) == by_lane(down)
    assert client.wait_sent(TIMEOUT_S)
    until(lambda: len(application.got[peer]) >= len(up))
    assert by_lane(application.got[peer]) == by_lane(up)
