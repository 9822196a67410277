"""Messages between sites and the global server as bytes, read as if a stranger had sent them.

    ┌─────────────┬─────────────┬──────────┬─────────────┬─────────────────┬────────┬─────────┬─────────┬─────────────┐
    │ header (32) │ site's name │ rate (8) │ sites taken │ starts + frames │ shares │ answers │ encoded │ safetensors │
    └─────────────┴─────────────┴──────────┴─────────────┴─────────────────┴────────┴─────────┴─────────┴─────────────┘
      all           push, join,   push,      answer        push, answer      answer   welcome   welcome   welcome
                    leave         answer

`docs/wire-format.md` gives every field and the order of the checks. The length is that of
`messages.nbytes`, to the byte. A count or a length is only believed after it was compared with a
limit and with the bytes at hand. There is one way to write a message: bytes that are accepted are
those that `pack` makes of what was read, so there is no room to hide anything in them.

Left out: a checksum of what is not in a frame, and proof of who sent it (both the link's affair, TLS).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from weightgrad import wire
from weightgrad.codecs import Payload
from weightgrad.errors import (
    ProtocolError,
    RangeError,
    ReservedError,
    SizeLimitError,
    SpecError,
    TrailingBytesError,
    TruncatedError,
)
from weightgrad.wan import encoded_snapshot, message_header, snapshot_bytes
from weightgrad.wan.message_header import (
    ENCODED,
    FINAL,
    FIRST_BASE,
    MAX_NAME_BYTES,
    PACE,
    RATE,
    REPORT,
    SNAPSHOT,
    Header,
)
from weightgrad.wan.messages import (
    HEADER_BYTES,
    LENGTH_BYTES,
    RATE_BYTES,
    START_BYTES,
    Answer,
    Call,
    Join,
    Leave,
    Message,
    Part,
    Plant,
    Push,
    Restarted,
    Share,
    Welcome,
)
from weightgrad.wan.pace import Pace, Report

_RATE = struct.Struct("<d")
_REPORT = struct.Struct("<dIdd")
_PACE = struct.Struct("<IIB")
_START = struct.Struct("<Q")
_TAKEN = struct.Struct("<IB3s")  # round, name_len, reserved
_SHARE = struct.Struct("<IIdBB2s")  # round, parts, weight, name_len, left out, reserved
_LEAST_TAKEN_BYTES = _TAKEN.size + 1
_LEAST_PART_BYTES = START_BYTES + 32


@dataclass(frozen=True, kw_only=True)
class MessageLimits:
    """What a reader accepts from a stranger.

    `max_bytes`: of a whole message. `max_parts`: parts of a message (of all answers in a welcome),
    answers of a welcome, tensors of a snapshot. `max_elements`: where the last part may end; a receiver
    that will decode sets it to the length of its vector, as kernels do not look where that ends.
    `max_sites`: pushes that one answer names.
    """

    max_bytes: int = 2**32
    max_parts: int = 2**16
    max_elements: int = 2**32
    max_sites: int = 2**12

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            # bool is an int in Python, and True as a limit is a misplaced flag.
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
                raise SpecError(f"MessageLimits.{name} is {value!r}; it must be an int from 1 to 2**63 - 1")


_DEFAULT_LIMITS = MessageLimits()


def pack(message: Message) -> bytes:
    """`message` as bytes, `nbytes(message)` of them. Copies the bodies once; `to_buffers` does not."""
    return b"".join(to_buffers(message))


def to_buffers(message: Message) -> list[bytes | memoryview]:
    """`message` as buffers to be sent one after the other, before any of its tensors is written again."""
    match message:
        case Push():
            numbers = (message.round, message.after, message.step, message.seen, message.samples)
            flags = FINAL * message.final | RATE * (message.rate is not None) | REPORT * (message.report is not None)
            head = _head(Push, *numbers, size=len(message.parts), flags=flags, site=message.site)
            return [head, _rate_bytes(message.rate), _report_bytes(message.report), *_part_buffers(message.parts)]
        case Call():
            return [_head(Call, message.round)]
        case Answer():
            clock = (message.version, message.round, message.step, len(message.taken), len(message.shares))
            flags = RATE * (message.rate is not None) | PACE * (message.pace is not None)
            head = _head(Answer, *clock, size=len(message.parts), flags=flags)
            told = [_rate_bytes(message.rate), _pace_bytes(message.pace), _taken_bytes(message.taken)]
            return [head, *told, *_part_buffers(message.parts), *_share_buffers(message.shares)]
        case Join():
            asks = FIRST_BASE * (message.first_base is not None)
            head = _head(Join, message.version + 1, flags=asks, site=message.site)
            return [head, _first_base_bytes(message.first_base)]
        case Welcome():
            numbers = (message.version, message.round, message.step, message.taken, message.pushed)
            flags = SNAPSHOT * (message.snapshot is not None) | PACE * (message.pace is not None)
            flags |= ENCODED * bool(message.encoded)
            head = _head(Welcome, *numbers, size=len(message.answers), flags=flags)
            answers = [buffer for answer in message.answers for buffer in to_buffers(answer)]
            snapshot = [] if message.snapshot is None else snapshot_bytes.to_buffers(message.snapshot)
            return [head, _pace_bytes(message.pace), *answers, *encoded_snapshot.to_buffers(message.encoded), *snapshot]
        case Restarted():
            return [_head(Restarted)]
        case Leave():
            return [_head(Leave, site=message.site)]
        case Plant():
            return [_head(Plant, site=message.site), *snapshot_bytes.to_buffers(message.snapshot)]


def _head(kind: type[Message], *numbers: int, size: int = 0, flags: int = 0, site: str | None = None) -> bytes:
    """The header, and the site's name if there is one."""
    name = b"" if site is None else message_header.name_bytes(site)
    return message_header.to_bytes(Header(kind, numbers, size, flags, len(name))) + name


