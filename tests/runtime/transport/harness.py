"""What the tests of transports share: an application that records its calls, and exchanges of messages."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from weightgrad.runtime.transport.transport import ClientTransport, EntryRequest, ServerTransport

T = TypeVar("T")

TIMEOUT_S = 120.0  # for a busy machine; nothing here should need it


class RecordingApplication:
    """Keeps what it gets; `check`, `admit` and `take` can be replaced."""

    def __init__(self) -> None:
        self.got: dict[str, list[bytes]] = defaultdict(list)
        self.entries: list[EntryRequest] = []
        self.lost: list[tuple[str, bool]] = []
        self.refused: list[str] = []
        self.check: Callable[[EntryRequest], object] = lambda entry: None
        self.admit: Callable[[EntryRequest], bytes] = lambda entry: b"welcome " + entry.request
        self.take: Callable[[str, memoryview], object] = lambda site, data: self.got[site].append(bytes(data))
        self.overlapping = False  # whether two callbacks about one site ever ran at the same time
        self._busy: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def check_peer(self, entry: EntryRequest) -> None:
        self.check(entry)

    def enter(self, entry: EntryRequest) -> bytes:
        self.entries.append(entry)
        return self._alone(entry.site, lambda: self.admit(entry))

    def on_message(self, site: str, data: memoryview) -> None:
        self._alone(site, lambda: self.take(site, data))

    def on_lost(self, site: str, left: bool) -> None:
        self._alone(site, lambda: self.lost.append((site, left)))

    def on_refused(self, reason: str) -> None:
        self.refused.append(reason)

    def _alone(self, site: str, call: Callable[[], T]) -> T:
        if not self._busy[site].acquire(blocking=False):
            self.overlapping = True
            return call()
        try:
            return call()
        finally:
            self._busy[site].release()


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


def exchange(
    application: RecordingApplication,
    server: ServerTransport,
    client: ClientTransport,
    up: list[bytes],
    down: list[bytes],
) -> None:
    """Send messages both ways between the server and oslo, and check that they arrive."""
    for message in up:
        client.send(message)
    for message in down:
        assert server.send("oslo", message)
    for message in down:
        assert receive(client) == message
    assert client.wait_sent(TIMEOUT_S)
    until(lambda: len(application.got["oslo"]) >= len(up))
    assert application.got["oslo"] == up
