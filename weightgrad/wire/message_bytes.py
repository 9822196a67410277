"""Messages between sites and the global server as bytes, parsed as if a stranger had sent them.

    header (32 bytes)      every message
    site's name            Push, PushPart, Holding, Join, Leave, FinalPart
    intervals              Holding
    name of a vector       ModelPart
    download codec         Join
    digest (8 bytes)       Join
    rate (8 bytes)         Push, RoundResult
    options                Push, RoundResult
    report                 Push
    sync schedule          RoundResult, JoinReply
    included sites         RoundResult; of a Waiting, those that are missing
    segments               PushPart, ResultPart, ModelPart: where it lies and a frame, each
    relayed pushes         RoundResult (without segments), ResultPart
    scalars                JoinReply: safetensors
    buffers                Push, RoundResult: safetensors
    data                   FinalPart

`docs/wire-format.md` gives every field and the order of the checks. The length is that of `message_sizes.nbytes`, to
the byte. A count or a length is only believed after it was compared with a limit and with the bytes at hand. There is
one way to write a message: bytes that are accepted are exactly those that `pack` makes of what was read, so nothing can
be hidden in them.

Left out: a checksum of what is not in a frame, and proof of who sent it. Both are the transport's task (TLS).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from weightgrad import wire
from weightgrad.errors import ProtocolError, RangeError, SizeLimitError, TrailingBytesError
from weightgrad.wire import message_header, snapshot_bytes
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_fields import (
    DIGEST_FIELD,
    HELD_SPAN_FIELD,
    INCLUDED_FIELD,
    OPTIONS_FIELD,
    RATE_FIELD,
    RELAYED_FIELD,
    REPORT_FIELD,
    SCHEDULE_FIELD,
    SEVERAL,
    SPAN_FIELD,
    START_FIELD,
    check_disjoint,
    check_relayed,
    checked_options,
    checked_rate,
)
from weightgrad.wire.message_header import (
    APPROXIMATE,
    BUFFERS,
    DIGEST,
    DOWNLOAD,
    DOWNLOAD_CODEC,
    FINAL,
    LAST,
    OPTIONS,
    PAUSED,
    RATE,
    REPORT,
    SCHEDULE,
    TRAINING,
    Header,
)
from weightgrad.wire.message_reader import MessageLimits, MessageReader
from weightgrad.wire.messages import (
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
    RelayedPush,
    ResultPart,
    RoundRequest,
    RoundResult,
    Segment,
    ServerRestarted,
    Waiting,
)
from weightgrad.wire.sync_schedule import MAX_TEXT_BYTES, Report, SyncSchedule

__all__ = ["MessageLimits", "pack", "to_buffers", "unpack"]

_DEFAULT_LIMITS = MessageLimits()


def pack(message: Message) -> bytes:
    """Pack a message into bytes, `nbytes(message)` of them. Copies the bodies once; `to_buffers` does not.

    Raises:
        RangeError: a number or a name does not fit the format.
        ProtocolError: segments or relayed pushes are out of order, or a control message holds values.
    """
    return b"".join(to_buffers(message))


def to_buffers(message: Message) -> list[bytes | memoryview]:
    """Pack a message into buffers, to be sent one after the other before any of its tensors is written again.

    Raises:
        RangeError: a number or a name does not fit the format.
        ProtocolError: segments or relayed pushes are out of order, or a control message holds values.
    """
    numbers: tuple[int, ...]
    match message:
        case Push():
            _check_empty(message, message.segments)
            numbers = (message.round, message.after, message.step, message.seen, message.samples)
            flags = FINAL * message.final | RATE * (message.rate is not None) | REPORT * (message.report is not None)
            flags |= BUFFERS * bool(message.buffers) | OPTIONS * bool(message.options)
            head = _head(Push, *numbers, flags=flags, site=message.site)
            fields = [_rate_bytes(message.rate), _options_bytes(message.options), _report_bytes(message.report)]
            return [head, *fields, *_buffers(message.buffers)]
        case PushPart():
            numbers, flags = (message.round, message.rank), LAST * message.last
            head = _head(PushPart, *numbers, size=len(message.segments), flags=flags, site=message.site)
            return [head, *_segment_buffers(message.segments)]
        case RoundRequest():
            return [_head(RoundRequest, message.round)]
        case RoundResult():
            _check_empty(message, message.moves)
            clock = (message.version, message.round, message.step, len(message.included), len(message.relayed))
            flags = RATE * (message.rate is not None) | SCHEDULE * (message.schedule is not None)
            flags |= BUFFERS * bool(message.buffers) | OPTIONS * bool(message.options)
            fields = [_rate_bytes(message.rate), _options_bytes(message.options)]
            fields += [_schedule_bytes(message.schedule), _included_bytes(message.included)]
            values = [*_relayed_buffers(message.relayed), *_buffers(message.buffers)]
            return [_head(RoundResult, *clock, flags=flags), *fields, *values]
        case ResultPart():
            numbers, flags = (message.version, len(message.relayed)), LAST * message.last
            head = _head(ResultPart, *numbers, size=len(message.segments), flags=flags)
            return [head, *_segment_buffers(message.segments), *_relayed_buffers(message.relayed)]
        case ModelPart():
            head = _head(ModelPart, message.version, size=len(message.segments), flags=LAST * message.last)
            return [head, _vector_bytes(message.vector), *_segment_buffers(message.segments)]
        case Holding():
            numbers = (message.rank, message.ranks, message.epoch)
            head = _head(Holding, *numbers, size=len(message.held.spans), site=message.site)
            return [head, _held_bytes(message.held)]
        case Join():
            flags = DOWNLOAD_CODEC * (message.download_codec is not None) | DIGEST * (message.digest is not None)
            flags |= TRAINING * message.training
            head = _head(Join, message.version + 1, message.epoch, flags=flags, site=message.site)
            return [head, _download_codec_bytes(message.download_codec), _digest_bytes(message.digest)]
        case JoinReply():
            _check_empty(message, (*message.results, *message.parts))
            numbers = (message.version, message.round, message.step, message.included, message.pushed)
            flags = DOWNLOAD * message.downloads | SCHEDULE * (message.schedule is not None)
            flags |= APPROXIMATE * message.approximate
            scalars = snapshot_bytes.to_buffers(message.scalars) if message.downloads else []
            return [_head(JoinReply, *numbers, flags=flags), _schedule_bytes(message.schedule), *scalars]
        case ServerRestarted():
            return [_head(ServerRestarted)]
        case Waiting():
            numbers = (message.round, message.seconds, len(message.missing))
            return [_head(Waiting, *numbers), _included_bytes(message.missing)]
        case Pause():
            return [_head(Pause, flags=PAUSED * message.paused)]
        case Leave():
            return [_head(Leave, site=message.site)]
        case FinalPart():
            numbers = (message.place, message.parts)
            return [_head(FinalPart, *numbers, size=len(message.data), site=message.site), message.data]


def _check_empty(message: Message, values: Sequence[object]) -> None:
    if values:
        raise ProtocolError(
            f"a {type(message).__name__} with values is not one message: send it without them, and them as parts "
            "(wire/message_parts.py)"
        )


def _head(kind: type[Message], *numbers: int, size: int = 0, flags: int = 0, site: str | None = None) -> bytes:
    """The header, and the site's name if there is one."""
    name = b"" if site is None else message_header.name_bytes(site)
    return message_header.to_bytes(Header(kind, numbers, size, flags, len(name))) + name


