"""The fault schedule of an emulated run: a recipe's faults and bandwidth traces as single actions, in order."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Protocol

from weightgrad.lab.recipes.expansion import Fault
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.launch import RunProgress
from weightgrad.units import show_bit_s, show_seconds


@dataclass(frozen=True, order=True)
class FaultAction:
    """One thing to do to a process or a link.

    Attributes:
        at: When, in seconds.
        what: kill or start (a site or the server); kill-worker (a site or the server, and a rank); resize (a site, and
            how many ranks it will have when it is started again); or, of a link: cut and heal, slow (to a fraction of
            its rate) and unslow (that fraction ends), rate (its rate from now on).
        where: One name, a name and a number, or the two ends of a link.
        bit_s: For rate: the new rate.
        factor: For slow and unslow: the fraction of the rate.
    """

    at: float
    what: str
    where: tuple[str, ...]
    bit_s: float | None = None
    factor: float = 1.0

    @property
    def is_start(self) -> bool:
        """Whether it starts a process."""
        return self.what == "start"

    def __str__(self) -> str:
        more = f" to {show_bit_s(self.bit_s)}" if self.bit_s is not None else ""
        more = f" to {self.factor:.0%}" if self.what == "slow" else more
        return f"{show_seconds(self.at)}: {self.what} {' - '.join(self.where)}{more}"


class FaultSchedule(Protocol):
    """Decides which action is next.

    Attributes:
        absent: Sites that are not there at the start.
    """

    absent: frozenset[str]

    def next(self, seconds: float, now: RunProgress) -> FaultAction | None:
        """The action that is due so many seconds after the first step; None if there is none yet, or none left."""
        ...

    @property
    def has_pending_start(self) -> bool:
        """Whether a process is still to be started."""
        ...


class TimedFaultSchedule:
    """The recipe's own faults and traces, by the clock."""

    def __init__(self, recipe: Recipe) -> None:
        self.absent = recipe.absent_at_start
        self._left = fault_actions(recipe)

    def next(self, seconds: float, now: RunProgress) -> FaultAction | None:
        """The first action whose time has come."""
        del now
        return self._left.pop(0) if self._left and self._left[0].at <= seconds else None

    @property
    def has_pending_start(self) -> bool:
        """Whether a process is still to be started."""
        return any(action.is_start for action in self._left)


def fault_actions(recipe: Recipe) -> list[FaultAction]:
    """All actions of a recipe in the order of time."""
    found = [FaultAction(at, "rate", x.between, rate) for x in recipe.link_list for at, rate in x.trace if at > 0]
    for fault in recipe.fault_list:
        found += actions_of(fault)
    heapq.heapify(found)
    return [heapq.heappop(found) for _ in range(len(found))]


def actions_of(fault: Fault) -> list[FaultAction]:
    """The beginning and the end of a fault; a flap is many cuts."""
    at, where = fault.at_seconds, fault.where
    until = None if fault.for_seconds is None else at + fault.for_seconds
    if fault.what == "join":
        return [FaultAction(at, "start", where)]
    if fault.what == "kill-worker":
        return [FaultAction(at, "kill-worker", where)]  # torchrun restarts it
    if fault.what == "resize":
        begin = FaultAction(at, "resize", where)
        return [begin, FaultAction(until if until is not None else at, "start", where[:1])]
    if fault.what == "flap":
        return _flaps(at, until if until is not None else at, where, fault.period_seconds or 1.0)
    end = {"kill": "start", "slow": "unslow", "cut": "heal"}[fault.what]
    factor = fault.factor or 0.0 if fault.what == "slow" else 1.0
    begin = FaultAction(at, fault.what, where, factor=factor)
    return [begin] if until is None else [begin, FaultAction(until, end, where, factor=factor)]


def _flaps(at: float, end: float, where: tuple[str, ...], period: float) -> list[FaultAction]:
    found = []
    while at < end:
        found += [FaultAction(at, "cut", where), FaultAction(min(at + period / 2, end), "heal", where)]
        at += period
    return found
