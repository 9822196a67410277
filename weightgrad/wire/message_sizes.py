"""The exact sizes of messages on the wire, without packing them."""

from __future__ import annotations

from weightgrad.wire import snapshot_bytes
from weightgrad.wire.message_parts import cut_push, cut_result
from weightgrad.wire.messages import (
    DIGEST_BYTES,
    HEADER_BYTES,
    HELD_SPAN_BYTES,
    LENGTH_BYTES,
    OPTIONS_BYTES,
    RATE_BYTES,
    RELAYED_BYTES,
    START_BYTES,
    FinalPart,
    Holding,
    Join,
    JoinReply,
    Leave,
    Message,
    ModelPart,
    Push,
    PushPart,
    ResultPart,
    RoundResult,
    Waiting,
    segments_bytes,
)
from weightgrad.wire.sync_schedule import REPORT_BYTES


def nbytes(message: Message) -> int:
    """The size of a message on the wire, without packing it.

    A push, a round result or a JoinReply with values counts with its parts, as one rank that holds everything sends or
    gets them.
    """
    size = HEADER_BYTES
    if isinstance(message, Push | PushPart | Holding | Join | Leave | FinalPart):
        size += len(message.site.encode())
    if isinstance(message, Push | RoundResult):
        size += 0 if message.rate is None else RATE_BYTES
        size += OPTIONS_BYTES + RATE_BYTES * len(message.options) if message.options else 0
        size += snapshot_bytes.nbytes(message.buffers) if message.buffers else 0
    if isinstance(message, Push):
        size += 0 if message.report is None else REPORT_BYTES
        if message.segments:
            size += sum(nbytes(part) for part in cut_push(message.site, message.round, 0, message.segments))
    if isinstance(message, RoundResult | JoinReply):
        size += 0 if message.schedule is None else message.schedule.nbytes
    if isinstance(message, RoundResult):
        size += sum(START_BYTES + len(site.encode()) for site in message.included)
        size += sum(RELAYED_BYTES + len(push.site.encode()) for push in message.relayed)
        if message.moves:
            size += sum(nbytes(part) for part in cut_result(message))
    if isinstance(message, Waiting):
        size += sum(START_BYTES + len(site.encode()) for site in message.missing)
    if isinstance(message, PushPart | ResultPart | ModelPart):
        size += segments_bytes(message.segments)
    if isinstance(message, Holding):
        size += HELD_SPAN_BYTES * len(message.held.spans)
    if isinstance(message, ResultPart):
        size += sum(RELAYED_BYTES + len(push.site.encode()) for push in message.relayed)
        size += sum(segments_bytes(push.segments or ()) for push in message.relayed)
    if isinstance(message, ModelPart):
        size += LENGTH_BYTES + len(message.vector.encode())
    if isinstance(message, FinalPart):
        size += len(message.data)
    if isinstance(message, Join):
        size += 0 if message.download_codec is None else LENGTH_BYTES + len(message.download_codec)
        size += 0 if message.digest is None else DIGEST_BYTES
    if isinstance(message, JoinReply):
        size += sum(nbytes(result) for result in message.results)
        size += sum(nbytes(part) for part in message.parts)
        size += snapshot_bytes.nbytes(message.scalars) if message.downloads else 0
    return size
