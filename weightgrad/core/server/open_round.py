"""A round at the global server, from its first push until it closes.

`OpenRounds.take_complete` decides when a round closes and `ServerShard.close` closes it; `OpenRound` is what is known
until then, and `ClosedRound` what is reported afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weightgrad.core.controller.agreement import Signs
from weightgrad.core.controller.decision import Decision
from weightgrad.core.server.guard import Verdict
from weightgrad.core.server.push_facts import PushFacts
from weightgrad.wire.messages import Push, RoundResult


@dataclass(kw_only=True)
class OpenRound:
    """The pushes of one round. Memory: no vector; the values of the pushes are with the shards, encoded."""

    opened_at: float
    step: int = 0  # the furthest step of a sender
    up_bytes: int = 0
    senders: set[str] = field(default_factory=set)
    late_senders: set[str] = field(default_factory=set)  # sent only what an earlier round closed without
    included: dict[str, int] = field(default_factory=dict)  # site -> the round of its newest push here
    pushes: list[Push] = field(default_factory=list)  # in the order of arrival, without their values
    facts: dict[tuple[str, int], PushFacts] = field(default_factory=dict)  # (site, round) -> what its values are
    arrivals: dict[str, tuple[float, int]] = field(default_factory=dict)  # site -> (time, bytes) of its newest push
    rejoined: set[str] = field(default_factory=set)  # joined since they pushed: may have forgotten it
    refused: dict[tuple[str, int], str] = field(
        default_factory=dict
    )  # (site, round) of a push -> why it counts as empty
    verdict: Verdict = field(default_factory=Verdict)  # of the guard, when the round closes
    overdue_reported: bool = False  # whether the sites that hold the others back have been reported

    def receive(self, push: Push, now: float, *, nbytes: int, late: bool, facts: PushFacts) -> None:
        """Take in a push.

        Args:
            push: the push.
            now: the time.
            nbytes: its size on the wire.
            late: whether it was made for a round that has closed without it.
            facts: what was found in its values.
        """
        self.pushes.append(replace(push, segments=()))
        self.facts[push.site, push.round] = facts
        self.arrivals[push.site] = (now, nbytes)
        self.step = max(self.step, push.step)
        self.up_bytes += nbytes
        self.senders.add(push.site)
        if late:
            self.late_senders.add(push.site)
        self.included[push.site] = push.round

    def counts(self, push: Push) -> bool:
        """Whether a push has anything in it that was not refused."""
        key = (push.site, push.round)
        return key not in self.refused and self.facts[key].numel > 0

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
