"""An expanded recipe: every site, link and fault by its own name, with templates written out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from weightgrad.lab.recipes.schema import FAULTS, AnyFault, Compute, Lan
from weightgrad.lab.recipes.values import Section

if TYPE_CHECKING:
    from weightgrad.lab.recipes.recipe import Recipe

_Section = TypeVar("_Section", bound=Section)


@dataclass(frozen=True)
class Site:
    """One site with its network and speed; `compute` has only the stragglers of this site."""

    name: str
    workers: int
    lan: Lan
    compute: Compute
    sharding: str = "none"


@dataclass(frozen=True)
class Link:
    """One WAN link; the server stands first where it is one end.

    A trace is (seconds, bit/s) from 0 on, and empty where the bandwidth never changes.
    """

    between: tuple[str, str]
    bandwidth_bit_s: float
    delay_seconds: float
    loss: float
    trace: tuple[tuple[float, float], ...]
    back_bit_s: float | None = None  # from the second to the first, where it differs

    @property
    def least_bit_s(self) -> float:
        """The bandwidth of the slower direction."""
        return min(self.bandwidth_bit_s, self.back_bit_s or self.bandwidth_bit_s)


@dataclass(frozen=True)
class Fault:
    """One fault: `what` happens to a link (two names) or to a site or the server (one name)."""

    at_seconds: float
    what: str
    where: tuple[str, ...]
    for_seconds: float | None = None
    factor: float | None = None
    period_seconds: float | None = None


def sites(recipe: Recipe) -> Iterator[Site]:
    """Every site in the order of the recipe."""
    for entry in recipe.sites:
        lan = recipe.lan if entry.lan is None else _changed(recipe.lan, entry.lan)
        compute = recipe.compute if entry.compute is None else _changed(recipe.compute, entry.compute)
        for name in entry.names:
            slow = tuple(
                straggler.model_copy(update={"site": straggler.site and name})
                for straggler in compute.stragglers
                if straggler.site in (None, name, entry.name)
            )
            own = compute.model_copy(update={"stragglers": slow})
            yield Site(name, entry.workers, lan, own, entry.sharding)


def expand(recipe: Recipe, name: str) -> tuple[str, ...]:
    """The sites a name or template stands for, or the server; empty if there is none."""
    if name == recipe.server.name:
        return (name,)
    for entry in recipe.sites:
        if name == entry.name:
            return entry.names
    return (name,) if any(name in entry.names for entry in recipe.sites) else ()


def ends(recipe: Recipe, pair: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """The links a pair of names or templates stands for, the server first."""
    for first in expand(recipe, pair[0]):
        for second in expand(recipe, pair[1]):
            yield (second, first) if second == recipe.server.name else (first, second)


def links(recipe: Recipe) -> Iterator[Link]:
    """Every link in the order of the recipe. A link that names its site replaces that of a template."""
    named = {frozenset(entry.between) for entry in recipe.links if not is_template(entry.between)}
    for entry in recipe.links:
        for between in ends(recipe, entry.between):
            if is_template(entry.between) and frozenset(between) in named:
                continue
            bandwidth_bit_s = entry.trace[0][1] if entry.trace else entry.bandwidth_bit_s
            assert bandwidth_bit_s is not None  # LinkEntry has one or the other
            back_bit_s = entry.back_bit_s
            if back_bit_s is not None and between[0] not in expand(recipe, entry.between[0]):
                bandwidth_bit_s, back_bit_s = back_bit_s, bandwidth_bit_s
            yield Link(between, bandwidth_bit_s, entry.delay_seconds, entry.loss, entry.trace or (), back_bit_s)


def faults(recipe: Recipe) -> Iterator[Fault]:
    """Every fault in the order of time, then of the recipe."""
    for entry in sorted(recipe.faults, key=lambda entry: entry.at_seconds):
        kind, target = fault_target(entry)
        places = ends(recipe, target) if isinstance(target, tuple) else ((name,) for name in expand(recipe, target))
        for where in places:
            yield Fault(
                entry.at_seconds,
                kind,
                where,
                getattr(entry, "for_seconds", None),
                getattr(entry, "factor", None),
                getattr(entry, "period_seconds", None),
            )


def fault_target(entry: AnyFault) -> tuple[str, str | tuple[str, str]]:
    """The kind of a fault, and the name or pair of names that it concerns."""
    kind = next(kind for kind in FAULTS if kind in type(entry).model_fields)
    return kind, getattr(entry, kind)


def is_template(names: tuple[str, ...]) -> bool:
    """Whether one of the names is a template."""
    return any("{}" in name for name in names)


def _changed(part: _Section, change: Section) -> _Section:
    given = {key: value for key in type(change).model_fields if (value := getattr(change, key)) is not None}
    return part.model_copy(update=given)
