"""Messages survive the wire, have the size that `nbytes` says, and what is not one is refused by name."""

from __future__ import annotations

import math
import re
import struct
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightgrad import codecs, errors
from weightgrad.wire.intervals import Intervals, Span
from weightgrad.wire.message_bytes import MessageLimits, pack, to_buffers, unpack
from weightgrad.wire.message_header import is_control
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import (
    Control,
    Holding,
    Join,
    JoinReply,
    Leave,
    Message,
    ModelPart,
    Push,
    PushPart,
    RoundRequest,
    Segment,
    Waiting,
)
from weightgrad.wire.sync_schedule import Report, SyncSchedule

from .message_samples import (
    LIMITS,
    SPECS,
    by_kind,
    holding,
    model_part,
    payload,
    plain,
    push,
    push_part,
    relayed_push,
    reply,
    result,
    result_part,
    seeds,
    segment,
    spread,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire-format.md"
WIDE = MessageLimits(max_elements=2**63 - 1)


# -- every kind survives --------------------------------------------------------------------


@pytest.mark.parametrize("kind", by_kind)
@settings(max_examples=60)
@given(data=st.data())
def test_round_trip(kind: str, data: st.DataObject) -> None:
    message = data.draw(by_kind[kind])
    written = pack(message)
    assert type(message).__name__ == kind
    assert len(written) == nbytes(message)
    found = unpack(written, WIDE)
    assert plain(found) == plain(message)
    assert pack(unpack(memoryview(bytearray(written)), WIDE)) == written


def test_control_is_told_from_bulk_without_reading_it() -> None:
    for data in seeds():
        assert is_control(data) == isinstance(unpack(data), Control)
    assert not is_control(b"")
    assert not is_control(PUSH[:5])


@pytest.mark.parametrize("spec", SPECS)
def test_what_comes_out_decodes_to_the_same_vector(spec: str) -> None:
    sent = push_part(
        segment(3, spec, (40,)), spread((43, 50), (95, 97), spec=spec), segment(50, spec, (5, 8)), segment(92)
    )
    found = unpack(pack(sent))
    assert isinstance(found, PushPart)
    here, there = torch.zeros(100), torch.zeros(100)
    for mine, theirs in zip(sent.segments, found.segments, strict=True):
        mine.into(here, 1)
        theirs.into(there, 1)
        assert theirs.payload.body.data_ptr() % 8 == 0
    assert here.any()
    assert torch.equal(here, there)


def test_the_values_of_a_segment_are_for_its_intervals_one_after_the_other() -> None:
    values = torch.arange(1.0, 7.0)
    sent = Segment.at(Intervals(((1, 3), (5, 6), (8, 11))), codecs.parse("fp32").encode(values, {}, 0)[0])
    found = unpack(pack(model_part(sent)))
    assert isinstance(found, ModelPart)
    vector = torch.zeros(12)
    found.segments[0].into(vector, 1)
    assert vector.tolist() == [0, 1, 2, 0, 0, 3, 0, 0, 4, 5, 6, 0]


def test_nothing_is_shared_with_the_bytes() -> None:
    for message in (
        reply(downloads=True, scalars={"clock": torch.arange(3.0)}),
        result_part(segment(0), relayed=(relayed_push("ohio", (spread((0, 1), (2, 3)),)),)),
    ):
        data = bytearray(pack(message))
        found = unpack(memoryview(data))
        data[:] = bytes(len(data))
        data.clear()  # raises BufferError if anything still looks at it
        assert plain(found) == plain(message)
        if isinstance(found, JoinReply):
            found.scalars["clock"].add_(1)


def test_bodies_are_not_copied_to_be_sent() -> None:
    own, other, tensor = payload("fp32", (40,)), payload("fp32", (7,)), torch.zeros(9)
    buffers = to_buffers(result_part(Segment(0, own), relayed=(relayed_push("ohio", (Segment(0, other),)),)))
    buffers += to_buffers(reply(downloads=True, scalars={"clock": tensor}))
    places = {torch.frombuffer(b, dtype=torch.uint8).data_ptr() for b in map(writable, buffers) if len(b)}
    assert {own.body.data_ptr(), other.body.data_ptr(), tensor.data_ptr()} <= places


def writable(buffer: bytes | memoryview) -> memoryview:
    obj = buffer.obj if isinstance(buffer, memoryview) else bytearray(buffer)
    return memoryview(obj)


def test_order_of_names_does_not_change_the_bytes() -> None:
    assert pack(result(included={"b": 1, "a": 2})) == pack(result(included={"a": 2, "b": 1}))


# -- the document ---------------------------------------------------------------------------

_FRAME = codecs.parse("fp32").encode(torch.tensor([1.0, -2.0]), {}, 0)[0]
GOLDEN: list[Message] = [
    Push(site="ohio", round=3, after=2, step=60, seen=2, samples=512),
    PushPart(
        site="ohio",
        round=3,
        rank=0,
        segments=(Segment(5, _FRAME, ((5, 6), (9, 10))), Segment(6, _FRAME)),
        last=True,
    ),
]
_FRAME_HEX = "57475244 01010101 0000 0000 00000000 0800000000000000 0200000000000000 0000803f 000000c0 206036ad81faca10"
GOLDEN_HEX = [
    text.replace(" ", "")
    for text in (
        "57474d53 02 01 00 04 03000000 02000000 3c000000 02000000 00020000 00000000 6f68696f",
        "57474d53 02 08 01 04 03000000 00000000 00000000 00000000 00000000 02000000 6f68696f"
        f"0200000000000080 0500000000000000 01000000 0900000000000000 01000000 {_FRAME_HEX}"
        f"0600000000000000 {_FRAME_HEX}",
    )
]


def test_golden_messages() -> None:
    assert [pack(message).hex() for message in GOLDEN] == GOLDEN_HEX
    assert [plain(unpack(bytes.fromhex(text))) for text in GOLDEN_HEX] == [plain(message) for message in GOLDEN]


def test_golden_messages_are_those_of_the_document() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    blocks = re.findall(r"```message\n(.*?)```", document, re.DOTALL)
    found = []
    for block in blocks:
        data = b""
        for line in block.splitlines():
            written, comment = line.split("#", 1)
            assert int(comment.split()[0]) == len(data)
            data += bytes.fromhex(written)
        found.append(data.hex())
    assert found == GOLDEN_HEX
    for text in GOLDEN_HEX:
        assert re.search(rf"\b{len(text) // 2} bytes:", document)


# -- what is refused when it is written -----------------------------------------------------


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_number_that_does_not_fit(value: int) -> None:
    for message in (
        RoundRequest(round=value),
        Waiting(round=value, seconds=0, missing={}),
        Waiting(round=1, seconds=1, missing={"ohio": value}),
        Join(site="ohio", version=2 * value),
        Join(site="ohio", version=0, epoch=value),
        push(step=value),
        push(report=Report(1.0, value)),
        push_part(rank=value),
        result(relayed=(relayed_push("ohio", round=value),)),
        result_part(version=value),
        model_part(version=value),
        reply(included=value),
        holding(ranks=value),
    ):
        with pytest.raises(errors.RangeError):
            pack(message)
    with pytest.raises(errors.RangeError, match=r"included\['ohio'\]"):
        pack(result(included={"ohio": value}))


@pytest.mark.parametrize("digest", [-1, 2**64])
def test_a_digest_that_does_not_fit(digest: int) -> None:
    with pytest.raises(errors.RangeError, match="digest"):
        pack(Join(site="ohio", version=0, digest=digest))


@pytest.mark.parametrize("site", ["", "n" * 65, "é" * 33, "\ud800"])
def test_a_site_name_that_cannot_be_written(site: str) -> None:
    for message in (
        Leave(site=site),
        push(site=site),
        push_part(site=site),
        holding(site=site),
        result(included={site: 1}),
    ):
        with pytest.raises(errors.RangeError):
            pack(message)


@pytest.mark.parametrize("name", ["", "n" * 256, "é" * 128, "\ud800"])
def test_the_name_of_a_vector_that_cannot_be_written(name: str) -> None:
    with pytest.raises(errors.RangeError, match="name of a vector"):
        pack(model_part(vector=name))
    longest = model_part(vector="é" * 127 + "n")
    assert plain(unpack(pack(longest))) == plain(longest)


@pytest.mark.parametrize(
    "message",
    [
        push(segments=(segment(0),)),
        result(segments=(segment(0),)),
        result(relayed=(relayed_push("ohio", (segment(0),)),)),
        reply(results=(result(),)),
        reply(downloads=True, parts=(model_part(segment(0)),)),
    ],
    ids=["push", "result", "relayed push", "results of a reply", "model of a reply"],
)
def test_values_in_a_control_message_are_not_written(message: Message) -> None:
    with pytest.raises(errors.ProtocolError, match="send it without them"):
        pack(message)


@pytest.mark.parametrize(
    "values",
    [
        (segment(2), segment(0)),
        (segment(0), segment(1)),
        (segment(-1),),
        (spread((0, 2), (4, 6)), segment(4)),
        (spread((0, 2), (4, 6)), segment(3)),
        (spread((0, 2), (9, 11)), spread((2, 4), (7, 10))),
        (spread((0, 2), (9, 11)), segment(4), segment(3)),
        (segment(0), segment(0)),
    ],
)
def test_segments_out_of_order_or_that_overlap_are_not_written(values: tuple[Segment, ...]) -> None:
    for message in (push_part(*values), result_part(*values), model_part(*values)):
        with pytest.raises(errors.ProtocolError):
            pack(message)
    with pytest.raises(errors.ProtocolError):
        pack(result_part(relayed=(relayed_push("ohio", values),)))


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_share_of_such_a_weight_is_not_written(weight: float) -> None:
    for message in (result, result_part):
        with pytest.raises(errors.ProtocolError, match="weighs"):
            pack(message(relayed=(relayed_push("iowa", weight=weight),)))


def test_relayed_pushes_out_of_order_are_not_written() -> None:
    for places in [("ohio", "iowa"), ("iowa", "iowa")]:
        with pytest.raises(errors.ProtocolError, match="sorted"):
            pack(result(relayed=tuple(relayed_push(place) for place in places)))


def test_a_segment_too_far_out_is_not_written() -> None:
    for values in (segment(2**63 - 2), spread((0, 1), (2**63 - 1, 2**63))):
        with pytest.raises(errors.RangeError):
            pack(push_part(values))
    last = push_part(segment(2**63 - 3))
    assert plain(unpack(pack(last), WIDE)) == plain(last)


def test_an_interval_of_a_segment_that_is_too_long_is_not_written() -> None:
    zeros = torch.zeros(0, dtype=torch.uint8)
    long = codecs.Payload("fp32", torch.float32, (2**32 + 1,), b"", zeros)
    with pytest.raises(errors.RangeError, match="length of the interval"):
        pack(push_part(Segment.at(Intervals(((0, 1), (2, 2**32 + 2))), long)))


def test_what_a_rank_holds_may_be_long_but_not_too_far_out() -> None:
    longest = holding((0, 1), (2, 2**63 - 1))
    assert plain(unpack(pack(longest), WIDE)) == plain(longest)
    with pytest.raises(errors.RangeError, match="holds elements"):
        pack(holding((0, 2**63)))


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf")])
def test_a_rate_that_makes_no_sense(rate: float) -> None:
    for message in (push, result):
        with pytest.raises(errors.ProtocolError):
            pack(message(rate=rate))
        data = bytearray(pack(message(rate=1.0)))
        data[-8:] = struct.pack("<d", rate)
        with pytest.raises(errors.ProtocolError):
            unpack(data)


def test_a_reply_without_a_download_has_nothing_of_one() -> None:
    for changes in (
        {"approximate": True},
        {"scalars": {"clock": torch.zeros(1)}},
        {"parts": (model_part(),)},
        {"schedule": SyncSchedule(1, 0, "fp32")},
    ):
        with pytest.raises(errors.ProtocolError, match="without a download"):
            reply(**changes)


# -- what is refused when it is read --------------------------------------------------------

PUSH = pack(GOLDEN[0])
# As in the document: count at 28, two intervals from 36 on, their frame at 68, the second segment at 116.
PART = pack(GOLDEN[1])
RESULT = pack(result(included={"iowa": 1, "ohio": 2}))
# Round at 32, count at 36, weight at 40, length of the name at 48, left out at 49, two zeros, the name at 52; then the
# second relayed push from 56 on. RELAYED is the same, with a segment of 56 bytes at its end.
RELAY = pack(result(relayed=(relayed_push("iowa", None), relayed_push("ohio", round=2))))
RELAYED = pack(result_part(relayed=(relayed_push("iowa", None), relayed_push("ohio", (segment(0),), round=2))))
# Length of the name at 32, "weights" at 33, a segment from 40 on.
MODEL = pack(model_part(segment(0)))
OPTIONS = pack(result(options=(1.0,)))
SCHEDULED = pack(result(schedule=SyncSchedule(8, 2, "fp32")))
REPORTED = pack(push(report=Report(0.5, 3, 1.5)))
REPLY = pack(reply(downloads=True))
JOIN = pack(Join(site="ohio", version=-1, download_codec="bf16"))
DIGEST = pack(Join(site="ohio", version=-1, digest=5))
# Two intervals of 16 bytes from 36 on.
HOLDING = pack(holding((2, 5), (6, 9)))
REQUEST = pack(RoundRequest(round=1))


def changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def with_intervals(*spans: tuple[int, int], count: int | None = None) -> bytes:
    """The golden part, in which the first segment has these intervals (start, length) in place of its own."""
    written = b"".join(struct.pack("<QI", *span) for span in spans)
    return PART[:36] + u64(2**63 | (len(spans) if count is None else count)) + written + PART[68:]


def holds(*spans: tuple[int, int]) -> bytes:
    written = b"".join(struct.pack("<QQ", *span) for span in spans)
    return changed(HOLDING[:36], 28, u32(len(spans))) + written


BAD: dict[str, tuple[bytes, type[Exception]]] = {
    "nothing": (b"", errors.TruncatedError),
    "another magic": (changed(PUSH, 0, b"WGRD"), errors.MagicError),
    "noise of two bytes": (b"no", errors.MagicError),
    "half a header": (PUSH[:31], errors.TruncatedError),
    "the version before": (changed(PUSH, 4, b"\x01"), errors.VersionError),
    "the version after": (changed(PUSH, 4, b"\x03"), errors.VersionError),
    "kind 0": (changed(PUSH, 5, b"\x00"), errors.ProtocolError),
    "kind 15": (changed(PUSH, 5, b"\x0f"), errors.ProtocolError),
    "a flag nobody knows": (changed(PUSH, 6, b"\x20"), errors.ReservedError),
    "a sync schedule every 0 steps": (changed(SCHEDULED, 32, u32(0)), errors.ProtocolError),
    "a sync schedule of an unknown codec": (changed(SCHEDULED, 41, b"zz32"), errors.ProtocolError),
    "a sync schedule cut off": (SCHEDULED[:-1], errors.TruncatedError),
    "a report of no number": (changed(REPORTED, len(REPORTED) - 8, b"\xff" * 8), errors.ProtocolError),
    "a flag of another kind": (changed(RESULT, 6, b"\x01"), errors.ReservedError),
    "a flag of a holding": (changed(HOLDING, 6, b"\x01"), errors.ReservedError),
    "a flag of a part that is not last": (changed(PART, 6, b"\x02"), errors.ReservedError),
    "a name where there is none": (changed(REQUEST, 7, b"\x01") + b"n", errors.ReservedError),
    "a number where there is none": (changed(REQUEST, 12, u32(1)), errors.ReservedError),
    "a count where there is none": (changed(REQUEST, 28, u32(1)), errors.ReservedError),
    "segments of a push": (changed(PUSH, 28, u32(1)) + PART[116:], errors.ReservedError),
    "segments of a result": (changed(RESULT, 28, u32(1)) + PART[116:], errors.ReservedError),
    "results of a reply": (changed(pack(reply()), 28, u32(1)) + pack(result()), errors.ReservedError),
    "a number of a push part": (changed(PART, 16, u32(1)), errors.ReservedError),
    "an empty name": (changed(pack(Leave(site="a")), 7, b"\x00")[:32], errors.ProtocolError),
    "a long name": (changed(pack(Leave(site="a")), 7, b"\x41") + b"a" * 64, errors.SizeLimitError),
    "a name cut off": (pack(Leave(site="ohio"))[:-1], errors.TruncatedError),
    "a name not UTF-8": (changed(pack(Leave(site="ohio")), 35, b"\xff"), errors.ProtocolError),
    "bytes after it": (PUSH + b"\0", errors.TrailingBytesError),
    "bytes after a part": (PART + b"\0", errors.TrailingBytesError),
    "bytes after a holding": (HOLDING + b"\0", errors.TrailingBytesError),
    "too many bytes": (PUSH + bytes(4096), errors.SizeLimitError),
    "too many segments": (changed(PART, 28, u32(9)), errors.SizeLimitError),
    "more segments than bytes": (changed(PART, 28, u32(4)), errors.TruncatedError),
    "fewer segments than there are": (changed(PART, 28, u32(1)), errors.TrailingBytesError),
    "a segment beyond the vector": (changed(PART, 116, u64(1023)), errors.SizeLimitError),
    "a segment far beyond the vector": (changed(PART, 116, u64(2**63 - 1)), errors.SizeLimitError),
    "a segment that starts before the one before it": (changed(PART, 116, u64(3)), errors.ProtocolError),
    "a segment that starts where the one before it does": (changed(PART, 116, u64(5)), errors.ProtocolError),
    "a segment that overlaps a later interval": (changed(PART, 116, u64(8)), errors.ProtocolError),
    "a segment that starts in a later interval": (changed(PART, 116, u64(9)), errors.ProtocolError),
    "no intervals written as several": (with_intervals(), errors.ProtocolError),
    "one interval written as several": (with_intervals((5, 2)), errors.ProtocolError),
    "intervals that touch": (with_intervals((5, 1), (6, 1)), errors.ProtocolError),
    "intervals that overlap": (with_intervals((5, 2), (6, 1)), errors.ProtocolError),
    "intervals that are the same": (with_intervals((5, 1), (5, 1)), errors.ProtocolError),
    "intervals that descend": (with_intervals((9, 1), (5, 1)), errors.ProtocolError),
    "an empty interval": (with_intervals((5, 0), (7, 2)), errors.ProtocolError),
    "an empty interval at the end": (with_intervals((5, 2), (9, 0)), errors.ProtocolError),
    "intervals with fewer elements than values": (with_intervals((5, 1), (9, 1), (11, 1)), errors.ProtocolError),
    "intervals with more elements than values": (with_intervals((5, 1), (9, 2)), errors.ProtocolError),
    "intervals beyond the vector": (with_intervals((5, 1), (1024, 1)), errors.SizeLimitError),
    "intervals far beyond the vector": (with_intervals((5, 1), (2**63, 1)), errors.SizeLimitError),
    "an interval at the end of all numbers": (with_intervals((5, 1), (2**64 - 1, 1)), errors.SizeLimitError),
    "too many intervals": (with_intervals((5, 1), (9, 1), count=17), errors.SizeLimitError),
    "as many intervals as can be written": (with_intervals((5, 1), (9, 1), count=2**63 - 1), errors.SizeLimitError),
    "more intervals than bytes": (with_intervals((5, 1), (9, 1), count=12), errors.TruncatedError),
    "intervals cut off": (PART[:60], errors.TruncatedError),
    "a frame cut off": (PART[:-1], errors.TruncatedError),
    "a frame that was damaged": (changed(PART, 160, b"\x01"), errors.ChecksumError),
    "a frame of an unknown codec": (changed(PART, 73, b"\xfe"), errors.UnknownCodecError),
    "options cut off": (pack(result(options=(1.0, 2.0)))[:-1], errors.TruncatedError),
    "an option that is not finite": (
        pack(result(options=(1.0,)))[:-8] + struct.pack("<d", math.inf),
        errors.ProtocolError,
    ),
    "no options where some are announced": (pack(result(options=(1.0,)))[:-10] + bytes(2), errors.ProtocolError),
    "a rate cut off": (pack(result(rate=1.0))[:-1], errors.TruncatedError),
    "too many sites": (changed(RESULT, 20, u32(5)), errors.SizeLimitError),
    "more sites than bytes": (changed(RESULT, 20, u32(3)), errors.TruncatedError),
    "sites that are not sorted": (changed(RESULT, 40, b"ohip"), errors.ProtocolError),
    "a site twice": (changed(RESULT, 40, b"ohio"), errors.ProtocolError),
    "a reserved byte of a site": (changed(RESULT, 37, b"\x01"), errors.ReservedError),
    "too many relayed pushes": (changed(RELAY, 24, u32(5)), errors.SizeLimitError),
    "more relayed pushes than bytes": (changed(RELAY, 24, u32(4)), errors.TruncatedError),
    "a relayed push cut off": (RELAY[:60], errors.TruncatedError),
    "a relayed push with segments that is left out": (changed(RELAY, 36, u32(1)), errors.ReservedError),
    "a relayed push left out twice": (changed(RELAY, 49, b"\x02"), errors.ReservedError),
    "a reserved byte of a relayed push": (changed(RELAY, 50, b"\x01"), errors.ReservedError),
    "a relayed push of no weight": (changed(RELAY, 40, struct.pack("<d", math.nan)), errors.ProtocolError),
    "a relayed push that lifts": (changed(RELAY, 40, struct.pack("<d", -1.0)), errors.ProtocolError),
    "relayed pushes that are not sorted": (changed(RELAY, 52, b"ohip"), errors.ProtocolError),
    "a relayed push twice": (changed(changed(RELAY, 52, b"ohio"), 32, u32(2)), errors.ProtocolError),
    "values of a relayed push in a result": (changed(RELAY, 60, u32(1)) + RELAYED[80:], errors.ProtocolError),
    "a claim of values of a relayed push in a result": (changed(RELAY, 60, u32(2**32 - 1)), errors.ProtocolError),
    "too many relayed pushes in a part": (changed(RELAYED, 12, u32(5)), errors.SizeLimitError),
    "too many segments of a relayed push": (changed(RELAYED, 60, u32(9)), errors.SizeLimitError),
    "more segments of a relayed push than bytes": (changed(RELAYED, 60, u32(2)), errors.TruncatedError),
    "a segment of a relayed push beyond the vector": (changed(RELAYED, 80, u64(1023)), errors.SizeLimitError),
    "a vector without a name": (MODEL[:32] + b"\0" + MODEL[40:], errors.ProtocolError),
    "the name of a vector cut off": (MODEL[:36], errors.TruncatedError),
    "the name of a vector longer than all bytes": (changed(MODEL, 32, b"\xff"), errors.TruncatedError),
    "the name of a vector not UTF-8": (changed(MODEL, 33, b"\xff"), errors.ProtocolError),
    "a model part without its name": (MODEL[:32], errors.TruncatedError),
    "an approximate model that is not sent": (changed(pack(reply()), 6, b"\x08"), errors.ProtocolError),
    "a sync schedule without a download": (changed(pack(reply()), 6, b"\x04") + SCHEDULED[32:], errors.ProtocolError),
    "scalars without a download": (pack(reply()) + REPLY[32:], errors.TrailingBytesError),
    "no scalars": (REPLY[:32], errors.TruncatedError),
    "buffers that are not announced": (pack(push()) + REPLY[32:], errors.TrailingBytesError),
    "buffers that are announced and not there": (changed(pack(push()), 6, b"\x08"), errors.TruncatedError),
    "announced buffers, and none": (changed(pack(push()), 6, b"\x08") + REPLY[32:], errors.ProtocolError),
    "a download codec cut off": (JOIN[:-1], errors.TruncatedError),
    "a Join without its download codec": (JOIN[:36], errors.TruncatedError),
    "a download codec of no letters": (JOIN[:36] + b"\0", errors.ProtocolError),
    "a download codec that is unknown": (changed(JOIN, 37, b"zf16"), errors.ProtocolError),
    "a download codec not ASCII": (changed(JOIN, 37, b"\xff"), errors.ProtocolError),
    "a download codec with a memory": (JOIN[:36] + b"\x06onebit", errors.ProtocolError),
    "a byte after a download codec": (JOIN + b"\0", errors.TrailingBytesError),
    "a digest cut off": (DIGEST[:-1], errors.TruncatedError),
    "a byte after a digest": (DIGEST + b"\0", errors.TrailingBytesError),
    "too many held intervals": (changed(HOLDING, 28, u32(17)), errors.SizeLimitError),
    "more held intervals than bytes": (changed(HOLDING, 28, u32(3)), errors.TruncatedError),
    "held intervals that touch": (holds((2, 3), (5, 3)), errors.ProtocolError),
    "held intervals that overlap": (holds((2, 3), (4, 3)), errors.ProtocolError),
    "held intervals that descend": (holds((6, 3), (2, 3)), errors.ProtocolError),
    "a held interval that is empty": (holds((2, 0)), errors.ProtocolError),
    "held elements beyond the vector": (holds((2, 1023)), errors.SizeLimitError),
    "held elements beyond all numbers": (holds((2**64 - 1, 2**64 - 1)), errors.SizeLimitError),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_message(case: str) -> None:
    data, error = BAD[case]
    with pytest.raises(error) as caught:
        unpack(data, LIMITS)
    assert type(caught.value) is error


@pytest.mark.parametrize("message", list(seeds()), ids=[f"kind {one[5]}, {len(one)} bytes" for one in seeds()])
def test_a_message_cut_off_anywhere(message: bytes) -> None:
    for size in range(len(message)):
        with pytest.raises(errors.TruncatedError):
            unpack(message[:size])


@pytest.mark.parametrize("message", list(seeds()), ids=[f"kind {one[5]}, {len(one)} bytes" for one in seeds()])
def test_a_byte_flipped_anywhere_is_refused_or_means_something_else(message: bytes) -> None:
    before = plain(unpack(message))
    for place in range(len(message)):
        for bit in range(8):
            data = changed(message, place, bytes([message[place] ^ 1 << bit]))
            try:
                found = unpack(data)
            except (errors.FrameError, errors.ProtocolError):
                continue
            assert pack(found) == data
            assert plain(found) != before


def test_numbers_near_the_end_of_all() -> None:
    """The reader's limits are as wide as they may be, so that nothing else refuses the numbers."""
    for data in (
        changed(PART, 116, u64(2**63 - 2)),
        with_intervals((5, 1), (2**63 - 1, 1)),
        with_intervals((2**63, 1), (2**64 - 1, 1)),
        with_intervals((5, 1), (9, 1), count=2**63 - 1),
        with_intervals((5, 1), (9, 1), count=2**32),
        holds((2**63 - 1, 1)),
        holds((2**64 - 1, 2**64 - 1)),
        holds((1, 2**63 - 1)),
    ):
        with pytest.raises(errors.SizeLimitError):
            unpack(data, WIDE)
    for good in (holds((1, 2**63 - 2)), with_intervals((5, 1), (2**63 - 2, 1))):
        assert pack(unpack(good, WIDE)) == good


def test_segments_of_a_message_and_of_its_relayed_pushes_count_together() -> None:
    five = tuple(segment(2 * i) for i in range(5))
    unpack(pack(result_part(*five)), LIMITS)
    for message in (
        result_part(*five, relayed=(relayed_push("ohio", five),)),
        result_part(relayed=(relayed_push("iowa", five), relayed_push("ohio", five))),
    ):
        with pytest.raises(errors.SizeLimitError, match="5 segments"):
            unpack(pack(message), LIMITS)


def test_intervals_of_all_segments_count_together() -> None:
    ten = spread(*((2 * i, 2 * i + 1) for i in range(10)))
    other = spread(*((2 * i + 1, 2 * i + 2) for i in range(10)))
    assert LIMITS.max_intervals == 16
    unpack(pack(push_part(ten)), LIMITS)
    for message in (push_part(ten, other), result_part(ten, relayed=(relayed_push("ohio", (ten,)),))):
        with pytest.raises(errors.SizeLimitError, match="10 intervals"):
            unpack(pack(message), LIMITS)


@pytest.mark.parametrize("limit", ["max_bytes", "max_segments", "max_intervals", "max_elements", "max_sites"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, 2**63])
def test_limits_that_make_no_sense(limit: str, value: int) -> None:
    with pytest.raises(errors.SpecError, match=limit):
        MessageLimits(**{limit: value})


def test_a_claim_costs_nothing() -> None:
    claims = [
        changed(PART, 28, u32(2**16)),
        with_intervals((5, 1), (9, 1), count=2**20),
        changed(HOLDING, 28, u32(2**20)),
        changed(RESULT, 20, u32(2**12)),
        changed(RELAY, 24, u32(2**12)),
        changed(RELAYED, 12, u32(2**12)),
        changed(RELAYED, 60, u32(2**16)),
        changed(PART, 68 + 16, u64(2**31)),
    ]
    tracemalloc.start()
    for data in claims:
        with pytest.raises(errors.TruncatedError):
            unpack(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**18


def test_interleaved_segments_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each segment: a stranger may send 2**16 of them."""
    calls = 0
    whole = Intervals.of

    def counted(spans: Iterable[Span]) -> Intervals:
        nonlocal calls
        calls += 1
        return whole(spans)

    monkeypatch.setattr(Intervals, "of", counted)
    around = spread((0, 1), (1000, 1001))
    data = pack(push_part(around, *(segment(2 * i) for i in range(1, 400))))
    calls = 0
    unpack(data)
    assert calls <= 1


def test_a_holding_may_be_of_nothing() -> None:
    found = unpack(pack(holding()))
    assert isinstance(found, Holding)
    assert not found.held
