"""A reader of messages written from docs/wire-format.md alone: no torch, nothing of WeightGrad.

    fields = read_message(data)      # {"kind": "Push", "site": "ohio", "round": 3, ...}

It is slow and plain on purpose: each method is one paragraph of the document. What the document says must be refused
raises `RejectedError`, whose `kind` is the name of the error in the document. Which texts are codecs, and which of them
have a memory, the document does not say: the caller does.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .spec_decoder import Frame, RejectedError, Values, read_frame, require

Fields = dict[str, Any]
Interval = tuple[int, int]  # first element, how many
KnowsCodec = Callable[[str, bool], bool]
"""Whether a text is a codec; and if True is given, whether it is one without memory."""


@dataclass(frozen=True)
class Limits:
    max_bytes: int = 2**32
    max_segments: int = 2**16
    max_intervals: int = 2**20
    max_elements: int = 2**32
    max_sites: int = 2**12


@dataclass(frozen=True)
class Kind:
    """A row of the table of kinds, and a column of the table of flags."""

    name: str
    has_name: bool
    numbers: tuple[str, ...]
    flags: tuple[str | None, ...] = ()
    has_count: bool = False


KINDS = {
    1: Kind(
        "Push", True, ("round", "after", "step", "seen", "samples"), ("final", "rate", "report", "buffers", "options")
    ),
    2: Kind("RoundRequest", False, ("round",)),
    3: Kind(
        "RoundResult",
        False,
        ("version", "round", "step", "sites", "relayed"),
        (None, "rate", "sync schedule", "buffers", "options"),
    ),
    4: Kind("Join", True, ("version + 1", "epoch"), ("download codec", "digest", "training")),
    5: Kind(
        "JoinReply",
        False,
        ("version", "round", "step", "included", "pushed"),
        ("download", None, "sync schedule", "approximate"),
    ),
    6: Kind("ServerRestarted", False, ()),
    7: Kind("Leave", True, ()),
    8: Kind("PushPart", True, ("round", "rank"), ("last",), has_count=True),
    9: Kind("ResultPart", False, ("version", "relayed"), ("last",), has_count=True),
    10: Kind("ModelPart", False, ("version",), ("last",), has_count=True),
    11: Kind("Holding", True, ("rank", "ranks", "epoch"), has_count=True),
    12: Kind("FinalPart", True, ("place", "parts"), has_count=True),
    13: Kind("Waiting", False, ("round", "seconds", "sites")),
    14: Kind("Pause", False, (), ("paused",)),
}


@dataclass(frozen=True)
class Segment:
    intervals: tuple[Interval, ...]
    frame: Frame

    @property
    def first(self) -> int:
        return self.intervals[0][0]

    @property
    def end(self) -> int:
        start, length = self.intervals[-1]
        return start + length

    def elements(self) -> list[int]:
        """The element that each value is for."""
        return [start + place for start, length in self.intervals for place in range(length)]

    def values(self) -> Values:
        return self.frame.values()


def read_message(data: bytes, limits: Limits, knows_codec: KnowsCodec) -> Fields:
    """The fields of exactly one message, by name."""
    require(len(data) <= limits.max_bytes, "SizeLimitError", "message")
    return Reader(data, limits, knows_codec).message()


class Reader:
    """Goes through a message from front to back."""

    def __init__(self, data: bytes, limits: Limits, knows_codec: KnowsCodec) -> None:
        self.data, self.at, self.limits, self.knows_codec = data, 0, limits, knows_codec
        self.segments_left, self.intervals_left = limits.max_segments, limits.max_intervals

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, size: int) -> bytes:
        require(self.left >= size, "TruncatedError")
        self.at += size
        return self.data[self.at - size : self.at]

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def count(self, count: int, limit: int, least: int) -> int:
        require(count <= limit, "SizeLimitError", "count")
        require(count * least <= self.left, "TruncatedError", "count")
        return count

    def options(self) -> tuple[float, ...]:
        (count,) = self.unpack("<H")
        numbers = tuple(self.unpack(f"<{count}d"))
        require(1 <= count <= 4096 and all(math.isfinite(one) for one in numbers), "ProtocolError", "options")
        return numbers

    def message(self) -> Fields:
        require(self.data[:4] == b"WGMS"[: len(self.data)], "MagicError")
        _, version, number, flags, name_len, *numbers, count = self.unpack("<4sBBBB5II")
        require(version == 2, "VersionError")
        require(number in KINDS, "ProtocolError", "kind")
        kind = KINDS[number]
        allowed = sum(1 << bit for bit, name in enumerate(kind.flags) if name)
        require(flags & ~allowed == 0, "ReservedError", "flags")
        require(not any(numbers[len(kind.numbers) :]), "ReservedError", "numbers")
        require(kind.has_name or name_len == 0, "ReservedError", "name_len")
        require(kind.has_count or count == 0, "ReservedError", "count")
        found: Fields = {"kind": kind.name, **dict(zip(kind.numbers, numbers, strict=False))}
        on = {name for bit, name in enumerate(kind.flags) if name and flags >> bit & 1}
        found |= {
            name: name in on for name in ("final", "training", "download", "approximate", "last") if name in kind.flags
        }
        if kind.has_name:
            found["site"] = self.site_name(name_len)
        if kind.name == "ModelPart":
            found["vector"] = text(self.take(self.unpack("<B")[0]))
        if kind.name == "Join":
            found["version"] = found.pop("version + 1") - 1
            codec = self.take(self.unpack("<B")[0]) if "download codec" in on else None
            found["digest"] = self.unpack("<Q")[0] if "digest" in on else None
            found["download codec"] = None if codec is None else self.codec(codec, without_memory=True)
        if "rate" in kind.flags:
            found["rate"] = positive(self.unpack("<d")[0]) if "rate" in on else None
        if "options" in kind.flags:
            found["options"] = self.options() if "options" in on else ()
        if kind.name == "Push":
            found["report"] = self.report() if "report" in on else None
        if "sync schedule" in kind.flags:
            found["sync schedule"] = self.schedule() if "sync schedule" in on else None
        if kind.name in ("RoundResult", "Waiting"):
            found["included"] = self.included(found.pop("sites"))
        if kind.name == "Holding":
            found["held"] = self.held(count)
        if kind.name in ("PushPart", "ResultPart", "ModelPart"):
            found["segments"] = self.segments(count)
        if "relayed" in kind.numbers:
            found["relayed"] = self.relayed(found["relayed"], values=kind.name == "ResultPart")
        if kind.name == "JoinReply":
            found["scalars"] = self.scalars() if "download" in on else {}
            require("download" in on or not on, "ProtocolError", "flags without a download")
        if "buffers" in kind.flags:
            found["buffers"] = self.scalars() if "buffers" in on else {}
            require("buffers" not in on or bool(found["buffers"]), "ProtocolError", "no buffers")
        if kind.name == "FinalPart":
            found["data"] = self.take(count)
            require(found["place"] < found["parts"], "ProtocolError", "place")
        require(self.left == 0, "TrailingBytesError")
        return found

    def site_name(self, size: int) -> str:
        require(size <= 64, "SizeLimitError", "name")
        return text(self.take(size))

    def codec(self, raw: bytes, *, without_memory: bool) -> str:
        require(1 <= len(raw) <= 255 and max(raw) < 128, "ProtocolError", "codec")
        spec = raw.decode("ascii")
        require(self.knows_codec(spec, without_memory), "ProtocolError", "codec")
        return spec

    def report(self) -> tuple[float, int, float, float]:
        step, round_, duration, trip = self.unpack("<dIdd")
        times = (step, duration, trip)
        require(all(0 <= one <= 1e9 for one in times), "ProtocolError", "a time of a report")
        return step, round_, duration, trip

    def schedule(self) -> tuple[int, int, str]:
        every, overlap, length = self.unpack("<IIB")
        up = self.take(length)
        require(every >= 1, "ProtocolError", "every")
        return every, overlap, self.codec(up, without_memory=False)

    def included(self, sites: int) -> dict[str, int]:
        found: dict[str, int] = {}
        last = b""
        for _ in range(self.count(sites, self.limits.max_sites, 9)):
            round_, name_len, reserved = self.unpack("<IB3s")
            require(reserved == bytes(3), "ReservedError", "included site")
            name = self.site_name(name_len)
            require(name.encode() > last, "ProtocolError", "included sites are not sorted")
            found[name], last = round_, name.encode()
        return found

    def held(self, count: int) -> tuple[Interval, ...]:
        self.count(count, self.limits.max_intervals, 16)
        found: tuple[Interval, ...] = tuple(self.unpack("<QQ") for _ in range(count))
        check_order(found)
        require(sum(found[-1] if found else (0,)) <= self.limits.max_elements, "SizeLimitError", "held")
        return found

    def segments(self, count: int) -> list[Segment]:
        self.segments_left -= self.count(count, self.segments_left, 40)
        found = [self.segment() for _ in range(count)]
        require(found == sorted(found, key=lambda one: one.first), "ProtocolError", "segments are not sorted")
        intervals = sorted(interval for one in found for interval in one.intervals if interval[1])
        for (start, length), (next_start, _) in pairwise(intervals):
            require(start + length <= next_start, "ProtocolError", "segments overlap")
        return found

    def segment(self) -> Segment:
        (start,) = self.unpack("<Q")
        intervals: tuple[Interval, ...] = ()
        if start >> 63:
            k = self.count(start - 2**63, self.intervals_left, 12)
            self.intervals_left -= k
            intervals = tuple(self.unpack("<QI") for _ in range(k))
            check_order(intervals)
            require(k >= 2, "ProtocolError", "one interval written as several")
        limits = self.limits
        frame = read_frame(
            self.data[self.at :], max_elements=limits.max_elements, max_body_bytes=limits.max_bytes, alone=False
        )
        self.take(frame.size)
        n = math.prod(frame.shape)
        found = Segment(intervals or ((start, n),), frame)
        require(sum(length for _, length in found.intervals) == n, "ProtocolError", "lengths of intervals")
        require(found.end <= limits.max_elements, "SizeLimitError", "a segment beyond the index space")
        return found

    def relayed(self, count: int, *, values: bool) -> list[Fields]:
        found: list[Fields] = []
        last = (b"", 0)
        for _ in range(self.count(count, self.limits.max_sites, 21)):
            round_, own_count, weight, name_len, left_out, reserved = self.unpack("<IIdBB2s")
            require(left_out <= 1 and not (left_out and own_count), "ReservedError", "left out")
            require(reserved == bytes(2), "ReservedError", "relayed push")
            require(values or own_count == 0, "ProtocolError", "values in a RoundResult")
            name = self.site_name(name_len)
            positive(weight)
            require((name.encode(), round_) > last, "ProtocolError", "relayed pushes are not sorted")
            last = (name.encode(), round_)
            segments = None if left_out else self.segments(own_count)
            found.append({"site": name, "round": round_, "weight": weight, "segments": segments})
        return found

    def scalars(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        (size,) = self.unpack("<Q")
        table = self.take(size)
        tensors = read_table(table, self.limits)
        require(write_table(tensors) == table, "ProtocolError", "not what a writer makes")
        found = {}
        for name, (dtype, shape) in tensors.items():
            found[name] = dtype, shape, self.take(math.prod(shape) * WIDTHS[dtype])
        return found


def text(raw: bytes) -> str:
    require(len(raw) > 0, "ProtocolError", "an empty name")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise RejectedError("ProtocolError", "a name that is not UTF-8") from None


def positive(number: float) -> float:
    require(0 <= number < math.inf, "ProtocolError", "a number that is negative or not finite")
    return number


def check_order(intervals: tuple[Interval, ...]) -> None:
    require(all(length > 0 for _, length in intervals), "ProtocolError", "an empty interval")
    for (start, length), (next_start, _) in pairwise(intervals):
        require(start + length < next_start, "ProtocolError", "intervals are not in order")


# Scalars: a safetensors file, written in one way.

Tensors = dict[str, tuple[str, tuple[int, ...]]]
WIDTHS = {"I64": 8, "F64": 8, "F32": 4}
ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def read_table(table: bytes, limits: Limits) -> Tensors:
    """Names, dtypes and shapes, in the order in which they come."""
    try:
        pairs = json.loads(table.decode(), object_pairs_hook=list)
    except (ValueError, RecursionError):
        raise RejectedError("ProtocolError", "not JSON") from None
    require(isinstance(pairs, list), "ProtocolError", "not an object")
    found: Tensors = {}
    for pair in pairs:
        require(isinstance(pair, tuple) and isinstance(pair[1], list), "ProtocolError", "not an entry")
        name, entry = pair
        require(name not in found and name != "__metadata__" and is_unicode(name), "ProtocolError", "name")
        require(all(isinstance(item, tuple) for item in entry), "ProtocolError", "not an entry")
        require([key for key, _ in entry] == ["dtype", "shape", "data_offsets"], "ProtocolError", "keys")
        (_, dtype), (_, shape), _ = entry
        require(isinstance(dtype, str) and isinstance(shape, list), "ProtocolError", "not an entry")
        require(dtype in WIDTHS, "UnknownDtypeError")
        require(all(type(size) is int and size >= 0 for size in shape), "ProtocolError", "shape")
        require(len(shape) <= 16, "ShapeError")
        product = math.prod(max(1, size) for size in shape)
        require(product * WIDTHS[dtype] <= limits.max_bytes, "SizeLimitError", "tensor")
        require(len(found) < limits.max_segments, "SizeLimitError", "tensors")
        require(len(name.encode()) <= 512, "ProtocolError", "name")
        found[name] = dtype, tuple(shape)
    return found


def is_unicode(name: str) -> bool:
    return not any(0xD800 <= ord(character) < 0xE000 for character in name)


def write_table(tensors: Tensors) -> bytes:
    entries, end = [], 0
    for name in sorted(tensors, key=lambda one: (list(WIDTHS).index(tensors[one][0]), one.encode())):
        dtype, shape = tensors[name]
        start, end = end, end + math.prod(shape) * WIDTHS[dtype]
        sizes = ",".join(map(str, shape))
        entries.append(f'"{escaped(name)}":{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{start},{end}]}}')
    written = ("{" + ",".join(entries) + "}").encode()
    return written + b" " * (-len(written) % 8)


def escaped(name: str) -> str:
    return "".join(ESCAPES.get(c, f"\\u{ord(c):04x}" if ord(c) < 32 else c) for c in name)
