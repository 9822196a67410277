"""A recipe's faults and traces as plain things to do, in order: what the emulator plays."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Protocol

from weightgrad.train.launch import Standing
from weightgrad.train.recipe import Recipe
from weightgrad.train.recipe_plan import Fault
from weightgrad.units import show_bit_s, show_seconds


@dataclass(frozen=True, order=True)
class Scene:
    """At that second: kill or start (one place), kill-worker (a site, a rank), or something about a link (two places).

    Of a link: cut and heal; slow (to a share of its rate) and unslow (that share is over); rate (what it is from now).
    """

    at: float
    what: str
    where: tuple[str, ...]
    bit_s: float | None = None
    factor: float = 1.0

    @property
    def starts(self) -> bool:
        """Whether it brings somebody back."""
        return self.what == "start"

    def __str__(self) -> str:
        more = f" to {show_bit_s(self.bit_s)}" if self.bit_s is not None else ""
        more = f" to {self.factor:.0%}" if self.what == "slow" else more
        return f"{show_seconds(self.at)}: {self.what} {' - '.join(self.where)}{more}"


class Plot(Protocol):
    """Says what happens next, and who is not there at the start."""

    absent: frozenset[str]

    def next(self, seconds: float, now: Standing) -> Scene | None:
        """What is due so many seconds after the first step; None: nothing yet, or nothing more."""
        ...

    @property
    def brings_back(self) -> bool:
        """Whether somebody is still to come."""
        ...


class Timetable:
    """A plot by the clock: the recipe's own faults and traces."""

    def __init__(self, recipe: Recipe) -> None:
        self.absent = recipe.absent_at_start
        self._left = scenes(recipe)

    def next(self, seconds: float, now: Standing) -> Scene | None:
        """The first whose time has come."""
        del now
        return self._left.pop(0) if self._left and self._left[0].at <= seconds else None

    @property
    def brings_back(self) -> bool:
        """Whether somebody is still to come."""
        return any(scene.starts for scene in self._left)


def scenes(recipe: Recipe) -> list[Scene]:
    """All of them by time."""
    found = [Scene(at, "rate", x.between, rate) for x in recipe.link_list for at, rate in x.trace if at > 0]
    for fault in recipe.fault_list:
        found += of_fault(fault)
    heapq.heapify(found)
    return [heapq.heappop(found) for _ in range(len(found))]


def of_fault(fault: Fault) -> list[Scene]:
    """Its beginning and its end; a flap is many cuts."""
    at, until = fault.at_seconds, None if fault.for_seconds is None else fault.at_seconds + fault.for_seconds
    if fault.what == "join":
        return [Scene(at, "start", fault.where)]
    if fault.what == "kill-worker":
        return [Scene(at, "kill-worker", fault.where)]  # torchrun brings it back
    if fault.what == "kill":
        return [Scene(at, "kill", fault.where), *([Scene(until, "start", fault.where)] if until is not None else [])]
    if fault.what == "slow":
        left = fault.factor or 0.0
        back = [Scene(until, "unslow", fault.where, factor=left)] if until is not None else []
        return [Scene(at, "slow", fault.where, factor=left), *back]
    if fault.what == "cut":
        return [Scene(at, "cut", fault.where), *([Scene(until, "heal", fault.where)] if until is not None else [])]
    period, end = fault.period_seconds or 1.0, until if until is not None else at
    found = []
    while at < end:
        found += [Scene(at, "cut", fault.where), Scene(min(at + period / 2, end), "heal", fault.where)]
        at += period
    return found
