"""Messages between sites and the global server as bytes, parsed as if a stranger had sent them.

    header (32 bytes)      every message
    site's name            Push, Join, Leave, InitModel
    download codec         Join
    rate (8 bytes)         Push, RoundResult
    report                 Push
    sync schedule          RoundResult, JoinReply
    included sites         RoundResult
    segments               Push, RoundResult: a start and a frame each
    relayed pushes         RoundResult
    round results          JoinReply
    encoded tensors        JoinReply
    snapshot               JoinReply, InitModel: safetensors

`docs/wire-format.md` gives every field and the order of the checks. The length is that of `messages.nbytes`, to the
byte. A count or a length is only believed after it was compared with a limit and with the bytes at hand. There is one
way to write a message: bytes that are accepted are exactly those that `pack` makes of what was read, so nothing can
be hidden in them.

Left out: a checksum of what is not in a frame, and proof of who sent it. Both are the transport's task (TLS).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightgrad import wire
from weightgrad.errors import RangeError, SizeLimitError, TrailingBytesError
from weightgrad.wire import encoded_snapshot, message_header, snapshot_bytes
from weightgrad.wire.message_fields import (
    INCLUDED_FIELD,
    RATE_FIELD,
    RELAYED_FIELD,
    REPORT_FIELD,
    SCHEDULE_FIELD,
    START_FIELD,
    check_relayed,
    check_segment_order,
    checked_rate,
)
from weightgrad.wire.message_header import DOWNLOAD_CODEC, ENCODED, FINAL, RATE, REPORT, SCHEDULE, SNAPSHOT, Header
from weightgrad.wire.message_reader import MessageLimits, MessageReader
from weightgrad.wire.messages import (
    InitModel,
    Join,
    JoinReply,
    Leave,
    Message,
    Push,
    RelayedPush,
    RoundRequest,
    RoundResult,
    Segment,
    ServerRestarted,
)
from weightgrad.wire.sync_schedule import Report, SyncSchedule

__all__ = ["MessageLimits", "pack", "to_buffers", "unpack"]

_DEFAULT_LIMITS = MessageLimits()


def pack(message: Message) -> bytes:
    """Pack a message into bytes, `nbytes(message)` of them. Copies the bodies once; `to_buffers` does not.

    Raises:
        RangeError: a number or a name does not fit the format.
        ProtocolError: segments or relayed pushes are out of order.
    """
    return b"".join(to_buffers(message))


def to_buffers(message: Message) -> list[bytes | memoryview]:
    """Pack a message into buffers, to be sent one after the other before any of its tensors is written again.

    Raises:
        RangeError: a number or a name does not fit the format.
        ProtocolError: segments or relayed pushes are out of order.
    """
    match message:
        case Push():
            numbers = (message.round, message.after, message.step, message.seen, message.samples)
            flags = FINAL * message.final | RATE * (message.rate is not None) | REPORT * (message.report is not None)
            head = _head(Push, *numbers, size=len(message.segments), flags=flags, site=message.site)
            return [head, _rate_bytes(message.rate), _report_bytes(message.report), *_segment_buffers(message.segments)]
        case RoundRequest():
            return [_head(RoundRequest, message.round)]
        case RoundResult():
            clock = (message.version, message.round, message.step, len(message.included), len(message.relayed))
            flags = RATE * (message.rate is not None) | SCHEDULE * (message.schedule is not None)
            head = _head(RoundResult, *clock, size=len(message.segments), flags=flags)
            fields = [_rate_bytes(message.rate), _schedule_bytes(message.schedule), _included_bytes(message.included)]
            return [head, *fields, *_segment_buffers(message.segments), *_relayed_buffers(message.relayed)]
        case Join():
            flags = DOWNLOAD_CODEC * (message.download_codec is not None)
            head = _head(Join, message.version + 1, flags=flags, site=message.site)
            return [head, _download_codec_bytes(message.download_codec)]
        case JoinReply():
            numbers = (message.version, message.round, message.step, message.included, message.pushed)
            flags = SNAPSHOT * (message.snapshot is not None) | SCHEDULE * (message.schedule is not None)
            flags |= ENCODED * bool(message.encoded)
            head = _head(JoinReply, *numbers, size=len(message.results), flags=flags)
            results = [buffer for result in message.results for buffer in to_buffers(result)]
            snapshot = [] if message.snapshot is None else snapshot_bytes.to_buffers(message.snapshot)
            return [
                head,
                _schedule_bytes(message.schedule),
                *results,
                *encoded_snapshot.to_buffers(message.encoded),
                *snapshot,
            ]
        case ServerRestarted():
            return [_head(ServerRestarted)]
        case Leave():
            return [_head(Leave, site=message.site)]
        case InitModel():
            return [_head(InitModel, site=message.site), *snapshot_bytes.to_buffers(message.snapshot)]


def _head(kind: type[Message], *numbers: int, size: int = 0, flags: int = 0, site: str | None = None) -> bytes:
    """The header, and the site's name if there is one."""
    name = b"" if site is None else message_header.name_bytes(site)
    return message_header.to_bytes(Header(kind, numbers, size, flags, len(name))) + name


