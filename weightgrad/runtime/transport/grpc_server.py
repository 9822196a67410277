"""The server of the gRPC transport.

    Enter   unary            a peer asks to enter; the reply carries its session, or the status says why not
    Stream  both ways        records of `records.py`, on several streams of one session at a time; stream 0 carries
                             the control lane, the others the bulk lane
    Ask, Measure             from outside any session: `grpc_questions.py`

A peer, one rank of a site, has one session; a successful Enter replaces the session before, whose queues are dropped.
If the replaced process still runs somewhere, it is refused from then on: the site was started twice.

Every call and every session has a thread of its own; all of them are daemons.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import grpc

from weightgrad.errors import LinkError, ProtocolError, RefusedError, StrategyError, WeightGradError
from weightgrad.runtime.rate_limiter import RateLimiter
from weightgrad.runtime.security.tls_check import is_loopback
from weightgrad.runtime.transport.connection_gate import ConnectionGate
from weightgrad.runtime.transport.grpc_listener import make_server
from weightgrad.runtime.transport.grpc_questions import Questions, Responder
from weightgrad.runtime.transport.grpc_sessions import (
    KnownPeer,
    Session,
    SessionEnd,
    TransportLimits,
    read_entry_request,
)
from weightgrad.runtime.transport.grpc_settings import MAX_STREAMS, SESSION_KEY, STREAM_KEY
from weightgrad.runtime.transport.message_stream import Stream
from weightgrad.runtime.transport.receive_queue import BufferPool
from weightgrad.runtime.transport.socket_bytes import SocketBytes, endpoint
from weightgrad.runtime.transport.transport import (
    Application,
    EntryRequest,
    Outgoing,
    Peer,
    ServerTransport,
    SessionStatus,
    Traffic,
)

log = logging.getLogger("weightgrad.serve")

_REMEMBERED_ENDS = 256
_TICK_S = 0.25
_SURELY_FEW = 256  # ranks of a site: where less than this part of the limit waits for one, nothing need be added up


class GrpcServer(ServerTransport):
    """The global server's gRPC port. It listens from its construction on and answers after `start`.

    Args:
        listen: HOST:PORT; for port 0 the system chooses a port.
        credentials: the server's certificates; None listens without TLS, which only a loopback address may.
        limits: what is accepted from one peer, and timeouts.

    Attributes:
        port: the port it listens on.

    Raises:
        StrategyError: no credentials, and `listen` can be reached from other machines.
        LinkError: the address cannot be listened on.
    """

    def __init__(
        self, listen: str, *, credentials: grpc.ServerCredentials | None, limits: TransportLimits | None = None
    ) -> None:
        if credentials is None and not is_loopback(listen):
            raise StrategyError(
                f"a server without certificates is for this machine only, not for {listen}; listen on 127.0.0.1:PORT"
            )
        self.limits = limits or TransportLimits()
        self._buffers = BufferPool(keep_bytes=self.limits.keep_bytes)
        self._lock = threading.Lock()
        self._entering = threading.Lock()
        self._sessions: dict[Peer, Session] = {}
        self._sent_while_entering: dict[Peer, list[tuple[Outgoing, bool]]] = {}  # while Enter is answered
        self._ended: OrderedDict[str, SessionEnd] = OrderedDict()  # by the session's id
        self._known: dict[Peer, KnownPeer] = {}
        self._lines = RateLimiter(per_s=1.0, burst=20)  # about peers at one address that are not admitted
        self._stopping = threading.Event()
        self._watch = threading.Thread(target=self._watch_sessions, name="sessions-watch", daemon=True)
        self._questions = Questions(
            lambda caller: self._gate.prove(_endpoint_of(caller.address), caller.name or ""),
            lambda error, context: SessionEnd.of(error).abort(context),
        )
        handlers = {
            "Ask": grpc.unary_unary_rpc_method_handler(self._questions.handle_ask),
            "Measure": grpc.stream_stream_rpc_method_handler(self._questions.handle_measure),
            "Enter": grpc.unary_unary_rpc_method_handler(self._handle_enter),
            "Stream": grpc.stream_stream_rpc_method_handler(self._handle_stream),
        }
        self._server, self.port = make_server(
            listen, credentials, self.limits.keepalive, self.limits.gate.handshake_s, handlers
        )
        self._gate = ConnectionGate(
            self.port, self.limits.gate, lambda reason: self._application.on_refused(reason), self._used_endpoints
        )
        self._endpoints: dict[str, Peer] = {}  # the peer at each endpoint
        self._sockets = SocketBytes(self.port, side="server", owner=lambda endpoint: self._endpoints.get(endpoint))

    def answer_with(self, responder: Responder) -> None:
        """Let questions from outside any session be answered."""
        self._questions.responder = responder

    def start(self, application: Application) -> None:
        """See `ServerTransport.start`."""
        self._application = application
        self._server.start()
        self._watch.start()
        self._gate.start()

    def send(self, peer: Peer, data: Outgoing, *, control: bool = False) -> bool:
        """See `ServerTransport.send`."""
        with self._lock:
            if peer in self._sent_while_entering:
                self._sent_while_entering[peer].append((data, control))
                return True
            session = self._sessions.get(peer)
            if session is None:
                return False
            slow = self._slowest(session)
            if slow is not session:
                session.messages.put(data, control=control)
            if slow is None:
                return True
        self._end(slow, SessionEnd(grpc.StatusCode.NOT_FOUND, f"{slow.peer} does not take what it is sent"))
        log.warning(
            "%s has not taken what it was sent, and %s more than %d bytes in all: it must enter again",
            *(slow.peer, peer.site, self.max_queued),
        )
        return slow is not session

    def _slowest(self, session: Session) -> Session | None:
        """Where too much waits for all ranks of a site together, the session with most of it; otherwise None."""
        if session.messages.queued_bytes <= self.max_queued // _SURELY_FEW:
            return None
        own = [one for peer, one in self._sessions.items() if peer.site == session.peer.site]
        waiting = {one: one.messages.queued_bytes for one in own}
        return max(own, key=lambda one: waiting[one]) if sum(waiting.values()) > self.max_queued else None

    def sessions(self) -> dict[Peer, SessionStatus]:
        """See `ServerTransport.sessions`."""
        with self._lock:
            found = list(self._sessions.items())
        return {
            peer: SessionStatus(s.incarnation, s.messages.open_streams, s.messages.unacknowledged_bytes)
            for peer, s in found
        }

    def traffic_of(self, peer: Peer) -> Traffic:
        """See `ServerTransport.traffic_of`."""
        with self._lock:
            known_peer = self._known.get(peer)
        return replace(known_peer.traffic) if known_peer else Traffic()

    def socket_bytes(self) -> dict[Peer, Traffic]:
        """See `ServerTransport.socket_bytes`."""
        self._endpoints = self._used_endpoints()
        return self._sockets.sample() or {}

    def _used_endpoints(self) -> dict[str, Peer]:
        """The peer at each endpoint that has a stream of a session."""
        with self._lock:
            sessions = list(self._sessions.values())
        return {_endpoint_of(entry.peer_address): session.peer for session in sessions for entry in session.entries()}

    def drop(self, peer: Peer, why: str) -> None:
        """See `ServerTransport.drop`. Its connections are closed a little later, unless they are used again."""
        with self._lock:
            session = self._sessions.get(peer)
        if session:
            for entry in session.entries():
                self._gate.doubt(_endpoint_of(entry.peer_address))
            self._end(session, SessionEnd(grpc.StatusCode.PERMISSION_DENIED, why))

    def stop(self, grace: float) -> None:
        """See `ServerTransport.stop`."""
        until = time.monotonic() + grace
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.messages.wait_sent(max(0.0, until - time.monotonic()))
        self._stopping.set()
        self._gate.stop()
        for session in sessions:
            session.end(SessionEnd(grpc.StatusCode.UNAVAILABLE, "the global server is stopping"))
        # The statuses must leave before the connections are closed.
        self._server.stop(0.5).wait(5.0)
        if self._watch.is_alive():
            self._watch.join(5.0)

    # -- Enter ------------------------------------------------------------------------------

    def _handle_enter(self, request: bytes, context: Any) -> bytes:
        try:
            entry = self._read_entry_request(request, context)
            self._application.check_peer(entry)
            self._gate.prove(_endpoint_of(entry.peer_address), entry.peer.site)
            result, session = self._admit(entry)
        except WeightGradError as error:
            if self._lines.try_take(_endpoint_of(unquote(context.peer())).rpartition(":")[0]):
                log.info("%s was not admitted: %s", context.peer(), error)
            SessionEnd.of(error).abort(context)
        except Exception as error:
            log.exception("admitting %s failed", context.peer())
            SessionEnd(grpc.StatusCode.INTERNAL, f"the global server failed ({error!r}); see its log").abort(context)
        context.send_initial_metadata(((SESSION_KEY, session.id),))
        return result

    def _read_entry_request(self, request: bytes, context: Any) -> EntryRequest:
        try:
            return read_entry_request(request, context)
        except WeightGradError:
            self._application.on_refused("another protocol")
            raise

    def _admit(self, entry: EntryRequest) -> tuple[bytes, Session]:
        peer = entry.peer
        with self._lock:
            known_peer = self._known.get(peer) or KnownPeer(self.limits)
            if entry.incarnation in known_peer.replaced:
                self._application.on_refused("started twice")
                raise RefusedError(f"another process has entered as {peer} since this one; is the site started twice?")
            if peer in self._sent_while_entering:
                raise LinkError(f"{peer} is entering already; try again")
            self._sent_while_entering[peer] = []
        new: Session | None = None
        with known_peer.callback_lock:
            try:
                with self._entering:
                    result = self._application.enter(entry)
                new = Session(entry, known_peer, self.limits.at_most(self.max_message), self._buffers)
            finally:
                self._install(peer, known_peer, new)
        threading.Thread(target=self._deliver, args=(new,), name=f"session-{peer}", daemon=True).start()
        return result, new

    def _install(self, peer: Peer, known_peer: KnownPeer, new: Session | None) -> None:
        with self._lock:
            old = self._sessions.get(peer)
            if new:
                self._known[peer], self._sessions[peer] = known_peer, new
            for data, control in self._sent_while_entering.pop(peer):
                if receiver := new or old:
                    receiver.messages.put(data, control=control)
        if new and old:
            if old.incarnation != new.incarnation:
                known_peer.replaced.append(old.incarnation)
            self._end(old, SessionEnd(grpc.StatusCode.NOT_FOUND, f"{peer} has entered again"))

    # -- Stream -----------------------------------------------------------------------------

    def _handle_stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        try:
            session, stream = self._open_stream(context)
        except WeightGradError as error:
            SessionEnd.of(error).abort(context)
        if not context.add_callback(stream.close):
            stream.close()
        threading.Thread(target=self._read, args=(session, stream, requests), name="stream", daemon=True).start()
        yield from stream.records()
        if session.ended and session.ended.code is not grpc.StatusCode.OK:
            session.ended.abort(context)

    def _open_stream(self, context: Any) -> tuple[Session, Stream]:
        metadata = dict(context.invocation_metadata())
        entry = self._read_entry_request(b"", context)
        self._application.check_peer(entry)
        self._gate.prove(_endpoint_of(entry.peer_address), entry.peer.site)
        number, key = metadata.get(STREAM_KEY, ""), metadata.get(SESSION_KEY, "")
        if not (number.isdecimal() and len(number) < 4 and int(number) <= MAX_STREAMS):
            raise ProtocolError(f"stream number {number[:20]!r}; it must be 0 to {MAX_STREAMS}")
        with self._lock:
            session = self._sessions.get(entry.peer)
            ended = self._ended.get(key)
        if session is None or session.id != key or session.incarnation != entry.incarnation:
            unknown = SessionEnd(grpc.StatusCode.NOT_FOUND, "the global server does not know this session")
            (ended or unknown).abort(context)
        self._check_streams(session, int(number))
        return session, session.open_stream(int(number), entry)

    def _check_streams(self, session: Session, number: int) -> None:
        """Refuse a stream of a site that has very many: each has threads of its own, which others need too."""
        with self._lock:
            own = [one for peer, one in self._sessions.items() if peer.site == session.peer.site]
        count = sum(one.messages.open_streams for one in own)
        most = MAX_STREAMS + self.limits.streams_per_rank * len(own)
        if count >= most and not session.has_stream(number):
            raise RefusedError(
                f"{session.peer.site} has {count} streams of {len(own)} ranks open; at most {most} may be"
            )

    def _read(self, session: Session, stream: Stream, requests: Iterator[bytes]) -> None:
        try:
            for record in requests:
                stream.handle_record(record)
                if session.messages.peer_left:
                    self._end(session, SessionEnd(grpc.StatusCode.OK, "goodbye"), drop=False)
        except grpc.RpcError:
            pass  # the stream broke, which `close` takes care of
        except RefusedError as error:
            self._end(session, SessionEnd(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)))
        except WeightGradError as error:
            self._end(session, SessionEnd.of(error))
        finally:
            stream.close()

    # -- the application --------------------------------------------------------------------

    def _deliver(self, session: Session) -> None:
        while True:
            message, control = session.messages.get_with_lane(None)
            if message is None:
                break
            with session.known_peer.callback_lock:
                if session.dropped:
                    break
                try:
                    self._application.on_message(session.peer, message, control)
                except WeightGradError as error:
                    self._end(session, SessionEnd.of(error))
                except Exception as error:
                    log.exception("taking a message of %s failed", session.peer)
                    why = f"the global server failed ({error!r}); see its log"
                    self._end(session, SessionEnd(grpc.StatusCode.INTERNAL, why))
            del message  # so that its memory can be used again during the wait
        self._report_lost(session)

    def _report_lost(self, session: Session, *, wait: bool = True) -> None:
        if not session.known_peer.callback_lock.acquire(blocking=wait):
            return
        try:
            with self._lock:
                current = self._sessions.get(session.peer, session)
            if current is session and not session.loss_reported and not self._stopping.is_set():
                session.loss_reported = True
                left = session.ended is not None and session.ended.code is grpc.StatusCode.OK
                self._application.on_lost(session.peer, left)
        except Exception:
            log.exception("reporting that %s is lost failed", session.peer)
        finally:
            session.known_peer.callback_lock.release()

    def _end(self, session: Session, end: SessionEnd, *, drop: bool = True) -> None:
        if end.code not in (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND):
            log.warning("%s: session ended by the global server: %s", session.peer, end.why)
        with self._lock:
            if self._sessions.get(session.peer) is session:
                del self._sessions[session.peer]
            if end.code is not grpc.StatusCode.OK:
                self._ended.setdefault(session.id, end)
            if len(self._ended) > _REMEMBERED_ENDS:
                self._ended.popitem(last=False)
        session.end(end, drop=drop)

    def _watch_sessions(self) -> None:
        checked = time.monotonic()
        while not self._stopping.wait(_TICK_S):
            now = time.monotonic()
            with self._lock:
                sessions = list(self._sessions.values())
            for session in sessions:
                silent = now - session.messages.heard_at >= self.limits.silent_s
                if session.messages.open_streams and not silent:
                    session.loss_reported = False
                elif silent or now - session.messages.without_stream_since >= self.limits.lost_after_s:
                    self._report_lost(session, wait=False)
            if now - checked >= self.limits.recheck_s:
                checked = now
                for session in sessions:
                    self._check_again(session)

    def _check_again(self, session: Session) -> None:
        try:
            for entry in session.entries():
                self._application.check_peer(entry)
        except WeightGradError as error:
            self._end(session, SessionEnd.of(error))
        except Exception:
            log.exception("checking %s again failed", session.peer)


def _endpoint_of(peer_address: str) -> str:
    """The endpoint in gRPC's notation of a peer, such as ipv4:10.0.0.1:50123 or ipv6:[::1]:50123."""
    host, _, port = peer_address.partition(":")[2].rpartition(":")
    return endpoint(host.strip("[]"), int(port)) if port.isdecimal() else peer_address
