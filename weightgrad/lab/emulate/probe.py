"""The programs of the self-check: a server, a client that asks for echoes, and a client that sends all it can.

    probe.py serve                                             prints its port; then, for each flood number it reads
                                                               from stdin, the samples of that flood
    probe.py echo  IP PORT COUNT                               prints the round trips in seconds
    probe.py flood IP PORT NUMBER CONNECTIONS SECONDS WINDOW   prints when it stopped; each connection has at most
                                                               WINDOW bytes on their way

The window is chosen so that the link is always full and its queue never: no packet is lost, and the rate is steady once
slow start is over. The program keeps to the window itself, by asking how much has not been acknowledged, because the
kernel's autotuning moves its own limits. It uses Reno, in which only loss ends slow start.

Started by path (`python -I -S probe.py ...`): standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import selectors
import socket
import struct
import sys
import termios
import time

_ECHO, _FLOOD = b"e", b"f"
_NUMBER = struct.Struct("!I")
_SAMPLE_S = 0.005
_TURN_S = 0.002
_PIECE = 65536  # bytes in a write: large packets are less work for the switch
_REALTIME_PRIORITY = 5  # below the switch's


class Flood:
    """What all connections of a flood have received: (second, bytes so far) every few milliseconds."""

    def __init__(self) -> None:
        self.connections: set[socket.socket] = set()
        self.samples: list[tuple[float, int]] = []
        self.total = 0

    def add(self, count: int) -> None:
        """Count received bytes."""
        self.total += count
        now = time.monotonic()
        if not self.samples or now >= self.samples[-1][0] + _SAMPLE_S:
            self.samples.append((now, self.total))


class Server:
    """Answers echoes, and counts the bytes of floods."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("0.0.0.0", 0), backlog=64)
        self._listener.setblocking(False)
        self._select = selectors.DefaultSelector()
        self._select.register(self._listener, selectors.EVENT_READ, self._accept)
        self._select.register(sys.stdin, selectors.EVENT_READ, self._report)
        self._floods: dict[int, Flood] = {}
        self._buffer = bytearray(1 << 18)

    def serve(self) -> None:
        """Serve until stdin ends."""
        print(self._listener.getsockname()[1], flush=True)
        while True:
            for key, _ in self._select.select():
                key.data(key.fileobj)

    def _report(self, _: object) -> None:
        line = sys.stdin.readline()
        if not line:
            sys.exit()
        flood = self._floods.get(int(line), Flood())
        while flood.connections:
            self._close(flood.connections.pop())
        print(json.dumps(flood.samples), flush=True)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._select.register(connection, selectors.EVENT_READ, self._first)

    def _first(self, connection: socket.socket) -> None:
        hello = b""
        with contextlib.suppress(OSError):  # a client that was killed resets its connection
            hello = connection.recv(1)
            if hello == _FLOOD:
                hello += connection.recv(_NUMBER.size)  # sent with the first byte, in one packet
        if hello == _ECHO:
            self._select.modify(connection, selectors.EVENT_READ, self._echo)
        elif len(hello) == len(_FLOOD) + _NUMBER.size:
            (number,) = _NUMBER.unpack(hello[len(_FLOOD) :])
            flood = self._floods.setdefault(number, Flood())
            flood.connections.add(connection)
            self._select.modify(connection, selectors.EVENT_READ, lambda _: self._count(connection, flood))
        else:
            self._close(connection)

    def _echo(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if got := connection.recv(1024):
                connection.sendall(got)
                return
        self._close(connection)

    def _count(self, connection: socket.socket, flood: Flood) -> None:
        with contextlib.suppress(OSError):
            if got := connection.recv_into(self._buffer):
                flood.add(got)
                return
        flood.connections.discard(connection)
        self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        if connection.fileno() >= 0:  # a report may have closed it while its own event was waiting in the same turn
            self._select.unregister(connection)
            connection.close()


def echo(ip: str, port: str, count: str) -> None:
    """Print round trips of one byte; the first is left out, because it includes the handshake."""
    with socket.create_connection((ip, int(port)), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_ECHO)
        found = []
        for _ in range(int(count) + 1):
            began = time.perf_counter()
            connection.sendall(b".")
            connection.recv(1)
            found.append(time.perf_counter() - began)
    print(json.dumps(found[1:]))


def flood(ip: str, port: str, number: str, connections: str, seconds: str, window: str) -> None:
    """Send for so many seconds, and end when all has arrived: closing at once would cause many resets."""
    hello, data = _FLOOD + _NUMBER.pack(int(number)), bytes(int(window))
    enough = min(len(data) // 4, _PIECE)
    sockets = [_flooder(ip, int(port)) for _ in range(int(connections))]
    for connection in sockets:
        select.select([], [connection], [], 10)  # wait until it is connected
        connection.send(hello)
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        for connection in sockets:
            if (room := len(data) - unacknowledged(connection)) >= enough:
                with contextlib.suppress(BlockingIOError):
                    connection.send(data[:room])
        time.sleep(_TURN_S)
    print(time.monotonic(), flush=True)  # all hosts share this clock
    while any(map(unacknowledged, sockets)):
        time.sleep(_TURN_S)
    for connection in sockets:
        connection.close()


def _flooder(ip: str, port: int) -> socket.socket:
    connection = socket.socket()
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        connection.connect((ip, port))
    return connection


def unacknowledged(connection: socket.socket) -> int:
    """Bytes that were given to the kernel and are not acknowledged yet."""
    found = bytearray(4)
    fcntl.ioctl(connection, termios.TIOCOUTQ, found)
    return int.from_bytes(found, sys.byteorder)


def main() -> None:
    """Run one of the three programs."""
    what, *rest = sys.argv[1:]
    with contextlib.suppress(
        OSError, AttributeError
    ):  # with real-time priority the probe measures the link, not the load of the machine
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_REALTIME_PRIORITY))
    if what == "serve":
        Server().serve()
    elif what == "echo":
        echo(*rest)
    else:
        flood(*rest)


if __name__ == "__main__":
    main()
