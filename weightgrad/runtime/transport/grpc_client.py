"""The client of the gRPC transport.

    channels = ProcessChannels("gs.example.net:7443", credentials=..., options=channel_options(streams=4))
    client = GrpcClient(channels, site="virginia", rank=0, incarnation="7")
    reply = client.enter(b"...", timeout=10)
    client.start()
    client.send(update); client.send(report, control=True); client.receive(timeout=1.0); client.close(grace=2.0)

A session has several gRPC channels, each with a TCP connection of its own. Channel 0 carries the control lane, so that
a control message does not queue behind bulk ones in the buffers of TCP; the others carry the chunks of all bulk
messages. A channel that breaks is opened again for as long as the session lasts; what it had not delivered is carried
by the other channels of its lane, or by itself when it is open again.
"""

from __future__ import annotations

import random
import threading
import time
from urllib.parse import quote

from weightgrad.errors import LinkError, RefusedError, WeightGradError
from weightgrad.runtime.transport.channels import Call, CallError, Channels, Status
from weightgrad.runtime.transport.grpc_settings import (
    INCARNATION_KEY,
    PROTOCOL_KEY,
    RANK_KEY,
    SESSION_KEY,
    SITE_KEY,
    STREAM_KEY,
)
from weightgrad.runtime.transport.lanes import CONTROL_STREAM, LaneLimits, Lanes
from weightgrad.runtime.transport.receive_queue import BufferPool
from weightgrad.runtime.transport.records import Goodbye, to_bytes
from weightgrad.runtime.transport.transport import (
    MAX_CONTROL_MESSAGE,
    ClientTransport,
    LinkEvent,
    Outgoing,
    Peer,
    Traffic,
    check_rank,
)
from weightgrad.wire.versions import TRANSPORT_VERSION

_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 2.0
_GOODBYE_S = 0.5
_REFUSALS = {
    "FAILED_PRECONDITION",
    "INVALID_ARGUMENT",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNIMPLEMENTED",
}


class _Session:
    def __init__(self, key: str, messages: Lanes) -> None:
        self.key, self.messages = key, messages
        self.ended = threading.Event()
        self.refused: str | None = None
        self.threads: list[threading.Thread] = []
        self.calls: dict[int, Call] = {}  # by stream
        self.answered: set[int] = set()  # the streams that are open and on which the server has answered
        self.link: LinkEvent | None = None  # the last CONNECTED or LOST

    def end(self) -> None:
        self.ended.set()
        self.messages.end()
        for call in list(self.calls.values()):
            call.cancel()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(5.0)


