"""A chaos schedule as a plot for the emulator: by how far the run is, not by the clock.

How long a process needs to come back depends on the machine, so a fault strikes when the slowest site has done the
fault's share of the steps. Those that the schedule has shortly after another strike as many seconds after it, into
what it has stopped; and whoever comes late comes by the clock, as nothing may move until he is there. So a schedule
strikes at about the same steps every time, and is over before the run is.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from weightgrad.train.launch import Standing
from weightgrad.train.recipe_plan import Fault
from weightgrad.train.scenes import Scene, of_fault

_TOGETHER = 0.25  # of the mean time between two faults
_LATEST_S = 12.0  # after the others' first step; they may do nothing until then


class Storm:
    """Faults in order of `at_seconds` within a horizon. Remembers when each was over, and when rounds closed."""

    def __init__(self, faults: Sequence[Fault], horizon: float, steps: int) -> None:
        self.absent = frozenset(fault.where[0] for fault in faults if fault.what == "join")
        self.struck: list[Fault] = []
        self.ends: list[float] = []  # in seconds since the first step
        self.rounds: list[float] = []
        self._waiting = [fault for fault in faults if fault.what != "join"]
        self._joins = [fault for fault in faults if fault.what == "join"]
        self._horizon, self._steps = horizon, steps
        self._together = _TOGETHER * horizon / max(1, len(faults))
        self._due: list[tuple[Scene, bool]] = []  # and whether it is the last of its fault
        self._late = set(self.absent)
        self._last = (0.0, 0.0)  # when the last one struck, and when it should have
        self._share = 0.0

    def next(self, seconds: float, now: Standing) -> Scene | None:
        """What is due."""
        if seconds < 0:
            return None
        self.rounds += [seconds] * (now.rounds - len(self.rounds))
        there = [step for site, step in now.steps.items() if site not in self._late]
        self._share = max(self._share, min(there, default=0) / self._steps)  # a site that is back begins further behind
        if self._due and self._due[0][0].at <= seconds:
            scene, last = heapq.heappop(self._due)
            if last:
                self.ends.append(seconds)
            return scene
        if self._joins and seconds >= min(self._joins[0].at_seconds, _LATEST_S):
            self._late.discard(self._joins[0].where[0])
            return self._strike(self._joins.pop(0), seconds)
        if self._waiting and self._is_due(self._waiting[0], seconds):
            self._last = (seconds, self._waiting[0].at_seconds)
            return self._strike(self._waiting.pop(0), seconds)
        return None

    def _is_due(self, fault: Fault, seconds: float) -> bool:
        then, planned = self._last
        gap = fault.at_seconds - planned
        soon = then > 0 and gap <= self._together
        return self._share * self._horizon >= fault.at_seconds or (soon and seconds >= then + gap)

    def _strike(self, fault: Fault, seconds: float) -> Scene:
        self.struck.append(fault)
        first, *rest = of_fault(replace(fault, at_seconds=seconds))
        for place, scene in enumerate(rest, start=1):
            heapq.heappush(self._due, (scene, place == len(rest)))
        if not rest:
            self.ends.append(seconds)
        return first

    @property
    def brings_back(self) -> bool:
        """Whether somebody is still to come."""
        return any(scene.starts for scene, _ in self._due) or bool(self._joins)
