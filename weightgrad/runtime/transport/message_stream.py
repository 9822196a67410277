"""Both directions of one lane of a session, over whatever streams are open at the moment.

A stream carries records both ways. `Stream.records` yields what is to be sent on it; `Stream.handle_record` takes
what has come. Whoever carries the records (gRPC, or a test) is not known here.

Each stream sleeps on a condition of its own and is woken only when there is something for it to send. With one
condition for all streams, a small message spent most of its time in threads that woke up for nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from weightgrad.errors import ProtocolError
from weightgrad.runtime.transport.receive_queue import BufferPool, ReceiveQueue
from weightgrad.runtime.transport.records import MAX_ACKS, Ack, Chunk, Goodbye, Hello, Record, parse, to_bytes
from weightgrad.runtime.transport.send_queue import SendQueue
from weightgrad.runtime.transport.transport import Data, Outgoing, Traffic

HEARTBEAT_S = 2.0
"""A stream that has had nothing to send for so long says that its process lives. gRPC's own pings do not: they are
answered by another process, or by threads that need nothing of this one."""


class SessionLock:
    """The lock that the lanes of a session share, and conditions on which a thread can wait for either lane."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.received = threading.Condition(self.lock)
        self.acknowledged = threading.Condition(self.lock)


class MessageStream:
    """The messages of one lane, both ways. It outlives its streams, until `end`.

    Args:
        max_message: the longest message that is received, in bytes.
        max_buffered: memory for received messages that were not taken yet, in bytes.
        stream_bytes: how much may be under way on one stream without an acknowledgement.
        buffers: where the memory of received messages comes from.
        admit: called with the length of a message before it is received; raises to refuse it.
        traffic: where the bytes of records are counted, repeated ones included.
        lock: the lock to use, where several lanes share one.
        limit_name: what the sender of a message that is too long is told to raise.
        heartbeat_s: seconds after which a stream that has nothing to send says that its process lives; None: never.
    """

    def __init__(
        self,
        *,
        max_message: int,
        max_buffered: int,
        stream_bytes: int,
        buffers: BufferPool | None = None,
        admit: Callable[[int], None] | None = None,
        traffic: Traffic | None = None,
        lock: SessionLock | None = None,
        limit_name: str = "max_message",
        heartbeat_s: float | None = None,
    ) -> None:
        self.heartbeat_s = heartbeat_s
        shared = lock or SessionLock()
        self.lock = shared.lock
        self.outgoing = SendQueue(stream_bytes=stream_bytes, changed=shared.acknowledged)
        self.incoming = ReceiveQueue(
            max_message=max_message,
            max_buffered=max_buffered,
            buffers=buffers,
            admit=admit,
            changed=shared.received,
            limit_name=limit_name,
        )
        self.traffic = traffic or Traffic()
        self.ended = False
        self.leaving: str | None = None  # the text of the goodbye
        self.peer_left = False
        self.streams: list[Stream] = []
        self.without_stream_since = time.monotonic()  # meaningless while a stream is open
        self.heard_at = time.monotonic()  # when a record last came
        self.announced = 0  # the last `released` that was sent on a stream that is still open
        self._streams_opened = 0

    def put(self, data: Outgoing) -> None:
        """Queue a message."""
        with self.lock:
            if not self.ended:
                self.outgoing.put(data)
                self.wake_one_sender()

    def get(self, timeout: float | None = 0.0) -> memoryview | None:
        """Return the next message; see `ReceiveQueue.get`."""
        with self.lock:
            message = self.incoming.get(timeout)
            if message is not None and (idle := next((stream for stream in self.streams if stream.idle), None)):
                idle.wake()  # to announce that the message is released
            return message

    def open_stream(self) -> Stream:
        """Return a new stream. The caller closes it when its connection ends, whatever the reason."""
        with self.lock:
            self._streams_opened += 1
            stream = Stream(self, self._streams_opened)
            stream.closed = self.ended
            if not stream.closed:
                self.streams.append(stream)
            return stream

    def wake_one_sender(self) -> None:
        """Wake one stream that may send a chunk. It wakes the next one, so that none is woken for nothing."""
        for stream in self.streams:
            if stream.idle and self.outgoing.has_for(stream.number):
                return stream.wake()

    def leave(self, why: str = "") -> None:
        """Let every stream send a goodbye and end once it has nothing else to send."""
        with self.lock:
            self.leaving = why
            for stream in self.streams:
                stream.wake()

    def end(self, *, forget: bool = True) -> None:
        """Close all streams and drop what was not sent; with `forget`, also what was received and not taken."""
        with self.lock:
            self.ended = True
            for stream in list(self.streams):
                stream.close()
            self.outgoing.clear()
            self.incoming.close(forget=forget)


