"""The process that has the gRPC connections of another one: what it runs.

It is started by `connection_process.py` and carries records between Unix sockets and gRPC streams. What a record
means is not known here; sessions, lanes and messages stay in the process that trains. It ends when that process
does, however that ends. It loads gRPC, and neither torch nor anything of the user.

A request comes on the control socket as a frame of facts, with one end of a socket pair on which it is answered:

    open      make the channels of a client          no answer
    enter     a record with the request follows      facts (the metadata) and a record, or an end
    stream    records until a half close             records, and an end; it has the record to send at the last
    count     the bytes on the sockets               facts
    close     close the channels of a client         facts, when they are closed

A socket that is closed at the other end cancels its call. If the parent has ended, the last record of the call is
sent before: so the server hears at once of a process that was killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from weightgrad.runtime.transport.socket_frames import FrameReader, Kind, send_facts, send_frame

if TYPE_CHECKING:
    from weightgrad.runtime.transport.channels import Channels
    from weightgrad.runtime.transport.transport import Data

_CANCEL_S = 0.2  # to find out whether the parent has ended, or only cancels a call
_LAST_S = 2.0  # for the last records to be sent
_LOOK_S = 0.5  # between two looks whether the parent lives: its forked children may hold its sockets open


def main(control: int, parent: int) -> None:
    """Serve the process with the id `parent` over the socket `control` until it ends."""
    # Ctrl-C and the end of a job are for the parent, which may still have something to send.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=control)
    server = _ConnectionServer()
    while os.getppid() == parent:
        if select.select([connection], [], [], _LOOK_S)[0]:
            found = _receive(connection)
            if found is None:
                break
            server.serve(*found)
    server.end()
    os._exit(0)  # gRPC's threads need not be waited for: what they would send has been sent, or is not wanted


def send_request(connection: socket.socket, facts: Any, answer: socket.socket) -> None:
    """Send a request, and the socket for its answer; raises OSError if the process is gone."""
    content = json.dumps(facts).encode()
    socket.send_fds(connection, [len(content).to_bytes(4, "big")], [answer.fileno()])
    connection.sendall(content)


def _receive(connection: socket.socket) -> tuple[Any, socket.socket] | None:
    try:
        header, files, _, _ = socket.recv_fds(connection, 4, 1, socket.MSG_WAITALL)
        if len(header) < 4:
            return None
        length = int.from_bytes(header, "big")
        content = connection.recv(length, socket.MSG_WAITALL)
    except OSError:
        return None
    return (json.loads(content), socket.socket(fileno=files[0])) if len(content) == length else None


class _ConnectionServer:
    def __init__(self) -> None:
        self._clients: dict[int, Channels] = {}
        self._streams: weakref.WeakKeyDictionary[threading.Thread, _Records] = weakref.WeakKeyDictionary()
        self._parent_ended = threading.Event()

    def serve(self, facts: Any, answer: socket.socket) -> None:
        if facts["do"] == "open":
            self._clients[facts["client"]] = _open(facts)
            answer.close()
            return
        client = self._clients.get(facts["client"])
        if client is None:  # it was closed by another thread of the parent
            answer.close()
            return
        if facts["do"] == "close":
            del self._clients[facts["client"]]
        if facts["do"] == "stream":
            records = _Records(answer, bytes.fromhex(facts["last"]), self._parent_ended)
            thread = threading.Thread(target=_stream, args=(client, facts, answer, records), daemon=True)
            self._streams[thread] = records
        else:
            work = {"enter": _enter, "count": _count, "close": _close}[facts["do"]]
            thread = threading.Thread(target=work, args=(client, facts, answer), daemon=True)
        thread.start()

    def end(self) -> None:
        """Send the last records, since the parent has ended."""
        self._parent_ended.set()
        until, streams = time.monotonic() + _LAST_S, list(self._streams.items())
        for _, records in streams:
            records.stop()
        for thread, _ in streams:
            thread.join(max(0.0, until - time.monotonic()))


def _open(facts: Any) -> Channels:
    sys.path += [place for place in facts["path"] if place not in sys.path]
    import grpc

    from weightgrad.runtime.transport.grpc_channels import GrpcChannels

    credentials = None
    if facts["credentials"] is not None:
        credentials = grpc.ssl_channel_credentials(*(pem.encode() for pem in facts["credentials"]))
    options = [[(key, value) for key, value in own] for own in facts["options"]]
    return GrpcChannels(facts["address"], credentials=credentials, options=options)


def _metadata(facts: Any) -> list[tuple[str, str]]:
    return [(key, value) for key, value in facts["metadata"]]


def _enter(client: Channels, facts: Any, answer: socket.socket) -> None:
    from weightgrad.runtime.transport.channels import CallError

    with suppress(OSError), answer:
        found = FrameReader(answer).read()
        if found is None:
            return
        try:
            reply, metadata = client.ask(bytes(found[1]), _metadata(facts), facts["timeout"])
        except CallError as error:
            send_facts(answer, Kind.END, error.status)
            return
        send_facts(answer, Kind.FACTS, dict(metadata))
        send_frame(answer, Kind.RECORD, reply)


def _stream(client: Channels, facts: Any, answer: socket.socket, records: _Records) -> None:
    try:
        call = records.call = client.open(facts["number"], iter(records), _metadata(facts))
    except ValueError as error:  # the channel was closed meanwhile
        with suppress(OSError):
            send_facts(answer, Kind.END, ["CANCELLED", str(error)])
        records.close()
        return
    try:
        for record in call:
            records.answer(record)
        send_facts(answer, Kind.END, call.status())
    except OSError:
        call.cancel()  # the other end is closed
    records.close()


class _Records:
    """The records that come on a socket. Its end without a half close cancels the call, after a last record."""

    def __init__(self, connection: socket.socket, last: bytes, parent_ended: threading.Event) -> None:
        self._connection, self._last, self._parent_ended = connection, last, parent_ended
        self._reads = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.call: Any = None

    def __iter__(self) -> Iterator[bytes]:
        reader, began = FrameReader(self._connection), False
        with self._lock:
            if self._over.is_set():
                return
            self._reads = True
        try:
            while found := reader.read_bytes():
                if found[0] is Kind.HALF_CLOSE:
                    return
                began = True
                yield found[1]
        except OSError:
            pass
        finally:
            with self._lock:
                self._reads = False
                if self._over.is_set():
                    self._connection.close()
        if began and self._last and not self._over.is_set() and self._parent_ended.wait(_CANCEL_S):
            yield self._last  # and a half close, as in order
        elif self.call is not None:
            self.call.cancel()

    def answer(self, record: Data) -> None:
        """Send a record to the parent; raises OSError if it has closed the socket, and has not ended."""
        try:
            send_frame(self._connection, Kind.RECORD, record)
        except OSError:
            if not (self._last and self._parent_ended.wait(_CANCEL_S)):
                raise

    def stop(self) -> None:
        """Let nothing come any more, though the other end may be open."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close the socket, as soon as nobody reads from it."""
        with self._lock:
            self._over.set()
            if self._reads:
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
            else:
                self._connection.close()


def _count(client: Channels, facts: Any, answer: socket.socket) -> None:
    del facts
    total, round_trip_s = client.socket_bytes()
    with suppress(OSError), answer:
        send_facts(answer, Kind.FACTS, [None if total is None else [total.sent, total.received], round_trip_s])


def _close(client: Channels, facts: Any, answer: socket.socket) -> None:
    del facts
    client.close()
    with suppress(OSError), answer:
        send_facts(answer, Kind.FACTS, None)
