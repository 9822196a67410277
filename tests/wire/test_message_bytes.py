"""Messages survive the wire, have the size that `nbytes` says, and what is not one is refused by name."""

from __future__ import annotations

import math
import random
import re
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightgrad import codecs, errors, wire
from weightgrad.codecs import Payload
from weightgrad.wire import encoded_snapshot
from weightgrad.wire.message_bytes import MessageLimits, pack, to_buffers, unpack
from weightgrad.wire.messages import (
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
    nbytes,
)
from weightgrad.wire.sync_schedule import Report, SyncSchedule

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire-format.md"
SPECS = ["fp32", "qsgd(bits=4)", "topk(0.1)", "terngrad", "ef(topk(0.1) > sign())"]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (40,), (5, 8), (3, 2, 2)]
LIMITS = MessageLimits(max_bytes=4096, max_segments=8, max_elements=1024, max_sites=4)


@cache
def payload(spec: str, shape: tuple[int, ...], seed: int = 0) -> Payload:
    codec = codecs.parse(spec)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return codec.encode(x, codec.init(x), seed)[0]


def segment(start: int, spec: str = "fp32", shape: tuple[int, ...] = (2,)) -> Segment:
    return Segment(start, payload(spec, shape))


def plain(thing: object) -> object:
    """Messages compare by identity; what this gives compares by content, to the bit."""
    if isinstance(thing, Tensor):
        return thing.dtype, tuple(thing.shape), thing.contiguous().view(-1).view(torch.uint8).tolist()
    if is_dataclass(thing):
        return type(thing), [plain(getattr(thing, field.name)) for field in fields(thing)]
    if isinstance(thing, Mapping):
        return {key: plain(value) for key, value in thing.items()}
    return [plain(inside) for inside in thing] if isinstance(thing, tuple) else thing


def check(message: Message) -> None:
    data = pack(message)
    assert len(data) == nbytes(message)
    assert plain(unpack(data)) == plain(message)
    assert pack(unpack(memoryview(bytearray(data)))) == data


# -- every kind survives --------------------------------------------------------------------

numbers = st.integers(0, 2**32 - 1)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=16)
rates = st.none() | st.floats(0, 1e300)
payloads = st.builds(payload, st.sampled_from(SPECS), st.sampled_from(SHAPES), st.integers(0, 3))
included = st.dictionaries(names, numbers, max_size=4)


@st.composite
def segments(draw: st.DrawFn) -> tuple[Segment, ...]:
    found, free = [], 0
    for gap, own in draw(st.lists(st.tuples(st.integers(0, 2**20), payloads), max_size=4)):
        found.append(Segment(free + gap, own))
        free += gap + own.numel
    return tuple(found)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int64]))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    return (torch.randn(shape) * 100).to(dtype)


seconds = st.floats(0, 1e300)
reports = st.none() | st.builds(Report, seconds, numbers, seconds)
specs = st.sampled_from(["fp32", "ef(topk(0.01) > sign())", "qsgd(bits=4)"])
schedules = st.none() | st.builds(SyncSchedule, st.integers(1, 2**32 - 1), numbers, specs)
pushes = st.builds(
    Push,
    site=names,
    round=numbers,
    after=numbers,
    step=numbers,
    seen=numbers,
    samples=numbers,
    segments=segments(),
    final=st.booleans(),
    rate=rates,
    report=reports,
)
weights = st.floats(0, 1e300)
relayed_pushes = st.dictionaries(st.tuples(names, numbers), st.tuples(weights, st.none() | segments()), max_size=3).map(
    lambda found: tuple(
        RelayedPush(site=site, round=round_, weight=found[site, round_][0], segments=found[site, round_][1])
        for site, round_ in sorted(found)
    )
)
results = st.builds(
    RoundResult,
    version=numbers,
    round=numbers,
    step=numbers,
    segments=segments(),
    included=included,
    rate=rates,
    schedule=schedules,
    relayed=relayed_pushes,
)
tensor_dictionaries = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=12), tensors(), max_size=5)
snapshots = st.none() | tensor_dictionaries
tensor_names = st.text(st.characters(codec="utf-8"), max_size=12)
encoded_tensors = st.dictionaries(tensor_names.map("of a codec: {}".format), payloads, max_size=4)
lists_of_results = st.lists(results, max_size=3).map(tuple)
progress: dict[str, st.SearchStrategy[Any]] = {
    "version": numbers,
    "round": numbers,
    "step": numbers,
    "included": numbers,
    "results": lists_of_results,
    "pushed": numbers,
    "schedule": schedules,
}
some = settings(max_examples=60, deadline=None)


