"""Bytes that crossed this process's TCP connections: messages, gRPC and TLS, without packet headers and repeats.

Linux counts them for every connection (`struct tcp_info` in linux/tcp.h: bytes acknowledged by the peer, and
bytes received). gRPC does not expose its sockets, so they are found among the open files of the process. What a
connection carried after the last `sample` before its end is not counted: sample every few seconds, and once
more before closing.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from weightgrad.runtime.transport.transport import Traffic

Owner = TypeVar("Owner")

_FILES = "/proc/self/fd"
_INFO_BYTES = 136
_COUNTS = struct.Struct("@QQ")
_COUNTS_AT = 120  # tcpi_bytes_acked, then tcpi_bytes_received
_ROUND_TRIP = struct.Struct("@I")
_ROUND_TRIP_AT = 148  # tcpi_min_rtt, in microseconds
_UNKNOWN_ROUND_TRIP = 2**32 - 1


class SocketBytes(Generic[Owner]):
    """Counts connections of this process to a port ("client"), or of peers to a port of this process ("server").

    Args:
        port: the server's port.
        side: which end of the connections this process is.
        owner: under whom a connection to the endpoint "HOST:PORT" of the other end is counted; None while that is
            not known. `host_of` counts by host.

    Attributes:
        why_not: why nothing can be counted on this machine; None where it can.
        round_trip_s: the shortest round trip that TCP has seen lately on an open connection; 0 if unknown.
    """

    def __init__(self, port: int, *, side: Literal["client", "server"], owner: Callable[[str], Owner | None]) -> None:
        self._port, self._side, self._owner = port, side, owner
        self._open: dict[str, tuple[Owner | None, Traffic]] = {}  # by inode: the owner, and the last count
        self._closed: dict[Owner, Traffic] = {}
        self._lock = threading.Lock()
        self.round_trip_s = 0.0
        self.why_not = _why_not()

    def sample(self) -> dict[Owner, Traffic] | None:
        """Count now. Returns totals by owner, closed connections included; None where nothing can be counted."""
        if self.why_not is not None:
            return None
        with self._lock:
            present: dict[str, tuple[Owner | None, Traffic]] = {}
            round_trips = []
            for name in os.listdir(_FILES):
                if found := self._inspect(int(name)):
                    inode, endpoint, count, round_trip = found
                    owner = self._owner(endpoint)
                    if owner is None and inode in self._open:
                        owner = self._open[inode][0]
                    present[inode] = owner, count
                    round_trips += [round_trip] if round_trip > 0 else []
            self.round_trip_s = min(round_trips, default=self.round_trip_s)
            for inode in self._open.keys() - present.keys():
                owner, count = self._open[inode]
                if owner is not None:
                    self._closed[owner] = self._closed.get(owner, Traffic()) + count
            self._open = present
            totals = dict(self._closed)
            for owner, count in present.values():
                if owner is not None:
                    totals[owner] = totals.get(owner, Traffic()) + count
            return totals

    def total(self) -> Traffic | None:
        """Count now. Returns the total of all connections; None where nothing can be counted."""
        counts = self.sample()
        return None if counts is None else sum(counts.values(), Traffic())

    def _inspect(self, file: int) -> tuple[str, str, Traffic, float] | None:
        try:
            link = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"{_FILES}/{file}"))
            if not link:
                return None
            # A duplicate, so that closing it here does not close gRPC's socket.
            with _socket_of(os.dup(file)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    return None
                ours, theirs = connection.getsockname(), connection.getpeername()
                if (theirs if self._side == "client" else ours)[1] != self._port:
                    return None
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP_AT + _ROUND_TRIP.size)
        except OSError:
            return None  # it was closed meanwhile, or is not connected
        count = Traffic(*_COUNTS.unpack_from(info, _COUNTS_AT))
        return link[1], endpoint(theirs[0], theirs[1]), count, _round_trip_s(info)


def _round_trip_s(info: bytes) -> float:
    """Seconds; 0 before anything was measured, and where the kernel does not report it."""
    found = _ROUND_TRIP.unpack_from(info, _ROUND_TRIP_AT)[0] if len(info) >= _ROUND_TRIP_AT + _ROUND_TRIP.size else 0
    return 0.0 if found == _UNKNOWN_ROUND_TRIP else 1e-6 * float(found)


def host_of(endpoint: str) -> str:
    """The HOST of "HOST:PORT"."""
    return endpoint.rpartition(":")[0]


def endpoint(host: str, port: int) -> str:
    """The endpoint "HOST:PORT"; an IPv4 address in IPv6 notation is written as IPv4."""
    return f"{host.removeprefix('::ffff:')}:{port}"


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
