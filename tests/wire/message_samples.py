"""Messages for tests: hypothesis strategies for every kind, one of each for damage, and how to compare them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import Payload
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import MessageLimits, pack
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
from weightgrad.wire.sync_schedule import Report, SyncSchedule

SPECS = ["fp32", "qsgd(bits=4)", "topk(0.1)", "terngrad", "ef(topk(0.1) > sign())"]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (40,), (5, 8), (3, 2, 2)]
LIMITS = MessageLimits(max_bytes=4096, max_segments=8, max_intervals=16, max_elements=1024, max_sites=4)


@cache
def payload(spec: str, shape: tuple[int, ...], seed: int = 0) -> Payload:
    codec = codecs.parse(spec)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return codec.encode(x, codec.init(x), seed)[0]


def segment(start: int, spec: str = "fp32", shape: tuple[int, ...] = (2,)) -> Segment:
    return Segment(start, payload(spec, shape))


def spread(*spans: tuple[int, int], spec: str = "fp32") -> Segment:
    """A segment of these intervals."""
    intervals = Intervals(spans)
    return Segment.at(intervals, payload(spec, (intervals.numel,)))


def plain(thing: object) -> object:
    """Messages compare by identity; what this gives compares by content, to the bit."""
    if isinstance(thing, Tensor):
        return thing.dtype, tuple(thing.shape), thing.contiguous().view(-1).view(torch.uint8).tolist()
    if is_dataclass(thing):
        return type(thing), [plain(getattr(thing, field.name)) for field in fields(thing)]
    if isinstance(thing, Mapping):
        return {key: plain(value) for key, value in thing.items()}
    return [plain(inside) for inside in thing] if isinstance(thing, tuple) else thing


# -- strategies -----------------------------------------------------------------------------

numbers = st.integers(0, 2**32 - 1)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=16)
rates = st.none() | st.floats(0, 1e300)
options = st.lists(st.floats(-1e300, 1e300), max_size=5).map(tuple)
payloads = st.builds(payload, st.sampled_from(SPECS), st.sampled_from(SHAPES), st.integers(0, 3))
included = st.dictionaries(names, numbers, max_size=4)


@st.composite
def in_a_row(draw: st.DrawFn) -> tuple[Segment, ...]:
    """Segments of one interval each, of any shape; some may be empty."""
    found, free = [], 0
    for gap, own in draw(st.lists(st.tuples(st.integers(0, 2**20), payloads), max_size=4)):
        found.append(Segment(free + gap, own))
        free += gap + own.numel
    return tuple(found)


@st.composite
def interleaved(draw: st.DrawFn, *, width: int = 2**10) -> tuple[Segment, ...]:
    """Segments of several intervals, one between the intervals of another."""
    owners = draw(st.integers(1, 4))
    spans: list[list[tuple[int, int]]] = [[] for _ in range(owners)]
    end = draw(st.integers(0, width))
    for gap, length in draw(st.lists(st.tuples(st.integers(0, width), st.integers(1, 5)), max_size=8)):
        spans[draw(st.integers(0, owners - 1))].append((end + gap, end + gap + length))
        end += gap + length
    sets = [Intervals.of(own) for own in spans if own]
    spec = draw(st.sampled_from(SPECS))
    found = [Segment.at(one, payload(spec, (one.numel,), draw(st.integers(0, 3)))) for one in sets]
    return tuple(sorted(found, key=lambda one: one.start))


segments = in_a_row() | interleaved()


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int64]))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    return (torch.randn(shape) * 100).to(dtype)


@st.composite
def holdings(draw: st.DrawFn) -> Intervals:
    end, spans = 0, []
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 2**40)), max_size=6)):
        spans.append((end + gap, end + gap + length))
        end += gap + length
    return Intervals.of(spans)


seconds = st.floats(0, 1e9)
reports = st.none() | st.builds(Report, seconds, numbers, seconds, seconds)
specs = st.sampled_from(["fp32", "ef(topk(0.01) > sign())", "qsgd(bits=4)"])
schedules = st.none() | st.builds(SyncSchedule, st.integers(1, 2**32 - 1), numbers, specs)
weights = st.floats(0, 1e300)
scalars = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=12), tensors(), max_size=5)
download_codecs = st.sampled_from([None, "fp32", "qsgd(bits=8)", "topk(0.25) > qsgd(bits=4)"])


def pushes(values: st.SearchStrategy[tuple[Segment, ...]]) -> st.SearchStrategy[Push]:
    return st.builds(
        Push,
        site=names,
        round=numbers,
        after=numbers,
        step=numbers,
        seen=numbers,
        samples=numbers,
        segments=values,
        final=st.booleans(),
        rate=rates,
        options=options,
        report=reports,
        buffers=scalars,
    )


def relayed(values: st.SearchStrategy[tuple[Segment, ...]]) -> st.SearchStrategy[tuple[RelayedPush, ...]]:
    return st.dictionaries(st.tuples(names, numbers), st.tuples(weights, st.none() | values), max_size=3).map(
        lambda found: tuple(
            RelayedPush(site=site, round=round_, weight=found[site, round_][0], segments=found[site, round_][1])
            for site, round_ in sorted(found)
        )
    )


def results(values: st.SearchStrategy[tuple[Segment, ...]]) -> st.SearchStrategy[RoundResult]:
    return st.builds(
        RoundResult,
        version=numbers,
        round=numbers,
        step=numbers,
        segments=values,
        included=included,
        rate=rates,
        options=options,
        schedule=schedules,
        relayed=relayed(values),
        buffers=scalars,
    )


nothing: st.SearchStrategy[tuple[Segment, ...]] = st.just(())
progress: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(("version", "round", "step", "included", "pushed"), numbers)
replies = st.builds(JoinReply, **progress) | st.builds(
    JoinReply, **progress, downloads=st.just(True), approximate=st.booleans(), schedule=schedules, scalars=scalars
)
joins = st.builds(
    Join,
    site=names,
    version=st.integers(-1, 2**32 - 2),
    epoch=numbers,
    digest=st.none() | st.integers(0, 2**64 - 1),
    download_codec=download_codecs,
    training=st.booleans(),
)


def final_part(site: str, place: int, more: int, data: bytes) -> FinalPart:
    return FinalPart(site=site, place=place, parts=place + more, data=data)


by_kind: dict[str, st.SearchStrategy[Message]] = {
    "Push": pushes(nothing),
    "RoundRequest": st.builds(RoundRequest, round=numbers),
    "RoundResult": results(nothing),
    "Join": joins,
    "JoinReply": replies,
    "ServerRestarted": st.builds(ServerRestarted),
    "Leave": st.builds(Leave, site=names),
    "PushPart": st.builds(PushPart, site=names, round=numbers, rank=numbers, segments=segments, last=st.booleans()),
    "ResultPart": st.builds(
        ResultPart, version=numbers, segments=segments, last=st.booleans(), relayed=relayed(segments)
    ),
    "ModelPart": st.builds(ModelPart, version=numbers, vector=names, segments=segments, last=st.booleans()),
    "Holding": st.builds(Holding, site=names, rank=numbers, ranks=numbers, epoch=numbers, held=holdings()),
    "Waiting": st.builds(Waiting, round=numbers, seconds=numbers, missing=included),
    "Pause": st.builds(Pause, paused=st.booleans()),
    "FinalPart": st.builds(final_part, names, st.integers(0, 2**31), st.integers(1, 9), st.binary()),
}
"""Messages of every kind that can be packed."""


# -- one of each, small enough to be damaged everywhere ---------------------------------------


def push(**changes: Any) -> Push:
    return Push(**{"site": "ohio", "round": 1, "after": 0, "step": 1, "seen": 0, "samples": 8, **changes})


def push_part(*values: Segment, **changes: Any) -> PushPart:
    return PushPart(**{"site": "ohio", "round": 1, "rank": 0, "segments": values, "last": True, **changes})


def result(**changes: Any) -> RoundResult:
    return RoundResult(**{"version": 1, "round": 1, "step": 1, **changes})


def result_part(*values: Segment, **changes: Any) -> ResultPart:
    return ResultPart(**{"version": 1, "segments": values, "last": True, **changes})


def model_part(*values: Segment, **changes: Any) -> ModelPart:
    return ModelPart(**{"version": 1, "vector": "weights", "segments": values, "last": True, **changes})


def relayed_push(site: str, values: tuple[Segment, ...] | None = (), **changes: Any) -> RelayedPush:
    return RelayedPush(**{"site": site, "round": 1, "weight": 1.0, "segments": values, **changes})


def reply(**changes: Any) -> JoinReply:
    return JoinReply(**{"version": 1, "round": 1, "step": 1, "included": 1, **changes})


def holding(*spans: tuple[int, int], **changes: Any) -> Holding:
    return Holding(**{"site": "ohio", "rank": 0, "ranks": 2, "epoch": 7, "held": Intervals(spans), **changes})


def seeds() -> Iterator[bytes]:
    mixed = tuple(Segment(50 * i, payload(spec, (5, 8))) for i, spec in enumerate(SPECS))
    woven = (spread((0, 3), (8, 10), (40, 41)), segment(3), spread((5, 8), (20, 30), spec="qsgd(bits=4)"), segment(60))
    named = {
        "steps": torch.linspace(-1.5, 2.5, 4),
        "clock": torch.arange(2),
        "wide": torch.zeros(2, 1, dtype=torch.float64),
    }
    schedule = SyncSchedule(8, 2, "qsgd(bits=4)")
    messages: list[Message] = [
        push(),
        push(final=True, rate=0.5, options=(0.9, -1.0), report=Report(0.5, 3, 1.5, 0.25)),
        push(buffers=named),
        push_part(),
        push_part(*mixed),
        push_part(*woven, last=False),
        RoundRequest(round=4),
        result(included={"iowa": 1, "ohio": 2}, rate=0.1, options=(0.95,), schedule=schedule),
        result(relayed=(relayed_push("iowa", None), relayed_push("ohio"))),
        result(relayed=(relayed_push("iowa", None),), buffers=named),
        result_part(*mixed[:2], last=False),
        result_part(
            *woven,
            relayed=(relayed_push("iowa", None), relayed_push("ohio", mixed[:2]), relayed_push("utah", woven[:2])),
        ),
        model_part(*woven),
        model_part(*mixed[:1], vector="optimizer.0.exp_avg", last=False),
        Join(site="ohio", version=-1),
        Join(site="ohio", version=0, epoch=3, digest=2**64 - 3, download_codec="qsgd(bits=8)", training=True),
        reply(),
        reply(downloads=True, scalars={}),
        reply(downloads=True, approximate=True, schedule=schedule, scalars=named),
        holding(),
        holding((0, 5), (7, 1000)),
        Leave(site="iowa"),
        FinalPart(site="iowa", place=1, parts=2, data=b"bytes of a file"),
        ServerRestarted(),
        Waiting(round=7, seconds=12, missing={"iowa": 6, "ohio": 0}),
        Pause(paused=True),
        Pause(paused=False),
    ]
    return map(pack, messages)
