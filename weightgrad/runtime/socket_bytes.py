"""Bytes that really crossed this process's TCP connections: frames, gRPC, TLS, all but headers and what was lost.

Linux counts them for every connection (`struct tcp_info` of linux/tcp.h: bytes acknowledged by the
other end, and bytes received). gRPC does not show its sockets, so they are looked for among the
open files of the process. A connection that goes takes along what it carried since the last
`sample`: sample every few seconds, and once more before hanging up.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
import threading
from dataclasses import dataclass
from typing import Literal

_FILES = "/proc/self/fd"
_INFO_BYTES = 136
_COUNTS = struct.Struct("@QQ")
_COUNTS_AT = 120  # tcpi_bytes_acked, then tcpi_bytes_received
_TRIP = struct.Struct("@I")
_TRIP_AT = 148  # tcpi_min_rtt, in microseconds
_UNKNOWN_TRIP = 2**32 - 1


@dataclass(frozen=True)
class SocketCount:
    """Bytes the other end has acknowledged, and bytes that came from it."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: SocketCount) -> SocketCount:
        return SocketCount(self.sent + other.sent, self.received + other.received)


class SocketBytes:
    """Counts the connections of this process to a port ("client"), or of others to its port ("server").

    `why_not` says why nothing can be counted here; it is None where it can. `trip` is the shortest round trip that
    TCP has seen of late on a connection that is there, in seconds; 0 where it is not known.
    """

    def __init__(self, port: int, *, side: Literal["client", "server"]) -> None:
        self._port, self._side = port, side
        self._seen: dict[str, tuple[str, SocketCount]] = {}  # by inode: the other end's address, and the last count
        self._gone: dict[str, SocketCount] = {}  # by address
        self._lock = threading.Lock()
        self.trip = 0.0
        self.why_not = _why_not()

    def sample(self) -> dict[str, SocketCount] | None:
        """Totals by the other end's address, connections that have gone included; None where they cannot be counted."""
        if self.why_not is not None:
            return None
        with self._lock:
            present, trips = {}, []
            for name in os.listdir(_FILES):
                if found := self._look_at(int(name)):
                    inode, address, count, trip = found
                    present[inode] = address, count
                    trips += [trip] if trip > 0 else []
            self.trip = min(trips, default=self.trip)
            for inode in self._seen.keys() - present.keys():
                address, count = self._seen[inode]
                self._gone[address] = self._gone.get(address, SocketCount()) + count
            self._seen = present
            totals = dict(self._gone)
            for address, count in present.values():
                totals[address] = totals.get(address, SocketCount()) + count
            return totals

    def total(self) -> SocketCount | None:
        """All addresses together, sampled now."""
        counts = self.sample()
        return None if counts is None else sum(counts.values(), SocketCount())

    def _look_at(self, file: int) -> tuple[str, str, SocketCount, float] | None:
        try:
            link = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"{_FILES}/{file}"))
            if not link:
                return None
            # A copy, so that closing ours does not close gRPC's, and theirs not ours.
            with _socket_of(os.dup(file)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    return None
                ours, theirs = connection.getsockname(), connection.getpeername()
                if (theirs if self._side == "client" else ours)[1] != self._port:
                    return None
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TRIP_AT + _TRIP.size)
        except OSError:
            return None  # it was closed under our eyes, or is no connection
        count = SocketCount(*_COUNTS.unpack_from(info, _COUNTS_AT))
        return link[1], theirs[0].removeprefix("::ffff:"), count, _trip(info)


def _trip(info: bytes) -> float:
    """Seconds; 0 before anything was measured, and where the kernel does not say."""
    found = _TRIP.unpack_from(info, _TRIP_AT)[0] if len(info) >= _TRIP_AT + _TRIP.size else 0
    return 0.0 if found == _UNKNOWN_TRIP else 1e-6 * float(found)


def _socket_of(file: int) -> socket.socket:
    try:
        return socket.socket(fileno=file)
    except OSError:
        os.close(file)
        raise


def _why_not() -> str | None:
    if not sys.platform.startswith("linux"):
        return f"the bytes on sockets are not counted on {sys.platform}; on Linux they are"
    if not os.path.isdir(_FILES):
        return f"the bytes on sockets are not counted: {_FILES} is not there; mount /proc"
    with socket.socket() as probe:
        try:
            length = len(probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES))
        except OSError as error:
            return f"the bytes on sockets are not counted: no TCP_INFO ({error.strerror})"
    if length < _INFO_BYTES:
        return (
            f"the bytes on sockets are not counted: this kernel's TCP_INFO has {length} bytes; {_INFO_BYTES} are wanted"
        )
    return None
