"""What sites and the global server say to each other.

A message is a value; `nbytes` is its true size on the wire: a header of 32 bytes, the site's name,
and for each part where it starts (8 bytes) and its frame. Parts say by themselves how to decode.
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
from weightgrad.wan import encoded_snapshot, snapshot_bytes
from weightgrad.wan.pace import REPORT_BYTES, Pace, Report

HEADER_BYTES = 32
START_BYTES = 8
LENGTH_BYTES = 1
RATE_BYTES = 8
SHARE_BYTES = 20


@dataclass(frozen=True, eq=False)
class Part:
    """An encoded stretch of the flat vector: elements start .. start + numel - 1."""

    start: int
    payload: Payload

    def into(self, flat: Tensor, mode: int) -> None:
        """flat (mode)= decoded, at this part's place."""
        if not 0 <= self.start <= flat.numel() - self.payload.numel:
            raise ProtocolError(
                f"a part of elements {self.start} to {self.start + self.payload.numel} for a vector of {flat.numel()}; "
                "both ends must train the same model"
            )
        decode_into(self.payload, flat[self.start : self.start + self.payload.numel], mode)


@dataclass(frozen=True, eq=False)
class Push:
    """Site to server: what left pending in one round. No parts: nothing was significant."""

    site: str
    round: int
    after: int  # the round of the site's push before this one: what shows that one was lost
    step: int
    seen: int  # version of the base it was computed on
    samples: int
    parts: tuple[Part, ...] = ()
    final: bool = False  # the site has finished training; later rounds do not wait for it
    rate: float | None = None  # of the step, where the server does not know it
    report: Report | None = None  # what the site has measured, where the server sets the pace


@dataclass(frozen=True, eq=False)
class Call:
    """Server to site: a round has begun; say what is significant, or that nothing is."""

    round: int


@dataclass(frozen=True, eq=False)
class Share:
    """One push in an answer that hands them on as they came. No parts, None: the reader's own, which it has."""

    site: str
    round: int
    weight: float
    parts: tuple[Part, ...] | None


@dataclass(frozen=True, eq=False)
class Answer:
    """Server to every site: move the base by this. `taken` names the pushes that are in it.

    Either the server has put the pushes together and encoded the result (`parts`), or they go on as they came and
    every replica takes their weighted mean itself (`shares`).
    """

    version: int
    round: int
    step: int
    parts: tuple[Part, ...]
    taken: Mapping[str, int] = field(default_factory=dict)
    rate: float | None = None  # to step with; None: every replica knows it
    pace: Pace | None = None  # from here on; None: as before
    shares: tuple[Share, ...] = ()

    @property
    def moves(self) -> tuple[Part, ...]:
        """Everything encoded that is in it."""
        return (*self.parts, *(part for share in self.shares for part in share.parts or ()))

    def without(self, site: str) -> Answer:
        """For a site that still has its own pushes."""
        own = tuple(replace(s, parts=None) if s.site == site and s.parts else s for s in self.shares)
        return replace(self, shares=own)


@dataclass(frozen=True, eq=False)
class Join:
    """Site to server: here I am, first or again, with the base of this version (-1: none).

    A site that is in already may say so again: it is then sent the base once more, and nothing else changes.
    """

    site: str
    version: int
    first_base: str | None = None  # the codec to send the whole base in, if that must be sent; None: exactly

    def __post_init__(self) -> None:
        if self.first_base is not None:
            try:
                encoded_snapshot.codec_of(self.first_base)
            except SpecError as error:
                raise ProtocolError(f"{self.site!r} asks for a first base that cannot be made: {error}") from None


@dataclass(frozen=True, eq=False)
class Welcome:
    """Server to site: the way to the present base: the answers missed, or all of it."""

    version: int
    round: int  # the next round
    step: int
    taken: int  # the last of the site's pushes that is in the base
    answers: tuple[Answer, ...] = ()
    snapshot: Mapping[str, Tensor] | None = None
    pushed: int = 0  # the last of the site's pushes that has come
    pace: Pace | None = None  # of the snapshot
    encoded: encoded_snapshot.Encoded = field(default_factory=dict)  # the tensors that the snapshot leaves out

    def __post_init__(self) -> None:
        if self.encoded and self.snapshot is None:
            raise ProtocolError("a Welcome with encoded tensors and no snapshot of the rest; its sender is wrong")
        if self.snapshot is not None and (twice := sorted(self.encoded.keys() & self.snapshot.keys())):
            raise ProtocolError(f"a Welcome with {twice[0]!r} both encoded and exact; its sender is wrong")


@dataclass(frozen=True, eq=False)
class Restarted:
    """Server to site: the server was away; say where you are."""


@dataclass(frozen=True, eq=False)
class Leave:
    """Site to server: do not wait for me again."""

    site: str


@dataclass(frozen=True, eq=False)
class Plant:
    """Site to server, in the field: these weights are the first base."""

    site: str
    snapshot: Mapping[str, Tensor]


Message: TypeAlias = Push | Call | Answer | Join | Welcome | Restarted | Leave | Plant


def parts_bytes(parts: Sequence[Part]) -> int:
    """Bytes of the parts on the wire."""
    return sum(START_BYTES + wire.frame_bytes(part.payload) for part in parts)


def numel(parts: Sequence[Part]) -> int:
    """Elements the parts stand for."""
    return sum(part.payload.numel for part in parts)


def nbytes(message: Message) -> int:
    """Bytes of a message on the wire."""
    size = HEADER_BYTES
    if isinstance(message, Push | Join | Leave | Plant):
        size += len(message.site.encode())
    if isinstance(message, Push | Answer):
        size += parts_bytes(message.parts) + (0 if message.rate is None else RATE_BYTES)
    if isinstance(message, Push):
        size += 0 if message.report is None else REPORT_BYTES
    if isinstance(message, Answer | Welcome):
        size += 0 if message.pace is None else message.pace.nbytes
    if isinstance(message, Answer):
        size += sum(START_BYTES + len(site.encode()) for site in message.taken)
        size += sum(SHARE_BYTES + len(share.site.encode()) + parts_bytes(share.parts or ()) for share in message.shares)
    if isinstance(message, Join):
        size += 0 if message.first_base is None else LENGTH_BYTES + len(message.first_base)
    if isinstance(message, Plant):
        size += snapshot_bytes.nbytes(message.snapshot)
    if isinstance(message, Welcome):
        size += sum(nbytes(answer) for answer in message.answers)
        size += encoded_snapshot.nbytes(message.encoded)
        size += 0 if message.snapshot is None else snapshot_bytes.nbytes(message.snapshot)
    return size
