"""What the self-check runs on the hosts: a server, a client that asks for echoes, and one that sends all it can.

    probe.py serve                                             prints its port; then, asked by number, a flood's samples
    probe.py echo  IP PORT COUNT                               prints the round trips, in seconds
    probe.py flood IP PORT NUMBER CONNECTIONS SECONDS WINDOW   prints when it stopped; WINDOW bytes a connection at most
                                                               are on their way

The window is chosen so that the link is always full and its queue never: no packet is lost, and the rate is steady as
soon as slow start is over. It is kept here, by asking how much has not been acknowledged; the kernel's own limits are
moved by its autotuning. Reno, because it knows no other reason than loss to end slow start.

Started by path (`python -I -S probe.py ...`): standard library only, so that it is there in milliseconds.
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
_PIECE = 65536  # as programs with much to send write it: in large packets, which are easier on the switch
_REALTIME_PRIORITY = 5  # below the switch's


class Flood:
    """What has come in by all its connections: (second, bytes so far) every few milliseconds."""

    def __init__(self) -> None:
        self.connections: set[socket.socket] = set()
        self.samples: list[tuple[float, int]] = []
        self.total = 0

    def add(self, count: int) -> None:
        """So many bytes more."""
        self.total += count
        now = time.monotonic()
        if not self.samples or now >= self.samples[-1][0] + _SAMPLE_S:
            self.samples.append((now, self.total))


class Server:
    """Echoes, and counts what comes in floods."""

    def __init__(self) -> None:
        self._door = socket.create_server(("0.0.0.0", 0), backlog=64)
        self._door.setblocking(False)
        self._select = selectors.DefaultSelector()
        self._select.register(self._door, selectors.EVENT_READ, self._welcome)
        self._select.register(sys.stdin, selectors.EVENT_READ, self._report)
        self._floods: dict[int, Flood] = {}
        self._buffer = bytearray(1 << 18)

    def serve(self) -> None:
        """Until stdin ends."""
        print(self._door.getsockname()[1], flush=True)
        while True:
            for key, _ in self._select.select():
                key.data(key.fileobj)

    def _report(self, _: object) -> None:
        line = sys.stdin.readline()
        if not line:
            sys.exit()
        flood = self._floods.get(int(line), Flood())
        for one in tuple(flood.connections):
            self._leave(one)
        print(json.dumps(flood.samples), flush=True)

    def _welcome(self, door: socket.socket) -> None:
        one, _ = door.accept()
        one.setblocking(False)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._select.register(one, selectors.EVENT_READ, self._first)

    def _first(self, one: socket.socket) -> None:
        got = one.recv(1)
        if got == _ECHO:
            self._select.modify(one, selectors.EVENT_READ, self._echo)
        elif got == _FLOOD:
            (number,) = _NUMBER.unpack(one.recv(_NUMBER.size))
            flood = self._floods.setdefault(number, Flood())
            flood.connections.add(one)
            self._select.modify(one, selectors.EVENT_READ, lambda _: self._count(one, flood))
        else:
            self._leave(one)

    def _echo(self, one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if got := one.recv(1024):
                one.sendall(got)
                return
        self._leave(one)

    def _count(self, one: socket.socket, flood: Flood) -> None:
        with contextlib.suppress(OSError):
            if got := one.recv_into(self._buffer):
                flood.add(got)
                return
        flood.connections.remove(one)
        self._leave(one)

    def _leave(self, one: socket.socket) -> None:
        self._select.unregister(one)
        one.close()


def echo(ip: str, port: str, count: str) -> None:
    """Round trips of one byte, the first (with its handshake) left out."""
    with socket.create_connection((ip, int(port)), timeout=10) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.sendall(_ECHO)
        found = []
        for _ in range(int(count) + 1):
            began = time.perf_counter()
            one.sendall(b".")
            one.recv(1)
            found.append(time.perf_counter() - began)
    print(json.dumps(found[1:]))


def flood(ip: str, port: str, number: str, connections: str, seconds: str, window: str) -> None:
    """Send for so long, and end when all has arrived: hanging up at once would leave a storm of resets."""
    hello, data = _FLOOD + _NUMBER.pack(int(number)), bytes(int(window))
    enough = min(len(data) // 4, _PIECE)
    sockets = [_flooder(ip, int(port)) for _ in range(int(connections))]
    for one in sockets:
        select.select([], [one], [], 10)  # connected
        one.send(hello)
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        for one in sockets:
            if (room := len(data) - unacknowledged(one)) >= enough:
                with contextlib.suppress(BlockingIOError):
                    one.send(data[:room])
        time.sleep(_TURN_S)
    print(time.monotonic(), flush=True)  # a clock that all hosts share
    while any(map(unacknowledged, sockets)):
        time.sleep(_TURN_S)
    for one in sockets:
        one.close()


def _flooder(ip: str, port: int) -> socket.socket:
    one = socket.socket()
    with contextlib.suppress(OSError):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        one.connect((ip, port))
    return one


def unacknowledged(one: socket.socket) -> int:
    """Bytes that were given to the kernel and have not arrived for sure."""
    found = bytearray(4)
    fcntl.ioctl(one, termios.TIOCOUTQ, found)
    return int.from_bytes(found, sys.byteorder)


def main() -> None:
    """One of the three."""
    what, *rest = sys.argv[1:]
    with contextlib.suppress(OSError, AttributeError):  # root measures the link, not how busy the machine is
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_REALTIME_PRIORITY))
    if what == "serve":
        Server().serve()
    elif what == "echo":
        echo(*rest)
    else:
        flood(*rest)


if __name__ == "__main__":
    main()
