"""Random fault schedules and conditions for chaos tests, drawn from a seed.

A schedule is a function of the recipe's sites and links, the seed, and two numbers. `horizon` is how long the run would
take without faults: every fault begins before that time, so a run that the faults only make longer meets all of them.
Every fault ends by itself, killed processes come back and late sites join, so every run can finish. Some faults are
close together: a server that dies while a site is coming back is another case than either alone.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from weightgrad.core.random_streams import RunStream
from weightgrad.kernels.noise import derive
from weightgrad.lab.recipes.expansion import Fault, ends
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.units import show_seconds

KINDS = {"kill site": 3, "kill server": 2, "kill-worker": 2, "resize": 2, "cut": 3, "flap": 2, "slow": 2}
LOSS = 0.01
FAR_SECONDS = 0.110  # one way: a round trip of 220 ms
NARROW = 4  # times less one way than the other
SLOWER = 10
_FIRST, _LAST = 0.03, 0.92  # shares of the horizon in which faults begin
_JOIN_BY = 0.35
_TOGETHER = 0.3  # of the faults come shortly after another one


@dataclass(frozen=True)
class Condition:
    """Something that holds for the whole run: a description, and the recipe settings that bring it about."""

    about: str
    settings: tuple[str, ...]


def random_faults(
    recipe: Recipe, seed: int, events: int, horizon: float, *, longest: float | None = None
) -> tuple[Fault, ...]:
    """Draw faults.

    Args:
        recipe: Its sites and links are what can fail.
        seed: Decides everything.
        events: Number of faults.
        horizon: Seconds that the run would take without faults.
        longest: Duration of the longest fault in seconds; None means what the horizon allows.

    Returns:
        The faults in the order of time.
    """
    draw = random.Random(derive(seed, RunStream.FAULT_SCHEDULE))
    unit = horizon / max(events, 1)
    most = max(5 * unit, horizon / 20) if longest is None else longest
    least = min(unit / 10, most / 4)
    moments = _moments(draw, events, horizon)
    late = _late(draw, recipe, moments, horizon)
    found = [Fault(at, "join", (name,)) for name, at in late.items()]
    for at in moments:
        if at in late.values():
            continue
        seconds = least * (most / least) ** draw.random()
        there = [site for site in recipe.site_list if late.get(site.name, 0.0) < at]
        found.append(_fault(draw, recipe, [site.name for site in there], at, seconds))
    return tuple(sorted(found, key=lambda fault: (fault.at_seconds, fault.what, fault.where)))


def _moments(draw: random.Random, events: int, horizon: float) -> list[float]:
    """Ascending times, all different."""
    gaps = [draw.uniform(0.01, 0.15) if draw.random() < _TOGETHER else draw.uniform(0.3, 2.0) for _ in range(events)]
    total, moments, at = sum(gaps), [], 0.0
    for gap in gaps:
        at += gap
        moments.append(horizon * (_FIRST + (_LAST - _FIRST) * at / total))
    return moments


def _late(draw: random.Random, recipe: Recipe, moments: list[float], horizon: float) -> dict[str, float]:
    """Sites that join late, and when; at least one site is there at the start."""
    names = [site.name for site in recipe.site_list]
    early = [at for at in moments if at <= _JOIN_BY * horizon]
    most = min(len(early), max(1, len(names) // 3), len(names) - 1)
    count = draw.randint(0, most) if most > 0 else 0
    return dict(zip(draw.sample(names, count), sorted(draw.sample(early, count)), strict=True))


def _fault(draw: random.Random, recipe: Recipe, there: list[str], at: float, seconds: float) -> Fault:
    server = recipe.server.name
    several = [(site.name, site.workers) for site in recipe.site_list if site.workers > 1 and site.name in there]
    several += [(server, recipe.server.processes)] if recipe.server.processes > 1 else []
    elastic = [site for site in recipe.site_list if site.sharding != "none" and site.workers > 1 and site.name in there]
    possible = {"kill-worker": bool(several), "resize": bool(elastic)}
    weights = {kind: weight for kind, weight in KINDS.items() if possible.get(kind, True)}
    (kind,) = draw.choices(list(weights), list(weights.values()))
    if kind == "kill-worker":
        name, ranks = draw.choice(several)
        return Fault(at, "kill-worker", (name, str(draw.randrange(ranks))), seconds)
    if kind == "resize":
        site = draw.choice(elastic)
        ranks = draw.choice([ranks for ranks in range(1, site.workers + 1) if site.workers % ranks == 0])
        return Fault(at, "resize", (site.name, str(ranks)), seconds)
    if kind.startswith("kill"):
        return Fault(at, "kill", (server if kind == "kill server" else draw.choice(there),), seconds)
    link = draw.choice([x.between for x in recipe.link_list if server in x.between])
    if kind == "flap":
        return Fault(at, "flap", link, seconds, period_seconds=seconds / draw.randint(2, 6))
    return Fault(at, kind, link, seconds, factor=draw.uniform(0.02, 0.5) if kind == "slow" else None)


def random_conditions(recipe: Recipe, seed: int) -> tuple[Condition, ...]:
    """Draw conditions: each of packet loss, a long delay, an asymmetric link and a slow site, or not, somewhere."""
    draw = random.Random(derive(seed, RunStream.CONDITIONS))
    server = recipe.server.name
    links = [n for n, x in enumerate(recipe.links) if any(server in pair for pair in ends(recipe, x.between))]
    found = []
    for name in ("loss", "far", "narrow", "slow"):
        place, backwards, site = draw.choice(links), draw.random() < 0.5, draw.choice(recipe.site_list).name
        entry, wanted = recipe.links[place], draw.random() < 0.5
        where = " - ".join(entry.between)
        if not wanted:
            continue
        if name == "loss":
            found.append(Condition(f"{where} loses {LOSS:.0%} of its packets", (f"links.{place}.loss={LOSS}",)))
        elif name == "far":
            about = f"{where} has a round trip of {show_seconds(2 * FAR_SECONDS)}"
            found.append(Condition(about, (f"links.{place}.delay={FAR_SECONDS}",)))
        elif name == "narrow" and (wide := entry.bandwidth_bit_s) is not None:
            there, back = (wide, wide / NARROW) if backwards else (wide / NARROW, wide)
            way = " > ".join(reversed(entry.between) if backwards else entry.between)
            settings = (f"links.{place}.bandwidth={there}", f"links.{place}.back={back}")
            found.append(Condition(f"{way} has a quarter of the bandwidth of the other direction", settings))
        elif name == "slow":
            known = recipe.dump()["compute"]["stragglers"]
            slower = json.dumps([*known, {"site": site, "factor": float(SLOWER)}])
            found.append(Condition(f"{site} computes {SLOWER} times slower", (f"compute.stragglers={slower}",)))
    return tuple(found)


def fault_text(fault: Fault) -> str:
    """A fault as text, without its time."""
    length = f" for {show_seconds(round(fault.for_seconds, 3))}" if fault.for_seconds else ""
    more = f" to {fault.factor:.0%}" if fault.factor is not None else ""
    return f"{fault.what} {' - '.join(fault.where)}{more}{length}"