@some
@given(pushes)
def test_push(message: Push) -> None:
    check(message)


@some
@given(results)
def test_result(message: RoundResult) -> None:
    check(message)


@some
@given(st.builds(JoinReply, **progress, snapshot=snapshots))
def test_join_reply(message: JoinReply) -> None:
    check(message)


@some
@given(st.builds(JoinReply, **progress, snapshot=tensor_dictionaries, encoded=encoded_tensors))
def test_join_reply_with_encoded_tensors(message: JoinReply) -> None:
    check(message)


download_codecs = st.sampled_from([None, "fp32", "qsgd(bits=8)", "topk(0.25) > qsgd(bits=4)"])
joins = st.builds(Join, site=names, version=st.integers(-1, 2**32 - 2), download_codec=download_codecs)


@given(st.builds(RoundRequest, round=numbers) | joins | st.builds(Leave, site=names))
def test_call_join_and_leave(message: Message) -> None:
    check(message)


def test_restarted() -> None:
    check(ServerRestarted())


@pytest.mark.parametrize("spec", SPECS)
def test_what_comes_out_decodes_to_the_same_vector(spec: str) -> None:
    sent = Push(
        site="ohio",
        round=1,
        after=0,
        step=1,
        seen=0,
        samples=8,
        segments=(segment(3, spec, (40,)), segment(50, spec, (5, 8))),
    )
    found = unpack(pack(sent))
    assert isinstance(found, Push)
    here, there = torch.zeros(100), torch.zeros(100)
    for mine, theirs in zip(sent.segments, found.segments, strict=True):
        mine.into(here, 1)
        theirs.into(there, 1)
        assert theirs.payload.body.data_ptr() % 8 == 0
    assert here.any()
    assert torch.equal(here, there)


def test_nothing_is_shared_with_the_bytes() -> None:
    message = JoinReply(
        version=1,
        round=2,
        step=3,
        included=1,
        results=(RoundResult(version=1, round=1, step=1, segments=(segment(0),)),),
        snapshot={"weights": torch.arange(3.0)},
    )
    data = bytearray(pack(message))
    found = unpack(memoryview(data))
    data[:] = bytes(len(data))
    data.clear()  # raises BufferError if anything still looks at it
    assert plain(found) == plain(message)
    assert isinstance(found, JoinReply)
    assert found.snapshot is not None
    found.snapshot["weights"].add_(1)


def test_bodies_are_not_copied_to_be_sent() -> None:
    own, tensor = payload("fp32", (40,)), torch.zeros(9)
    buffers = to_buffers(
        JoinReply(
            version=1,
            round=1,
            step=1,
            included=1,
            results=(RoundResult(version=1, round=1, step=1, segments=(Segment(0, own),)),),
            snapshot={"weights": tensor},
        )
    )
    places = {torch.frombuffer(b, dtype=torch.uint8).data_ptr() for b in map(writable, buffers) if len(b)}
    assert {own.body.data_ptr(), tensor.data_ptr()} <= places


def writable(buffer: bytes | memoryview) -> memoryview:
    obj = buffer.obj if isinstance(buffer, memoryview) else bytearray(buffer)
    return memoryview(obj)


def test_order_of_names_does_not_change_the_bytes() -> None:
    one = RoundResult(version=1, round=1, step=1, segments=(), included={"b": 1, "a": 2})
    other = RoundResult(version=1, round=1, step=1, segments=(), included={"a": 2, "b": 1})
    assert pack(one) == pack(other)


# -- the document ---------------------------------------------------------------------------

GOLDEN = Push(
    site="ohio",
    round=3,
    after=2,
    step=60,
    seen=2,
    samples=512,
    segments=(Segment(5, codecs.parse("fp32").encode(torch.tensor([1.0, -2.0]), {}, 0)[0]),),
)
GOLDEN_HEX = (
    "57474d53 01 01 00 04 03000000 02000000 3c000000 02000000 00020000 01000000 6f68696f 0500000000000000"
    "57475244 01010101 0000 0000 00000000 0800000000000000 0200000000000000 0000803f 000000c0 206036ad81faca10"
).replace(" ", "")


def test_golden_message() -> None:
    assert pack(GOLDEN).hex() == GOLDEN_HEX
    assert plain(unpack(bytes.fromhex(GOLDEN_HEX))) == plain(GOLDEN)