def _rate_bytes(rate: float | None) -> bytes:
    return b"" if rate is None else _RATE.pack(_checked_rate(rate))


def _report_bytes(report: Report | None) -> bytes:
    if report is None:
        return b""
    return _REPORT.pack(report.step_seconds, report.round, report.round_seconds, report.trip_seconds)


def _pace_bytes(pace: Pace | None) -> bytes:
    return b"" if pace is None else _PACE.pack(pace.every, pace.overlap, len(pace.up)) + pace.up.encode()


def _first_base_bytes(spec: str | None) -> bytes:
    return b"" if spec is None else bytes([len(spec)]) + spec.encode()


def _taken_bytes(taken: Mapping[str, int]) -> bytes:
    found = []
    for site in sorted(taken):
        message_header.check_number(f"Answer: taken[{site!r}]", taken[site])
        name = message_header.name_bytes(site)
        found.append(_TAKEN.pack(taken[site], len(name), bytes(3)) + name)
    return b"".join(found)


def _part_buffers(parts: Sequence[Part]) -> list[bytes | memoryview]:
    found: list[bytes | memoryview] = []
    free = 0
    for part in parts:
        _check_order(part.start, free)
        free = part.start + part.payload.numel
        if free >= 2**63:
            raise RangeError(f"a part ends at element {free}; a message holds less than 2**63")
        found += [_START.pack(part.start), *wire.to_buffers(part.payload)]
    return found


def _share_buffers(shares: Sequence[Share]) -> list[bytes | memoryview]:
    found: list[bytes | memoryview] = []
    last = ("", 0)
    for share in shares:
        last = _check_share(share.site, share.round, share.weight, last)
        message_header.check_number(f"Share of {share.site!r}: round", share.round)
        name, own = message_header.name_bytes(share.site), share.parts is None
        found.append(_SHARE.pack(share.round, len(share.parts or ()), share.weight, len(name), own, bytes(2)) + name)
        found += _part_buffers(share.parts or ())
    return found


