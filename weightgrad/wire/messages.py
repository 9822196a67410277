"""The messages between sites and the global server.

Two kinds. Control messages are small and travel between the coordinators: rank 0 of a site and process 0 of the global
server. Bulk messages carry values and travel between every rank and the server processes that serve what it holds.

A message is a value. Its exact size on the wire (`wire/message_sizes.py`) is a header of 32 bytes, the site's name, and
for each segment where it lies (8 bytes, or 8 and 12 for each interval if there are several) and its frame. A segment
describes itself: decoding it needs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from weightgrad import codecs, wire
from weightgrad.codecs import Codec, Payload
from weightgrad.codecs.registry import decode_into
from weightgrad.codecs.sparse_entries import SparseEntries
from weightgrad.errors import ProtocolError, SpecError
from weightgrad.kernels import fixed
from weightgrad.wire.intervals import Intervals, Span
from weightgrad.wire.sync_schedule import MAX_TEXT_BYTES, Report, SyncSchedule

HEADER_BYTES = 32
START_BYTES = 8
SPAN_BYTES = 12
HELD_SPAN_BYTES = 16
LENGTH_BYTES = 1
RATE_BYTES = 8
OPTIONS_BYTES = 2  # how many numbers follow
MAX_OPTIONS = 4096
DIGEST_BYTES = 8
RELAYED_BYTES = 20


@dataclass(frozen=True, eq=False)
class Segment:
    """Encoded elements of the index space: the payload is what lies in the segment's intervals, one after the other.

    Attributes:
        start: the first element.
        payload: the encoded values.
        spans: all intervals if there are several; empty if the segment is one interval from `start` on.
    """

    start: int
    payload: Payload
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        if not self.spans:
            return
        if len(self.spans) < 2 or self.start != self.spans[0][0] or self.intervals.numel != self.payload.numel:
            raise ProtocolError(
                f"a segment at {self.start} with {self.payload.numel} values for {self.intervals.numel} elements from "
                f"{self.intervals.first} on in {len(self.spans)} intervals; wanted as many, the same start, and two "
                "intervals or more"
            )

    @staticmethod
    def at(intervals: Intervals, payload: Payload) -> Segment:
        """A segment for these intervals.

        Raises:
            ProtocolError: there are more or fewer values than elements.
        """
        if intervals.numel != payload.numel:
            raise ProtocolError(f"{payload.numel} values for {intervals.numel} elements from {intervals.first} on")
        return Segment(intervals.first, payload, intervals.spans if len(intervals.spans) > 1 else ())

    @cached_property
    def intervals(self) -> Intervals:
        """Where the values lie in the index space."""
        if self.spans:
            return Intervals(self.spans)
        return Intervals(((self.start, self.end),) if self.payload.numel else ())

    @cached_property
    def entries(self) -> SparseEntries | None:
        """The entries of a sparse payload, which a round works on several times; None if it is not sparse.

        Raises:
            DecodeError: The payload is not something that the encoder writes.
        """
        return SparseEntries.of(self.payload) if self.payload.codec == "sparse" else None

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.spans[-1][1] if self.spans else self.start + self.payload.numel

    def into(self, vector: Tensor, mode: int, held: Intervals | None = None, *, share: float = 1.0) -> None:
        """Decode the segment into its place in a vector.

        Args:
            vector: changed in place.
            mode: `kernels.fixed.STORE`, `ADD` or `SUBTRACT`.
            held: which elements the vector stores; elements that it does not are left out. None: the whole index space.
            share: what each value is multiplied by.

        Raises:
            ProtocolError: `held` is None and the segment does not lie within the vector.
        """
        if held is None:
            if not 0 <= self.start <= self.end <= vector.numel():
                raise ProtocolError(
                    f"a segment of elements {self.start} to {self.end} for a vector of {vector.numel()}; both ends "
                    "must train the same model"
                )
            held = Intervals.whole(vector.numel())
        place = held.slice_of(self.intervals)
        entries = self.entries
        if place is not None and entries is not None:
            entries.write([(0, vector[place])], mode, share)
            return
        if place is not None and share == 1:
            decode_into(self.payload, vector[place], mode)
            return
        values = torch.empty(self.payload.numel, device=vector.device, dtype=torch.float32)
        decode_into(self.payload, values, fixed.STORE)
        if share != 1:
            values.mul_(share)
        for run in held.runs(self.intervals):
            mine, theirs = vector[run.mine : run.mine + run.count], values[run.theirs : run.theirs + run.count]
            if mode == fixed.STORE:
                mine.copy_(theirs)
            else:
                mine.add_(theirs) if mode == fixed.ADD else mine.sub_(theirs)


@dataclass(frozen=True, eq=False, kw_only=True)
class Push:
    """Site to server: a site starts a round. What left the residual comes in parts.

    In one process `segments` holds all of it. Between processes the push travels without segments, and each rank of
    the site sends its own as `PushPart`s. Without any, nothing was significant.
    """

    site: str
    round: int
    after: int  # the round of the site's push before this one, which shows whether that one was lost
    step: int
    seen: int  # the version of the global model that the push was computed on
    samples: int
    segments: tuple[Segment, ...] = ()
    final: bool = False  # the site has finished training; later rounds do not wait for it
    rate: float | None = None  # the learning rate of the step, where the server does not know it
    options: tuple[float, ...] = ()  # numbers among the optimizer's options, if they are not those it announced
    report: Report | None = None  # what the site has measured, where the server sets the sync schedule
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # the site's buffers, such as statistics of batch norm


@dataclass(frozen=True, eq=False, kw_only=True)
class PushPart:
    """Rank to server process: some segments of a push. The parts of a rank come in order; the last one says so."""

    site: str
    round: int
    rank: int
    segments: tuple[Segment, ...]
    last: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundRequest:
    """Server to site: a round has begun; push for it, even if nothing is significant."""

    round: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Waiting:
    """Server to every site that is connected: for whom the oldest open round waits. It is said, and nothing follows."""

    round: int  # 0: the first global model has not come
    seconds: int  # since the round was opened
    missing: Mapping[str, int]  # site -> the round of its last push; 0: none


@dataclass(frozen=True, eq=False, kw_only=True)
class RelayedPush:
    """One push in a round result that relays pushes as they came.

    `segments` is None if the push is the receiver's own, which it has already.
    """

    site: str
    round: int
    weight: float
    segments: tuple[Segment, ...] | None


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundResult:
    """Server to every site: move the global model by this.

    Either the server has aggregated the pushes and encoded the result (`segments`), or it relays them as they came
    (`relayed`) and every replica computes their weighted mean itself. Between processes the result travels without
    segments, and each rank gets what it holds as `ResultPart`s.
    """

    version: int
    round: int
    step: int
    segments: tuple[Segment, ...] = ()
    included: Mapping[str, int] = field(default_factory=dict)  # site -> the round of its push in this result
    rate: float | None = None  # the learning rate to step with; None: every replica knows it
    options: tuple[float, ...] = ()  # the optimizer's options to step with; none: those that it announced
    schedule: SyncSchedule | None = None  # the sync schedule from here on; None: as before
    relayed: tuple[RelayedPush, ...] = ()
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # of all sites together, if any push had some

    @property
    def moves(self) -> tuple[Segment, ...]:
        """Every segment in the result, those of relayed pushes too."""
        return (*self.segments, *(segment for push in self.relayed for segment in push.segments or ()))

    def without(self, site: str) -> RoundResult:
        """The result for a site that still has its own pushes: they are left out, empty ones too."""
        relayed = tuple(replace(push, segments=None) if push.site == site else push for push in self.relayed)
        return replace(self, relayed=relayed)


@dataclass(frozen=True, eq=False, kw_only=True)
class ResultPart:
    """Server process to rank: what a round result says of elements that the rank holds. The last part says so."""

    version: int
    segments: tuple[Segment, ...]
    last: bool
    relayed: tuple[RelayedPush, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelPart:
    """A part of a model: its weights, or a vector of its optimizer. The last part of a model says so.

    From a rank to a server process it is the first global model; the other way it is a download.
    """

    version: int
    vector: str  # "weights", or the name of a vector of the optimizer
    segments: tuple[Segment, ...]
    last: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class Holding:
    """Rank to server process, before anything else: which elements the rank holds, so that it is sent only these."""

    site: str
    rank: int
    ranks: int  # how many ranks of the site hold elements that this process serves
    epoch: int  # of the site's processes: those that were started together have the same
    held: Intervals


@dataclass(frozen=True, eq=False, kw_only=True)
class Join:
    """Site to server: the site asks to join, for the first time or again, and says which global model it has.

    A joined site may ask again: it is sent the global model once more, and nothing else changes.
    """

    site: str
    version: int  # of the site's global model; -1: it has none
    epoch: int = 0  # of the site's processes, as in their `Holding`s
    digest: int | None = None  # of a model that was never trained: if it is the first global model, nothing is sent
    download_codec: str | None = None  # the codec of a download, if the whole model must be sent; None: exact
    training: bool = False  # the site goes on training while a download comes, so rounds wait for it

    def __post_init__(self) -> None:
        if self.download_codec is not None:
            try:
                check_download_codec(self.download_codec)
            except SpecError as error:
                raise ProtocolError(f"{self.site!r} asks for a download that cannot be made: {error}") from None


@dataclass(frozen=True, eq=False, kw_only=True)
class JoinReply:
    """Server to site: the way to the present global model, by the results that the site missed or by a download.

    In one process `results` or `parts` hold all of it. Between processes they are left out and follow as `ResultPart`s
    or `ModelPart`s.
    """

    version: int
    round: int  # the next round
    step: int
    included: int  # the round of the site's last push that is in the global model
    pushed: int = 0  # the round of the site's last push that the server has received
    results: tuple[RoundResult, ...] = ()
    downloads: bool = False  # whether the whole model is sent
    approximate: bool = False  # whether it is sent through a lossy codec
    schedule: SyncSchedule | None = None  # the sync schedule in force, with a download
    scalars: Mapping[str, Tensor] = field(default_factory=dict)  # what the optimizer keeps beside vectors
    parts: tuple[ModelPart, ...] = ()

    def __post_init__(self) -> None:
        if not self.downloads and (self.approximate or self.scalars or self.parts or self.schedule is not None):
            raise ProtocolError("a JoinReply without a download, but with parts of one; its sender is wrong")


@dataclass(frozen=True, eq=False)
class ServerRestarted:
    """Server to site: the server has restarted; join again."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Pause:
    """Server to site: the operator pauses the run, or lets it go on; the site trains on when it goes on."""

    paused: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class Leave:
    """Site to server: do not wait for this site any more."""

    site: str


