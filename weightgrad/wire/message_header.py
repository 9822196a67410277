"""The 32 bytes that every message starts with, and which of them each kind uses.

    magic (4) · version (1) · kind (1) · flags (1) · name_len (1) · five numbers (20) · count (4)

What a kind does not use is zero, so that there is one way to write a message.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from weightgrad.errors import MagicError, ProtocolError, RangeError, ReservedError, TruncatedError, VersionError
from weightgrad.wire.messages import (
    HEADER_BYTES,
    FinalPart,
    Holding,
    Join,
    JoinReply,
    Leave,
    Message,
    ModelPart,
    Pause,
    Push,
    PushPart,
    ResultPart,
    RoundRequest,
    RoundResult,
    ServerRestarted,
    Waiting,
)
from weightgrad.wire.versions import MESSAGE_VERSION

MAGIC = b"WGMS"
MAX_NAME_BYTES = 64
FINAL = 1  # flag of a Push
DOWNLOAD = 1  # flag of a JoinReply
DOWNLOAD_CODEC = 1  # flag of a Join
DIGEST = 2  # flag of a Join
TRAINING = 4  # flag of a Join
LAST = 1  # flag of a part
RATE = 2  # flag of a Push or a RoundResult
REPORT = 4  # flag of a Push
SCHEDULE = 4  # flag of a RoundResult or a JoinReply
APPROXIMATE = 8  # flag of a JoinReply
BUFFERS = 8  # flag of a Push or a RoundResult
OPTIONS = 16  # flag of a Push or a RoundResult
PAUSED = 1  # flag of a Pause

_FIELDS = struct.Struct("<4sBBBB5II")
_NUMBERS = 5
_KIND_AT = 5  # where the kind stands


class _Kind(NamedTuple):
    """Which fields a kind of message uses."""

    number: int
    numbers: tuple[str, ...] = ()
    named: bool = False
    flags: int = 0
    counts: bool = False


_KINDS: dict[type[Message], _Kind] = {
    Push: _Kind(
        1, ("round", "after", "step", "seen", "samples"), named=True, flags=FINAL | RATE | REPORT | BUFFERS | OPTIONS
    ),
    RoundRequest: _Kind(2, ("round",)),
    RoundResult: _Kind(
        3, ("version", "round", "step", "len(included)", "len(relayed)"), flags=RATE | SCHEDULE | BUFFERS | OPTIONS
    ),
    Join: _Kind(4, ("version + 1", "epoch"), named=True, flags=DOWNLOAD_CODEC | DIGEST | TRAINING),
    JoinReply: _Kind(5, ("version", "round", "step", "included", "pushed"), flags=DOWNLOAD | SCHEDULE | APPROXIMATE),
    ServerRestarted: _Kind(6),
    Leave: _Kind(7, named=True),
    PushPart: _Kind(8, ("round", "rank"), named=True, flags=LAST, counts=True),
    ResultPart: _Kind(9, ("version", "len(relayed)"), flags=LAST, counts=True),
    ModelPart: _Kind(10, ("version",), flags=LAST, counts=True),
    Holding: _Kind(11, ("rank", "ranks", "epoch"), named=True, counts=True),
    FinalPart: _Kind(12, ("place", "parts"), named=True, counts=True),
    Waiting: _Kind(13, ("round", "seconds", "len(missing)")),
    Pause: _Kind(14, flags=PAUSED),
}
_CONTROL = frozenset((*range(1, 8), 12, 13, 14))
_TYPES = {kind.number: type_ for type_, kind in _KINDS.items()}


class Header(NamedTuple):
    """The fields that the kind uses; `size` counts the segments of a part, the intervals of a Holding, or bytes."""

    kind: type[Message]
    numbers: tuple[int, ...] = ()
    size: int = 0
    flags: int = 0
    name_bytes: int = 0


def to_bytes(header: Header) -> bytes:
    """The header as its 32 bytes.

    Raises:
        RangeError: a number does not fit 32 bits.
    """
    kind = _KINDS[header.kind]
    for field, value in zip((*kind.numbers, "count"), (*header.numbers, header.size), strict=True):
        check_number(f"{header.kind.__name__}: {field}", value)
    numbers = [*header.numbers, *[0] * _NUMBERS][:_NUMBERS]
    return _FIELDS.pack(MAGIC, MESSAGE_VERSION, kind.number, header.flags, header.name_bytes, *numbers, header.size)


def parse(view: memoryview) -> Header:
    """Read the header that starts `view`.

    Raises:
        FrameError: the bytes are not the start of a message of this version.
        ProtocolError: the kind of message is unknown.
    """
    start = bytes(view[: len(MAGIC)])
    # Also of fewer than four bytes: noise should not be mistaken for the start of a message.
    if not MAGIC.startswith(start):
        raise MagicError(f"starts with {start!r}; a message starts with {MAGIC!r}; check what was sent")
    if len(view) < HEADER_BYTES:
        raise TruncatedError(f"{len(view)} bytes came; a message's header has {HEADER_BYTES}; send it again")
    _, version, number, flags, name_bytes, *numbers, size = _FIELDS.unpack_from(view)
    if version != MESSAGE_VERSION:
        raise VersionError(f"message version {version}; this build reads {MESSAGE_VERSION}; run one release everywhere")
    if number not in _TYPES:
        raise ProtocolError(f"a message of kind {number}; this build knows 1 to {len(_TYPES)}; upgrade the reader")
    type_ = _TYPES[number]
    kind = _KINDS[type_]
    used, unused = numbers[: len(kind.numbers)], numbers[len(kind.numbers) :]
    if flags & ~kind.flags or any(unused) or (name_bytes and not kind.named) or (size and not kind.counts):
        raise ReservedError(
            f"a {type_.__name__} with flags {flags:#04x}, numbers {numbers}, a name of {name_bytes} bytes and "
            f"count {size}: what it does not use must be zero; the message is damaged or its writer is wrong"
        )
    return Header(type_, tuple(used), size, flags, name_bytes)


def is_control(data: bytes | bytearray | memoryview) -> bool:
    """Whether bytes look like a control message, without parsing them. Everything else is bulk."""
    return len(data) > _KIND_AT and data[_KIND_AT] in _CONTROL


def check_number(what: str, value: int) -> None:
    """Raise RangeError for a number that does not fit 32 bits."""
    if not 0 <= value < 2**32:
        raise RangeError(f"{what} is {value}; a message holds 0 to 2**32 - 1")


def name_bytes(site: str) -> bytes:
    """A site's name in UTF-8, as it stands in a message.

    Raises:
        RangeError: the name is empty, too long, or not valid Unicode.
    """
    try:
        name = site.encode()
    except UnicodeEncodeError as error:
        raise RangeError(f"the site name {site!r} cannot be written in UTF-8; rename the site") from error
    if not 1 <= len(name) <= MAX_NAME_BYTES:
        raise RangeError(f"site name {site!r} has {len(name)} bytes; a message holds 1 to {MAX_NAME_BYTES}; rename it")
    return name
