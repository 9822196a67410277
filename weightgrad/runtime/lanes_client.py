"""A site's end of the lanes: enter, then messages go both ways, whole, once and in order, through cuts.

    client = LanesClient("gs.example.net:7443", site="virginia", incarnation="7", credentials=...)
    answer = client.enter(b"let me in", timeout=10)
    client.start()
    client.send(update); client.receive(timeout=1.0); client.close(grace=2.0)

Several gRPC channels, each with a connection of its own, carry the chunks of all messages. One that
breaks is opened again for as long as the session lives; what it carried goes by the others.
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
from weightgrad.runtime.chunks import Data
from weightgrad.runtime.conversation import Conversation, Traffic
from weightgrad.runtime.incoming import check_room
from weightgrad.runtime.lane_buffers import Buffers
from weightgrad.runtime.lane_service import (
    ENTER,
    INCARNATION_KEY,
    LANE,
    LANE_KEY,
    MAX_LANES,
    PROTOCOL,
    PROTOCOL_KEY,
    SESSION_KEY,
    SITE_KEY,
    Keepalive,
    make_channel,
)

CONNECTED, LOST, GONE, REFUSED = "connected", "lost", "gone", "refused"

_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 2.0
_REFUSALS = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}


class _Session:
    def __init__(self, key: str, talk: Conversation) -> None:
        self.key, self.talk = key, talk
        self.over = threading.Event()
        self.refused: str | None = None
        self.threads: list[threading.Thread] = []
        self.calls: dict[int, Any] = {}  # by lane
        self.connected = 0  # lanes

    def hang_up(self) -> None:
        self.over.set()
        self.talk.end()
        for call in list(self.calls.values()):
            call.cancel()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(5.0)


class LanesClient:
    """One site's line to the global server. Enters, sends and receives from any thread.

    `max_message` and `max_buffered` bound the memory for what comes. `lane_bytes` is how much may be
    on its way on one lane: at least its share of bandwidth times round trip.
    """

    def __init__(
        self,
        address: str,
        *,
        site: str,
        incarnation: str | int,
        credentials: grpc.ChannelCredentials | None,
        lanes: int = 4,
        server_name_override: str | None = None,
        keepalive: Keepalive | None = None,
        max_message: int = 1 << 30,
        max_buffered: int = (1 << 30) + (64 << 20),
        lane_bytes: int = 4 << 20,
        keep_bytes: int = 512 << 20,
    ) -> None:
        if not 1 <= lanes <= MAX_LANES:
            raise SpecError(f"lanes is {lanes}; it must be 1 to {MAX_LANES}")
        check_room(max_message, max_buffered)
        self.address, self._site, self._lanes = address, site, lanes
        self._metadata: tuple[tuple[str, str], ...] = (
            (SITE_KEY, quote(site, safe="")),
            (INCARNATION_KEY, quote(str(incarnation), safe="")),
            (PROTOCOL_KEY, PROTOCOL),
        )
        self.traffic = Traffic()
        self._begin = partial(
            Conversation,
            max_message=max_message,
            max_buffered=max_buffered,
            lane_bytes=lane_bytes,
            buffers=Buffers(keep_bytes=keep_bytes),
            traffic=self.traffic,
        )
        self.why = ""  # the words of the last trouble
        self._changed = threading.Condition()
        self._events: list[str] = []
        self._happened = 0
        self._session: _Session | None = None
        self._channels = [
            make_channel(address, credentials, keepalive or Keepalive(), lane, server_name_override)
            for lane in range(lanes)
        ]
        self._closed = False

    def enter(self, request: bytes, timeout: float) -> bytes:
        """Ask to be let in; returns the server's answer, and a new session begins: nothing of an old one is sent.

        RefusedError has the server's words. LinkError: nobody answered within `timeout` seconds.
        """
        if self._closed:
            raise LinkError(f"this line to {self.address} was closed; make a new one")
        self._end_session()
        ask = self._channels[0].unary_unary(ENTER)
        until, retry = time.monotonic() + timeout, _FIRST_RETRY_S
        while True:
            left = until - time.monotonic()
            try:
                answer, call = ask.with_call(request, timeout=max(left, 0.001), metadata=self._metadata)
            except grpc.RpcError as error:
                code, self.why = error.code(), error.details() or ""
                if code in _REFUSALS:
                    raise RefusedError(self.why) from None
                if code is grpc.StatusCode.DEADLINE_EXCEEDED or left <= retry:
                    raise LinkError(
                        f"{self.address} did not let {self._site} in within {timeout:g} s ({self.why}); check the "
                        "address, that the global server runs there, the firewall between, and both certificates"
                    ) from None
            else:
                break
            time.sleep(retry)
            retry = min(2 * retry, _LAST_RETRY_S)
        key = dict(call.initial_metadata())[SESSION_KEY]
        self._session = _Session(key, self._begin())
        return bytes(answer)

    def start(self) -> None:
        """Open the lanes of the session that `enter` began. They stay until it ends."""
        session = self._current()
        for lane in range(self._lanes):
            thread = threading.Thread(target=self._keep_lane, args=(session, lane), name=f"lane-{lane}", daemon=True)
            session.threads.append(thread)
            thread.start()

    def send(self, data: Data) -> None:
        """Queue a message. Its memory must not be written until it was sent.

        In a session that is gone it is dropped, like all that was queued there.
        """
        session = self._current()
        if session.refused is not None:
            raise RefusedError(session.refused)
        session.talk.put(data)

    def receive(self, timeout: float = 0.0) -> memoryview | None:
        """The next message, or None if there is none within `timeout` seconds, or as soon as there is an event.

        Its memory is the caller's for as long as the view is kept. RefusedError: the server has ended the session.
        """
        session, happened = self._current(), self._happened
        incoming, changed = session.talk.incoming, session.talk.incoming.changed
        with changed:
            changed.wait_for(lambda: incoming.whole or self._happened != happened or self._closed, timeout)
            message = session.talk.get()
        if message is None and session.refused is not None:
            raise RefusedError(session.refused)
        return message

    @property
    def unacknowledged_bytes(self) -> int:
        """What was sent and is not known to have arrived."""
        session = self._session
        return 0 if session is None else session.talk.outgoing.unacknowledged_bytes

    def wait_sent(self, timeout: float) -> bool:
        """Wait until the server has everything; False if that took too long or the session ended."""
        session = self._current()
        return session.talk.outgoing.wait_empty(timeout) and not session.over.is_set()

    def events(self) -> list[str]:
        """What has happened to the line since the last call; `why` has the words.

        "connected": a lane is open. "lost": none is; they are being opened again. "gone": the server
        does not know this session any more; its queues are void, `enter` and `start` again.
        "refused": the server ended it on purpose.
        """
        with self._changed:
            events, self._events = self._events, []
            return events

    def close(self, grace: float) -> None:
        """Give what is queued `grace` seconds to arrive, say goodbye and hang up. Safe to call again."""
        until = time.monotonic() + grace
        session, closed, self._closed = self._session, self._closed, True
        if session and not closed and not session.over.is_set():
            session.talk.outgoing.wait_empty(grace)
            session.talk.leave()
            # The goodbye itself needs a moment even when the grace is used up.
            until = max(until, time.monotonic() + 0.5)
            for thread in session.threads:
                thread.join(max(0.0, until - time.monotonic()))
        self._end_session()
        for channel in self._channels:
            channel.close()

    def _end_session(self) -> None:
        if self._session:
            self._session.hang_up()
            self._session.join()

    # -- lanes ------------------------------------------------------------------------------

    def _current(self) -> _Session:
        if self._session is None or self._closed:
            raise LinkError(f"no session with {self.address}; enter first")
        return self._session

    def _keep_lane(self, session: _Session, number: int) -> None:
        retry = _FIRST_RETRY_S
        while not session.over.is_set():
            was_connected = self._run_lane(session, number)
            if session.talk.leaving is not None:
                return
            retry = _FIRST_RETRY_S if was_connected else min(2 * retry, _LAST_RETRY_S)
            session.over.wait(retry * random.uniform(0.7, 1.0))

    def _run_lane(self, session: _Session, number: int) -> bool:
        """Carry records until the stream ends; whether it had begun."""
        lane = session.talk.open_lane()
        metadata = (*self._metadata, (SESSION_KEY, session.key), (LANE_KEY, str(number)))
        call = self._channels[number].stream_stream(LANE)(lane.records(), metadata=metadata, wait_for_ready=True)
        session.calls[number] = call
        if session.over.is_set():
            call.cancel()
        try:
            for record in call:
                greeted = lane.greeted
                lane.take_in(record)
                if not greeted:
                    self._count(session, +1)
            code, why = call.code(), call.details()
        except grpc.RpcError:
            code, why = call.code(), call.details()
        except WeightGradError as error:
            call.cancel()
            code, why = grpc.StatusCode.FAILED_PRECONDITION, f"the global server did what it must not: {error}"
        finally:
            lane.close()
        self._judge(session, code, why or "")
        if lane.greeted:
            self._count(session, -1)
        return lane.greeted

    def _count(self, session: _Session, change: int) -> None:
        with self._changed:
            before, session.connected = session.connected, session.connected + change
            if not session.over.is_set() and not (before and session.connected):
                self._say(session, CONNECTED if session.connected else LOST)

    def _judge(self, session: _Session, code: grpc.StatusCode, why: str) -> None:
        with self._changed:
            if session.over.is_set() or session.talk.leaving is not None or code is grpc.StatusCode.OK:
                return
            self.why = why
            if code is grpc.StatusCode.NOT_FOUND or code in _REFUSALS:
                session.over.set()
                session.refused = why if code in _REFUSALS else None
                self._say(session, GONE if session.refused is None else REFUSED)
        if session.over.is_set():
            session.hang_up()

    def _say(self, session: _Session, event: str) -> None:
        self._events.append(event)
        self._happened += 1
        with session.talk.incoming.changed:
            session.talk.incoming.changed.notify_all()
