"""The server of the in-memory transport."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import replace

from weightgrad.errors import LinkError, RefusedError, WeightGradError
from weightgrad.runtime.transport.in_memory import InMemoryNetwork
from weightgrad.runtime.transport.in_memory_session import KnownPeer, Session
from weightgrad.runtime.transport.transport import (
    MAX_CONTROL_MESSAGE,
    Application,
    EntryRequest,
    LinkEvent,
    Outgoing,
    Peer,
    ServerTransport,
    SessionStatus,
    Traffic,
    joined,
)

log = logging.getLogger("weightgrad.serve")


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
            own = [one for other, one in self._sessions.items() if other.site == peer.site]
            slow = max(own, key=lambda one: one.undelivered)
            if sum(one.undelivered for one in own) > self.max_queued:
                self._end(slow, LinkEvent.GONE, f"{slow.peer} does not take what it is sent")
                if slow is session:
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