def _rate_bytes(rate: float | None) -> bytes:
    return b"" if rate is None else RATE_FIELD.pack(checked_rate(rate))


def _report_bytes(report: Report | None) -> bytes:
    if report is None:
        return b""
    return REPORT_FIELD.pack(report.step_seconds, report.round, report.round_seconds, report.trip_seconds)


def _schedule_bytes(schedule: SyncSchedule | None) -> bytes:
    return (
        b""
        if schedule is None
        else SCHEDULE_FIELD.pack(schedule.every, schedule.overlap, len(schedule.up)) + schedule.up.encode()
    )


def _download_codec_bytes(spec: str | None) -> bytes:
    return b"" if spec is None else bytes([len(spec)]) + spec.encode()


def _included_bytes(included: Mapping[str, int]) -> bytes:
    found = []
    for site in sorted(included):
        message_header.check_number(f"RoundResult: included[{site!r}]", included[site])
        name = message_header.name_bytes(site)
        found.append(INCLUDED_FIELD.pack(included[site], len(name), bytes(3)) + name)
    return b"".join(found)


def _segment_buffers(segments: Sequence[Segment]) -> list[bytes | memoryview]:
    found: list[bytes | memoryview] = []
    end = 0
    for segment in segments:
        check_segment_order(segment.start, end)
        end = segment.start + segment.payload.numel
        if end >= 2**63:
            raise RangeError(f"a segment ends at element {end}; a message holds less than 2**63")
        found += [START_FIELD.pack(segment.start), *wire.to_buffers(segment.payload)]
    return found


def _relayed_buffers(relayed: Sequence[RelayedPush]) -> list[bytes | memoryview]:
    found: list[bytes | memoryview] = []
    last = ("", 0)
    for push in relayed:
        last = check_relayed(push.site, push.round, push.weight, last)
        message_header.check_number(f"RelayedPush of {push.site!r}: round", push.round)
        name, left_out = message_header.name_bytes(push.site), push.segments is None
        count = len(push.segments or ())
        found.append(RELAYED_FIELD.pack(push.round, count, push.weight, len(name), left_out, bytes(2)) + name)
        found += _segment_buffers(push.segments or ())
    return found


def unpack(data: bytes | bytearray | memoryview, limits: MessageLimits = _DEFAULT_LIMITS) -> Message:
    """Parse exactly one message. Its tensors are copies and share nothing with `data`.

    The body of a payload is checked when it is decoded, not here.

    Args:
        data: the bytes of the message.
        limits: what the reader accepts.

    Returns:
        The message.

    Raises:
        FrameError: the bytes are not a message, are damaged, or exceed a limit.
        ProtocolError: the bytes are a message with contents that no correct sender writes.
    """
    # A read-only view makes `wire` copy the bodies, also where the caller may write to `data`.
    view = memoryview(data).cast("B").toreadonly()
    if len(view) > limits.max_bytes:
        raise SizeLimitError(
            f"a message of {len(view)} bytes; MessageLimits.max_bytes is {limits.max_bytes}; "
            "raise it if you trust the sender"
        )
    reader = MessageReader(view, limits)
    message = reader.message()
    if reader.left:
        raise TrailingBytesError(f"{reader.left} bytes follow a message of {len(view) - reader.left}; wanted none")
    return message
