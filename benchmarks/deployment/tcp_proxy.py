"""A TCP proxy whose connections can be cut."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

_RESET = struct.pack("ii", 1, 0)  # closing sends a reset


class TcpProxy:
    """Forwards connections from a local port to an address, with a thread for each direction of a connection."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed_until = 0.0
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut(self, seconds: float = 0.0) -> int:
        """Reset every connection and refuse new ones for so many seconds.

        Returns:
            How many connections were reset.
        """
        self._closed_until = time.monotonic() + seconds
        with self._lock:
            found, self._open = self._open, set()
        for one in found:
            _break(one)
        return len(found) // 2

    def close(self) -> None:
        """Stop listening and reset every connection."""
        # A thread in accept() would keep the port open.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            if time.monotonic() < self._closed_until:
                _break(here)
                continue
            try:
                there = socket.create_connection(self._target, 5.0)
            except OSError:
                _break(here)
                continue
            there.settimeout(None)
            for one in (here, there):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {here, there}
            for a, b in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=(a, b), name="proxy", daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        room = memoryview(bytearray(1 << 18))
        with contextlib.suppress(OSError):
            while (count := source.recv_into(room)) > 0:
                target.sendall(room[:count])
        with self._lock:
            self._open -= {source, target}
        _break(source)
        _break(target)


def _break(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait on it
    one.close()