def test_golden_message_is_the_one_of_the_document() -> None:
    (block,) = re.findall(r"```message\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert bytes.fromhex("".join(line.split("#")[0] for line in block.splitlines())).hex() == GOLDEN_HEX


# -- snapshots ------------------------------------------------------------------------------


def snapshot_of(data: bytes) -> Mapping[str, Tensor]:
    found = unpack(pack(JoinReply(version=1, round=1, step=1, included=1, results=(), snapshot={}))[:32] + data, LIMITS)
    assert isinstance(found, JoinReply)
    assert found.snapshot is not None
    return found.snapshot


def table(text: str, data: bytes = b"") -> bytes:
    written = text.encode() + b" " * (-len(text.encode()) % 8)
    return struct.pack("<Q", len(written)) + written + data


def entry(name: str, dtype: str, shape: str, start: int, stop: int) -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{start},{stop}]}}'


def test_a_snapshot_is_what_the_safetensors_library_writes_and_reads() -> None:
    tensors = {
        "weights": torch.randn(7),
        "optimizer.0.step": torch.tensor(3.0),
        "clock": torch.arange(4),
        "wide": torch.randn(2, 3, dtype=torch.float64),
        'none "of" it\n\x01é': torch.zeros(0, 5),
    }
    blob = pack(JoinReply(version=1, round=1, step=1, included=1, results=(), snapshot=tensors))[32:]
    assert blob == safetensors.torch.save(tensors)
    assert plain(safetensors.torch.load(blob)) == plain(tensors)


def test_a_snapshot_may_be_empty_or_not_contiguous() -> None:
    check(JoinReply(version=1, round=1, step=1, included=1, results=(), snapshot={}))
    check(
        JoinReply(
            version=1,
            round=1,
            step=1,
            included=1,
            results=(),
            snapshot={"turned": torch.arange(6.0).view(2, 3).t(), "every": torch.arange(9)[::2]},
        )
    )
    assert nbytes(JoinReply(version=1, round=1, step=1, included=1)) == 32


def test_a_good_table_is_read() -> None:
    assert torch.equal(snapshot_of(table("{" + entry("a", "F32", "2", 0, 8) + "}", bytes(8)))["a"], torch.zeros(2))


BAD_SNAPSHOTS: dict[str, tuple[bytes, type[Exception]]] = {
    "no length": (b"\x08", errors.TruncatedError),
    "a table cut off": (struct.pack("<Q", 2**63) + b"{}      ", errors.TruncatedError),
    "data cut off": (table("{" + entry("a", "F32", "2", 0, 8) + "}", bytes(7)), errors.TruncatedError),
    "data after the last": (table("{}", b"\0"), errors.TrailingBytesError),
    "another dtype": (table("{" + entry("a", "F16", "2", 0, 4) + "}", bytes(4)), errors.UnknownDtypeError),
    "too large": (table("{" + entry("a", "F32", "2048", 0, 8192) + "}"), errors.SizeLimitError),
    "strides too large": (table("{" + entry("a", "F32", "0," + str(2**62), 0, 0) + "}"), errors.SizeLimitError),
    "too many dimensions": (table("{" + entry("a", "F32", "0" + ",1" * 16, 0, 0) + "}"), errors.ShapeError),
    "too many tensors": (
        table("{" + ",".join(entry(f"{i}", "F32", "0", 0, 0) for i in range(9)) + "}"),
        errors.SizeLimitError,
    ),
    "a name twice": (
        table("{" + entry("a", "F32", "1", 0, 4) + "," + entry("a", "F32", "1", 4, 8) + "}", bytes(8)),
        errors.ProtocolError,
    ),
    "metadata": (table('{"__metadata__":{"format":"pt"}}'), errors.ProtocolError),
    "a tensor called metadata": (table("{" + entry("__metadata__", "F32", "0", 0, 0) + "}"), errors.ProtocolError),
    "a gap": (table("{" + entry("a", "F32", "1", 4, 8) + "}", bytes(8)), errors.ProtocolError),
    "another order": (
        table("{" + entry("b", "F32", "1", 0, 4) + "," + entry("a", "F32", "1", 4, 8) + "}", bytes(8)),
        errors.ProtocolError,
    ),
    "padding of another kind": (struct.pack("<Q", 8) + b"{}\t     ", errors.ProtocolError),
    "no padding": (struct.pack("<Q", 2) + b"{}", errors.ProtocolError),
    "an escape that is not needed": (table("{" + entry("\\u0061", "F32", "0", 0, 0) + "}"), errors.ProtocolError),
    "half a surrogate": (table("{" + entry("\\ud800", "F32", "0", 0, 0) + "}"), errors.ProtocolError),
    "a leading zero": (table("{" + entry("a", "F32", "01", 0, 4) + "}", bytes(4)), errors.ProtocolError),
    "deep nesting": (table("[" * 3000), errors.ProtocolError),
    "not UTF-8": (
        table("{" + entry("?", "F32", "0", 0, 0) + "}").replace(b"?", b"\xff"),
        errors.ProtocolError,
    ),
}


