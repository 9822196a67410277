"""The document is enough for messages too: a reader written from it alone reads the same, and refuses the same."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightgrad import codecs, wire
from weightgrad.errors import SpecError, WeightGradError
from weightgrad.kernels import fixed
from weightgrad.wire import message_header
from weightgrad.wire.message_bytes import MessageLimits, pack, unpack
from weightgrad.wire.message_fields import HELD_SPAN_FIELD, INCLUDED_FIELD, RELAYED_FIELD, SPAN_FIELD
from weightgrad.wire.message_parts import PART_BYTES
from weightgrad.wire.messages import (
    Holding,
    Join,
    JoinReply,
    Message,
    ModelPart,
    Push,
    PushPart,
    RelayedPush,
    ResultPart,
    RoundResult,
    Segment,
    Waiting,
    check_download_codec,
)
from weightgrad.wire.versions import FRAME_VERSION, MESSAGE_VERSION

from . import spec_messages
from .message_damage import MUTATIONS, reseal
from .message_samples import LIMITS, by_kind, payload, push_part, seeds
from .spec_decoder import Frame, RejectedError
from .spec_messages import KINDS, Fields, Limits, read_message
from .test_message_bytes import BAD, GOLDEN_HEX

DOCUMENT = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text(encoding="utf-8")
NARROW = Limits(**asdict(LIMITS))
WIDE = MessageLimits(max_elements=2**63 - 1)


def knows_codec(spec: str, without_memory: bool) -> bool:
    try:
        check_download_codec(spec) if without_memory else codecs.parse(spec)
    except SpecError:
        return False
    return True


def segment_fields(segment: Segment) -> spec_messages.Segment:
    own = segment.payload
    spans = segment.spans or ((segment.start, segment.end),)
    number, dtype = wire.to_bytes(own)[5:7]
    frame = Frame(own.shape, number, dtype, own.params, bytes(own.body.tolist()), wire.frame_bytes(own))
    return spec_messages.Segment(tuple((start, stop - start) for start, stop in spans), frame)


def relayed_fields(relayed: tuple[RelayedPush, ...]) -> list[Fields]:
    return [
        {
            "site": push.site,
            "round": push.round,
            "weight": push.weight,
            "segments": None if push.segments is None else [segment_fields(one) for one in push.segments],
        }
        for push in relayed
    ]


def fields(message: Message) -> Fields:
    """What the other reader should say of it."""
    kind = next(kind for kind in KINDS.values() if kind.name == type(message).__name__)
    found: Fields = {"kind": kind.name}
    same = {
        *kind.numbers,
        "site",
        "version",
        "final",
        "training",
        "approximate",
        "last",
        "rate",
        "options",
        "digest",
        "vector",
        "data",
    }
    found |= {name: getattr(message, name) for name in same if hasattr(message, name)}
    if isinstance(message, Push):
        report = message.report
        found["report"] = report and (report.step_seconds, report.round, report.round_seconds, report.trip_seconds)
    if isinstance(message, RoundResult | JoinReply):
        schedule = message.schedule
        found["sync schedule"] = schedule and (schedule.every, schedule.overlap, schedule.up)
    if isinstance(message, RoundResult):
        found["included"] = dict(message.included)
    if isinstance(message, Waiting):
        found["included"] = dict(message.missing)
    if isinstance(message, PushPart | ResultPart | ModelPart):
        found["segments"] = [segment_fields(one) for one in message.segments]
    if isinstance(message, RoundResult | ResultPart):
        found["relayed"] = relayed_fields(message.relayed)
    if isinstance(message, Holding):
        found["held"] = tuple((start, stop - start) for start, stop in message.held.spans)
    if isinstance(message, Join):
        found["download codec"] = message.download_codec
    if isinstance(message, JoinReply):
        found["download"] = message.downloads
        found["scalars"] = {name: tensor_fields(tensor) for name, tensor in message.scalars.items()}
    if isinstance(message, Push | RoundResult):
        found["buffers"] = {name: tensor_fields(tensor) for name, tensor in message.buffers.items()}
    return found


def tensor_fields(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    name = {torch.int64: "I64", torch.float64: "F64", torch.float32: "F32"}[tensor.dtype]
    return name, tuple(tensor.shape), tensor.contiguous().numpy().tobytes()


@pytest.mark.parametrize("kind", by_kind)
@settings(max_examples=40)
@given(data=st.data())
def test_both_read_the_same(kind: str, data: st.DataObject) -> None:
    message = data.draw(by_kind[kind])
    assert read_message(pack(message), Limits(max_elements=2**63 - 1), knows_codec) == fields(message)


def test_values_are_for_the_same_elements() -> None:
    decoded = 0
    for data in seeds():
        ours, theirs = read_message(data, Limits(), knows_codec), unpack(data)
        if not isinstance(theirs, PushPart | ResultPart | ModelPart):
            continue
        for mine, other in zip(ours["segments"], theirs.segments, strict=True):
            here, there = np.zeros(400, dtype=np.float32), torch.zeros(400)
            here[mine.elements()] = mine.values()
            other.into(there, fixed.STORE)
            assert np.array_equal(here.view("u4"), there.numpy().view("u4"))
            decoded += 1
    assert decoded > 15


def outcome(data: bytes) -> Fields | str:
    try:
        return read_message(data, NARROW, knows_codec)
    except RejectedError as refused:
        return refused.kind


def real_outcome(data: bytes) -> Fields | str:
    try:
        return fields(unpack(data, LIMITS))
    except WeightGradError as error:
        return type(error).__name__


@pytest.mark.parametrize("case", BAD)
def test_both_refuse_what_is_bad(case: str) -> None:
    data, error = BAD[case]
    assert outcome(data) == error.__name__


@pytest.mark.parametrize("message", list(seeds()), ids=[f"kind {one[5]}, {len(one)} bytes" for one in seeds()])
def test_both_refuse_what_is_cut_off(message: bytes) -> None:
    assert {outcome(message[:size]) for size in range(len(message))} == {"TruncatedError"}


def test_both_refuse_the_same_damage() -> None:
    rng = random.Random(5)
    whole = list(seeds())
    outcomes: Counter[str] = Counter()
    for _ in range(6_000):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.randint(1, 3)):
            rng.choice(MUTATIONS)(rng, data)
        if rng.random() < 0.6:
            reseal(data)
        ours, theirs = outcome(bytes(data)), real_outcome(bytes(data))
        if has_tensors(data):  # which of the mistakes in a table is found first is not said
            assert isinstance(ours, str) == isinstance(theirs, str), data.hex(" ")
            ours, theirs = ("refused", "refused") if isinstance(ours, str) else (ours, theirs)
        assert ours == theirs, data.hex(" ")
        outcomes[ours if isinstance(ours, str) else "Message"] += 1
    assert len(outcomes) >= 11, outcomes
    assert outcomes["Message"] > 300


def has_tensors(data: bytearray) -> bool:
    return len(data) > 6 and bool((data[5] == 5 and data[6] & 1) or (data[5] in (1, 3) and data[6] & 8))


# -- names and numbers of the document --------------------------------------------------------


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table whose first column has this heading."""
    lines = DOCUMENT[DOCUMENT.index(f"\n| {heading} |") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_document_has_every_kind() -> None:
    found = rows("kind")
    kinds = {kind.number: (type_, kind) for type_, kind in message_header._KINDS.items()}
    assert [int(row[0]) for row in found] == sorted(kinds)
    for number, name, _, named, numbers, _ in found:
        type_, kind = kinds[int(number)]
        other = KINDS[int(number)]
        assert name == type_.__name__ == other.name
        assert (named == "yes") == kind.named == other.has_name
        said = [one for one in numbers.split(";")[0].split(", ") if one]
        spelled = {"len(included)": "sites", "len(missing)": "sites", "len(relayed)": "relayed"}
        assert said == [spelled.get(one, one) for one in kind.numbers] == list(other.numbers)
        assert sum(1 << bit for bit, flag in enumerate(other.flags) if flag) == kind.flags
        assert kind.counts == other.has_count
    assert f"| kind | 1 to {len(kinds)}, see below |" in DOCUMENT
    assert f"| kind is 1 to {len(kinds)} |" in DOCUMENT


def test_the_document_has_every_flag() -> None:
    header = DOCUMENT[DOCUMENT.index("\n| flag |") + 1 :].splitlines()[0].strip("|").split("|")
    table = rows("flag")
    for column, names in enumerate(header[1:], start=1):
        for name in names.strip().split(", "):
            kind = next(kind for kind in message_header._KINDS if kind.__name__ == name)
            flags = sum(1 << int(row[0].split()[1]) for row in table if row[column])
            assert flags == message_header._KINDS[kind].flags


def test_the_document_has_every_limit_and_version() -> None:
    powers = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
    lines = re.findall(r"^\| (max_\w+) \| 2([⁰¹²³⁴⁵⁶⁷⁸⁹]+) \|", DOCUMENT, re.MULTILINE)
    found = {name: 2 ** int(power.translate(powers)) for name, power in lines}
    assert found == asdict(MessageLimits()) == asdict(Limits())
    assert f"version {FRAME_VERSION} of frames and version {MESSAGE_VERSION} of messages" in DOCUMENT
    assert f"| version is {MESSAGE_VERSION} | `VersionError` |" in DOCUMENT
    assert f"have {PART_BYTES >> 20} MiB or more" in DOCUMENT


def test_the_worked_messages() -> None:
    control, part = (read_message(bytes.fromhex(text), Limits(), knows_codec) for text in GOLDEN_HEX)
    assert (control["site"], control["round"], control["samples"]) == ("ohio", 3, 512)
    assert (part["site"], part["round"], part["rank"], part["last"]) == ("ohio", 3, 0, True)
    values = {
        element: value for one in part["segments"] for element, value in zip(one.elements(), one.values(), strict=True)
    }
    assert values == {5: 1.0, 9: -2.0, 6: 1.0, 7: -2.0}


def test_the_smallest_sizes_of_the_document() -> None:
    """What a count is compared with: no message can have less."""
    scalar = payload("fp32", ())
    least = len(pack(push_part(Segment(0, scalar)))) - len(pack(push_part())) - scalar.body.numel()
    said = (
        f"a segment has at least {least}, an interval of a segment {SPAN_FIELD.size}, a held interval "
        f"{HELD_SPAN_FIELD.size}, an included site {INCLUDED_FIELD.size + 1}, a relayed push {RELAYED_FIELD.size + 1}"
    )
    assert said in DOCUMENT