def unpack(data: bytes | bytearray | memoryview, limits: MessageLimits = _DEFAULT_LIMITS) -> Message:
    """The message in `data`, which is exactly one. Its tensors are copies and share nothing with `data`.

    Anything else raises a FrameError or a ProtocolError. What is inside a payload's body is checked
    when it is decoded.
    """
    # A read-only view makes `wire` copy the bodies, also where the caller may write to `data`.
    view = memoryview(data).cast("B").toreadonly()
    if len(view) > limits.max_bytes:
        raise SizeLimitError(
            f"a message of {len(view)} bytes; MessageLimits.max_bytes is {limits.max_bytes}; "
            "raise it if you trust the sender"
        )
    reader = _Reader(view, limits)
    message = reader.message()
    if reader.left:
        raise TrailingBytesError(f"{reader.left} bytes follow a message of {len(view) - reader.left}; wanted none")
    return message


class _Reader:
    """Takes things off the front of a message."""

    def __init__(self, view: memoryview, limits: MessageLimits) -> None:
        self._rest = view
        self._limits = limits
        self._frame_limits = wire.Limits(max_elements=limits.max_elements, max_body_bytes=limits.max_bytes)
        self._parts_left = limits.max_parts

    @property
    def left(self) -> int:
        return len(self._rest)

    def message(self) -> Message:
        head = self._head()
        if head.kind is Call:
            return Call(head.numbers[0])
        if head.kind is Restarted:
            return Restarted()
        if head.kind is Answer:
            return self._answer(head)
        if head.kind is Welcome:
            return self._welcome(head)
        site = self._name(head.name_bytes)
        if head.kind is Join:
            return Join(site, head.numbers[0] - 1, self._first_base(head))
        if head.kind is Leave:
            return Leave(site)
        if head.kind is Plant:
            return Plant(site, self._snapshot())
        round_, after, step, seen, samples = head.numbers
        rate, report = self._rate(head), self._report(head)
        parts, final = self._parts(head.size), bool(head.flags & FINAL)
        return Push(site, round_, after, step, seen, samples, parts, final, rate, report)

    def _answer(self, head: Header) -> Answer:
        version, round_, step, sites, shares = head.numbers
        rate, pace, taken = self._rate(head), self._pace(head), self._taken(sites)
        return Answer(version, round_, step, self._parts(head.size), taken, rate, pace, self._shares(shares))

    def _shares(self, count: int) -> tuple[Share, ...]:
        self._claim("shares", count, self._limits.max_sites, _SHARE.size + 1)
        found: list[Share] = []
        last = ("", 0)
        for _ in range(count):
            round_, size, weight, name_bytes, own, reserved = _SHARE.unpack(self._take(_SHARE.size, "share"))
            if own > 1 or any(reserved) or (own and size):
                raise ReservedError(
                    f"a share left out: {own}, of {size} parts, then {reserved.hex(' ')}; wanted 0 or 1, none where it "
                    "is left out, and zeros; its writer is wrong"
                )
            site = self._name(name_bytes)
            last = _check_share(site, round_, weight, last)
            found.append(Share(site, round_, weight, None if own else self._parts(size)))
        return tuple(found)

    def _welcome(self, head: Header) -> Welcome:
        version, round_, step, taken, pushed = head.numbers
        pace = self._pace(head)
        self._claim("answers", head.size, self._limits.max_parts, HEADER_BYTES)
        answers = []
        for _ in range(head.size):
            inner = self._head()
            if inner.kind is not Answer:
                raise ProtocolError(f"a {inner.kind.__name__} inside a Welcome, which holds answers only")
            answers.append(self._answer(inner))
        encoded = self._encoded() if head.flags & ENCODED else {}
        snapshot = self._snapshot() if head.flags & SNAPSHOT else None
        return Welcome(version, round_, step, taken, tuple(answers), snapshot, pushed, pace, encoded)

    def _encoded(self) -> dict[str, Payload]:
        limit = self._limits.max_parts
        found, size = encoded_snapshot.parse(self._rest, limits=self._frame_limits, max_tensors=limit)
        self._take(size, "encoded base")
        return found

    def _snapshot(self) -> dict[str, Tensor]:
        blob = self._take(self.left, "snapshot")
        return snapshot_bytes.parse(blob, max_bytes=self._limits.max_bytes, max_tensors=self._limits.max_parts)

    def _take(self, size: int, what: str) -> memoryview:
        if size > self.left:
            raise TruncatedError(f"{what}: {self.left} bytes came of {size}; the message was cut short; send it again")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def _claim(self, what: str, count: int, limit: int, least: int) -> None:
        """Refuse a count beyond the limit, or one for which there are too few bytes."""
        if count > limit:
            raise SizeLimitError(f"{count} {what}; the reader's limit is {limit}; raise it if you trust the sender")
        if count * least > self.left:
            raise TruncatedError(f"{count} {what} take {count * least} bytes or more; {self.left} came; send it again")

    def _head(self) -> Header:
        head = message_header.parse(self._rest)
        self._take(HEADER_BYTES, "header")
        return head

    def _name(self, size: int) -> str:
        if size > MAX_NAME_BYTES:
            raise SizeLimitError(f"a site name of {size} bytes; a message holds 1 to {MAX_NAME_BYTES}")
        raw = bytes(self._take(size, "site name"))
        try:
            name = raw.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"site name {raw.hex(' ')} is not UTF-8; its writer is wrong") from error
        if not name:
            raise ProtocolError("a site without a name; its writer is wrong")
        return name

    def _rate(self, head: Header) -> float | None:
        if not head.flags & RATE:
            return None
        (rate,) = _RATE.unpack(self._take(RATE_BYTES, "rate"))
        return _checked_rate(rate)

    def _report(self, head: Header) -> Report | None:
        return Report(*_REPORT.unpack(self._take(_REPORT.size, "report"))) if head.flags & REPORT else None

    def _pace(self, head: Header) -> Pace | None:
        if not head.flags & PACE:
            return None
        every, overlap, length = _PACE.unpack(self._take(_PACE.size, "pace"))
        text = bytes(self._take(length, "codec of a pace")).decode("latin-1")
        return Pace(every, overlap, text)

    def _first_base(self, head: Header) -> str | None:
        if not head.flags & FIRST_BASE:
            return None
        (length,) = self._take(LENGTH_BYTES, "length of a codec")
        return bytes(self._take(length, "codec of a first base")).decode("latin-1")

    def _taken(self, sites: int) -> dict[str, int]:
        self._claim("sites", sites, self._limits.max_sites, _LEAST_TAKEN_BYTES)
        taken: dict[str, int] = {}
        last = ""
        for _ in range(sites):
            round_, name_bytes, reserved = _TAKEN.unpack(self._take(_TAKEN.size, "site taken"))
            if any(reserved):
                raise ReservedError(f"site taken: came {reserved.hex(' ')}; wanted zeros; its writer is wrong")
            site = self._name(name_bytes)
            if site <= last:
                raise ProtocolError(f"site {site!r} after {last!r}; the sites taken are sorted and each comes once")
            taken[site], last = round_, site
        return taken

    def _parts(self, count: int) -> tuple[Part, ...]:
        self._claim("parts", count, self._parts_left, _LEAST_PART_BYTES)
        self._parts_left -= count
        parts, free = [], 0
        for _ in range(count):
            (start,) = _START.unpack(self._take(START_BYTES, "start of a part"))
            _check_order(start, free)
            payload, size = wire.parse_prefix(self._rest, limits=self._frame_limits)
            self._take(size, "frame")
            free = start + payload.numel
            if free > self._limits.max_elements:
                raise SizeLimitError(
                    f"a part from {start} up to {free}; MessageLimits.max_elements is {self._limits.max_elements}; "
                    "both ends must train the same model"
                )
            parts.append(Part(start, payload))
        return tuple(parts)


def _checked_rate(rate: float) -> float:
    if not 0 <= rate < math.inf:
        raise ProtocolError(f"a learning rate of {rate}; it must be finite and not negative; its sender is wrong")
    return rate


def _check_share(site: str, round_: int, weight: float, last: tuple[str, int]) -> tuple[str, int]:
    if not 0 <= weight < math.inf:
        raise ProtocolError(f"{site!r}'s push weighs {weight}; it must be finite and not negative; its sender is wrong")
    if (site, round_) <= last:
        raise ProtocolError(f"the push {round_} of {site!r} after {last[1]} of {last[0]!r}; shares are sorted")
    return site, round_


def _check_order(start: int, free: int) -> None:
    if start < free:
        raise ProtocolError(f"a part starts at {start}, before {free}, where the last ended; parts come in order")
