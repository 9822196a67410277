"""The round results that a site has and has not applied yet, and when they are due."""

from __future__ import annotations

from weightgrad.core.site.progress import SiteProgress
from weightgrad.core.site.pushes_in_flight import PushesInFlight
from weightgrad.core.site.replay import Replay
from weightgrad.core.site.schedule import SiteSchedule
from weightgrad.wire.messages import RoundResult


class ResultInbox:
    """Results not applied yet, by version. Memory: those results; in a deployment they are without their values.

    Args:
        site: the name of the site.
        progress: how far the site has come.
        schedule: the sync schedule in force.
        in_flight: the site's pushes without a result.
        replay: the pushes that the site is about to make again.
    """

    def __init__(
        self,
        site: str,
        progress: SiteProgress,
        schedule: SiteSchedule,
        in_flight: PushesInFlight,
        replay: Replay,
    ) -> None:
        self._site = site
        self._progress = progress
        self._schedule = schedule
        self._in_flight = in_flight
        self._replay = replay
        self._by_version: dict[int, RoundResult] = {}

    def __getitem__(self, version: int) -> RoundResult:
        return self._by_version[version]

    def add(self, result: RoundResult) -> None:
        """A result has come; one that is applied already is dropped."""
        if result.version > self._progress.version:
            self._by_version[result.version] = result

    def remove_through(self, version: int) -> None:
        """Forget the results up to and including this version: the global model has them."""
        self._by_version = {one: result for one, result in self._by_version.items() if one > version}

    def clear(self) -> None:
        """Forget all results."""
        self._by_version.clear()

    @property
    def following(self) -> RoundResult | None:
        """The result to be applied next, if it has come."""
        return self._by_version.get(self._progress.version + 1)

    @property
    def answered_through(self) -> int:
        """The last round whose push of this site is in one of these results; -1 if none is."""
        return max((result.included.get(self._site, -1) for result in self._by_version.values()), default=-1)

    def is_due(self, result: RoundResult) -> bool:
        """Whether a result may be applied at this step: the same step however fast the link is."""
        own, progress = result.included.get(self._site), self._progress
        if own is None:
            return True
        if own in self._replay.rounds:
            return False  # the push is in the server's hands, and is about to be made again here
        if not self._schedule.overlap or progress.finishing:
            return True
        # A result may contain several pushes of a site that was late: `blocked` waits for the oldest of them.
        pushed_at = next((sent.push.step for sent in self._in_flight if sent.push.round <= own), None)
        if pushed_at is None:
            return True  # a push that was made before the site lost its state: nothing here waits for its result
        return progress.step >= pushed_at + self._schedule.overlap

    def misses_own_push(self, result: RoundResult) -> bool:
        """Whether a relayed result leaves out a push that this site neither has in flight nor is about to replay."""
        left_out = {push.round for push in result.relayed if push.segments is None}
        return not left_out <= self._in_flight.rounds.union(self._replay.rounds)