class Stream:
    """One stream of records each way. Made by `MessageStream.open_stream`."""

    def __init__(self, session: MessageStream, number: int) -> None:
        self.number = number
        self.hello_received = False
        self.closed = False
        self.idle = False
        self.waiting = False  # idle, or woken and not yet running again
        self._session = session
        self._something_to_send = threading.Condition(session.lock)
        self._acks: list[tuple[int, int]] = []
        self._goodbye_sent = False

    def records(self) -> Iterator[bytes]:
        """Yield what is to be sent, and wait for more, until the stream is closed."""
        session = self._session
        record: Record | None = None if self.closed else Hello(session.incoming.window, session.incoming.released)
        while record is not None:
            data = to_bytes(record)
            with session.lock:
                session.traffic.sent += len(data)
            yield data
            del data
            record = self._wait()

    def handle_record(self, data: Data) -> None:
        """Act on a record that came.

        Raises:
            ProtocolError: no correct peer sends this record now.
            RefusedError: a message is too long, or one too many.
        """
        record, session = parse(data), self._session
        with session.lock:
            if self.closed:
                return
            session.traffic.received += len(data)
            session.heard_at = time.monotonic()
            if isinstance(record, Hello) is self.hello_received:
                raise ProtocolError("a stream must start with exactly one hello record")
            if isinstance(record, Chunk):
                session.incoming.add(record)
                self._acks.append((record.message, record.offset))
                self.wake()
            elif isinstance(record, Goodbye):
                session.peer_left = True
            else:
                if isinstance(record, Hello):
                    self.hello_received = True
                    session.outgoing.granted(record.window)
                else:
                    for message, offset in record.chunks:
                        session.outgoing.acknowledged(message, offset)
                session.outgoing.released(record.released)
                session.wake_one_sender()

    def wake(self) -> None:
        """Look again whether there is something to send."""
        self.idle = False
        self._something_to_send.notify()

    def close(self) -> None:
        """Note that the stream has ended: another one sends what it carried and was not acknowledged."""
        session = self._session
        with session.lock:
            if self.closed:
                return
            self.closed = True
            self.wake()
            session.streams.remove(self)
            if not session.streams:
                session.without_stream_since = time.monotonic()
            session.outgoing.stream_broke(self.number)
            # Its last announcement may not have arrived.
            session.announced = 0
            for stream in session.streams:
                stream.wake()

    def _wait(self) -> Record | None:
        with self._session.lock:
            while not self.closed and not self._goodbye_sent:
                record = self._next()
                if record is not None:
                    self._session.wake_one_sender()
                    return record
                self.idle = self.waiting = True
                woken = self._something_to_send.wait(self._session.heartbeat_s)
                self.waiting = False
                if not woken and not self.closed:
                    self._session.wake_one_sender()
                    return Ack(self._session.incoming.released, ())  # says that this process lives
            return None

    def _gives_way(self) -> bool:
        """Leave a chunk to a stream that carries none, rather than take one more.

        A message of a few chunks is dealt among the streams because a connection that was idle starts slowly; the
        first thread to run must not take them all, as on a busy machine it would.
        """
        session = self._session
        if session.outgoing.carries(self.number) and session.outgoing.has_for(self.number):
            for other in session.streams:
                if other is not self and other.waiting and not session.outgoing.carries(other.number):
                    other.wake()
                    return True
        return False

    def _next(self) -> Record | None:
        session = self._session
        released = session.incoming.released
        # An acknowledgement goes before data: the sender may be waiting for it.
        if self._acks or released > session.announced:
            acks, self._acks = tuple(self._acks[:MAX_ACKS]), self._acks[MAX_ACKS:]
            session.announced = released
            return Ack(released, acks)
        if not self._gives_way() and (chunk := session.outgoing.take(self.number)):
            return chunk
        if session.leaving is not None:
            self._goodbye_sent = True
            return Goodbye(session.leaving)
        return None
