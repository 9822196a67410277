"""The open rounds of the global server: when one opens, for whom it waits and how long, when it may close.

A round opens with its first push. It closes when every awaited site has pushed; with `backup(b)`, when all but b of
them have pushed for this very round. Rounds close in order, so only the oldest one has deadlines.

Deadlines: a site that is missing `t_local` seconds after a round opened is reported as holding the others back; after
`t_global` seconds it is lost, and the round closes without it. While the run is paused, no deadline expires and no
round closes.
"""

from __future__ import annotations

from weightgrad.core.server.membership import Members
from weightgrad.core.server.open_round import OpenRound
from weightgrad.core.server.operation import Pause
from weightgrad.core.server.outbox import Outbox
from weightgrad.core.server.push_facts import are_of_the_same_values
from weightgrad.core.server.round_timing import RoundDeadlines
from weightgrad.core.server.strategy import ServerStrategy
from weightgrad.wire.messages import RoundRequest, Waiting


class OpenRounds:
    """The rounds that have a push and have not closed. Memory: what `OpenRound` says of each.

    Args:
        plan: the server's parts of the strategy.
        members: the sites.
        pause: whether the operator has paused the run.

    Attributes:
        deadlines: when the oldest of them stops waiting.
    """

    def __init__(self, plan: ServerStrategy, members: Members, pause: Pause) -> None:
        self._plan = plan
        self._members = members
        self._pause = pause
        self.deadlines = RoundDeadlines(t_local=plan.t_local, t_global=plan.t_global, adapts=plan.adapts)
        self._by_number: dict[int, OpenRound] = {}

    def has(self, site: str, round_: int) -> bool:
        """Whether a push is in a round that has not closed."""
        return any((site, round_) in opened.facts for opened in self._by_number.values())

    def refuse_others(self, site: str, round_: int, process: int, squares: float) -> str | None:
        """Refuse a push that has come to a process once more, with other values than those that were judged.

        Args:
            site: the site.
            round_: the round that the push was made for.
            process: the process.
            squares: the sum of the squares of the values that have come now.

        Returns:
            Why it is refused; None if it is not, or is in no open round.
        """
        key = (site, round_)
        opened = next((one for one in self._by_number.values() if key in one.facts), None)
        if opened is None or key in opened.refused:
            return None
        judged = opened.facts[key].by_process
        if not judged or are_of_the_same_values(judged[process], squares):
            return None
        opened.refused[key] = f"update of {site} at round {round_} has come again with other values"
        return opened.refused[key]

    def of(self, number: int, sender: str, now: float, out: Outbox) -> OpenRound:
        """The round of this number, which opens if it is not open yet.

        Args:
            number: the round.
            sender: the site whose push goes into it.
            now: the time.
            out: gets the requests to the other sites, if the strategy wants them.
        """
        if number not in self._by_number:
            self._by_number[number] = OpenRound(opened_at=now)
            if self._plan.calls and not self._plan.consistency.alone:
                for name in self._members.awaited:
                    if name != sender and self._members.by_name[name].pushed_round < number:
                        out.messages.append((name, RoundRequest(round=number)))
        return self._by_number[number]

    def rejoined(self, site: str) -> None:
        """A site joins again: it may have forgotten what it has pushed for open rounds."""
        for opened in self._by_number.values():
            if site in opened.senders:
                opened.rejoined.add(site)

    def postpone(self, seconds: float) -> None:
        """Move all deadlines by the time of a pause, or the missing sites would be lost for it."""
        for opened in self._by_number.values():
            opened.opened_at += seconds

    def take_complete(self) -> tuple[int, OpenRound] | None:
        """The number of the oldest open round and the round, which is open no more, if it may close."""
        oldest = self._oldest
        if oldest is None or self._pause.on or not self._may_close(oldest):
            return None
        number = min(self._by_number)
        return number, self._by_number.pop(number)

    def _may_close(self, opened: OpenRound) -> bool:
        if self._plan.consistency.alone:
            return True
        # Those that have finished wait for nobody either, so they count.
        may_miss = min(self._plan.consistency.missing, len(self._members.listening) - 1)
        return opened.is_complete(self._members.awaited, may_miss=may_miss)

    def closed(self, seconds: float) -> None:
        """A round has closed, so many seconds after it opened."""
        self.deadlines.round_closed(seconds)

    def clear(self) -> None:
        """Forget all open rounds."""
        self._by_number = {}

    # -- time ----------------------------------------------------------------------------------

    @property
    def _oldest(self) -> OpenRound | None:
        return self._by_number[min(self._by_number)] if self._by_number else None

    def wake(self, now: float, out: Outbox) -> None:
        """Handle the deadlines that have expired: report the sites that are missing, or lose them."""
        oldest = self._oldest
        if oldest is None or self._pause.on:
            return
        missing = oldest.missing_from(self._members.awaited)
        if self.deadlines.holds_back(oldest, now):
            oldest.overdue_reported = True
            out.held_back = missing
        if self.deadlines.is_lost(oldest, now):
            out.aside += [name for name in missing if self._members.lose(name)]
            out.lost = missing

    def next_wake(self) -> float | None:
        """When the next deadline expires if nothing comes before, or None if no round is open."""
        oldest = self._oldest
        return None if oldest is None or self._pause.on else self.deadlines.next_wake(oldest)

    def timeout(self) -> float | None:
        """Seconds after which a missing site is lost, or None to wait forever."""
        return self.deadlines.timeout()

    def overdue(self, now: float) -> bool:
        """Whether the oldest open round has been open five times as long as usual; never while the run is paused."""
        oldest = self._oldest
        return oldest is not None and not self._pause.on and self.deadlines.is_overdue(oldest, now)

    def stuck(self, now: float) -> bool:
        """Whether the oldest open round should have closed long ago, with or without the sites that it misses."""
        oldest, timeout = self._oldest, self.timeout()
        if oldest is None or self._pause.on or timeout is None:
            return False
        return now - oldest.opened_at > 2 * timeout + 60.0

    def waits_for(self) -> list[str]:
        """The sites that the oldest open round misses, sorted."""
        oldest = self._oldest
        return [] if oldest is None else sorted(oldest.missing_from(self._members.awaited))

    def waiting(self, now: float) -> Waiting | None:
        """For whom the oldest open round waits, and how long it has; None if no round is open, or misses nobody."""
        if self._pause.on or not (missing := self.waits_for()):
            return None
        number = min(self._by_number)
        pushed = {name: self._members.by_name[name].pushed_round for name in missing}
        seconds = max(0, int(now - self._by_number[number].opened_at))
        return Waiting(round=number, seconds=seconds, missing=pushed)
