"""The in-memory transport: queues between threads of one process, for tests and for trying things out.

    network = InMemoryNetwork()
    server = InMemoryServer(network, "hub")
    client = InMemoryClient(network, "hub", site="virginia", incarnation=1)

It keeps the contract of `transport.py`. There are no certificates, no limits on memory and no lost connections;
a message is copied once, when it is sent, so that its memory behaves as if it had crossed a network.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from weightgrad.errors import LinkError, RefusedError, WeightGradError
from weightgrad.runtime.transport.transport import (
    Application,
    ClientTransport,
    Data,
    EntryRequest,
    LinkEvent,
    ServerTransport,
    SessionStatus,
    Traffic,
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


@dataclass(eq=False)
class _Session:
    """One admitted site: a queue each way. `ended` is what the client sees of the end, if it ended."""

    server: InMemoryServer
    site: str
    incarnation: str
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)
    started: bool = False
    ended: LinkEvent | None = None
    why: str = ""
    left: bool = False  # the client closed it; what is queued upwards is still delivered
    dropped: bool = False  # no more of its messages are delivered

    @property
    def undelivered(self) -> int:
        """Bytes for a client that has not started yet; once it has, they are at its disposal."""
        return 0 if self.started else sum(map(len, self.down))

    @property
    def open(self) -> bool:
        return self.ended is None and not self.left


@dataclass
class _KnownSite:
    callback_lock: threading.RLock = field(default_factory=threading.RLock)
    traffic: Traffic = field(default_factory=Traffic)
    replaced: set[str] = field(default_factory=set)  # incarnations that a later process has replaced


class InMemoryServer(ServerTransport):
    """A server that clients of the same network reach under a name, from `start` until `stop`."""

    def __init__(self, network: InMemoryNetwork, name: str) -> None:
        self.name, self._network = name, network
        self._application: Application | None = None
        self._entering = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._sent_while_entering: dict[str, list[Data]] = {}
        self._sites: dict[str, _KnownSite] = {}
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

    def send(self, site: str, data: Data) -> bool:
        """See `ServerTransport.send`."""
        with self._network.changed:
            if site in self._sent_while_entering:
                self._sent_while_entering[site].append(bytes(data))
                return True
            session = self._sessions.get(site)
            if session is None:
                return False
            self._put_down(session, data)
            return True

    def sessions(self) -> dict[str, SessionStatus]:
        """See `ServerTransport.sessions`."""
        with self._network.changed:
            return {
                site: SessionStatus(one.incarnation, int(one.started), one.undelivered)
                for site, one in self._sessions.items()
            }

    def traffic_of(self, site: str) -> Traffic:
        """See `ServerTransport.traffic_of`."""
        with self._network.changed:
            known_site = self._sites.get(site)
            return replace(known_site.traffic) if known_site else Traffic()

    def socket_bytes(self) -> dict[str, Traffic]:
        """There are no sockets: no site is counted."""
        return {}

    def drop(self, site: str, why: str) -> None:
        """See `ServerTransport.drop`."""
        with self._network.changed:
            if session := self._sessions.get(site):
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

    def admit(self, entry: EntryRequest) -> tuple[bytes, _Session]:
        """Let the application admit a site, and begin its session."""
        application, site = self._application, entry.site
        assert application is not None
        application.check_peer(entry)
        with self._network.changed:
            if self._stopping:
                raise LinkError("the global server is stopping")
            known_site = self._sites.setdefault(site, _KnownSite())
            if entry.incarnation in known_site.replaced:
                application.on_refused("started twice")
                raise RefusedError(f"another process has entered as {site} since this one; is the site started twice?")
            if site in self._sent_while_entering:
                raise LinkError(f"{site} is entering already; try again")
            self._sent_while_entering[site] = []
        new: _Session | None = None
        with known_site.callback_lock:
            try:
                with self._entering:
                    reply = application.enter(entry)
                new = _Session(self, site, entry.incarnation)
            finally:
                self._install(site, known_site, new)
        threading.Thread(target=self._deliver, args=(new, known_site), name=f"session-{site}", daemon=True).start()
        return reply, new

    def _install(self, site: str, known_site: _KnownSite, new: _Session | None) -> None:
        with self._network.changed:
            old = self._sessions.get(site)
            if new and old:
                if old.incarnation != new.incarnation:
                    known_site.replaced.add(old.incarnation)
                self._end(old, LinkEvent.GONE, f"{site} has entered again")
            if new:
                self._sessions[site] = new
            for data in self._sent_while_entering.pop(site):
                if receiver := new or old:
                    self._put_down(receiver, data)

    def _put_down(self, session: _Session, data: Data) -> None:
        session.down.append(bytes(data))
        self._sites[session.site].traffic.sent += len(session.down[-1])
        self._network.changed.notify_all()

    # -- the application --------------------------------------------------------------------

    def _deliver(self, session: _Session, known_site: _KnownSite) -> None:
        application = self._application
        assert application is not None
        while (message := self._next_message(session)) is not None:
            with known_site.callback_lock:
                if session.dropped:
                    break
                known_site.traffic.received += len(message)
                try:
                    application.on_message(session.site, memoryview(bytearray(message)))
                except WeightGradError as error:
                    self._end(session, LinkEvent.REFUSED, str(error))
                except Exception as error:
                    log.exception("taking a message of %s failed", session.site)
                    self._end(session, LinkEvent.LOST, f"the global server failed ({error!r}); see its log")
            with self._network.changed:
                if session.up:
                    session.up.popleft()  # only now: it is not acknowledged before the application took it
                self._network.changed.notify_all()
        with known_site.callback_lock:
            with self._network.changed:
                report = self._sessions.get(session.site, session) is session and not self._stopping
            try:
                if report:
                    application.on_lost(session.site, session.left)
            except Exception:
                log.exception("reporting that %s is lost failed", session.site)

    def _next_message(self, session: _Session) -> bytes | None:
        """Wait for a message; None if the session has ended and none is left."""
        with self._network.changed:
            self._network.wait_for(lambda: session.up or not session.open, None)
            return session.up[0] if session.up else None

    def _end(self, session: _Session, event: LinkEvent, why: str) -> None:
        if event is LinkEvent.REFUSED:
            log.warning("%s: session ended by the global server: %s", session.site, why)
        with self._network.changed:
            if self._sessions.get(session.site) is session:
                del self._sessions[session.site]
            if session.open:
                session.ended, session.why = event, why
                for client in self._network.clients:
                    client.session_ended(session)
            session.dropped = True
            session.up.clear()
            if event is not LinkEvent.LOST:
                session.down.clear()
            self._network.changed.notify_all()

    def forget(self, session: _Session) -> None:
        """A client has left: nothing more is sent to its session."""
        if self._sessions.get(session.site) is session:
            del self._sessions[session.site]


class InMemoryClient(ClientTransport):
    """One site's connection to the server of that name on the network."""

    def __init__(self, network: InMemoryNetwork, address: str, *, site: str, incarnation: str | int) -> None:
        self.address, self.why, self.traffic = address, "", Traffic()
        self._network, self._site, self._incarnation = network, site, str(incarnation)
        self._session: _Session | None = None
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
        entry = EntryRequest(self._site, self._incarnation, bytes(request), None, None, "memory")
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
                log.exception("admitting %s failed", self._site)
                self.why = f"the global server failed ({error!r}); see its log"
            if time.monotonic() + _RETRY_S >= until:
                raise LinkError(
                    f"{self.address} did not admit {self._site} within {timeout:g} s ({self.why}); check the address"
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

    def send(self, data: Data) -> None:
        """See `ClientTransport.send`."""
        with self._network.changed:
            session = self._current()
            if session.ended is LinkEvent.REFUSED:
                raise RefusedError(session.why)
            if session.open:
                session.up.append(bytes(data))
                self.traffic.sent += len(session.up[-1])
                self._network.changed.notify_all()

    def receive(self, timeout: float = 0.0) -> memoryview | None:
        """See `ClientTransport.receive`."""
        with self._network.changed:
            session, seen = self._current(), self._event_count

            def ready() -> bool:
                news = self._event_count != seen or session.ended is LinkEvent.REFUSED or self._closed
                return bool(session.started and session.down) or news

            self._network.wait_for(ready, timeout)
            if session.started and session.down:
                message = session.down.popleft()
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
            return 0 if self._session is None else sum(map(len, self._session.up))

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

    def session_ended(self, session: _Session) -> None:
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

    def _current(self) -> _Session:
        if self._session is None or self._closed:
            raise LinkError(f"no session with {self.address}; enter first")
        return self._session
