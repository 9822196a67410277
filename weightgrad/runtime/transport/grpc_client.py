"""The client of the gRPC transport.

    client = GrpcClient("gs.example.net:7443", site="virginia", incarnation="7", credentials=...)
    reply = client.enter(b"...", timeout=10)
    client.start()
    client.send(update); client.receive(timeout=1.0); client.close(grace=2.0)

Several gRPC channels, each with a TCP connection of its own, carry the chunks of all messages. A channel that
breaks is opened again for as long as the session lasts; the other channels carry what it had not delivered.
"""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from typing import Any
from urllib.parse import quote

import grpc

from weightgrad.errors import LinkError, RefusedError, SpecError, WeightGradError
from weightgrad.runtime.transport.grpc_settings import (
    ENTER,
    INCARNATION_KEY,
    MAX_STREAMS,
    PROTOCOL_KEY,
    SESSION_KEY,
    SITE_KEY,
    STREAM,
    STREAM_KEY,
    Keepalive,
    make_channel,
)
from weightgrad.runtime.transport.message_stream import MessageStream
from weightgrad.runtime.transport.receive_queue import BufferPool, check_memory_limits
from weightgrad.runtime.transport.socket_bytes import SocketBytes
from weightgrad.runtime.transport.transport import ClientTransport, Data, LinkEvent, Traffic
from weightgrad.wire.versions import TRANSPORT_VERSION

_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 2.0
_GOODBYE_S = 0.5
_REFUSALS = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}


class _Session:
    def __init__(self, key: str, messages: MessageStream) -> None:
        self.key, self.messages = key, messages
        self.ended = threading.Event()
        self.refused: str | None = None
        self.threads: list[threading.Thread] = []
        self.calls: dict[int, Any] = {}  # by stream
        self.connected_streams = 0

    def end(self) -> None:
        self.ended.set()
        self.messages.end()
        for call in list(self.calls.values()):
            call.cancel()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(5.0)


