"""What crosses a lane: messages in chunks, and the words that keep them going.

    put ─> Outgoing ─take─> lane 0 ─┐
                    ─take─> lane 1 ─┼─add─> Incoming ─get─> the same messages, once, in order
                    ─take─> lane 2 ─┘
             ^──────── acknowledged, released ────────┘

Where a message is cut depends on its length alone (`Cut`). So an offset names a chunk, chunks
cannot overlap, and the receiver needs one flag for each. Nobody sends what the other end has no
room for: the receiver tells its room (`window`) and which messages its application has taken
(`released`), and a message starts when it fits beside those that are not. A chunk that breaks
this rule is refused before anything is allocated.

One record is one gRPC message, little-endian, read as if a stranger had sent it:

    hello    1 · 0 0 0 · version u32 · window u64 · released u64          first, on every lane
    chunk    2 · 0 .. 0 · message u64 · offset u64 · total u64 · data
    ack      3 · 0 0 0 · count u32 · released u64 · count of (message u64, offset u64)
    goodbye  4 · UTF-8 text                                               last, from a site that leaves

There is no checksum: TLS has one, and so has every frame inside.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

from weightgrad.errors import ProtocolError

VERSION = 1
MAX_ACKS = 4096
MAX_GOODBYE_BYTES = 1024
CHUNK_HEADER_BYTES = 32

_HELLO = struct.Struct("<B3sIQQ")
_CHUNK = struct.Struct("<B7sQQQ")
_ACK = struct.Struct("<B3sIQ")
_PAIR = struct.Struct("<QQ")
_ZEROS = bytes(7)

Data: TypeAlias = bytes | bytearray | memoryview

# What a message costs beside its bytes, so that empty ones cannot fill the memory either.
OVERHEAD_BYTES = 1024


@dataclass(frozen=True)
class Chunk:
    """The bytes of message number `message` from `offset` on; the message has `total` of them."""

    message: int
    offset: int
    total: int
    data: Data


@dataclass(frozen=True)
class Cut:
    """How long the chunks of a message are, but the last. Both ends must cut alike.

    What is shorter goes by one connection: over several, the one with the smallest window would hold the others back.
    """

    length: int = 1024 * 1024

    def count(self, total: int) -> int:
        """How many chunks such a message has; an empty one has one, which is empty."""
        return max(1, -(-total // self.length))


DEFAULT_CUT = Cut()


@dataclass(frozen=True)
class Hello:
    """A lane is open: this end has room for `window` bytes, and its application took all up to `released`."""

    window: int
    released: int


@dataclass(frozen=True)
class Ack:
    """These chunks (message, offset) are here, and the application took all messages up to `released`."""

    released: int
    chunks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Goodbye:
    """The site leaves; it has sent all it wanted to."""

    why: str = ""


Record: TypeAlias = Hello | Chunk | Ack | Goodbye


def to_bytes(record: Record) -> bytes:
    """A record as bytes; copies the data of a chunk once."""
    if isinstance(record, Chunk):
        return b"".join((_CHUNK.pack(2, _ZEROS, record.message, record.offset, record.total), record.data))
    if isinstance(record, Ack):
        head = _ACK.pack(3, _ZEROS[:3], len(record.chunks), record.released)
        return head + b"".join(_PAIR.pack(*pair) for pair in record.chunks)
    if isinstance(record, Hello):
        return _HELLO.pack(1, _ZEROS[:3], VERSION, record.window, record.released)
    return b"\x04" + record.why.encode()[:MAX_GOODBYE_BYTES]


def parse(data: Data) -> Record:
    """The record in these bytes; a chunk's data is a view of them."""
    kind = data[0] if len(data) else None
    if kind == 2:
        return _chunk(data)
    if kind == 3:
        return _ack(data)
    if kind == 1:
        return _hello(data)
    if kind == 4:
        return _goodbye(data)
    raise ProtocolError(f"a record of kind {kind} and {len(data)} bytes; this build knows 1 to 4")


def _chunk(data: Data) -> Chunk:
    _check(len(data) >= CHUNK_HEADER_BYTES, f"a chunk of {len(data)} bytes; its header alone has {CHUNK_HEADER_BYTES}")
    _, zeros, message, offset, total = _CHUNK.unpack_from(data)
    body = memoryview(data)[CHUNK_HEADER_BYTES:]
    _check(zeros == _ZEROS, "a chunk whose reserved bytes are not zero")
    _check(message >= 1, "a chunk of message 0; the first is 1")
    _check(
        offset + len(body) <= total < 2**63,
        f"a chunk of {len(body)} bytes at {offset} of a message of {total}; it must lie within it",
    )
    return Chunk(message, offset, total, body)


def _ack(data: Data) -> Ack:
    _check(len(data) >= _ACK.size, f"acknowledgements of {len(data)} bytes; their header alone has {_ACK.size}")
    _, zeros, count, released = _ACK.unpack_from(data)
    _check(zeros == _ZEROS[:3], "acknowledgements whose reserved bytes are not zero")
    _check(count <= MAX_ACKS, f"{count} acknowledgements in one record; {MAX_ACKS} are the most")
    wanted = _ACK.size + count * _PAIR.size
    _check(len(data) == wanted, f"{count} acknowledgements in {len(data)} bytes; they take {wanted}")
    return Ack(released, tuple(_PAIR.iter_unpack(memoryview(data)[_ACK.size :])))


def _hello(data: Data) -> Hello:
    _check(len(data) == _HELLO.size, f"a hello of {len(data)} bytes; it has {_HELLO.size}")
    _, zeros, version, window, released = _HELLO.unpack(data)
    _check(version == VERSION, f"version {version} of lanes; this build speaks {VERSION}; use one release at both ends")
    _check(zeros == _ZEROS[:3], "a hello whose reserved bytes are not zero")
    return Hello(window, released)


def _goodbye(data: Data) -> Goodbye:
    _check(len(data) <= 1 + MAX_GOODBYE_BYTES, f"a goodbye of {len(data)} bytes; {1 + MAX_GOODBYE_BYTES} are the most")
    return Goodbye(bytes(data[1:]).decode(errors="replace"))


def _check(right: bool, wrong: str) -> None:
    if not right:
        raise ProtocolError(wrong)