@pytest.mark.parametrize("case", BAD_SNAPSHOTS)
def test_bad_snapshot(case: str) -> None:
    data, error = BAD_SNAPSHOTS[case]
    with pytest.raises(error):
        snapshot_of(data)


@pytest.mark.parametrize("name", ["__metadata__", "n" * 513, "\ud800"])
def test_a_tensor_name_that_cannot_be_written(name: str) -> None:
    with pytest.raises(errors.RangeError):
        pack(JoinReply(version=1, round=1, step=1, included=1, results=(), snapshot={name: torch.zeros(1)}))


def test_a_tensor_that_cannot_be_written() -> None:
    with pytest.raises(errors.UnknownDtypeError):
        pack(
            JoinReply(
                version=1, round=1, step=1, included=1, results=(), snapshot={"a": torch.zeros(1, dtype=torch.float16)}
            )
        )
    with pytest.raises(errors.ShapeError):
        pack(JoinReply(version=1, round=1, step=1, included=1, results=(), snapshot={"a": torch.zeros((1,) * 17)}))


# -- what is refused when it is written -----------------------------------------------------


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_number_that_does_not_fit(value: int) -> None:
    for message in (
        RoundRequest(round=value),
        Join(site="ohio", version=2 * value),
        Push(site="ohio", round=1, after=0, step=value, seen=0, samples=1),
        JoinReply(version=1, round=1, step=1, included=value),
    ):
        with pytest.raises(errors.RangeError):
            pack(message)
    with pytest.raises(errors.RangeError, match=r"included\['ohio'\]"):
        pack(RoundResult(version=1, round=1, step=1, segments=(), included={"ohio": value}))


@pytest.mark.parametrize("site", ["", "n" * 65, "é" * 33, "\ud800"])
def test_a_site_name_that_cannot_be_written(site: str) -> None:
    for message in (Leave(site=site), RoundResult(version=1, round=1, step=1, segments=(), included={site: 1})):
        with pytest.raises(errors.RangeError):
            pack(message)


def test_parts_out_of_order_are_not_written() -> None:
    for places in [(2, 0), (0, 1), (-1,)]:
        with pytest.raises(errors.ProtocolError):
            pack(RoundResult(version=1, round=1, step=1, segments=tuple(segment(place) for place in places)))


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_share_of_such_a_weight_is_not_written(weight: float) -> None:
    with pytest.raises(errors.ProtocolError, match="weighs"):
        pack(
            RoundResult(
                version=1,
                round=1,
                step=1,
                segments=(),
                relayed=(RelayedPush(site="iowa", round=1, weight=weight, segments=()),),
            )
        )


def test_relayed_pushes_out_of_order_are_not_written() -> None:
    for places in [("ohio", "iowa"), ("iowa", "iowa")]:
        with pytest.raises(errors.ProtocolError, match="sorted"):
            pack(
                RoundResult(
                    version=1,
                    round=1,
                    step=1,
                    segments=(),
                    relayed=tuple(RelayedPush(site=place, round=1, weight=1.0, segments=()) for place in places),
                )
            )


def test_a_part_too_far_out_is_not_written() -> None:
    with pytest.raises(errors.RangeError):
        pack(RoundResult(version=1, round=1, step=1, segments=(segment(2**63),)))


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf")])
def test_a_rate_that_makes_no_sense(rate: float) -> None:
    with pytest.raises(errors.ProtocolError):
        pack(RoundResult(version=1, round=1, step=1, segments=(), rate=rate))
    data = bytearray(pack(RoundResult(version=1, round=1, step=1, segments=(), rate=1.0)))
    data[-8:] = struct.pack("<d", rate)
    with pytest.raises(errors.ProtocolError):
        unpack(data)


# -- what is refused when it is read --------------------------------------------------------