class GrpcClient(ClientTransport):
    """One rank's connection to the global server over gRPC.

    Args:
        channels: gRPC, in this process or in another; the client closes them.
        site: the name of the site.
        rank: the rank of this process inside the site.
        incarnation: identifies this process; choose it at random.
        max_message: the longest bulk message to receive, in bytes.
        max_buffered: memory for received bulk messages that were not taken yet, in bytes.
        max_control_message: the longest control message to receive, in bytes.
        stream_bytes: how much may be under way on one stream; at least its share of bandwidth times round trip.
        keep_bytes: memory kept for further messages.
        announces_end: whether the server hears a goodbye when this process ends without `close`, even if it is killed.
            Otherwise that looks to it like a connection that is cut. It needs gRPC in another process.
    """

    def __init__(
        self,
        channels: Channels,
        *,
        site: str,
        rank: int = 0,
        incarnation: str | int,
        max_message: int = 1 << 30,
        max_buffered: int = (1 << 30) + (64 << 20),
        max_control_message: int = MAX_CONTROL_MESSAGE,
        stream_bytes: int = 4 << 20,
        keep_bytes: int = 4 << 20,
        announces_end: bool = False,
    ) -> None:
        check_rank(rank)
        self._limits = LaneLimits(
            max_message=max_message,
            max_buffered=max_buffered,
            max_control_message=max_control_message,
            stream_bytes=stream_bytes,
        )
        self.address, self._peer, self._channels = channels.address, Peer(site, rank), channels
        self._metadata: tuple[tuple[str, str], ...] = (
            (SITE_KEY, quote(site, safe="")),
            (RANK_KEY, str(rank)),
            (INCARNATION_KEY, quote(str(incarnation), safe="")),
            (PROTOCOL_KEY, TRANSPORT_VERSION),
        )
        self._last = to_bytes(Goodbye("its process has ended")) if announces_end else b""
        self.traffic = Traffic()
        self._buffers = BufferPool(keep_bytes=keep_bytes)
        self.why = ""
        self._changed = threading.Condition()
        self._events: list[LinkEvent] = []
        self._event_count = 0
        self._session: _Session | None = None
        self._round_trip_s = 0.0
        self._closed = False
        self.asked_at = 0.0
        """When the server was last asked to admit this rank, by the clock of this machine."""

    def enter(self, request: bytes, timeout: float) -> bytes:
        """See `ClientTransport.enter`."""
        if self._closed:
            raise LinkError(f"this connection to {self.address} was closed; make a new one")
        self._end_session()
        until, retry = time.monotonic() + timeout, _FIRST_RETRY_S
        while True:
            left = until - time.monotonic()
            self.asked_at = time.time()
            try:
                reply, metadata = self._channels.ask(request, self._metadata, max(left, 0.001))
            except CallError as error:
                code, self.why = error.status
                if code in _REFUSALS:
                    raise RefusedError(self.why) from None
                if code == "DEADLINE_EXCEEDED" or left <= retry:
                    raise LinkError(
                        f"{self.address} did not admit {self._peer} within {timeout:g} s ({self.why}); check the "
                        "address, that the global server runs there, the firewall between, and both certificates"
                    ) from None
            else:
                break
            time.sleep(retry)
            retry = min(2 * retry, _LAST_RETRY_S)
        self._session = _Session(
            metadata[SESSION_KEY], Lanes(self._limits, buffers=self._buffers, traffic=self.traffic)
        )
        return reply

    def start(self) -> None:
        """See `ClientTransport.start`."""
        session = self._current()
        for stream in range(self._channels.count):
            thread = threading.Thread(
                target=self._keep_stream_open, args=(session, stream), name=f"stream-{stream}", daemon=True
            )
            session.threads.append(thread)
            thread.start()

    def send(self, data: Outgoing, *, control: bool = False) -> None:
        """See `ClientTransport.send`."""
        session = self._current()
        if session.refused is not None:
            raise RefusedError(session.refused)
        session.messages.put(data, control=control)

    def receive(self, timeout: float = 0.0) -> memoryview | None:
        """See `ClientTransport.receive`."""
        session, seen = self._current(), self._event_count
        messages = session.messages
        with messages.received:
            messages.received.wait_for(
                lambda: messages.whole or self._event_count != seen or session.refused is not None or self._closed,
                timeout,
            )
            message = messages.get()
        if message is None and session.refused is not None:
            raise RefusedError(session.refused)
        return message

    @property
    def unacknowledged_bytes(self) -> int:
        """See `ClientTransport.unacknowledged_bytes`."""
        session = self._session
        return 0 if session is None else session.messages.unacknowledged_bytes

    def wait_sent(self, timeout: float) -> bool:
        """See `ClientTransport.wait_sent`."""
        session = self._current()
        return session.messages.wait_sent(timeout) and not session.ended.is_set()

    def events(self) -> list[LinkEvent]:
        """See `ClientTransport.events`."""
        with self._changed:
            events, self._events = self._events, []
            return events

    def socket_bytes(self) -> Traffic | None:
        """See `ClientTransport.socket_bytes`."""
        total, self._round_trip_s = self._channels.socket_bytes()
        return total

    @property
    def round_trip_s(self) -> float:
        """See `ClientTransport.round_trip_s`; updated by `socket_bytes`."""
        return self._round_trip_s

    def close(self, grace: float) -> None:
        """See `ClientTransport.close`."""
        until = time.monotonic() + grace
        session, closed, self._closed = self._session, self._closed, True
        if session and not closed and not session.ended.is_set():
            session.messages.wait_sent(grace)
            session.messages.leave()
            # The goodbye itself needs a moment even when the grace is used up.
            until = max(until, time.monotonic() + _GOODBYE_S)
            for thread in session.threads:
                thread.join(max(0.0, until - time.monotonic()))
        self._disconnect()

    def abort(self) -> None:
        """See `ClientTransport.abort`."""
        self._closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        self._end_session()
        self._channels.close()

    def _end_session(self) -> None:
        if self._session:
            self._session.end()
            self._session.join()

    def _current(self) -> _Session:
        if self._session is None or self._closed:
            raise LinkError(f"no session with {self.address}; enter first")
        return self._session

    # -- streams ------------------------------------------------------------------------------

    def _keep_stream_open(self, session: _Session, number: int) -> None:
        retry = _FIRST_RETRY_S
        while not session.ended.is_set():
            was_connected = self._run_stream(session, number)
            if session.messages.leaving:
                return
            retry = _FIRST_RETRY_S if was_connected else min(2 * retry, _LAST_RETRY_S)
            session.ended.wait(retry * random.uniform(0.7, 1.0))

    def _run_stream(self, session: _Session, number: int) -> bool:
        """Carry records until the stream ends. Returns whether the server had answered on it."""
        stream = session.messages.open_stream(number)
        metadata = (*self._metadata, (SESSION_KEY, session.key), (STREAM_KEY, str(number)))
        try:
            call = self._channels.open(number, stream.records(), metadata, self._last)
        except LinkError as error:
            stream.close()
            self.why = str(error)
            return False
        session.calls[number] = call
        if session.ended.is_set():
            call.cancel()
        try:
            for record in call:
                first = not stream.hello_received
                stream.handle_record(record)
                if first:
                    self._note_stream(session, number, answered=True)
            status = call.status()
        except WeightGradError as error:
            call.cancel()
            status = Status("FAILED_PRECONDITION", f"the global server broke the protocol: {error}")
        finally:
            stream.close()
        self._handle_stream_end(session, *status)
        if stream.hello_received:
            self._note_stream(session, number, answered=False)
        return stream.hello_received

    def _note_stream(self, session: _Session, number: int, *, answered: bool) -> None:
        with self._changed:
            if answered:
                session.answered.add(number)
            else:
                session.answered.discard(number)
            link = session.link  # which stays as it is while only one lane is open, so that it does not flap
            if CONTROL_STREAM in session.answered and len(session.answered) > 1:
                link = LinkEvent.CONNECTED
            elif not session.answered:
                link = LinkEvent.LOST
            if link is not None and link is not session.link and not session.ended.is_set():
                session.link = link
                self._add_event(session, link)

    def _handle_stream_end(self, session: _Session, code: str, why: str) -> None:
        with self._changed:
            if session.ended.is_set() or session.messages.leaving or code == "OK":
                return
            self.why = why
            if code == "NOT_FOUND" or code in _REFUSALS:
                session.ended.set()
                session.refused = why if code in _REFUSALS else None
                self._add_event(session, LinkEvent.GONE if session.refused is None else LinkEvent.REFUSED)
        if session.ended.is_set():
            session.end()

    def _add_event(self, session: _Session, event: LinkEvent) -> None:
        self._events.append(event)
        self._event_count += 1
        with session.messages.received:
            session.messages.received.notify_all()
