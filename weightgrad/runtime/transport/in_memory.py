"""The in-memory transport: queues between threads of one process, for tests and for trying things out.

    network = InMemoryNetwork()
    server = InMemoryServer(network, "hub")
    client = InMemoryClient(network, "hub", site="virginia", incarnation=1)

It keeps the contract of `transport.py`. There are no certificates, no lost connections, and no limits but that on the
length of control messages. A message is copied once, when it is sent, so that its memory behaves as if it had crossed
a network.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from weightgrad.errors import LinkError, RefusedError, WeightGradError
from weightgrad.runtime.transport.in_memory_session import KnownPeer, Session
from weightgrad.runtime.transport.transport import (
    MAX_CONTROL_MESSAGE,
    Application,
    ClientTransport,
    EntryRequest,
    LinkEvent,
    Outgoing,
    Peer,
    ServerTransport,
    SessionStatus,
    Traffic,
    check_rank,
    joined,
)

log = logging.getLogger("weightgrad.serve")

_RETRY_S = 0.02


class InMemoryNetwork:
    """The servers that can be reached by name. One lock guards everything on it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.servers: dict[str, InMemoryServer] = {}
        self.clients: list[InMemoryClient] = []

    def wait_for(self, condition: Callable[[], object], timeout: float | None) -> bool:
        """Wait until the condition holds; False if that takes longer than `timeout` seconds."""
        with self.changed:
            return bool(self.changed.wait_for(condition, timeout))