PUSH = pack(GOLDEN)
RESULT = pack(RoundResult(version=1, round=1, step=1, segments=(), included={"iowa": 1, "ohio": 2}))
# Round at 32, count at 36, weight at 40, length of the name at 48, left out at 49, two zeros, the name at 52; then the
# second relayed push from 56 on, with a segment of 56 bytes at its end.
SHARED = pack(
    RoundResult(
        version=1,
        round=1,
        step=1,
        segments=(),
        relayed=(
            RelayedPush(site="iowa", round=1, weight=1.0, segments=None),
            RelayedPush(site="ohio", round=2, weight=1.0, segments=(segment(0),)),
        ),
    )
)
SCHEDULED = pack(RoundResult(version=1, round=1, step=1, segments=(), schedule=SyncSchedule(8, 2, "fp32")))
REPORTED = pack(Push(site="ohio", round=1, after=0, step=1, seen=0, samples=8, report=Report(0.5, 3, 1.5)))
REPLY = pack(
    JoinReply(version=1, round=1, step=1, included=1, results=(RoundResult(version=1, round=1, step=1, segments=()),))
)
JOIN = pack(Join(site="ohio", version=-1, download_codec="bf16"))
# From 32: the count; from 36 and 86 a length of 1, a name, and a frame of 48 bytes less one.
ENCODED = pack(
    JoinReply(
        version=1,
        round=1,
        step=1,
        included=1,
        results=(),
        snapshot={},
        encoded={"a": payload("fp32", (2,)), "b": payload("fp32", (2,))},
    )
)
HALF = Payload("fp32", torch.float16, (1,), b"", torch.zeros(4, dtype=torch.uint8))


def changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


