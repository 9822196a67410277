"""When a site starts a round: the strategy's trigger, asked with what the site knows at a step."""

from __future__ import annotations

import math
from collections.abc import Callable

from weightgrad.core.parts.triggers import DynamicThreshold, Moment, Significance, Trigger
from weightgrad.core.site.progress import SiteProgress
from weightgrad.core.site.schedule import SiteSchedule

Squares = Callable[[], tuple[float, float]]
"""The squared norms of what was made since the last push and of the last step, summed over the ranks of the site."""


class RoundTrigger:
    """Asks the trigger of a strategy.

    Args:
        trigger: the trigger.
        progress: how far the site has come.
        schedule: the sync schedule in force.

    Attributes:
        threshold: the significance threshold, where the trigger has one.
    """

    def __init__(self, trigger: Trigger, progress: SiteProgress, schedule: SiteSchedule) -> None:
        self.threshold = (
            DynamicThreshold(trigger.threshold, trigger.low, trigger.high)
            if isinstance(trigger, Significance)
            else None
        )
        self._trigger = trigger
        self._progress = progress
        self._schedule = schedule

    @property
    def threshold_value(self) -> float:
        """The threshold as a number; 0 where the trigger has none."""
        return self.threshold.value if self.threshold is not None else 0.0

    def moment(self, squares: Squares) -> Moment:
        """What the trigger may ask at this step.

        Args:
            squares: measures the fresh update and the last step, where the trigger compares them.
        """

        def ratio() -> float:
            since, last = squares()
            if self.threshold is not None:
                self.threshold.measured(math.sqrt(last))
            return math.sqrt(since / last) if last > 0 else 0.0

        progress = self._progress
        return Moment(
            step=progress.step,
            steps_since_push=progress.step - progress.sent_step,
            ratio=ratio,
            threshold=self.threshold_value,
            steps_since_round=progress.step - progress.round_step,
            every=self._schedule.every,
        )

    def starts(self, moment: Moment) -> bool:
        """Whether a round starts at this step: the trigger fires, or the server has requested a push."""
        return self._progress.requested_round > self._progress.round or self._trigger.fires(moment)

    def next_step(self) -> int:
        """The next step at which the trigger may fire."""
        return self._trigger.next_step(self.moment(lambda: (0.0, 0.0)))

    def new_epoch(self, last_squares: float) -> None:
        """An epoch has ended: the dynamic threshold moves.

        Args:
            last_squares: the squared norm of the last step's update.
        """
        if self.threshold is not None:
            self.threshold.measured(math.sqrt(last_squares))
            self.threshold.epoch()