@dataclass(frozen=True, eq=False, kw_only=True)
class FinalPart:
    """Site to server, before its Leave: what the site adds to the file of the final model.

    All parts of a site together are a safetensors file (`runtime/checkpoints/final_state.py`): the buffers of its
    module and, where the strategy is judged by quantized weights, those.
    """

    site: str
    place: int  # of this part among the parts, from 0
    parts: int
    data: bytes

    def __post_init__(self) -> None:
        if self.place >= self.parts:
            raise ProtocolError(f"{self.site!r} sent part {self.place} of {self.parts} of its final state")


Control: TypeAlias = (
    Push | RoundRequest | RoundResult | Join | JoinReply | ServerRestarted | Leave | FinalPart | Waiting | Pause
)
"""Messages between the coordinators; they are small and never wait behind bulk. A FinalPart is a piece of a file, and
a control message because the Leave must not overtake it."""

Bulk: TypeAlias = Holding | PushPart | ResultPart | ModelPart
"""Messages between a rank and a server process."""

Message: TypeAlias = Control | Bulk


def check_download_codec(spec: str) -> Codec:
    """The codec of a download.

    Args:
        spec: the codec as text, such as qsgd(bits=8).

    Returns:
        The codec.

    Raises:
        SpecError: the text cannot be read, or the codec has a memory.
    """
    if not spec.isascii() or not 1 <= len(spec) <= MAX_TEXT_BYTES:
        raise SpecError(f"the codec {spec[:40]!r}; wanted 1 to {MAX_TEXT_BYTES} ASCII characters, such as qsgd(bits=8)")
    codec = codecs.parse(spec)
    if codec.init(torch.zeros(1, dtype=torch.float32)):
        raise SpecError(
            f"{codec} keeps a memory from round to round, and a download is sent once; take a codec without memory, "
            "such as qsgd(bits=8) or bf16"
        )
    return codec


def segments_bytes(segments: Sequence[Segment]) -> int:
    """The size of segments on the wire."""
    return sum(
        START_BYTES + SPAN_BYTES * len(segment.spans) + wire.frame_bytes(segment.payload) for segment in segments
    )


def numel(segments: Sequence[Segment]) -> int:
    """How many elements of the index space the segments cover."""
    return sum(segment.payload.numel for segment in segments)