BAD: dict[str, tuple[bytes, type[Exception]]] = {
    "nothing": (b"", errors.TruncatedError),
    "another magic": (changed(PUSH, 0, b"WGRD"), errors.MagicError),
    "noise of two bytes": (b"no", errors.MagicError),
    "half a header": (PUSH[:31], errors.TruncatedError),
    "another version": (changed(PUSH, 4, b"\x02"), errors.VersionError),
    "kind 0": (changed(PUSH, 5, b"\x00"), errors.ProtocolError),
    "kind 9": (changed(PUSH, 5, b"\x09"), errors.ProtocolError),
    "a flag nobody knows": (changed(PUSH, 6, b"\x08"), errors.ReservedError),
    "a sync schedule every 0 steps": (changed(SCHEDULED, 32, u32(0)), errors.ProtocolError),
    "a sync schedule of an unknown codec": (changed(SCHEDULED, 41, b"zz32"), errors.ProtocolError),
    "a sync schedule cut off": (SCHEDULED[:-1], errors.TruncatedError),
    "a report of no number": (changed(REPORTED, len(REPORTED) - 8, b"\xff" * 8), errors.ProtocolError),
    "a flag of another kind": (changed(RESULT, 6, b"\x01"), errors.ReservedError),
    "a name where there is none": (changed(pack(RoundRequest(round=1)), 7, b"\x01") + b"n", errors.ReservedError),
    "a number where there is none": (changed(pack(RoundRequest(round=1)), 12, u32(1)), errors.ReservedError),
    "a count where there is none": (changed(pack(RoundRequest(round=1)), 28, u32(1)), errors.ReservedError),
    "an empty name": (changed(pack(Leave(site="a")), 7, b"\x00")[:32], errors.ProtocolError),
    "a long name": (changed(pack(Leave(site="a")), 7, b"\x41") + b"a" * 64, errors.SizeLimitError),
    "a name cut off": (pack(Leave(site="ohio"))[:-1], errors.TruncatedError),
    "a name not UTF-8": (changed(pack(Leave(site="ohio")), 35, b"\xff"), errors.ProtocolError),
    "bytes after it": (PUSH + b"\0", errors.TrailingBytesError),
    "too many bytes": (PUSH + bytes(4096), errors.SizeLimitError),
    "too many segments": (changed(PUSH, 28, u32(9)), errors.SizeLimitError),
    "more segments than bytes": (changed(PUSH, 28, u32(2)), errors.TruncatedError),
    "a segment beyond the vector": (changed(PUSH, 36, struct.pack("<Q", 1023)), errors.SizeLimitError),
    "a segment far beyond the vector": (changed(PUSH, 36, struct.pack("<Q", 2**64 - 1)), errors.SizeLimitError),
    "a frame cut off": (PUSH[:-1], errors.TruncatedError),
    "a frame that was damaged": (changed(PUSH, 80, b"\x01"), errors.ChecksumError),
    "a frame of an unknown codec": (changed(PUSH, 49, b"\xfe"), errors.UnknownCodecError),
    "a rate cut off": (
        pack(RoundResult(version=1, round=1, step=1, segments=(), rate=1.0))[:-1],
        errors.TruncatedError,
    ),
    "too many sites": (changed(RESULT, 20, u32(5)), errors.SizeLimitError),
    "more sites than bytes": (changed(RESULT, 20, u32(3)), errors.TruncatedError),
    "sites that are not sorted": (changed(RESULT, 40, b"ohip"), errors.ProtocolError),
    "a site twice": (changed(RESULT, 40, b"ohio"), errors.ProtocolError),
    "a reserved byte of a site": (changed(RESULT, 37, b"\x01"), errors.ReservedError),
    "too many relayed pushes": (changed(SHARED, 24, u32(5)), errors.SizeLimitError),
    "more relayed pushes than bytes": (changed(SHARED, 24, u32(4)), errors.TruncatedError),
    "a relayed push cut off": (SHARED[:60], errors.TruncatedError),
    "a relayed push with segments that is left out": (changed(SHARED, 36, u32(1)), errors.ReservedError),
    "a relayed push left out twice": (changed(SHARED, 49, b"\x02"), errors.ReservedError),
    "a reserved byte of a relayed push": (changed(SHARED, 50, b"\x01"), errors.ReservedError),
    "a relayed push of no weight": (changed(SHARED, 40, struct.pack("<d", math.nan)), errors.ProtocolError),
    "a relayed push that lifts": (changed(SHARED, 40, struct.pack("<d", -1.0)), errors.ProtocolError),
    "relayed pushes that are not sorted": (changed(SHARED, 52, b"ohip"), errors.ProtocolError),
    "a relayed push twice": (changed(changed(SHARED, 52, b"ohio"), 32, u32(2)), errors.ProtocolError),
    "a segment of a relayed push beyond the vector": (
        changed(SHARED, 80, struct.pack("<Q", 1023)),
        errors.SizeLimitError,
    ),
    "too many results": (changed(REPLY, 28, u32(9)), errors.SizeLimitError),
    "more results than bytes": (changed(REPLY, 28, u32(2)), errors.TruncatedError),
    "a request inside a reply": (REPLY[:32] + pack(RoundRequest(round=1)), errors.ProtocolError),
    "a reply inside a reply": (REPLY[:32] + REPLY, errors.ProtocolError),
    "a first model without a codec": (JOIN[:36], errors.TruncatedError),
    "a first model cut off": (JOIN[:-1], errors.TruncatedError),
    "a first model of no letters": (JOIN[:36] + b"\0", errors.ProtocolError),
    "a first model of an unknown codec": (changed(JOIN, 37, b"zf16"), errors.ProtocolError),
    "a first model not ASCII": (changed(JOIN, 37, b"\xff"), errors.ProtocolError),
    "a first model with a memory": (JOIN[:36] + b"\x06onebit", errors.ProtocolError),
    "a first model after it": (JOIN + b"\0", errors.TrailingBytesError),
    "no encoded tensors": (changed(ENCODED, 32, u32(0)), errors.ProtocolError),
    "too many encoded tensors": (changed(ENCODED, 32, u32(9)), errors.SizeLimitError),
    "more encoded tensors than bytes": (changed(ENCODED, 32, u32(8)), errors.TruncatedError),
    "one encoded tensor more than there are": (changed(ENCODED, 32, u32(3)), errors.ProtocolError),
    "no count of encoded tensors": (ENCODED[:34], errors.TruncatedError),
    "encoded tensors that are not sorted": (changed(ENCODED, 38, b"c"), errors.ProtocolError),
    "an encoded tensor twice": (changed(ENCODED, 38, b"b"), errors.ProtocolError),
    "a long name of an encoded tensor": (changed(ENCODED, 36, b"\x01\x02"), errors.SizeLimitError),
    "a name of an encoded tensor not UTF-8": (changed(ENCODED, 38, b"\xff"), errors.ProtocolError),
    "a name of an encoded tensor cut off": (changed(ENCODED, 36, b"\xff\x01"), errors.TruncatedError),
    "an encoded tensor called metadata": (
        ENCODED[:32] + u32(1) + b"\x0c\0__metadata__" + ENCODED[39:87] + ENCODED[-16:],
        errors.ProtocolError,
    ),
    "an encoded tensor of a damaged frame": (changed(ENCODED, 80, b"\xff"), errors.ChecksumError),
    "an encoded tensor of float16": (
        ENCODED[:32] + u32(1) + b"\1\0a" + wire.to_bytes(HALF) + ENCODED[-16:],
        errors.UnknownDtypeError,
    ),
    "encoded tensors without the rest": (changed(ENCODED, 6, b"\x08")[:-16], errors.ProtocolError),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_message(case: str) -> None:
    data, error = BAD[case]
    with pytest.raises(error):
        unpack(data, LIMITS)


def test_a_tensor_both_encoded_and_exact() -> None:
    with pytest.raises(errors.ProtocolError, match="'a' both encoded and exact"):
        JoinReply(
            version=1,
            round=1,
            step=1,
            included=1,
            results=(),
            snapshot={"a": torch.zeros(1)},
            encoded={"a": payload("fp32", (2,))},
        )
    exact = pack(JoinReply(version=1, round=1, step=1, included=1, results=(), snapshot={"a": torch.zeros(1)}))[32:]
    with pytest.raises(errors.ProtocolError, match="'a' both encoded and exact"):
        unpack(ENCODED[:-16] + exact)


def test_encoded_tensors_that_cannot_be_written() -> None:
    with pytest.raises(errors.RangeError):
        pack(
            JoinReply(
                version=1,
                round=1,
                step=1,
                included=1,
                results=(),
                snapshot={},
                encoded={"n" * 513: payload("fp32", (2,))},
            )
        )
    with pytest.raises(errors.UnknownDtypeError):
        pack(JoinReply(version=1, round=1, step=1, included=1, results=(), snapshot={}, encoded={"a": HALF}))


def test_parts_that_overlap() -> None:
    data = bytearray(pack(RoundResult(version=1, round=1, step=1, segments=(segment(0), segment(2)))))
    assert data[-56:-48] == struct.pack("<Q", 2)
    data[-56] = 1
    with pytest.raises(errors.ProtocolError, match="starts at 1, before 2"):
        unpack(data)


def test_the_segments_of_all_results_of_a_join_reply_count() -> None:
    few = RoundResult(version=1, round=1, step=1, segments=tuple(segment(2 * i) for i in range(5)))
    unpack(pack(JoinReply(version=1, round=1, step=1, included=1, results=(few,))), LIMITS)
    with pytest.raises(errors.SizeLimitError, match="5 segments"):
        unpack(pack(JoinReply(version=1, round=1, step=1, included=1, results=(few, few))), LIMITS)


@pytest.mark.parametrize("limit", ["max_bytes", "max_segments", "max_elements", "max_sites"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, 2**63])
def test_limits_that_make_no_sense(limit: str, value: int) -> None:
    with pytest.raises(errors.SpecError, match=limit):
        MessageLimits(**{limit: value})


def test_a_claim_costs_nothing() -> None:
    claims = [
        changed(PUSH, 28, u32(2**16)),
        changed(RESULT, 20, u32(2**12)),
        changed(SHARED, 24, u32(2**12)),
        changed(REPLY, 28, u32(2**16)),
        changed(PUSH, 44 + 16, struct.pack("<Q", 2**31)),
        changed(ENCODED, 32, u32(2**16)),
        changed(ENCODED, 39 + 16, struct.pack("<Q", 2**31)),
        pack(JoinReply(version=1, round=1, step=1, included=1, results=(), snapshot={}))[:32]
        + table("{" + entry("a", "F32", str(2**29), 0, 2**31) + "}"),
    ]
    tracemalloc.start()
    for data in claims:
        with pytest.raises(errors.TruncatedError):
            unpack(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**18


# -- fuzz -----------------------------------------------------------------------------------

MUTANTS = 20_000
EXTREMES = [0, 1, 2, 7, 8, 9, 64, 65, 2**16, 2**31, 2**32 - 1]


def seeds() -> list[bytes]:
    mixed = tuple(Segment(50 * i, payload(spec, (5, 8))) for i, spec in enumerate(SPECS))
    result = RoundResult(version=2, round=2, step=2, segments=mixed[:2], included={"iowa": 1, "ohio": 2}, rate=0.1)
    named = {"weights": torch.randn(4), "clock": torch.arange(2), "wide": torch.zeros(2, 1, dtype=torch.float64)}
    messages: list[Message] = [
        GOLDEN,
        Push(site="ohio", round=1, after=0, step=1, seen=0, samples=8, segments=mixed, final=True, rate=0.5),
        result,
        RoundResult(
            version=2,
            round=2,
            step=2,
            segments=(),
            included={"iowa": 1},
            relayed=(
                RelayedPush(site="iowa", round=1, weight=1.0, segments=None),
                RelayedPush(site="ohio", round=2, weight=0.5, segments=mixed[:2]),
            ),
        ),
        JoinReply(
            version=2,
            round=3,
            step=2,
            included=1,
            results=(RoundResult(version=1, round=1, step=1, segments=()), result),
        ),
        JoinReply(version=2, round=3, step=2, included=1, results=(), snapshot=named),
        JoinReply(version=2, round=3, step=2, included=1, results=(result,), snapshot={"weights": torch.randn(3)}),
        JoinReply(
            version=2,
            round=3,
            step=2,
            included=1,
            results=(),
            snapshot=named,
            encoded={"a": payload("qsgd(bits=4)", (40,)), "b": payload("fp32", (7,))},
        ),
        *(
            RoundRequest(round=4),
            Join(site="ohio", version=-1),
            Join(site="ohio", version=0, download_codec="qsgd(bits=8)"),
            Leave(site="iowa"),
            ServerRestarted(),
        ),
    ]
    return [pack(message) for message in messages]


def flip(rng: random.Random, data: bytearray) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, data: bytearray) -> None:
    """A field of the header, of an included site, or anything at all."""
    at = rng.choice([4, 5, 6, 7, 28, *range(8, 28, 4), rng.randint(0, len(data))])
    width = 1 if at < 8 else rng.choice([1, 4, 8])
    data[at : at + width] = (rng.choice(EXTREMES) & (2 ** (8 * width) - 1)).to_bytes(width, "little")


def inside_frame(rng: random.Random, data: bytearray) -> None:
    """A field of a frame's header."""
    found = [match.start() for match in re.finditer(b"WGRD", data)]
    if found:
        at = rng.choice(found) + rng.choice([4, 5, 6, 7, 8, 9, 10, 12, 16, 24])
        data[at : at + 1] = bytes([rng.choice(EXTREMES) & 255])


def digit(rng: random.Random, data: bytearray) -> None:
    """A snapshot's table that can still be read, if there is one."""
    found = [at for at in range(len(data)) if data[at : at + 1].isalnum()]
    if found:
        data[rng.choice(found)] = rng.choice(b"0123456789abF")


def splice(rng: random.Random, data: bytearray) -> None:
    a, b, c = (rng.randint(0, len(data)) for _ in range(3))
    data[c : c + rng.randrange(9)] = data[min(a, b) : max(a, b)]


def cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randint(0, len(data)) :]


