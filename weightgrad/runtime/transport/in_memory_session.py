"""The sessions of the in-memory transport: who was admitted, and the messages on their way."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightgrad.runtime.transport.transport import LinkEvent, Peer, Traffic

if TYPE_CHECKING:
    from weightgrad.runtime.transport.in_memory_server import InMemoryServer


class LaneQueues:
    """The messages of one direction that were not taken yet, on two lanes."""

    def __init__(self) -> None:
        self._control: deque[bytes] = deque()
        self._bulk: deque[bytes] = deque()

    def __bool__(self) -> bool:
        return bool(self._control or self._bulk)

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return sum(map(len, self._control)) + sum(map(len, self._bulk))

    @property
    def next_lane(self) -> deque[bytes]:
        """The lane whose first message is to be taken next: control messages go before bulk ones."""
        return self._control or self._bulk

    def is_control(self, lane: deque[bytes]) -> bool:
        """Whether a lane that `next_lane` returned is the control lane."""
        return lane is self._control

    def put(self, data: bytes, *, control: bool) -> None:
        """Append a message to one of the lanes."""
        (self._control if control else self._bulk).append(data)

    def clear(self) -> None:
        """Drop every message."""
        self._control.clear()
        self._bulk.clear()


@dataclass(eq=False)
class Session:
    """One admitted peer: queues each way. `ended` is what the client sees of the end, if it ended."""

    server: InMemoryServer
    peer: Peer
    incarnation: str
    up: LaneQueues = field(default_factory=LaneQueues)
    down: LaneQueues = field(default_factory=LaneQueues)
    started: bool = False
    ended: LinkEvent | None = None
    why: str = ""
    left: bool = False  # the client closed it; what is queued upwards is still delivered
    dropped: bool = False  # no more of its messages are delivered

    @property
    def undelivered(self) -> int:
        """Bytes for a client that has not started yet; once it has, they are at its disposal."""
        return 0 if self.started else self.down.nbytes

    @property
    def open(self) -> bool:
        """Whether neither end has ended it."""
        return self.ended is None and not self.left


@dataclass
class KnownPeer:
    """What the server remembers of a peer across its sessions."""

    callback_lock: threading.RLock = field(default_factory=threading.RLock)
    traffic: Traffic = field(default_factory=Traffic)
    replaced: set[str] = field(default_factory=set)  # incarnations that a later process has replaced
