"""The fields that follow a message's header: their layout, and the checks that writer and reader share."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from weightgrad.errors import ProtocolError
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import MAX_OPTIONS, Segment

RATE_FIELD = struct.Struct("<d")
OPTIONS_FIELD = struct.Struct("<H")
DIGEST_FIELD = struct.Struct("<Q")
REPORT_FIELD = struct.Struct("<dIdd")
SCHEDULE_FIELD = struct.Struct("<IIB")
START_FIELD = struct.Struct("<Q")
SPAN_FIELD = struct.Struct("<QI")  # start, length
HELD_SPAN_FIELD = struct.Struct("<QQ")  # start, length
SEVERAL = 1 << 63  # in the start of a segment: the other bits count the intervals that follow
INCLUDED_FIELD = struct.Struct("<IB3s")  # round, name_len, reserved
RELAYED_FIELD = struct.Struct("<IIdBB2s")  # round, segments, weight, name_len, left out, reserved


def checked_rate(rate: float) -> float:
    """The learning rate, or ProtocolError if it is negative or not finite."""
    if not 0 <= rate < math.inf:
        raise ProtocolError(f"a learning rate of {rate}; it must be finite and not negative; its sender is wrong")
    return rate


def checked_options(options: Sequence[float]) -> tuple[float, ...]:
    """Numbers among an optimizer's options, or ProtocolError if one is not finite or there are too many."""
    if not 0 < len(options) <= MAX_OPTIONS or not all(math.isfinite(one) for one in options):
        raise ProtocolError(
            f"{len(options)} options of an optimizer; wanted 1 to {MAX_OPTIONS}, all finite; its sender is wrong"
        )
    return tuple(options)


def check_relayed(site: str, round_: int, weight: float, last: tuple[str, int]) -> tuple[str, int]:
    """Check a relayed push against the one before it.

    Args:
        site: the site that pushed.
        round_: the round of the push.
        weight: its weight in the mean.
        last: the (site, round) of the relayed push before it.

    Returns:
        (site, round_), to check the next one against.

    Raises:
        ProtocolError: the weight is negative or not finite, or the pushes are not sorted.
    """
    if not 0 <= weight < math.inf:
        raise ProtocolError(f"{site!r}'s push weighs {weight}; it must be finite and not negative; its sender is wrong")
    if (site, round_) <= last:
        raise ProtocolError(
            f"the push of {site!r} for round {round_} after that of {last[0]!r} for round {last[1]}; "
            "relayed pushes are sorted by site and round"
        )
    return site, round_


def check_disjoint(segments: Sequence[Segment]) -> None:
    """Raise ProtocolError unless segments are sorted by their first elements and no element is in two of them."""
    end = start = 0
    interleave = False
    for segment in segments:
        if segment.start < start:
            raise ProtocolError(
                f"a segment starts at {segment.start}, before {start}, where the last one started; they come in order"
            )
        start = segment.start
        interleave = interleave or segment.start < end  # between the intervals of another one, or overlapping it
        end = max(end, segment.end)
    if interleave:  # once for all of them: a stranger chose how many there are
        Intervals.of(span for segment in segments for span in segment.intervals.spans)
