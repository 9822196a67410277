"""A random fault schedule for the emulator that follows the progress of the run, not the clock.

How long a process needs to come back depends on the machine, so a fault begins when the slowest site has done the same
share of the steps as the fault's share of the horizon. A fault that was drawn shortly after another one begins as many
seconds after it, while the first one still has its effect. Sites that join late join by the clock, because nothing may
move until they are there. So a schedule strikes at about the same steps every time, and ends before the run does.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from weightgrad.lab.recipes.expansion import Fault
from weightgrad.lab.run.fault_schedule import FaultAction, actions_of
from weightgrad.lab.run.launch import RunProgress

_TOGETHER = 0.25  # of the mean time between two faults
_LATEST_S = 12.0  # after the first step of the others, who may have to wait for it


class ProgressFaultSchedule:
    """Faults in the order of `at_seconds` within a horizon.

    Attributes:
        absent: Sites that are not there at the start.
        struck: The faults that have begun.
        ends: When each fault was over, in seconds since the first step.
        rounds: When each round closed, in seconds since the first step.
    """

    def __init__(self, faults: Sequence[Fault], horizon: float, steps: int) -> None:
        self.absent = frozenset(fault.where[0] for fault in faults if fault.what == "join")
        self.struck: list[Fault] = []
        self.ends: list[float] = []
        self.rounds: list[float] = []
        self._waiting = [fault for fault in faults if fault.what != "join"]
        self._joins = [fault for fault in faults if fault.what == "join"]
        self._horizon, self._steps = horizon, steps
        self._together = _TOGETHER * horizon / max(1, len(faults))
        self._due: list[tuple[FaultAction, bool]] = []  # the action, and whether it is the last of its fault
        self._late = set(self.absent)
        self._last = (0.0, 0.0)  # when the last fault began, and when it was drawn to begin
        self._share = 0.0

    def next(self, seconds: float, now: RunProgress) -> FaultAction | None:
        """The next action that is due; None if there is none yet, or none left."""
        if seconds < 0:
            return None
        self.rounds += [seconds] * (now.rounds - len(self.rounds))
        there = [step for site, step in now.steps.items() if site not in self._late]
        self._share = max(
            self._share, min(there, default=0) / self._steps
        )  # a site that restarts begins further behind
        if self._due and self._due[0][0].at <= seconds:
            action, last = heapq.heappop(self._due)
            if last:
                self.ends.append(seconds)
            return action
        if self._joins and seconds >= min(self._joins[0].at_seconds, _LATEST_S):
            self._late.discard(self._joins[0].where[0])
            return self._begin(self._joins.pop(0), seconds)
        if self._waiting and self._has_come(self._waiting[0], seconds):
            self._last = (seconds, self._waiting[0].at_seconds)
            return self._begin(self._waiting.pop(0), seconds)
        return None

    def _has_come(self, fault: Fault, seconds: float) -> bool:
        then, planned = self._last
        gap = fault.at_seconds - planned
        soon = then > 0 and gap <= self._together
        return self._share * self._horizon >= fault.at_seconds or (soon and seconds >= then + gap)

    def _begin(self, fault: Fault, seconds: float) -> FaultAction:
        self.struck.append(fault)
        first, *rest = actions_of(replace(fault, at_seconds=seconds))
        for place, action in enumerate(rest, start=1):
            heapq.heappush(self._due, (action, place == len(rest)))
        if not rest:
            self.ends.append(seconds)
        return first

    @property
    def has_pending_start(self) -> bool:
        """Whether a process is still to be started."""
        return any(action.is_start for action, _ in self._due) or bool(self._joins)
