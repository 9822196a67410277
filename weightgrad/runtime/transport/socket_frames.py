"""Frames over a Unix socket between a process and the process of its connections.

A frame is its kind (one byte), the length of its content (four bytes) and the content. Both ends are of one release
and on one machine, so nothing here is versioned.
"""

from __future__ import annotations

import json
import socket
import struct
from enum import IntEnum
from typing import Any

from weightgrad.runtime.transport.transport import Data

_HEADER = struct.Struct("=BI")


class Kind(IntEnum):
    """What a frame contains."""

    RECORD = 1
    """Bytes that gRPC carries."""
    HALF_CLOSE = 2
    """Nothing: no more records follow in this direction."""
    FACTS = 3
    """A JSON value: a request, or a reply to one."""
    END = 4
    """A JSON list: the status of a call that is over."""


def send_frame(connection: socket.socket, kind: Kind, content: Data = b"") -> None:
    """Send a frame; raises OSError if the other end is gone."""
    header = _HEADER.pack(kind, len(content))
    sent = connection.sendmsg((header, content))
    if sent < len(header):
        connection.sendall(header[sent:])
    if sent < len(header) + len(content):
        connection.sendall(memoryview(content)[max(0, sent - len(header)) :])


def send_facts(connection: socket.socket, kind: Kind, facts: Any) -> None:
    """Send a frame with a JSON value."""
    send_frame(connection, kind, json.dumps(facts).encode())


class FrameReader:
    """Reads frames from a socket. A frame's content is valid until the next one is read."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._header = bytearray(_HEADER.size)
        self._buffer = bytearray()

    def read(self) -> tuple[Kind, memoryview] | None:
        """The next frame; None if the other end has closed the socket. Raises OSError if it cannot be read."""
        if not self._fill(memoryview(self._header)):
            return None
        kind, length = _HEADER.unpack(self._header)
        if length > len(self._buffer):
            self._buffer = bytearray(length)
        content = memoryview(self._buffer)[:length]
        return (Kind(kind), content) if self._fill(content) else None

    def read_bytes(self) -> tuple[Kind, bytes] | None:
        """The next frame as `read` returns it, in memory of its own."""
        if not self._fill(memoryview(self._header)):
            return None
        kind, length = _HEADER.unpack(self._header)
        content = self._connection.recv(length, socket.MSG_WAITALL) if length else b""
        if len(content) < length:  # a signal came, or the end
            rest = memoryview(bytearray(length - len(content)))
            if not content or not self._fill(rest):
                return None
            content += rest
        return Kind(kind), content

    def _fill(self, buffer: memoryview) -> bool:
        while buffer:
            count = self._connection.recv_into(buffer, 0, socket.MSG_WAITALL)
            if count == 0:
                return False
            buffer = buffer[count:]
        return True
