"""The messages between sites and the global server.

A message is a value. `nbytes` is its exact size on the wire: a header of 32 bytes, the site's name, and for each
segment where it starts (8 bytes) and its frame. A segment describes itself: decoding it needs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from torch import Tensor

from weightgrad import wire
from weightgrad.codecs import Payload
from weightgrad.codecs.registry import decode_into
from weightgrad.errors import ProtocolError, SpecError
from weightgrad.wire import encoded_snapshot, snapshot_bytes
from weightgrad.wire.sync_schedule import REPORT_BYTES, Report, SyncSchedule

HEADER_BYTES = 32
START_BYTES = 8
LENGTH_BYTES = 1
RATE_BYTES = 8
RELAYED_BYTES = 20


@dataclass(frozen=True, eq=False)
class Segment:
    """An encoded interval of the flat vector: elements start .. start + numel - 1."""

    start: int
    payload: Payload

    def into(self, flat: Tensor, mode: int) -> None:
        """Decode the segment into its place in a flat vector.

        Args:
            flat: the vector, changed in place.
            mode: `kernels.fixed.STORE`, `ADD` or `SUBTRACT`.

        Raises:
            ProtocolError: the segment does not lie within the vector.
        """
        if not 0 <= self.start <= flat.numel() - self.payload.numel:
            raise ProtocolError(
                f"a segment of elements {self.start} to {self.start + self.payload.numel} for a vector of "
                f"{flat.numel()}; both ends must train the same model"
            )
        decode_into(self.payload, flat[self.start : self.start + self.payload.numel], mode)


@dataclass(frozen=True, eq=False, kw_only=True)
class Push:
    """Site to server: what left the residual in one round. Without segments, nothing was significant."""

    site: str
    round: int
    after: int  # the round of the site's push before this one, which shows whether that one was lost
    step: int
    seen: int  # the version of the global model that the push was computed on
    samples: int
    segments: tuple[Segment, ...] = ()
    final: bool = False  # the site has finished training; later rounds do not wait for it
    rate: float | None = None  # the learning rate of the step, where the server does not know it
    report: Report | None = None  # what the site has measured, where the server sets the sync schedule


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundRequest:
    """Server to site: a round has begun; push for it, even if nothing is significant."""

    round: int


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
    (`relayed`) and every replica computes their weighted mean itself.
    """

    version: int
    round: int
    step: int
    segments: tuple[Segment, ...]
    included: Mapping[str, int] = field(default_factory=dict)  # site -> the round of its push in this result
    rate: float | None = None  # the learning rate to step with; None: every replica knows it
    schedule: SyncSchedule | None = None  # the sync schedule from here on; None: as before
    relayed: tuple[RelayedPush, ...] = ()

    @property
    def moves(self) -> tuple[Segment, ...]:
        """Every segment in the result, those of relayed pushes too."""
        return (*self.segments, *(segment for push in self.relayed for segment in push.segments or ()))

    def without(self, site: str) -> RoundResult:
        """The result for a site that still has its own pushes: they are left out."""
        relayed = tuple(
            replace(push, segments=None) if push.site == site and push.segments else push for push in self.relayed
        )
        return replace(self, relayed=relayed)


@dataclass(frozen=True, eq=False, kw_only=True)
class Join:
    """Site to server: the site asks to join, for the first time or again, and says which global model it has.

    A joined site may ask again: it is sent the global model once more, and nothing else changes.
    """

    site: str
    version: int  # of the site's global model; -1: it has none
    download_codec: str | None = None  # the codec of a download, if the whole model must be sent; None: exact

    def __post_init__(self) -> None:
        if self.download_codec is not None:
            try:
                encoded_snapshot.codec_of(self.download_codec)
            except SpecError as error:
                raise ProtocolError(f"{self.site!r} asks for a download that cannot be made: {error}") from None


@dataclass(frozen=True, eq=False, kw_only=True)
class JoinReply:
    """Server to site: the way to the present global model, by the results that the site missed or by a download."""

    version: int
    round: int  # the next round
    step: int
    included: int  # the round of the site's last push that is in the global model
    results: tuple[RoundResult, ...] = ()
    snapshot: Mapping[str, Tensor] | None = None
    pushed: int = 0  # the round of the site's last push that the server has received
    schedule: SyncSchedule | None = None  # the sync schedule in force, with a snapshot
    encoded: encoded_snapshot.Encoded = field(default_factory=dict)  # the tensors that the snapshot leaves out

    def __post_init__(self) -> None:
        if self.encoded and self.snapshot is None:
            raise ProtocolError("a JoinReply with encoded tensors but no snapshot of the rest; its sender is wrong")
        if self.snapshot is not None and (twice := sorted(self.encoded.keys() & self.snapshot.keys())):
            raise ProtocolError(f"a JoinReply with {twice[0]!r} both encoded and exact; its sender is wrong")


@dataclass(frozen=True, eq=False)
class ServerRestarted:
    """Server to site: the server has restarted; join again."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Leave:
    """Site to server: do not wait for this site any more."""

    site: str


@dataclass(frozen=True, eq=False, kw_only=True)
class InitModel:
    """Site to server, in a deployment: the weights that training starts from."""

    site: str
    snapshot: Mapping[str, Tensor]


Message: TypeAlias = Push | RoundRequest | RoundResult | Join | JoinReply | ServerRestarted | Leave | InitModel


def segments_bytes(segments: Sequence[Segment]) -> int:
    """The size of segments on the wire."""
    return sum(START_BYTES + wire.frame_bytes(segment.payload) for segment in segments)


def numel(segments: Sequence[Segment]) -> int:
    """How many elements of the flat vector the segments cover."""
    return sum(segment.payload.numel for segment in segments)


def nbytes(message: Message) -> int:
    """The size of a message on the wire, without packing it."""
    size = HEADER_BYTES
    if isinstance(message, Push | Join | Leave | InitModel):
        size += len(message.site.encode())
    if isinstance(message, Push | RoundResult):
        size += segments_bytes(message.segments) + (0 if message.rate is None else RATE_BYTES)
    if isinstance(message, Push):
        size += 0 if message.report is None else REPORT_BYTES
    if isinstance(message, RoundResult | JoinReply):
        size += 0 if message.schedule is None else message.schedule.nbytes
    if isinstance(message, RoundResult):
        size += sum(START_BYTES + len(site.encode()) for site in message.included)
        size += sum(
            RELAYED_BYTES + len(push.site.encode()) + segments_bytes(push.segments or ()) for push in message.relayed
        )
    if isinstance(message, Join):
        size += 0 if message.download_codec is None else LENGTH_BYTES + len(message.download_codec)
    if isinstance(message, InitModel):
        size += snapshot_bytes.nbytes(message.snapshot)
    if isinstance(message, JoinReply):
        size += sum(nbytes(result) for result in message.results)
        size += encoded_snapshot.nbytes(message.encoded)
        size += 0 if message.snapshot is None else snapshot_bytes.nbytes(message.snapshot)
    return size
