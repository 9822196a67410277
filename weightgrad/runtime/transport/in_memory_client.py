"""The clients of the in-memory transport."""

from __future__ import annotations

import logging
import time

from weightgrad.errors import LinkError, RefusedError, WeightGradError
from weightgrad.runtime.transport.in_memory import InMemoryNetwork
from weightgrad.runtime.transport.in_memory_server import InMemoryServer
from weightgrad.runtime.transport.in_memory_session import Session
from weightgrad.runtime.transport.transport import (
    ClientTransport,
    EntryRequest,
    LinkEvent,
    Outgoing,
    Peer,
    Traffic,
    check_rank,
    joined,
)

log = logging.getLogger("weightgrad.serve")

_RETRY_S = 0.02


class InMemoryClient(ClientTransport):
    """One rank's connection to the server of that name on the network."""

    def __init__(
        self, network: InMemoryNetwork, address: str, *, site: str, rank: int = 0, incarnation: str | int
    ) -> None:
        check_rank(rank)
        self.address, self.why, self.traffic = address, "", Traffic()
        self._network, self._peer, self._incarnation = network, Peer(site, rank), str(incarnation)
        self._session: Session | None = None
        self._events: list[LinkEvent] = []
        self._event_count = 0
        self._closed = False
        with network.changed:
            network.clients.append(self)

    def enter(self, request: bytes, timeout: float) -> bytes:
        """See `ClientTransport.enter`."""
        if self._closed:
            raise LinkError(f"this connection to {self.address} was closed; make a new one")
        self._session = None
        entry = EntryRequest(*self._peer, self._incarnation, bytes(request), None, None, "memory")
        until = time.monotonic() + timeout
        while True:
            with self._network.changed:
                server = self._network.servers.get(self.address)
            self.why = "nobody has this name"
            try:
                if server is not None:
                    reply, self._session = server.admit(entry)
                    return reply
            except LinkError as error:
                self.why = str(error)
            except WeightGradError as error:
                self.why = str(error)
                raise RefusedError(self.why) from None
            except Exception as error:
                log.exception("admitting %s failed", self._peer)
                self.why = f"the global server failed ({error!r}); see its log"
            if time.monotonic() + _RETRY_S >= until:
                raise LinkError(
                    f"{self.address} did not admit {self._peer} within {timeout:g} s ({self.why}); check the address"
                )
            time.sleep(_RETRY_S)

    def start(self) -> None:
        """See `ClientTransport.start`."""
        with self._network.changed:
            session = self._current()
            session.started = True
            if session.ended is None:
                self._add_event(LinkEvent.CONNECTED)
            self._network.changed.notify_all()

    def send(self, data: Outgoing, *, control: bool = False) -> None:
        """See `ClientTransport.send`."""
        with self._network.changed:
            session = self._current()
            if session.ended is LinkEvent.REFUSED:
                raise RefusedError(session.why)
            if session.open:
                self.traffic.sent += len(joined(data))
                session.server.put_up(session, data, control=control)

    def receive(self, timeout: float = 0.0) -> memoryview | None:
        """See `ClientTransport.receive`."""
        with self._network.changed:
            session, seen = self._current(), self._event_count

            def ready() -> bool:
                news = self._event_count != seen or session.ended is LinkEvent.REFUSED or self._closed
                return bool(session.started and session.down) or news

            self._network.wait_for(ready, timeout)
            if session.started and session.down:
                message = session.down.next_lane.popleft()
                self.traffic.received += len(message)
                self._network.changed.notify_all()
                return memoryview(bytearray(message))
            if session.ended is LinkEvent.REFUSED:
                raise RefusedError(session.why)
            return None

    def events(self) -> list[LinkEvent]:
        """See `ClientTransport.events`."""
        with self._network.changed:
            events, self._events = self._events, []
            return events

    @property
    def unacknowledged_bytes(self) -> int:
        """See `ClientTransport.unacknowledged_bytes`."""
        with self._network.changed:
            return 0 if self._session is None else self._session.up.nbytes

    def wait_sent(self, timeout: float) -> bool:
        """See `ClientTransport.wait_sent`."""
        session = self._current()
        return self._network.wait_for(lambda: not session.up, timeout) and session.ended is None

    def socket_bytes(self) -> Traffic | None:
        """There are no sockets to count."""
        return None

    @property
    def round_trip_s(self) -> float:
        """There is no round trip to measure."""
        return 0.0

    def close(self, grace: float) -> None:
        """See `ClientTransport.close`."""
        session = self._session
        if session is not None and not self._closed and session.open:
            self._network.wait_for(lambda: not session.up or not session.open, grace)
        self._leave(in_order=True)

    def abort(self) -> None:
        """See `ClientTransport.abort`."""
        self._leave(in_order=False)

    # -- what servers call, holding the network's lock --------------------------------------

    def server_started(self, server: InMemoryServer) -> None:
        """A server answers under the name: a session with an earlier one is unknown to it."""
        session = self._session
        if session is not None and session.server is not server and session.ended is LinkEvent.LOST:
            session.ended, session.why = LinkEvent.GONE, "the global server does not know this session"
            session.down.clear()
            self.session_ended(session)

    def session_ended(self, session: Session) -> None:
        """A session has ended; an event if it is this client's."""
        if session is self._session and session.ended is not None and not self._closed:
            self.why = session.why
            self._add_event(session.ended)

    def _add_event(self, event: LinkEvent) -> None:
        self._events.append(event)
        self._event_count += 1
        self._network.changed.notify_all()

    def _leave(self, *, in_order: bool) -> None:
        with self._network.changed:
            session, closed, self._closed = self._session, self._closed, True
            if self in self._network.clients:
                self._network.clients.remove(self)
            if session is not None and not closed and session.open:
                session.server.forget(session)
                session.left = in_order
                if not in_order:
                    session.ended, session.dropped = LinkEvent.LOST, True
                    session.up.clear()
            self._network.changed.notify_all()

    def _current(self) -> Session:
        if self._session is None or self._closed:
            raise LinkError(f"no session with {self.address}; enter first")
        return self._session
