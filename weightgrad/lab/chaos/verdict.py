"""The verdict of a chaos test: lost updates, equal global models, and how long it took to recover.

An update is lost when it left a site's residual and never became part of the global model. For a run with real
processes that is read from what the run wrote: the sites' event logs say what was pushed, the server's event log says
what was applied in which round, and the sites' checkpoints say with which global model they ended. Where nothing may
depend on time (a synchronous strategy that gives up no site), the global model must also have the same bits as that of
a simulated run without faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from weightgrad import event_log
from weightgrad.core.global_model import digest_of
from weightgrad.core.strategies import Strategy
from weightgrad.runtime.checkpoints.checkpoint_files import newest_global_model
from weightgrad.wire.intervals import Intervals


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on verdict run, or on several together.

    Attributes:
        events: Faults that have begun.
        updates_lost: Pushes that were never applied.
        models_equal: Whether server and sites ended with the same global model.
        worst_resume_s: Longest time from the end of a fault to the next round that closed.
        worst_stall_s: Longest time between two rounds.
        updates: Pushes of all sites.
        updates_twice: Pushes that were applied more than once.
        rounds: Rounds that closed.
        seed: The seed of the schedule.
        strategy: The strategy.
        environment: Simulated, or emulated with which kind of network.
        trusted: Whether the links were as asked for; None in the simulator.
        identical: Whether the bits are those of a run without faults; None if they need not be.
        conditions: Descriptions of the conditions of the run.
        why: What is wrong; empty if nothing is.
        command: The command that repeats the run.
    """

    events: int
    updates_lost: int
    models_equal: bool
    worst_resume_s: float
    worst_stall_s: float
    updates: int = 0
    updates_twice: int = 0
    rounds: int = 0
    seed: int = 0
    strategy: str = ""
    environment: str = ""
    trusted: bool | None = None
    identical: bool | None = None
    conditions: list[str] = field(default_factory=list)
    why: str = ""
    command: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing was lost or applied twice, all global models are equal, and the run has finished."""
        return not self.updates_lost and not self.updates_twice and self.models_equal and not self.why

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        return asdict(self)


def combine(found: Sequence[Verdict]) -> Verdict:
    """Several verdicts as one: sums of the counts, and the worst of the times."""
    if len(found) == 1:
        return found[0]
    bad = next((verdict for verdict in found if not verdict.good), None)
    together = Verdict(
        events=sum(verdict.events for verdict in found),
        updates_lost=sum(verdict.updates_lost for verdict in found),
        models_equal=all(verdict.models_equal for verdict in found),
        worst_resume_s=max((verdict.worst_resume_s for verdict in found), default=0.0),
        worst_stall_s=max((verdict.worst_stall_s for verdict in found), default=0.0),
        updates=sum(verdict.updates for verdict in found),
        updates_twice=sum(verdict.updates_twice for verdict in found),
        rounds=sum(verdict.rounds for verdict in found),
        seed=min((verdict.seed for verdict in found), default=0),
        strategy=", ".join(dict.fromkeys(verdict.strategy for verdict in found)),
        environment=", ".join(dict.fromkeys(verdict.environment for verdict in found)),
        trusted=None if any(v.trusted is None for v in found) else all(v.trusted for v in found),
        identical=None if all(v.identical is None for v in found) else all(v.identical is not False for v in found),
    )
    return together if bad is None else replace(together, why=bad.why, command=bad.command)


def worst_resume(ends: Sequence[float], rounds: Sequence[float]) -> float:
    """The longest time from the end of a fault to the next round; faults after the last round do not count."""
    waits = [min((r - end for r in rounds if r >= end), default=0.0) for end in ends]
    return max(waits, default=0.0)


def worst_stall(rounds: Sequence[float]) -> float:
    """The longest time between two rounds."""
    return max((later - sooner for sooner, later in pairwise(rounds)), default=0.0)


def is_deterministic(strategy: Strategy) -> bool:
    """Whether the global model depends on nothing but the recipe.

    That is so if no site is given up, no site runs ahead, and the server requests no rounds by time. A site that stalls
    waits; what it does is the same.
    """
    plan = strategy.for_site()
    free = plan.consistency.alone or plan.consistency.ahead or plan.consistency.missing
    return not free and not plan.trigger.calls and strategy.t_global is None and strategy.auto is None


# -- audit of a run with real processes ---------------------------------------------------------


@dataclass(frozen=True)
class DeploymentAudit:
    """What the files of a run with real processes show.

    Attributes:
        pushed: (site, round) of every push.
        applied: (site, round) of every push that was part of a round, in order.
        refused: Number of pushes that the server refused.
        differences: Descriptions of global models that differ or are missing.
        rounds: Rounds that closed.
    """

    pushed: frozenset[tuple[str, int]]
    applied: tuple[tuple[str, int], ...]
    refused: int
    differences: tuple[str, ...]
    rounds: int

    @property
    def lost(self) -> list[tuple[str, int]]:
        """Pushes that were never applied."""
        return sorted(self.pushed - set(self.applied))

    @property
    def twice(self) -> list[tuple[str, int]]:
        """Pushes that were applied more than once."""
        return sorted(key for key, times in Counter(self.applied).items() if times > 1)


def audit_deployment(directory: Path, sites: Sequence[str]) -> DeploymentAudit:
    """Read the event logs and checkpoints of a run with real processes.

    Args:
        directory: The directory of the run.
        sites: Names of the sites.
    """
    path = directory / "events.jsonl"
    events = event_log.read(path) if path.exists() else []
    rounds = [entry for entry in events if entry["kind"] == "round"]
    global_models = {entry["version"]: entry["digest"] for entry in rounds}
    differences = []
    if sorted(global_models) != list(range(1, len(rounds) + 1)):
        differences.append("versions of the global model are missing, or were made twice, in the server's event log")
    for site in sites:
        version, digest = _last_model(directory / "state" / site)
        if version is None:
            differences.append(f"{site} left no checkpoint")
        elif version not in global_models:
            differences.append(f"{site} ended with version {version}, which the server never made")
        elif digest != global_models[version]:
            differences.append(
                f"{site} ended with another global model of version {version}: {digest}, not {global_models[version]}"
            )
    return DeploymentAudit(
        pushed=frozenset((site, number) for site in sites for number in _pushed(directory / "state" / site)),
        applied=tuple((str(site), int(number)) for entry in rounds for site, number in entry["pushes"]),
        refused=sum(entry["kind"] == "refused" for entry in events),
        differences=tuple(differences),
        rounds=len(rounds),
    )


def _pushed(directory: Path) -> set[int]:
    """The rounds for which a site has pushed.

    After a restart, the pushes since the last checkpoint do not count: the site makes them again, or others.
    """
    path, found = directory / "events.jsonl", set[int]()
    for entry in event_log.read(path) if path.exists() else []:
        if entry["kind"] == "start":
            found = {number for number in found if number <= entry["pushed"]}
        elif entry["kind"] == "push":
            found.add(entry["round"])
    return found


def _last_model(directory: Path) -> tuple[int | None, str]:
    found = newest_global_model(directory)
    if found is None:
        return None, ""
    version, vector = found
    return version, f"{digest_of(vector, Intervals.whole(vector.numel())):016x}"


def first_difference(one: Path, other: Path) -> str | None:
    """Describes the first version in which the global models of two runs differ; None if all are equal, bit for bit."""
    first, second = (
        {e["version"]: e["digest"] for e in event_log.read(run / "events.jsonl") if e["kind"] == "round"}
        for run in (one, other)
    )
    for version in sorted(first.keys() | second.keys()):
        if first.get(version) != second.get(version):
            return f"version {version} of the global model differs from that of the run without faults"
    return None
