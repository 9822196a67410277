"""The sync schedule that a site follows, and the measurements it reports so that the server can set one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import Codec
from weightgrad.core.saved_schedule import schedule_from_tensor, schedule_to_tensor
from weightgrad.wire.sync_schedule import Report, SyncSchedule

_SMOOTHING = 0.3  # the weight of a new step in the moving mean of step times


class SiteSchedule:
    """The sync schedule in force at a site; the strategy's fixed values where the server sets none.

    Args:
        initial: the schedule to begin with, or None where the strategy is fixed.
        up: the codec of pushes without a schedule.
        overlap: the steps a site goes on while a round is under way, without a schedule.
    """

    def __init__(self, initial: SyncSchedule | None, *, up: Codec, overlap: int) -> None:
        self.current = initial
        self._up = up
        self._overlap = overlap

    @property
    def every(self) -> int:
        """Steps between two rounds, or 0 without a schedule."""
        return 0 if self.current is None else self.current.every

    @property
    def overlap(self) -> int:
        """Steps a site goes on while a round is under way."""
        return self._overlap if self.current is None else self.current.overlap

    @property
    def rounds_under_way(self) -> int:
        """Rounds under way at a time; 1 without a schedule."""
        return 1 if self.current is None else max(1, -(-self.current.overlap // self.current.every))

    @property
    def up(self) -> Codec:
        """The codec of pushes."""
        return self._up if self.current is None else codecs.parse(self.current.up)

    @property
    def announced_codec(self) -> Codec | None:
        """The codec of pushes that the server has set, or None without a schedule."""
        return None if self.current is None else self.up

    def adopt(self, schedule: SyncSchedule | None) -> None:
        """Follow a schedule that came with a message; None, or a fixed strategy, changes nothing."""
        if schedule is not None and self.current is not None:
            self.current = schedule

    def state(self) -> dict[str, Tensor]:
        """The schedule in force for a checkpoint; nothing without one."""
        return {} if self.current is None else {"schedule": schedule_to_tensor(self.current)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; other names in `state` are ignored."""
        if self.current is not None:
            self.current = schedule_from_tensor(state["schedule"])


class StepTimer:
    """A site's own measurements, from the times its driver passes in. Waiting for results is not part of a step."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._step_seconds = 0.0
        self._round = 0
        self._round_seconds = 0.0
        self.trip = 0.0  # seconds of a round trip on the link, set by the driver if it knows

    def begins(self, now: float) -> None:
        """The workers may start a step now."""
        self._began = now

    def ends(self, now: float) -> None:
        """The workers have finished a step."""
        if self._began is not None:
            seconds = max(0.0, now - self._began)
            smoothed = (1 - _SMOOTHING) * self._step_seconds + _SMOOTHING * seconds
            self._step_seconds = seconds if self._step_seconds == 0 else smoothed
            self._began = now

    def result_received(self, round_: int, seconds: float) -> None:
        """The result that contains the push of this round has come, so many seconds after the push was sent."""
        self._round, self._round_seconds = round_, max(0.0, seconds)

    def report(self) -> Report:
        """The measurements for the next push. The time of a round is reported once."""
        report = Report(
            step_seconds=self._step_seconds,
            round=self._round,
            round_seconds=self._round_seconds,
            trip_seconds=self.trip,
        )
        self._round, self._round_seconds = 0, 0.0
        return report
