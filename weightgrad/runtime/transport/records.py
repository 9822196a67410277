"""The records that cross a stream: messages in chunks, and what keeps the chunks flowing.

    put ─> SendQueue ─take─> stream 0 ─┐
                     ─take─> stream 1 ─┼─add─> ReceiveQueue ─get─> the same messages, once, in order
                     ─take─> stream 2 ─┘
             ^──────── acknowledged, released ─────────┘

The length of a message alone decides where it is cut (`Chunking`). So an offset identifies a chunk, chunks
cannot overlap, and the receiver needs one flag for each chunk. Nobody sends more than the receiver has memory
for: the receiver announces how many bytes it can hold (`window`) and which messages its application has taken
(`released`), and a message starts only when it fits beside the messages that are not yet released. A chunk
that breaks this rule is refused before anything is allocated.

One record is one gRPC message, little-endian. The parser trusts nothing:

    hello    1 · 0 0 0 · version u32 · window u64 · released u64          first, on every stream
    chunk    2 · 0 .. 0 · message u64 · offset u64 · total u64 · data
    ack      3 · 0 0 0 · count u32 · released u64 · count of (message u64, offset u64)
    goodbye  4 · UTF-8 text                                               last, from a peer that leaves

A record has no checksum: TLS has one, and so has every frame inside a message.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

from weightgrad.errors import ProtocolError
from weightgrad.runtime.transport.transport import Data
from weightgrad.wire.versions import STREAM_VERSION

MAX_ACKS = 4096
MAX_GOODBYE_BYTES = 1024
CHUNK_HEADER_BYTES = 32

_HELLO = struct.Struct("<B3sIQQ")
_CHUNK = struct.Struct("<B7sQQQ")
_ACK = struct.Struct("<B3sIQ")
_PAIR = struct.Struct("<QQ")
_ZEROS = bytes(7)

# What a message is taken to cost besides its bytes, so that empty messages cannot fill the memory either.
OVERHEAD_BYTES = 1024


@dataclass(frozen=True)
class Chunk:
    """The bytes of message number `message` from `offset` on; the whole message has `total` bytes."""

    message: int
    offset: int
    total: int
    data: Data


@dataclass(frozen=True)
class Chunking:
    """How a message is cut: into equal chunks, except the last. Both ends must cut alike.

    A connection that has been idle starts with a window of about 14 KB and doubles it in every round trip. So a
    message of some tens of kilobytes is dealt among `connections` of them, and arrives one or two round trips sooner.
    Shorter messages travel on one connection.

    Attributes:
        most_bytes: the longest chunk.
        least_bytes: the shortest, except for the last of a message.
        connections: how many connections a message is dealt among.
    """

    most_bytes: int = 1024 * 1024
    least_bytes: int = 8 * 1024
    connections: int = 4

    def chunk_bytes(self, total: int) -> int:
        """The length of the chunks of a message of `total` bytes, except the last."""
        return min(self.most_bytes, max(self.least_bytes, -(-total // self.connections)))

    def count(self, total: int) -> int:
        """The number of chunks of a message of `total` bytes; an empty message has one empty chunk."""
        return max(1, -(-total // self.chunk_bytes(total)))


DEFAULT_CHUNKING = Chunking()


@dataclass(frozen=True)
class Hello:
    """A stream is open. The sender can hold `window` bytes, and its application took all messages up to `released`."""

    window: int
    released: int


@dataclass(frozen=True)
class Ack:
    """These chunks (message, offset) have arrived, and the application took all messages up to `released`."""

    released: int
    chunks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Goodbye:
    """The peer leaves; it has sent everything."""

    why: str = ""


Record: TypeAlias = Hello | Chunk | Ack | Goodbye


def to_bytes(record: Record) -> bytes:
    """Encode a record; the data of a chunk is copied once."""
    if isinstance(record, Chunk):
        return b"".join((_CHUNK.pack(2, _ZEROS, record.message, record.offset, record.total), record.data))
    if isinstance(record, Ack):
        head = _ACK.pack(3, _ZEROS[:3], len(record.chunks), record.released)
        return head + b"".join(_PAIR.pack(*pair) for pair in record.chunks)
    if isinstance(record, Hello):
        return _HELLO.pack(1, _ZEROS[:3], STREAM_VERSION, record.window, record.released)
    return b"\x04" + record.why.encode()[:MAX_GOODBYE_BYTES]


def parse(data: Data) -> Record:
    """Decode a record; the data of a chunk is a view of `data`.

    Raises:
        ProtocolError: the bytes are not a record.
    """
    kind = data[0] if len(data) else None
    if kind == 2:
        return _chunk(data)
    if kind == 3:
        return _ack(data)
    if kind == 1:
        return _hello(data)
    if kind == 4:
        return _goodbye(data)
    raise ProtocolError(f"a record of kind {kind} and {len(data)} bytes; this build knows kinds 1 to 4")


def _chunk(data: Data) -> Chunk:
    _check(len(data) >= CHUNK_HEADER_BYTES, f"a chunk of {len(data)} bytes; its header has {CHUNK_HEADER_BYTES}")
    _, zeros, message, offset, total = _CHUNK.unpack_from(data)
    body = memoryview(data)[CHUNK_HEADER_BYTES:]
    _check(zeros == _ZEROS, "a chunk whose reserved bytes are not zero")
    _check(message >= 1, "a chunk of message 0; the first message is 1")
    _check(
        offset + len(body) <= total < 2**63,
        f"a chunk of {len(body)} bytes at {offset} of a message of {total} bytes; it must lie within the message",
    )
    return Chunk(message, offset, total, body)


def _ack(data: Data) -> Ack:
    _check(len(data) >= _ACK.size, f"acknowledgements of {len(data)} bytes; their header has {_ACK.size}")
    _, zeros, count, released = _ACK.unpack_from(data)
    _check(zeros == _ZEROS[:3], "acknowledgements whose reserved bytes are not zero")
    _check(count <= MAX_ACKS, f"{count} acknowledgements in one record; at most {MAX_ACKS} are allowed")
    wanted = _ACK.size + count * _PAIR.size
    _check(len(data) == wanted, f"{count} acknowledgements in {len(data)} bytes; wanted {wanted} bytes")
    return Ack(released, tuple(_PAIR.iter_unpack(memoryview(data)[_ACK.size :])))


def _hello(data: Data) -> Hello:
    _check(len(data) == _HELLO.size, f"a hello of {len(data)} bytes; wanted {_HELLO.size}")
    _, zeros, version, window, released = _HELLO.unpack(data)
    _check(
        version == STREAM_VERSION,
        f"version {version} of streams, here {STREAM_VERSION}; run the same release on both ends",
    )
    _check(zeros == _ZEROS[:3], "a hello whose reserved bytes are not zero")
    return Hello(window, released)


def _goodbye(data: Data) -> Goodbye:
    _check(
        len(data) <= 1 + MAX_GOODBYE_BYTES,
        f"a goodbye of {len(data)} bytes; at most {1 + MAX_GOODBYE_BYTES} are allowed",
    )
    return Goodbye(bytes(data[1:]).decode(errors="replace"))


def _check(valid: bool, problem: str) -> None:
    if not valid:
        raise ProtocolError(problem)
