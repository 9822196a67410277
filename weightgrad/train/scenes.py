"""A recipe's faults and traces as plain things to do, in order: what the emulator plays."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from weightgrad.train.recipe import Recipe
from weightgrad.train.recipe_plan import Fault
from weightgrad.units import show_bit_s, show_seconds


@dataclass(frozen=True, order=True)
class Scene:
    """At that second: kill or start (one place), cut, heal, or set the rate of a link (two)."""

    at: float
    what: str
    where: tuple[str, ...]
    bit_s: float | None = None

    @property
    def starts(self) -> bool:
        """Whether it brings somebody back."""
        return self.what == "start"

    def __str__(self) -> str:
        rate = f" to {show_bit_s(self.bit_s)}" if self.bit_s is not None else ""
        return f"{show_seconds(self.at)}: {self.what} {' - '.join(self.where)}{rate}"


def scenes(recipe: Recipe) -> list[Scene]:
    """All of them by time."""
    found = [Scene(at, "rate", x.between, rate) for x in recipe.link_list for at, rate in x.trace if at > 0]
    rates = {frozenset(x.between): x.bandwidth_bit_s for x in recipe.link_list}
    for fault in recipe.fault_list:
        found += of_fault(fault, rates.get(frozenset(fault.where), 0.0))
    heapq.heapify(found)
    return [heapq.heappop(found) for _ in range(len(found))]


def of_fault(fault: Fault, bit_s: float) -> list[Scene]:
    """Its beginning and its end; a flap is many cuts."""
    at, until = fault.at_seconds, None if fault.for_seconds is None else fault.at_seconds + fault.for_seconds
    if fault.what == "join":
        return [Scene(at, "start", fault.where)]
    if fault.what == "kill":
        return [Scene(at, "kill", fault.where), *([Scene(until, "start", fault.where)] if until is not None else [])]
    if fault.what == "slow":
        back = [Scene(until, "rate", fault.where, bit_s)] if until is not None else []
        return [Scene(at, "rate", fault.where, bit_s * (fault.factor or 0.0)), *back]
    if fault.what == "cut":
        return [Scene(at, "cut", fault.where), *([Scene(until, "heal", fault.where)] if until is not None else [])]
    period, end = fault.period_seconds or 1.0, until if until is not None else at
    found = []
    while at < end:
        found += [Scene(at, "cut", fault.where), Scene(min(at + period / 2, end), "heal", fault.where)]
        at += period
    return found
