"""Parsing a message as if a stranger had sent it: nothing is allocated for a count or length that was not checked."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weightgrad import wire
from weightgrad.errors import ProtocolError, ReservedError, SizeLimitError, SpecError, TruncatedError
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
    MAX_NAME_BYTES,
    OPTIONS,
    PAUSED,
    RATE,
    REPORT,
    SCHEDULE,
    TRAINING,
    Header,
)
from weightgrad.wire.messages import (
    DIGEST_BYTES,
    HEADER_BYTES,
    HELD_SPAN_BYTES,
    LENGTH_BYTES,
    RATE_BYTES,
    SPAN_BYTES,
    START_BYTES,
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
from weightgrad.wire.sync_schedule import Report, SyncSchedule

_LEAST_INCLUDED_BYTES = INCLUDED_FIELD.size + 1
_LEAST_SEGMENT_BYTES = START_BYTES + 32


@dataclass(frozen=True, kw_only=True)
class MessageLimits:
    """What a reader accepts from a stranger.

    Attributes:
        max_bytes: the size of a whole message.
        max_segments: segments of a message, and tensors among the scalars of a JoinReply.
        max_intervals: intervals of a message, summed over the segments that have several.
        max_elements: where the last segment may end. A receiver that will decode sets it to the length of its
            vector, because kernels do not check where that ends.
        max_sites: the pushes that one round result names.
    """

    max_bytes: int = 2**32
    max_segments: int = 2**16
    max_intervals: int = 2**20
    max_elements: int = 2**32
    max_sites: int = 2**12

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            # bool is an int in Python, and True as a limit is a misplaced flag.
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
                raise SpecError(f"MessageLimits.{name} is {value!r}; it must be an int from 1 to 2**63 - 1")


class MessageReader:
    """Reads a message from front to back."""

    def __init__(self, view: memoryview, limits: MessageLimits) -> None:
        self._rest = view
        self._limits = limits
        self._frame_limits = wire.Limits(max_elements=limits.max_elements, max_body_bytes=limits.max_bytes)
        self._segments_left = limits.max_segments
        self._intervals_left = limits.max_intervals

    @property
    def left(self) -> int:
        """Bytes that have not been read."""
        return len(self._rest)

    def message(self) -> Message:
        """The message that starts what is left."""
        head = self._head()
        if head.kind is RoundRequest:
            return RoundRequest(round=head.numbers[0])
        if head.kind is ServerRestarted:
            return ServerRestarted()
        if head.kind is Waiting:
            round_, seconds, sites = head.numbers
            return Waiting(round=round_, seconds=seconds, missing=self._included(sites))
        if head.kind is Pause:
            return Pause(paused=bool(head.flags & PAUSED))
        if head.kind is RoundResult:
            return self._result(head)
        if head.kind is JoinReply:
            return self._reply(head)
        if head.kind is ResultPart:
            version, relayed = head.numbers
            segments, pushes = self._segments(head.size), self._relayed(relayed, values=True)
            return ResultPart(version=version, segments=segments, last=bool(head.flags & LAST), relayed=pushes)
        if head.kind is ModelPart:
            vector = self._vector()
            segments = self._segments(head.size)
            return ModelPart(version=head.numbers[0], vector=vector, segments=segments, last=bool(head.flags & LAST))
        site = self._name(head.name_bytes)
        if head.kind is PushPart:
            round_, rank = head.numbers
            segments = self._segments(head.size)
            return PushPart(site=site, round=round_, rank=rank, segments=segments, last=bool(head.flags & LAST))
        if head.kind is Holding:
            rank, ranks, epoch = head.numbers
            return Holding(site=site, rank=rank, ranks=ranks, epoch=epoch, held=self._held(head.size))
        if head.kind is Join:
            version, epoch = head.numbers
            codec, digest = self._download_codec(head), self._digest(head)
            training = bool(head.flags & TRAINING)
            return Join(
                site=site, version=version - 1, epoch=epoch, digest=digest, download_codec=codec, training=training
            )
        if head.kind is Leave:
            return Leave(site=site)
        if head.kind is FinalPart:
            place, parts = head.numbers
            return FinalPart(site=site, place=place, parts=parts, data=bytes(self._take(head.size, "data")))
        round_, after, step, seen, samples = head.numbers
        rate, options, report = self._rate(head), self._options(head), self._report(head)
        return Push(
            site=site,
            round=round_,
            after=after,
            step=step,
            seen=seen,
            samples=samples,
            final=bool(head.flags & FINAL),
            rate=rate,
            options=options,
            report=report,
            buffers=self._buffers(head),
        )

    def _result(self, head: Header) -> RoundResult:
        version, round_, step, sites, relayed = head.numbers
        rate, options = self._rate(head), self._options(head)
        schedule, included = self._schedule(head), self._included(sites)
        return RoundResult(
            version=version,
            round=round_,
            step=step,
            included=included,
            rate=rate,
            options=options,
            schedule=schedule,
            relayed=self._relayed(relayed, values=False),
            buffers=self._buffers(head),
        )

    def _relayed(self, count: int, *, values: bool) -> tuple[RelayedPush, ...]:
        self._claim("relayed pushes", count, self._limits.max_sites, RELAYED_FIELD.size + 1)
        found: list[RelayedPush] = []
        last = ("", 0)
        for _ in range(count):
            fields = RELAYED_FIELD.unpack(self._take(RELAYED_FIELD.size, "relayed push"))
            round_, size, weight, name_bytes, left_out, reserved = fields
            if left_out > 1 or any(reserved) or (left_out and size):
                raise ReservedError(
                    f"a relayed push with left out = {left_out}, {size} segments and reserved bytes "
                    f"{reserved.hex(' ')}; wanted 0 or 1, no segments with 1, and zeros; its writer is wrong"
                )
            if size and not values:
                raise ProtocolError(
                    f"a RoundResult with {size} segments of a relayed push, which come in parts; its writer is wrong"
                )
            site = self._name(name_bytes)
            last = check_relayed(site, round_, weight, last)
            segments = None if left_out else self._segments(size)
            found.append(RelayedPush(site=site, round=round_, weight=weight, segments=segments))
        return tuple(found)

    def _reply(self, head: Header) -> JoinReply:
        version, round_, step, included, pushed = head.numbers
        schedule, downloads = self._schedule(head), bool(head.flags & DOWNLOAD)
        return JoinReply(
            version=version,
            round=round_,
            step=step,
            included=included,
            pushed=pushed,
            schedule=schedule,
            downloads=downloads,
            approximate=bool(head.flags & APPROXIMATE),
            scalars=self._tensors("scalars") if downloads else {},
        )

    def _tensors(self, what: str) -> dict[str, Tensor]:
        """Named tensors, which are the rest of the message."""
        blob = self._take(self.left, what)
        return snapshot_bytes.parse(blob, max_bytes=self._limits.max_bytes, max_tensors=self._limits.max_segments)

    def _buffers(self, head: Header) -> dict[str, Tensor]:
        if not head.flags & BUFFERS:
            return {}
        found = self._tensors("buffers")
        if not found:
            raise ProtocolError("buffers are announced, and there is none; its writer is wrong")
        return found

    def _vector(self) -> str:
        (length,) = self._take(LENGTH_BYTES, "length of a name")
        raw = bytes(self._take(length, "name of a vector"))
        try:
            name = raw.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"the name of a vector, {raw.hex(' ')}, is not UTF-8; its writer is wrong") from error
        if not name:
            raise ProtocolError("a vector without a name; its writer is wrong")
        return name

    def _take(self, size: int, what: str) -> memoryview:
        if size > self.left:
            raise TruncatedError(f"{what}: {self.left} bytes came of {size}; the message was cut short; send it again")
        front, self._rest = self._rest[:size], self._rest[size:]
        return front

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
        (rate,) = RATE_FIELD.unpack(self._take(RATE_BYTES, "rate"))
        return checked_rate(rate)

    def _options(self, head: Header) -> tuple[float, ...]:
        if not head.flags & OPTIONS:
            return ()
        (count,) = OPTIONS_FIELD.unpack(self._take(OPTIONS_FIELD.size, "count of options"))
        numbers = self._take(RATE_BYTES * count, "options")
        return checked_options([one for (one,) in RATE_FIELD.iter_unpack(numbers)])

    def _report(self, head: Header) -> Report | None:
        if not head.flags & REPORT:
            return None
        step_seconds, round_, round_seconds, trip_seconds = REPORT_FIELD.unpack(self._take(REPORT_FIELD.size, "report"))
        return Report(step_seconds, round_, round_seconds, trip_seconds)

    def _schedule(self, head: Header) -> SyncSchedule | None:
        if not head.flags & SCHEDULE:
            return None
        every, overlap, length = SCHEDULE_FIELD.unpack(self._take(SCHEDULE_FIELD.size, "sync schedule"))
        text = bytes(self._take(length, "codec of a sync schedule")).decode("latin-1")
        return SyncSchedule(every=every, overlap=overlap, up=text)

    def _download_codec(self, head: Header) -> str | None:
        if not head.flags & DOWNLOAD_CODEC:
            return None
        (length,) = self._take(LENGTH_BYTES, "length of a codec")
        return bytes(self._take(length, "codec of a download")).decode("latin-1")

    def _digest(self, head: Header) -> int | None:
        if not head.flags & DIGEST:
            return None
        (found,) = DIGEST_FIELD.unpack(self._take(DIGEST_BYTES, "digest"))
        return int(found)

    def _included(self, sites: int) -> dict[str, int]:
        self._claim("included sites", sites, self._limits.max_sites, _LEAST_INCLUDED_BYTES)
        included: dict[str, int] = {}
        last = ""
        for _ in range(sites):
            round_, name_bytes, reserved = INCLUDED_FIELD.unpack(self._take(INCLUDED_FIELD.size, "included site"))
            if any(reserved):
                raise ReservedError(f"included site: came {reserved.hex(' ')}; wanted zeros; its writer is wrong")
            site = self._name(name_bytes)
            if site <= last:
                raise ProtocolError(f"site {site!r} after {last!r}; included sites are sorted and each comes once")
            included[site], last = round_, site
        return included

    def _segments(self, count: int) -> tuple[Segment, ...]:
        self._claim("segments", count, self._segments_left, _LEAST_SEGMENT_BYTES)
        self._segments_left -= count
        segments = []
        for _ in range(count):
            intervals = self._intervals()
            payload, size = wire.parse_prefix(self._rest, limits=self._frame_limits)
            self._take(size, "frame")
            segment = Segment(intervals, payload) if isinstance(intervals, int) else Segment.at(intervals, payload)
            if segment.end > self._limits.max_elements:
                raise SizeLimitError(
                    f"a segment from {segment.start} up to {segment.end}; MessageLimits.max_elements is "
                    f"{self._limits.max_elements}; both ends must train the same model"
                )
            segments.append(segment)
        check_disjoint(segments)
        return tuple(segments)

    def _held(self, count: int) -> Intervals:
        self._claim("intervals", count, self._limits.max_intervals, HELD_SPAN_BYTES)
        raw = self._take(count * HELD_SPAN_BYTES, "intervals")
        held = Intervals(tuple((start, start + length) for start, length in HELD_SPAN_FIELD.iter_unpack(raw)))
        if held.end > self._limits.max_elements:
            raise SizeLimitError(
                f"a rank that holds elements up to {held.end}; MessageLimits.max_elements is "
                f"{self._limits.max_elements}; both ends must train the same model"
            )
        return held

    def _intervals(self) -> int | Intervals:
        """Where a segment lies: where its only interval starts, or all of its intervals."""
        (start,) = START_FIELD.unpack(self._take(START_BYTES, "start of a segment"))
        if not start & SEVERAL:
            return int(start)
        count = start & ~SEVERAL
        self._claim("intervals", count, self._intervals_left, SPAN_BYTES)
        self._intervals_left -= count
        raw = self._take(count * SPAN_BYTES, "intervals of a segment")
        found = Intervals(tuple((first, first + length) for first, length in SPAN_FIELD.iter_unpack(raw)))
        if count < 2:
            raise ProtocolError(f"a segment of {count} intervals written as several; its writer is wrong")
        return found
