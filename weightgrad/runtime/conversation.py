"""Both directions between a site and the global server, by whatever lanes are open just now.

A lane is a stream of records each way. What is to be sent on it comes from `Lane.records`, what
has come goes into `Lane.take_in`; who carries them (gRPC, or a test) is not known here.

Each lane sleeps by itself and is woken only when there is something for it: with one bell for all,
a small message spent most of its time in threads that woke up for nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from weightgrad.errors import ProtocolError
from weightgrad.runtime.chunks import MAX_ACKS, Ack, Chunk, Data, Goodbye, Hello, Record, parse, to_bytes
from weightgrad.runtime.incoming import Incoming
from weightgrad.runtime.lane_buffers import Buffers
from weightgrad.runtime.outgoing import Outgoing


@dataclass
class Traffic:
    """Bytes of records handed to gRPC and taken from it, those sent again included."""

    sent: int = 0
    received: int = 0


class Conversation:
    """One session's messages out and in. It survives its lanes; `end` is its end."""

    def __init__(
        self,
        *,
        max_message: int,
        max_buffered: int,
        lane_bytes: int,
        buffers: Buffers | None = None,
        admit: Callable[[int], None] | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.outgoing = Outgoing(lane_bytes=lane_bytes, lock=self.lock)
        self.incoming = Incoming(
            max_message=max_message, max_buffered=max_buffered, buffers=buffers, admit=admit, lock=self.lock
        )
        self.traffic = traffic or Traffic()
        self.over = False
        self.leaving: str | None = None  # the words to leave with
        self.peer_left = False
        self.lanes: list[Lane] = []
        self.alone_since = time.monotonic()  # when the last lane went; means nothing while there is one
        self.announced = 0  # the last `released` that the other end was told on a lane that lives
        self._lanes_ever = 0

    def put(self, data: Data) -> None:
        """Queue a message."""
        with self.lock:
            if not self.over:
                self.outgoing.put(data)
                self.wake_a_taker()

    def get(self, timeout: float | None = 0.0) -> memoryview | None:
        """The next message, as of `Incoming.get`."""
        with self.lock:
            message = self.incoming.get(timeout)
            if message is not None and (idle := next((lane for lane in self.lanes if lane.idle), None)):
                idle.wake()  # to tell the other end
            return message

    def open_lane(self) -> Lane:
        """A new lane. Close it when its stream ends, whatever the reason."""
        with self.lock:
            self._lanes_ever += 1
            lane = Lane(self, self._lanes_ever)
            lane.closed = self.over
            if not lane.closed:
                self.lanes.append(lane)
            return lane

    def wake_a_taker(self) -> None:
        """Wake one lane that may take a chunk. It wakes the next, so that none is woken for nothing."""
        for lane in self.lanes:
            if lane.idle and self.outgoing.has_for(lane.number):
                return lane.wake()

    def leave(self, why: str = "") -> None:
        """Every lane says goodbye once it has nothing else to send, and ends."""
        with self.lock:
            self.leaving = why
            for lane in self.lanes:
                lane.wake()

    def end(self, *, forget: bool = True) -> None:
        """Close all lanes and drop what was not sent; and what was not taken, unless told to keep it."""
        with self.lock:
            self.over = True
            for lane in list(self.lanes):
                lane.close()
            self.outgoing.clear()
            self.incoming.close(forget=forget)


class Lane:
    """One stream of records each way. Made by `Conversation.open_lane`."""

    def __init__(self, talk: Conversation, number: int) -> None:
        self.number = number
        self.greeted = False  # the other end's hello has come
        self.closed = False
        self.idle = False
        self._talk = talk
        self._bell = threading.Condition(talk.lock)
        self._acks: list[tuple[int, int]] = []
        self._left = False

    def records(self) -> Iterator[bytes]:
        """What to send, as it comes to be; ends when the lane is closed."""
        talk = self._talk
        record: Record | None = None if self.closed else Hello(talk.incoming.window, talk.incoming.released)
        while record is not None:
            data = to_bytes(record)
            with talk.lock:
                talk.traffic.sent += len(data)
            yield data
            del data
            record = self._wait()

    def take_in(self, data: Data) -> None:
        """Act on a record that came. ProtocolError or RefusedError if no honest end would send it."""
        record, talk = parse(data), self._talk
        with talk.lock:
            if self.closed:
                return
            talk.traffic.received += len(data)
            if isinstance(record, Hello) is self.greeted:
                raise ProtocolError("a lane starts with one hello; this one has none or two")
            if isinstance(record, Chunk):
                talk.incoming.add(record)
                self._acks.append((record.message, record.offset))
                self.wake()
            elif isinstance(record, Goodbye):
                talk.peer_left = True
            else:
                if isinstance(record, Hello):
                    self.greeted = True
                    talk.outgoing.granted(record.window)
                else:
                    for message, offset in record.chunks:
                        talk.outgoing.acknowledged(message, offset)
                talk.outgoing.released(record.released)
                talk.wake_a_taker()

    def wake(self) -> None:
        """There may be something to send."""
        self.idle = False
        self._bell.notify()

    def close(self) -> None:
        """The stream has ended: what it carried and was not acknowledged goes by another."""
        talk = self._talk
        with talk.lock:
            if self.closed:
                return
            self.closed = True
            self.wake()
            talk.lanes.remove(self)
            if not talk.lanes:
                talk.alone_since = time.monotonic()
            talk.outgoing.lane_broke(self.number)
            # What it said last may not have been heard.
            talk.announced = 0
            for lane in talk.lanes:
                lane.wake()

    def _wait(self) -> Record | None:
        with self._talk.lock:
            while not self.closed and not self._left:
                record = self._next()
                if record is not None:
                    self._talk.wake_a_taker()
                    return record
                self.idle = True
                self._bell.wait()
            return None

    def _next(self) -> Record | None:
        talk = self._talk
        released = talk.incoming.released
        # An acknowledgement goes before data: the other end may be waiting for it.
        if self._acks or released > talk.announced:
            acks, self._acks = tuple(self._acks[:MAX_ACKS]), self._acks[MAX_ACKS:]
            talk.announced = released
            return Ack(released, acks)
        if chunk := talk.outgoing.take(self.number):
            return chunk
        if talk.leaving is not None:
            self._left = True
            return Goodbye(talk.leaving)
        return None
