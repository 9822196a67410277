"""What a run in chaos came to: lost updates, equal bases, and how long it took to go on.

An update is lost when it left a site's pending and never became part of the base. In the field that is read from what
the run left behind: the sites' ledgers say what was pushed, the server's what was taken in which round, and the sites'
last states which base they ended with. Where nothing may depend on time (a synchronous row that gives nobody up) the
base must also be, bit for bit, that of a simulated run to which nothing has happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

from weightgrad import ledger
from weightgrad.runtime import saved
from weightgrad.wan.strategies import Strategy


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one run, or of many together."""

    events: int  # that have happened
    updates_lost: int
    bases_equal: bool
    worst_resume_s: float  # from the end of an event to the next round that closed
    worst_stall_s: float  # between two rounds
    updates: int = 0  # that were pushed
    updates_twice: int = 0  # taken more than once
    rounds: int = 0
    seed: int = 0
    strategy: str = ""
    world: str = ""
    trusted: bool | None = None  # whether the links were what was asked for; None: simulated
    identical: bool | None = None  # with an undisturbed run, bit for bit; None: it need not be
    conditions: list[str] = field(default_factory=list)
    why: str = ""  # what is wrong
    command: str = ""  # to do it again

    @property
    def good(self) -> bool:
        """Nothing was lost or counted twice, all have the same base, and the run has finished."""
        return not self.updates_lost and not self.updates_twice and self.bases_equal and not self.why

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def all_of(found: Sequence[Verdict]) -> Verdict:
    """Many runs as one: sums, and the worst of each."""
    if len(found) == 1:
        return found[0]
    bad = next((one for one in found if not one.good), None)
    together = Verdict(
        events=sum(one.events for one in found),
        updates_lost=sum(one.updates_lost for one in found),
        bases_equal=all(one.bases_equal for one in found),
        worst_resume_s=max((one.worst_resume_s for one in found), default=0.0),
        worst_stall_s=max((one.worst_stall_s for one in found), default=0.0),
        updates=sum(one.updates for one in found),
        updates_twice=sum(one.updates_twice for one in found),
        rounds=sum(one.rounds for one in found),
        seed=min((one.seed for one in found), default=0),
        strategy=", ".join(dict.fromkeys(one.strategy for one in found)),
        world=", ".join(dict.fromkeys(one.world for one in found)),
        trusted=None if any(one.trusted is None for one in found) else all(one.trusted for one in found),
        identical=None if all(one.identical is None for one in found) else all(o.identical is not False for o in found),
    )
    return together if bad is None else replace(together, why=bad.why, command=bad.command)


def worst_resume(ends: Sequence[float], rounds: Sequence[float]) -> float:
    """The longest time from the end of an event to the next round; of events after the last round there is none."""
    waits = [min((r - end for r in rounds if r >= end), default=0.0) for end in ends]
    return max(waits, default=0.0)


def worst_stall(rounds: Sequence[float]) -> float:
    """The longest time between two rounds."""
    return max((later - sooner for sooner, later in pairwise(rounds)), default=0.0)


def timeless(row: Strategy) -> bool:
    """Whether the base depends on nothing but the recipe: nobody is given up, nobody runs ahead, nobody is called."""
    plan = row.for_site()
    free = plan.consistency.alone or plan.consistency.ahead or plan.consistency.missing
    return not free and not plan.trigger.calls and row.t_global is None and row.t is None and row.auto is None


# -- what a run in the field left behind ----------------------------------------------------


@dataclass(frozen=True)
class Remains:
    """Pushes by (site, round), and what is wrong with the bases."""

    pushed: frozenset[tuple[str, int]]
    taken: tuple[tuple[str, int], ...]
    refused: int
    differences: tuple[str, ...]
    rounds: int

    @property
    def lost(self) -> list[tuple[str, int]]:
        """Pushed, and never taken."""
        return sorted(self.pushed - set(self.taken))

    @property
    def twice(self) -> list[tuple[str, int]]:
        """Taken more than once."""
        return sorted(key for key, times in Counter(self.taken).items() if times > 1)


def remains(directory: Path, sites: Sequence[str]) -> Remains:
    """Of a run of real processes."""
    path = directory / "ledger.jsonl"
    book = ledger.read(path) if path.exists() else []
    rounds = [entry for entry in book if entry["kind"] == "round"]
    bases = {entry["version"]: entry["base"] for entry in rounds}
    differences = []
    if sorted(bases) != list(range(1, len(rounds) + 1)):
        differences.append("versions of the base are missing, or were made twice, in the server's ledger")
    for site in sites:
        version, digest = _last_base(directory / "state" / site)
        if version is None:
            differences.append(f"{site} left no state")
        elif version not in bases:
            differences.append(f"{site} ended with version {version}, which the server never made")
        elif digest != bases[version]:
            differences.append(f"{site} ended with another base of version {version}: {digest}, not {bases[version]}")
    return Remains(
        pushed=frozenset((site, number) for site in sites for number in _pushed(directory / "state" / site)),
        taken=tuple((str(site), int(number)) for entry in rounds for site, number in entry["pushes"]),
        refused=sum(entry["kind"] == "refused" for entry in book),
        differences=tuple(differences),
        rounds=len(rounds),
    )


def _pushed(directory: Path) -> set[int]:
    """The rounds a site has pushed for. What a life did after its last checkpoint, the next does again, or has not."""
    path, found = directory / "ledger.jsonl", set[int]()
    for entry in ledger.read(path) if path.exists() else []:
        if entry["kind"] == "start":
            found = {number for number in found if number <= entry["pushed"]}
        elif entry["kind"] == "push":
            found.add(entry["round"])
    return found


def _last_base(directory: Path) -> tuple[int | None, str]:
    last = saved.newest(directory, "rank-0")
    if last is None:
        return None, ""
    return int(last.facts["version"]), xxhash.xxh3_64_hexdigest(last.tensors["end.base.base"].numpy().tobytes())


def first_difference(one: Path, other: Path) -> str | None:
    """The first version at which the bases of two runs differ; None: every one is the same, bit for bit."""
    first, second = (
        {e["version"]: e["base"] for e in ledger.read(run / "ledger.jsonl") if e["kind"] == "round"}
        for run in (one, other)
    )
    for version in sorted(first.keys() | second.keys()):
        if first.get(version) != second.get(version):
            return f"version {version} of the base is not what it is undisturbed"
    return None
