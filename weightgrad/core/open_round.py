"""A round at the global server, from its first push until it closes.

`ServerState._close_ready_rounds` decides when a round closes and `ServerState._close_round` closes it; `OpenRound` is
what is known until then, `ClosedRound` what is reported afterwards, and `Outbox` what each call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightgrad.core.aggregators import Accumulator
from weightgrad.core.agreement import Agreement, Signs
from weightgrad.core.controller import Decision
from weightgrad.wire.messages import Message, Push, RelayedPush, RoundResult, Segment

Weigh = Callable[[Push], tuple[float, tuple[Segment, ...]]]
"""The weight of a push, and its segments as they are to be added."""


@dataclass(kw_only=True)
class OpenRound:
    """The pushes of one round, added up in the order of the sites' names.

    Memory, in vectors of the model's size: those of the `Accumulator` (one sum; with some aggregators also counts, or
    each push decoded). Pushes that came out of turn, and pushes to be relayed, are kept encoded.
    """

    opened_at: float
    accumulator: Accumulator
    agreement: Agreement | None = None  # compares signs, where the controller asks
    step: int = 0  # the furthest step of a sender
    rate: float | None = None  # the learning rate that came with the pushes, if any
    up_bytes: int = 0
    senders: set[str] = field(default_factory=set)
    late_senders: set[str] = field(default_factory=set)  # sent only what an earlier round closed without
    included: dict[str, int] = field(default_factory=dict)  # site -> the round of its newest push here
    pushes: list[tuple[str, int]] = field(default_factory=list)  # (site, round) of every push here
    arrivals: dict[str, tuple[float, int]] = field(default_factory=dict)  # site -> (time, bytes) of its newest push
    relayed: list[RelayedPush] = field(default_factory=list)  # the added pushes, where they are relayed
    rejoined: set[str] = field(default_factory=set)  # joined since the round opened: may have forgotten their pushes
    overdue_reported: bool = False  # whether the sites that hold the others back have been reported
    _out_of_turn: list[Push] = field(default_factory=list)

    def receive(self, push: Push, now: float, *, nbytes: int, late: bool) -> None:
        """Take in a push; `accumulate` adds it when its turn has come.

        Args:
            push: the push.
            now: the time.
            nbytes: its size on the wire.
            late: whether it was made for a round that has closed without it.
        """
        self._out_of_turn.append(push)
        self.arrivals[push.site] = (now, nbytes)
        self.step = max(self.step, push.step)
        self.up_bytes += nbytes
        self.senders.add(push.site)
        if late:
            self.late_senders.add(push.site)
        self.included[push.site] = push.round
        self.pushes.append((push.site, push.round))

    def accumulate(self, missing: Sequence[str], weigh: Weigh, *, relays: bool) -> None:
        """Add the pushes that come before those of all missing sites, in the order of the sites' names.

        The sum then has the same bits whatever the order of arrival, and only pushes that came out of turn wait.

        Args:
            missing: the sites whose push is still awaited.
            weigh: gives the weight and the segments of a push.
            relays: whether the pushes are kept, to be relayed in the result.
        """
        self._out_of_turn.sort(key=lambda push: push.site)
        while self._out_of_turn and all(self._out_of_turn[0].site < name for name in missing):
            push = self._out_of_turn.pop(0)
            weight, segments = weigh(push)
            self.accumulator.add(push.site, segments, weight)
            if self.agreement is not None:
                self.agreement.add(segments)
            if relays:
                self.relayed.append(RelayedPush(site=push.site, round=push.round, weight=weight, segments=segments))
            self.rate = push.rate if push.rate is not None else self.rate

    @property
    def relays_all(self) -> bool:
        """Whether every push has been kept for relaying; not if the number of sites changed meanwhile."""
        return len(self.relayed) == len(self.pushes)

    def missing_from(self, awaited: Sequence[str]) -> list[str]:
        """Those of the awaited sites that have not pushed."""
        return [name for name in awaited if name not in self.senders]

    def is_complete(self, awaited: Sequence[str], *, may_miss: int) -> bool:
        """Whether the round may close.

        Args:
            awaited: the sites that rounds wait for.
            may_miss: how many of their pushes the round may close without.

        Returns:
            True if every awaited site has pushed, or all but `may_miss` of them have pushed for this very round.
        """
        missing = self.missing_from(awaited)
        if not missing:
            return True
        # Late pushes come along, but the round waits for as many of its own all the same: otherwise it would close
        # with fewer of them, leave more of them late, and so on.
        return len(missing) + sum(name in self.late_senders for name in awaited) <= may_miss


@dataclass(kw_only=True)
class ClosedRound:
    """What a driver may record about a round that has closed."""

    result: RoundResult
    senders: list[str]
    pushes: list[tuple[str, int]]  # (site, round) of each; a site that was late may have two
    up_bytes: int
    down_bytes: int  # of the result, as sent to the site that gets most of it
    digest: str  # of the global model after the result
    decision: Decision | None = None  # a new sync schedule, and why
    signs: Signs | None = None  # how alike the pushes were, where the controller asks

    def to_dict(self) -> dict[str, Any]:
        """The facts for an event log."""
        facts: dict[str, Any] = {
            "version": self.result.version,
            "step": self.result.step,
            "senders": self.senders,
            "pushes": [list(push) for push in self.pushes],
            "up_bytes": self.up_bytes,
            "down_bytes": self.down_bytes,
            "digest": self.digest,
        }
        return facts if self.signs is None else {**facts, "common": self.signs.common, "same": self.signs.same}


@dataclass
class Outbox:
    """Messages to send, and what has happened."""

    messages: list[tuple[str, Message]] = field(default_factory=list)
    closed: list[ClosedRound] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    held_back: list[str] = field(default_factory=list)  # the sites that hold the others back
    refused: list[tuple[str, str]] = field(default_factory=list)  # (site, reason) of pushes counted as empty