class GrpcClient(ClientTransport):
    """One site's connection to the global server over gRPC.

    Args:
        address: the server's HOST:PORT.
        site: the name of the site.
        incarnation: identifies this process; choose it at random.
        credentials: the site's certificates; None connects without TLS.
        streams: how many TCP connections to use.
        server_name_override: the name to expect in the server's certificate instead of the host, for tests.
        keepalive: how a connection that falls silent is noticed.
        max_message: the longest message to receive, in bytes.
        max_buffered: memory for received messages that were not taken yet, in bytes.
        stream_bytes: how much may be under way on one stream; at least its share of bandwidth times round trip.
        keep_bytes: memory kept for further messages.
    """

    def __init__(
        self,
        address: str,
        *,
        site: str,
        incarnation: str | int,
        credentials: grpc.ChannelCredentials | None,
        streams: int = 4,
        server_name_override: str | None = None,
        keepalive: Keepalive | None = None,
        max_message: int = 1 << 30,
        max_buffered: int = (1 << 30) + (64 << 20),
        stream_bytes: int = 4 << 20,
        keep_bytes: int = 512 << 20,
    ) -> None:
        if not 1 <= streams <= MAX_STREAMS:
            raise SpecError(f"streams is {streams}; it must be 1 to {MAX_STREAMS}")
        check_memory_limits(max_message, max_buffered)
        self.address, self._site, self._streams = address, site, streams
        self._metadata: tuple[tuple[str, str], ...] = (
            (SITE_KEY, quote(site, safe="")),
            (INCARNATION_KEY, quote(str(incarnation), safe="")),
            (PROTOCOL_KEY, TRANSPORT_VERSION),
        )
        self.traffic = Traffic()
        self._new_message_stream = partial(
            MessageStream,
            max_message=max_message,
            max_buffered=max_buffered,
            stream_bytes=stream_bytes,
            buffers=BufferPool(keep_bytes=keep_bytes),
            traffic=self.traffic,
        )
        self.why = ""
        self._changed = threading.Condition()
        self._events: list[LinkEvent] = []
        self._event_count = 0
        self._session: _Session | None = None
        self._channels = [
            make_channel(address, credentials, keepalive or Keepalive(), stream, server_name_override)
            for stream in range(streams)
        ]
        self._sockets = SocketBytes(int(address.rsplit(":", 1)[1]), side="client")
        self._closed = False

    def enter(self, request: bytes, timeout: float) -> bytes:
        """See `ClientTransport.enter`."""
        if self._closed:
            raise LinkError(f"this connection to {self.address} was closed; make a new one")
        self._end_session()
        ask = self._channels[0].unary_unary(ENTER)
        until, retry = time.monotonic() + timeout, _FIRST_RETRY_S
        while True:
            left = until - time.monotonic()
            try:
                result, call = ask.with_call(request, timeout=max(left, 0.001), metadata=self._metadata)
            except grpc.RpcError as error:
                code, self.why = error.code(), error.details() or ""
                if code in _REFUSALS:
                    raise RefusedError(self.why) from None
                if code is grpc.StatusCode.DEADLINE_EXCEEDED or left <= retry:
                    raise LinkError(
                        f"{self.address} did not admit {self._site} within {timeout:g} s ({self.why}); check the "
                        "address, that the global server runs there, the firewall between, and both certificates"
                    ) from None
            else:
                break
            time.sleep(retry)
            retry = min(2 * retry, _LAST_RETRY_S)
        key = dict(call.initial_metadata())[SESSION_KEY]
        self._session = _Session(key, self._new_message_stream())
        return bytes(result)

    def start(self) -> None:
        """See `ClientTransport.start`."""
        session = self._current()
        for stream in range(self._streams):
            thread = threading.Thread(
                target=self._keep_stream_open, args=(session, stream), name=f"stream-{stream}", daemon=True
            )
            session.threads.append(thread)
            thread.start()

    def send(self, data: Data) -> None:
        """See `ClientTransport.send`."""
        session = self._current()
        if session.refused is not None:
            raise RefusedError(session.refused)
        session.messages.put(data)

    def receive(self, timeout: float = 0.0) -> memoryview | None:
        """See `ClientTransport.receive`."""
        session, seen = self._current(), self._event_count
        incoming, changed = session.messages.incoming, session.messages.incoming.changed
        with changed:
            changed.wait_for(
                lambda: incoming.whole or self._event_count != seen or session.refused is not None or self._closed,
                timeout,
            )
            message = session.messages.get()
        if message is None and session.refused is not None:
            raise RefusedError(session.refused)
        return message

    @property
    def unacknowledged_bytes(self) -> int:
        """See `ClientTransport.unacknowledged_bytes`."""
        session = self._session
        return 0 if session is None else session.messages.outgoing.unacknowledged_bytes

    def wait_sent(self, timeout: float) -> bool:
        """See `ClientTransport.wait_sent`."""
        session = self._current()
        return session.messages.outgoing.wait_empty(timeout) and not session.ended.is_set()

    def events(self) -> list[LinkEvent]:
        """See `ClientTransport.events`."""
        with self._changed:
            events, self._events = self._events, []
            return events

    def socket_bytes(self) -> Traffic | None:
        """See `ClientTransport.socket_bytes`."""
        return self._sockets.total()

    @property
    def round_trip_s(self) -> float:
        """See `ClientTransport.round_trip_s`; updated by `socket_bytes`."""
        return self._sockets.round_trip_s

    def close(self, grace: float) -> None:
        """See `ClientTransport.close`."""
        until = time.monotonic() + grace
        session, closed, self._closed = self._session, self._closed, True
        if session and not closed and not session.ended.is_set():
            session.messages.outgoing.wait_empty(grace)
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
        for channel in self._channels:
            channel.close()

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
            if session.messages.leaving is not None:
                return
            retry = _FIRST_RETRY_S if was_connected else min(2 * retry, _LAST_RETRY_S)
            session.ended.wait(retry * random.uniform(0.7, 1.0))

    def _run_stream(self, session: _Session, number: int) -> bool:
        """Carry records until the stream ends. Returns whether the server had answered on it."""
        stream = session.messages.open_stream()
        metadata = (*self._metadata, (SESSION_KEY, session.key), (STREAM_KEY, str(number)))
        call = self._channels[number].stream_stream(STREAM)(stream.records(), metadata=metadata, wait_for_ready=True)
        session.calls[number] = call
        if session.ended.is_set():
            call.cancel()
        try:
            for record in call:
                first = not stream.hello_received
                stream.handle_record(record)
                if first:
                    self._count_streams(session, +1)
            code, why = call.code(), call.details()
        except grpc.RpcError:
            code, why = call.code(), call.details()
        except WeightGradError as error:
            call.cancel()
            code, why = grpc.StatusCode.FAILED_PRECONDITION, f"the global server broke the protocol: {error}"
        finally:
            stream.close()
        self._handle_stream_end(session, code, why or "")
        if stream.hello_received:
            self._count_streams(session, -1)
        return stream.hello_received

    def _count_streams(self, session: _Session, change: int) -> None:
        with self._changed:
            before, session.connected_streams = session.connected_streams, session.connected_streams + change
            if not session.ended.is_set() and not (before and session.connected_streams):
                self._add_event(session, LinkEvent.CONNECTED if session.connected_streams else LinkEvent.LOST)

    def _handle_stream_end(self, session: _Session, code: grpc.StatusCode, why: str) -> None:
        with self._changed:
            if session.ended.is_set() or session.messages.leaving is not None or code is grpc.StatusCode.OK:
                return
            self.why = why
            if code is grpc.StatusCode.NOT_FOUND or code in _REFUSALS:
                session.ended.set()
                session.refused = why if code in _REFUSALS else None
                self._add_event(session, LinkEvent.GONE if session.refused is None else LinkEvent.REFUSED)
        if session.ended.is_set():
            session.end()

    def _add_event(self, session: _Session, event: LinkEvent) -> None:
        self._events.append(event)
        self._event_count += 1
        with session.messages.incoming.changed:
            session.messages.incoming.changed.notify_all()
