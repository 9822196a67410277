"""What the global server does next: messages to send, what has happened, and the sites that need values."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightgrad.codecs import Codec
from weightgrad.core.server.open_round import ClosedRound
from weightgrad.wire.messages import JoinReply, Message, RoundResult


@dataclass
class Outbox:
    """Messages to send, and what has happened."""

    messages: list[tuple[str, Message]] = field(default_factory=list)
    closed: list[ClosedRound] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    held_back: list[str] = field(default_factory=list)  # the sites that hold the others back
    refused: list[tuple[str, str]] = field(default_factory=list)  # (site, reason) of pushes counted as empty
    limited: list[tuple[str, str]] = field(default_factory=list)  # (site, reason) of pushes that count only in part
    aside: list[str] = field(default_factory=list)  # the sites that are set aside from now on


@dataclass(frozen=True, kw_only=True)
class Download:
    """A site that needs the global model, or the results after some version.

    Attributes:
        site: the site.
        epoch: of the processes of the site that asked; None if they have not asked.
        reply: what it is told.
        results: the versions whose results it needs, without their values.
        codec: the codec in which it wants the model; None: exact.
    """

    site: str
    epoch: int | None
    reply: JoinReply
    results: tuple[RoundResult, ...] = ()
    codec: Codec | None = None


@dataclass
class Decisions(Outbox):
    """Messages to send, what has happened, and the sites that need values from the shards."""

    downloads: list[Download] = field(default_factory=list)