def _rate_bytes(rate: float | None) -> bytes:
    return b"" if rate is None else RATE_FIELD.pack(checked_rate(rate))


def _options_bytes(options: Sequence[float]) -> bytes:
    if not options:
        return b""
    return OPTIONS_FIELD.pack(len(checked_options(options))) + b"".join(RATE_FIELD.pack(one) for one in options)


def _report_bytes(report: Report | None) -> bytes:
    if report is None:
        return b""
    message_header.check_number("Report: round", report.round)
    return REPORT_FIELD.pack(report.step_seconds, report.round, report.round_seconds, report.trip_seconds)


def _schedule_bytes(schedule: SyncSchedule | None) -> bytes:
    return (
        b""
        if schedule is None
        else SCHEDULE_FIELD.pack(schedule.every, schedule.overlap, len(schedule.up)) + schedule.up.encode()
    )


def _buffers(buffers: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    return snapshot_bytes.to_buffers(buffers) if buffers else []


def _download_codec_bytes(spec: str | None) -> bytes:
    return b"" if spec is None else bytes([len(spec)]) + spec.encode()


def _digest_bytes(digest: int | None) -> bytes:
    if digest is not None and not 0 <= digest < 2**64:
        raise RangeError(f"the digest of a model is {digest}; a message holds 0 to 2**64 - 1")
    return b"" if digest is None else DIGEST_FIELD.pack(digest)


def _held_bytes(held: Intervals) -> bytes:
    if held.end >= 2**63:
        raise RangeError(f"a rank holds elements up to {held.end}; a message holds less than 2**63")
    return b"".join(HELD_SPAN_FIELD.pack(start, stop - start) for start, stop in held.spans)


def _vector_bytes(name: str) -> bytes:
    try:
        data = name.encode()
    except UnicodeEncodeError as error:
        raise RangeError(f"the name of a vector, {name[:40]!r}, cannot be written in UTF-8; rename it") from error
    if not 1 <= len(data) <= MAX_TEXT_BYTES:
        raise RangeError(
            f"the name of a vector, {name[:40]!r}, has {len(data)} bytes; a message holds 1 to {MAX_TEXT_BYTES}"
        )
    return bytes([len(data)]) + data


def _included_bytes(included: Mapping[str, int]) -> bytes:
    found = []
    for site in sorted(included):
        message_header.check_number(f"RoundResult or Waiting: included[{site!r}]", included[site])
        name = message_header.name_bytes(site)
        found.append(INCLUDED_FIELD.pack(included[site], len(name), bytes(3)) + name)
    return b"".join(found)


def _segment_buffers(segments: Sequence[Segment]) -> list[bytes | memoryview]:
    found: list[bytes | memoryview] = []
    check_disjoint(segments)
    for segment in segments:
        if segment.end >= 2**63:
            raise RangeError(f"a segment ends at element {segment.end}; a message holds less than 2**63")
        if segment.spans:
            found.append(START_FIELD.pack(SEVERAL | len(segment.spans)))
            found.append(b"".join(_span_bytes(start, stop - start) for start, stop in segment.spans))
        else:
            found.append(START_FIELD.pack(segment.start))
        found += wire.to_buffers(segment.payload)
    return found


def _span_bytes(start: int, length: int) -> bytes:
    message_header.check_number(f"the length of the interval of a segment at {start}", length)
    return SPAN_FIELD.pack(start, length)


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