def extend(rng: random.Random, data: bytearray) -> None:
    data += rng.randbytes(rng.randint(1, 16))


MUTATIONS: list[Callable[[random.Random, bytearray], None]] = [
    flip,
    overwrite,
    inside_frame,
    digit,
    splice,
    cut,
    extend,
]


def reseal(data: bytearray) -> None:
    """Checksums that hold, or they would hide the rest of the reader."""
    for found in list(re.finditer(b"WGRD", data)):
        try:
            end = found.start() + wire.frame_size(data[found.start() : found.start() + 24])
        except errors.FrameError:
            continue
        if end <= len(data):
            data[end - 8 : end] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[found.start() : end - 8])))


def use(message: Message) -> None:
    """What a receiver does with it: decode every segment."""
    results = message.results if isinstance(message, JoinReply) else (message,)
    for result in results:
        for one in (
            result.moves if isinstance(result, RoundResult) else result.segments if isinstance(result, Push) else ()
        ):
            one.into(torch.zeros(LIMITS.max_elements), 1)
    if isinstance(message, JoinReply) and message.snapshot is not None:
        encoded_snapshot.whole(message.snapshot, message.encoded, LIMITS.max_elements)


def test_no_mutant_escapes() -> None:
    rng = random.Random(4)
    whole = seeds()
    outcomes: Counter[str] = Counter()
    for _ in range(MUTANTS):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.randint(1, 3)):
            rng.choice(MUTATIONS)(rng, data)
        if rng.random() < 0.6:
            reseal(data)
        try:
            message = unpack(data if rng.random() < 0.5 else bytes(data), LIMITS)
        except (errors.FrameError, errors.ProtocolError) as error:
            outcomes[type(error).__name__] += 1
            continue
        # One way to write a message: what is accepted is what a writer makes of it.
        assert pack(message) == data
        assert nbytes(message) == len(data)
        outcomes["Message"] += 1
        try:
            use(message)
        except errors.DecodeError:
            outcomes["DecodeError"] += 1
    # The fuzz is only worth something if it comes to every check, and past the last one.
    reached = {error.__name__ for error in errors.FrameError.__subclasses__()}
    reached |= {"ProtocolError", "DecodeError", "Message"}
    assert {name for name in reached if outcomes[name] < 10} == set(), outcomes