class InMemoryServer(ServerTransport):
    """A server that clients of the same network reach under a name, from `start` until `stop`."""

    def __init__(self, network: InMemoryNetwork, name: str) -> None:
        self.name, self._network = name, network
        self._application: Application | None = None
        self._entering = threading.Lock()
        self._sessions: dict[Peer, Session] = {}
        self._sent_while_entering: dict[Peer, list[tuple[Outgoing, bool]]] = {}
        self._known: dict[Peer, KnownPeer] = {}
        self._stopping = False

    def start(self, application: Application) -> None:
        """See `ServerTransport.start`."""
        with self._network.changed:
            if self.name in self._network.servers:
                raise LinkError(f"another server is called {self.name}; choose another name")
            self._application = application
            self._network.servers[self.name] = self
            for client in self._network.clients:
                client.server_started(self)
            self._network.changed.notify_all()

    def send(self, peer: Peer, data: Outgoing, *, control: bool = False) -> bool:
        """See `ServerTransport.send`."""
        with self._network.changed:
            if peer in self._sent_while_entering:
                self._sent_while_entering[peer].append((joined(data), control))
                return True
            session = self._sessions.get(peer)
            if session is None:
                return False
            if session.undelivered > self.max_queued:
                self._end(session, LinkEvent.GONE, f"{peer} does not take what it is sent")
                return False
            self._put_down(session, data, control=control)
            return True

    def sessions(self) -> dict[Peer, SessionStatus]:
        """See `ServerTransport.sessions`."""
        with self._network.changed:
            return {
                peer: SessionStatus(one.incarnation, int(one.started), one.undelivered)
                for peer, one in self._sessions.items()
            }

    def traffic_of(self, peer: Peer) -> Traffic:
        """See `ServerTransport.traffic_of`."""
        with self._network.changed:
            known_peer = self._known.get(peer)
            return replace(known_peer.traffic) if known_peer else Traffic()

    def socket_bytes(self) -> dict[Peer, Traffic]:
        """There are no sockets: no peer is counted."""
        return {}

    def drop(self, peer: Peer, why: str) -> None:
        """See `ServerTransport.drop`."""
        with self._network.changed:
            if session := self._sessions.get(peer):
                self._end(session, LinkEvent.REFUSED, why)

    def stop(self, grace: float) -> None:
        """See `ServerTransport.stop`."""
        self._network.wait_for(lambda: not any(session.undelivered for session in self._sessions.values()), grace)
        with self._network.changed:
            self._stopping = True
            if self._network.servers.get(self.name) is self:
                del self._network.servers[self.name]
            for session in list(self._sessions.values()):
                self._end(session, LinkEvent.LOST, "the global server is stopping")

    # -- what clients call ------------------------------------------------------------------

    def admit(self, entry: EntryRequest) -> tuple[bytes, Session]:
        """Let the application admit a peer, and begin its session."""
        application, peer = self._application, entry.peer
        assert application is not None
        application.check_peer(entry)
        with self._network.changed:
            if self._stopping:
                raise LinkError("the global server is stopping")
            known_peer = self._known.setdefault(peer, KnownPeer())
            if entry.incarnation in known_peer.replaced:
                application.on_refused("started twice")
                raise RefusedError(f"another process has entered as {peer} since this one; is the site started twice?")
            if peer in self._sent_while_entering:
                raise LinkError(f"{peer} is entering already; try again")
            self._sent_while_entering[peer] = []
        new: Session | None = None
        with known_peer.callback_lock:
            try:
                with self._entering:
                    reply = application.enter(entry)
                new = Session(self, peer, entry.incarnation)
            finally:
                self._install(peer, known_peer, new)
        threading.Thread(target=self._deliver, args=(new, known_peer), name=f"session-{peer}", daemon=True).start()
        return reply, new

    def _install(self, peer: Peer, known_peer: KnownPeer, new: Session | None) -> None:
        with self._network.changed:
            old = self._sessions.get(peer)
            if new and old:
                if old.incarnation != new.incarnation:
                    known_peer.replaced.add(old.incarnation)
                self._end(old, LinkEvent.GONE, f"{peer} has entered again")
            if new:
                self._sessions[peer] = new
            for data, control in self._sent_while_entering.pop(peer):
                if receiver := new or old:
                    self._put_down(receiver, data, control=control)

    def _put_down(self, session: Session, data: Outgoing, *, control: bool) -> None:
        if control and (why := _too_long(data)):
            return self._end(session, LinkEvent.REFUSED, why)
        session.down.put(message := joined(data), control=control)
        self._known[session.peer].traffic.sent += len(message)
        self._network.changed.notify_all()

    def put_up(self, session: Session, data: Outgoing, *, control: bool) -> None:
        """Take a message from a client, or end its session if the message is too long."""
        if control and (why := _too_long(data)):
            return self._end(session, LinkEvent.REFUSED, why)
        session.up.put(joined(data), control=control)
        self._network.changed.notify_all()

    # -- the application --------------------------------------------------------------------

    def _deliver(self, session: Session, known_peer: KnownPeer) -> None:
        application = self._application
        assert application is not None
        while found := self._wait_for_message(session):
            lane, message = found
            with known_peer.callback_lock:
                if session.dropped:
                    break
                known_peer.traffic.received += len(message)
                try:
                    application.on_message(session.peer, memoryview(bytearray(message)), session.up.is_control(lane))
                except WeightGradError as error:
                    self._end(session, LinkEvent.REFUSED, str(error))
                except Exception as error:
                    log.exception("taking a message of %s failed", session.peer)
                    self._end(session, LinkEvent.LOST, f"the global server failed ({error!r}); see its log")
            with self._network.changed:
                if lane:
                    lane.popleft()  # only now: it is not acknowledged before the application took it
                self._network.changed.notify_all()
        with known_peer.callback_lock:
            with self._network.changed:
                report = self._sessions.get(session.peer, session) is session and not self._stopping
            try:
                if report:
                    application.on_lost(session.peer, session.left)
            except Exception:
                log.exception("reporting that %s is lost failed", session.peer)

    def _wait_for_message(self, session: Session) -> tuple[deque[bytes], bytes] | None:
        """Wait for a message. Returns it and its lane; None if the session has ended and no message is left."""
        with self._network.changed:
            self._network.wait_for(lambda: (session.started and session.up) or not session.open, None)
            lane = session.up.next_lane
            return (lane, lane[0]) if session.started and lane else None

    def _end(self, session: Session, event: LinkEvent, why: str) -> None:
        if event is LinkEvent.REFUSED:
            log.warning("%s: session ended by the global server: %s", session.peer, why)
        with self._network.changed:
            if self._sessions.get(session.peer) is session:
                del self._sessions[session.peer]
            if session.open:
                session.ended, session.why = event, why
                for client in self._network.clients:
                    client.session_ended(session)
            session.dropped = True
            session.up.clear()
            if event is not LinkEvent.LOST:
                session.down.clear()
            self._network.changed.notify_all()

    def forget(self, session: Session) -> None:
        """A client has left: nothing more is sent to its session."""
        if self._sessions.get(session.peer) is session:
            del self._sessions[session.peer]


def _too_long(data: Outgoing) -> str | None:
    length = len(joined(data))
    if length <= MAX_CONTROL_MESSAGE:
        return None
    return f"a message of {length} bytes; the receiver takes at most {MAX_CONTROL_MESSAGE}; send it as a bulk message"


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
