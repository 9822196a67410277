"""The global server's end of the lanes: sites enter, then messages go both ways, whole, once and in order.

    Enter   unary            who are you, what do you want -> come in, with a session; or the reason why not
    Lane    both ways        records of `chunks.py`, on several streams of one session at a time

A site has one session; a successful Enter replaces the one before, whose queues are void. Its old
incarnation, should it still run somewhere, is refused from then on: the site was started twice.

One thread a call and one a session, all of them daemons. For one site, `enter`, `on_message` and
`on_lost` never run at the same time; for different sites they may.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc

from weightgrad.errors import LinkError, ProtocolError, RefusedError, WeightGradError
from weightgrad.runtime.chunks import Data
from weightgrad.runtime.conversation import Lane, Traffic
from weightgrad.runtime.lane_buffers import Buffers
from weightgrad.runtime.lane_service import LANE_KEY, MAX_LANES, SESSION_KEY, make_server
from weightgrad.runtime.lane_sessions import Ending, Entry, LaneLimits, Session, SessionView, SiteRecord, read_entry

__all__ = ["Entry", "LaneLimits", "LanesServer", "SessionView"]

log = logging.getLogger("weightgrad")

_REMEMBERED = 256  # ended sessions
_TICK_S = 0.25


class LanesServer:
    """Listens at once and answers after `start`.

    `enter` lets a site in and returns the answer, or raises RefusedError, CredentialsError or
    ProtocolError, whose words the site is shown. `peer_check` is asked before that, for every lane,
    and every few seconds for lanes that are open. `on_message` gets a view of memory that is the
    application's for as long as it keeps it; a WeightGradError from it ends the session with its
    words. `on_lost` tells that a site left, was refused, or has had no lane for some seconds; in the
    last case its session goes on should it come back. `on_refused` is told, in a few fixed words, of
    those that were refused before `enter` was asked.
    """

    def __init__(
        self,
        listen: str,
        *,
        credentials: grpc.ServerCredentials | None,
        enter: Callable[[Entry], bytes],
        on_message: Callable[[str, memoryview], None],
        on_lost: Callable[[str], None],
        peer_check: Callable[[Entry], None] | None = None,
        on_refused: Callable[[str], None] | None = None,
        limits: LaneLimits | None = None,
    ) -> None:
        self._enter, self._on_message, self._on_lost = enter, on_message, on_lost
        self._check = peer_check or (lambda entry: None)
        self._refused = on_refused or (lambda reason: None)
        self.limits = limits or LaneLimits()
        self._buffers = Buffers(keep_bytes=self.limits.keep_bytes)
        self._lock = threading.Lock()
        self._entering = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._waiting: dict[str, list[Data]] = {}  # sent to a site whose Enter is being answered
        self._ended: OrderedDict[str, Ending] = OrderedDict()  # by the session's id
        self._sites: dict[str, SiteRecord] = {}
        self._stopping = threading.Event()
        self._watch = threading.Thread(target=self._keep_watch, name="lanes-watch", daemon=True)
        handlers = {
            "Enter": grpc.unary_unary_rpc_method_handler(self._answer_enter),
            "Lane": grpc.stream_stream_rpc_method_handler(self._answer_lane),
        }
        self._server, self.port = make_server(listen, credentials, self.limits.keepalive, handlers)

    def start(self) -> None:
        """Answer calls from now on."""
        self._server.start()
        self._watch.start()

    def send(self, site: str, data: Data) -> bool:
        """Queue a message for a site; False if it has no session, so that nobody will get it.

        The memory must not be written until the site has it. What is sent while the site's Enter is
        being answered goes to the session that comes of it.
        """
        with self._lock:
            if site in self._waiting:
                self._waiting[site].append(data)
                return True
            session = self._sessions.get(site)
            if session is None:
                return False
            session.talk.put(data)
            return True

    def sessions(self) -> dict[str, SessionView]:
        """The sessions there are, by site."""
        with self._lock:
            found = list(self._sessions.items())
        return {
            site: SessionView(s.incarnation, len(s.talk.lanes), s.talk.outgoing.unacknowledged_bytes)
            for site, s in found
        }

    def bytes_of(self, site: str) -> Traffic:
        """Bytes handed to gRPC for a site and taken from it, over all its sessions."""
        with self._lock:
            record = self._sites.get(site)
        return replace(record.traffic) if record else Traffic()

    def drop(self, site: str, why: str) -> None:
        """End a site's session; it is told why, and refused. It may enter again if `enter` lets it."""
        with self._lock:
            session = self._sessions.get(site)
        if session:
            self._end(session, Ending(grpc.StatusCode.PERMISSION_DENIED, why))

    def stop(self, grace: float) -> None:
        """Give what is queued `grace` seconds to arrive, then hang up. Safe to call again."""
        until = time.monotonic() + grace
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.talk.outgoing.wait_empty(max(0.0, until - time.monotonic()))
        self._stopping.set()
        for session in sessions:
            session.end(Ending(grpc.StatusCode.UNAVAILABLE, "the global server is stopping"))
        # The endings must leave before the connections are closed.
        self._server.stop(0.5).wait(5.0)
        if self._watch.is_alive():
            self._watch.join(5.0)

    # -- Enter ------------------------------------------------------------------------------

    def _answer_enter(self, request: bytes, context: Any) -> bytes:
        try:
            entry = self._read_entry(request, context)
            self._check(entry)
            answer, session = self._let_in(entry)
        except WeightGradError as error:
            log.info("%s was not let in: %s", context.peer(), error)
            Ending.of(error).abort(context)
        except Exception as error:
            log.exception("letting in %s failed", context.peer())
            Ending(grpc.StatusCode.INTERNAL, f"the global server failed ({error!r}); see its log").abort(context)
        context.send_initial_metadata(((SESSION_KEY, session.id),))
        return answer

    def _read_entry(self, request: bytes, context: Any) -> Entry:
        try:
            return read_entry(request, context)
        except WeightGradError:
            self._refused("another protocol")
            raise

    def _let_in(self, entry: Entry) -> tuple[bytes, Session]:
        site = entry.site
        with self._lock:
            record = self._sites.get(site) or SiteRecord(self.limits)
            if entry.incarnation in record.replaced:
                self._refused("started twice")
                raise RefusedError(f"another process has entered as {site} since this one; is the site started twice?")
            if site in self._waiting:
                raise LinkError(f"{site} is entering already; try again")
            self._waiting[site] = []
        new: Session | None = None
        with record.gate:
            try:
                with self._entering:
                    answer = self._enter(entry)
                new = Session(entry, record, self.limits, self._buffers)
            finally:
                self._install(site, record, new)
        threading.Thread(target=self._deliver, args=(new,), name=f"lanes-{site}", daemon=True).start()
        return answer, new

    def _install(self, site: str, record: SiteRecord, new: Session | None) -> None:
        with self._lock:
            old = self._sessions.get(site)
            if new:
                self._sites[site], self._sessions[site] = record, new
            for data in self._waiting.pop(site):
                if heir := new or old:
                    heir.talk.put(data)
        if new and old:
            if old.incarnation != new.incarnation:
                record.replaced.append(old.incarnation)
            self._end(old, Ending(grpc.StatusCode.NOT_FOUND, f"{site} has entered again"))

    # -- Lane -------------------------------------------------------------------------------

    def _answer_lane(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        try:
            session, lane = self._open_lane(context)
        except WeightGradError as error:
            Ending.of(error).abort(context)
        if not context.add_callback(lane.close):
            lane.close()
        threading.Thread(target=self._read, args=(session, lane, requests), name="lane", daemon=True).start()
        yield from lane.records()
        if session.ending and session.ending.code is not grpc.StatusCode.OK:
            session.ending.abort(context)

    def _open_lane(self, context: Any) -> tuple[Session, Lane]:
        metadata = dict(context.invocation_metadata())
        entry = self._read_entry(b"", context)
        self._check(entry)
        number, key = metadata.get(LANE_KEY, ""), metadata.get(SESSION_KEY, "")
        if not (number.isdecimal() and len(number) < 4 and int(number) < MAX_LANES):
            raise ProtocolError(f"lane number {number!r}; it must be 0 to {MAX_LANES - 1}")
        with self._lock:
            session = self._sessions.get(entry.site)
            ended = self._ended.get(key)
        if session is None or session.id != key or session.incarnation != entry.incarnation:
            (ended or Ending(grpc.StatusCode.NOT_FOUND, "the global server does not know this session")).abort(context)
        return session, session.open_lane(int(number), entry)

    def _read(self, session: Session, lane: Lane, requests: Iterator[bytes]) -> None:
        try:
            for record in requests:
                lane.take_in(record)
                if session.talk.peer_left:
                    self._end(session, Ending(grpc.StatusCode.OK, "goodbye"), drop=False)
        except grpc.RpcError:
            pass  # the stream broke, which `close` takes care of
        except RefusedError as error:
            self._end(session, Ending(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)))
        except WeightGradError as error:
            self._end(session, Ending.of(error))
        finally:
            lane.close()

    # -- the application --------------------------------------------------------------------

    def _deliver(self, session: Session) -> None:
        while (message := session.talk.get(None)) is not None:
            with session.record.gate:
                if session.dropped:
                    break
                try:
                    self._on_message(session.site, message)
                except WeightGradError as error:
                    self._end(session, Ending.of(error))
                except Exception as error:
                    log.exception("taking a message of %s failed", session.site)
                    why = f"the global server failed ({error!r}); see its log"
                    self._end(session, Ending(grpc.StatusCode.INTERNAL, why))
            del message  # so that its memory can be used again while we wait
        self._tell_lost(session)

    def _tell_lost(self, session: Session, *, wait: bool = True) -> None:
        if not session.record.gate.acquire(blocking=wait):
            return
        try:
            with self._lock:
                current = self._sessions.get(session.site, session)
            if current is session and not session.told_lost and not self._stopping.is_set():
                session.told_lost = True
                self._on_lost(session.site)
        except Exception:
            log.exception("telling that %s is lost failed", session.site)
        finally:
            session.record.gate.release()

    def _end(self, session: Session, ending: Ending, *, drop: bool = True) -> None:
        if ending.code not in (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND):
            log.warning("the session of %s ends: %s", session.site, ending.why)
        with self._lock:
            if self._sessions.get(session.site) is session:
                del self._sessions[session.site]
            if ending.code is not grpc.StatusCode.OK:
                self._ended.setdefault(session.id, ending)
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        session.end(ending, drop=drop)

    def _keep_watch(self) -> None:
        checked = time.monotonic()
        while not self._stopping.wait(_TICK_S):
            now = time.monotonic()
            with self._lock:
                sessions = list(self._sessions.values())
            for session in sessions:
                if session.talk.lanes:
                    session.told_lost = False
                elif now - session.talk.alone_since >= self.limits.lost_after_s:
                    self._tell_lost(session, wait=False)
            if now - checked >= self.limits.recheck_s:
                checked = now
                for session in sessions:
                    self._check_again(session)

    def _check_again(self, session: Session) -> None:
        try:
            for entry in session.entries():
                self._check(entry)
        except WeightGradError as error:
            self._end(session, Ending.of(error))
        except Exception:
            log.exception("checking %s again failed", session.site)
