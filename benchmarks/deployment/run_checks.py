"""What must be true of a run, whatever was killed: read from what it wrote.

The event log of the server says which pushes each round closed with, and the sites' say what they pushed. Global models
of sites are in their checkpoints, which are removed, so these are collected during the run.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightgrad import event_log
from weightgrad.core.global_model import digest_of
from weightgrad.errors import WeightGradError
from weightgrad.lab.chaos.verdict import DeploymentAudit, audit_deployment
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import simulate
from weightgrad.runtime.checkpoints.checkpoint_files import newest_global_model
from weightgrad.wire.intervals import Intervals


@dataclass(frozen=True)
class Check:
    """One thing that must be true, and what was found. `good` is None if it could not be checked."""

    what: str
    good: bool | None
    found: str


class Watcher:
    """Collects, every half second, the global models in the sites' newest checkpoints."""

    def __init__(self, out: Path, sites: list[str]) -> None:
        self._out, self.sites = out, sites
        self.global_models: dict[tuple[str, int], str] = {}  # digest by site and version
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self.look()

    def look(self) -> None:
        """Read the newest checkpoint of every site."""
        for site in self.sites:
            try:
                found = newest_global_model(self._out / "state" / site)
            except (OSError, ValueError, KeyError, WeightGradError):
                continue  # it was removed while it was read
            if found is not None:
                version, vector = found
                digest = f"{digest_of(vector, Intervals.whole(vector.numel())):016x}"
                self.global_models[site, version] = digest


def check_run(out: Path, watcher: Watcher) -> list[Check]:
    """Check a run that has ended.

    Args:
        out: The directory of the run.
        watcher: What was collected during the run.
    """
    rounds = [entry for entry in event_log.read(out / "events.jsonl") if entry["kind"] == "round"]
    if not rounds:
        return [Check("the server has closed rounds", False, "none in its event log")]
    audit = audit_deployment(out, watcher.sites)
    return [
        _versions([entry["version"] for entry in rounds], max(entry["version"] for entry in rounds)),
        _past_models(watcher, {entry["version"]: entry["digest"] for entry in rounds}),
        *_pushes(audit),
        Check("no update was refused", not audit.refused, f"{audit.refused} refused"),
    ]


def _versions(found: list[int], last: int) -> Check:
    counts = Counter(found)
    twice = sorted(number for number, count in counts.items() if count > 1)
    missing = sorted(set(range(1, last + 1)) - set(found))
    later = sorted(number for number in counts if number > last)
    words = [f"{last} versions"]
    words += [
        f"{len(numbers)} {what}: {_few(numbers)}"
        for what, numbers in (("twice", twice), ("missing", missing), ("beyond the state", later))
        if numbers
    ]
    return Check("every version is once in the event log", not (twice or missing or later), "; ".join(words))


def _past_models(watcher: Watcher, digests: dict[int, str]) -> Check:
    known = {at: digest for at, digest in watcher.global_models.items() if at[1] in digests}
    wrong = [f"{site} at {version}" for (site, version), digest in known.items() if digests[version] != digest]
    good = not wrong if known else None
    words = f"{len(known)} global models of sites compared" + (f"; other bits: {_few(wrong)}" if wrong else "")
    return Check("sites have the server's global model at every version", good, words)


def _pushes(audit: DeploymentAudit) -> list[Check]:
    """Each push is in the global model at most once, none is skipped, and all of them were sent."""
    newest = {site: max(number for name, number in audit.pushed if name == site) for site, _ in audit.pushed}
    applied = {site: max((number for name, number in audit.applied if name == site), default=0) for site in newest}
    # What a site pushed last may have been on its way when everything was stopped.
    lost = [f"{site} {number}" for site, number in audit.lost if number < applied[site]]
    # The last push may have left just before its site was stopped.
    unsent = sorted(set(audit.applied) - audit.pushed)
    unsent_words = [f"{site} {number}" for site, number in unsent if number < newest.get(site, 0)]
    twice = [f"{site} {number}" for site, number in audit.twice]
    seen = f"{len(audit.applied)} pushes in {audit.rounds} rounds, {len(audit.pushed)} sent"
    return [
        Check("no update is in the global model twice", not twice, f"{seen}; twice: {_few(twice) or 'none'}"),
        Check("no update is lost", not lost, f"{seen}; lost: {_few(lost) or 'none'}"),
        Check(
            "nothing is in the global model that was not sent",
            not unsent_words,
            f"unsent: {_few(unsent_words) or 'none'}",
        ),
    ]


def like_simulator(recipe: Recipe, out: Path, reached: int, most: int) -> Check:
    """Check that every version has the bits that the simulator predicts.

    Args:
        recipe: What was run.
        out: The directory of the run.
        reached: Steps that every site has done.
        most: Steps to simulate at most.
    """
    what = "every version has the simulator's bits"
    rounds = _rounds(out / "events.jsonl")
    finished = reached >= recipe.training.steps
    if not finished and (recipe.training.schedule == "cosine" or reached < 2):
        return Check(what, None, "the run was stopped, and its learning rate depends on its length")
    steps = recipe.training.steps if finished else min(reached, most)
    short = recipe.with_settings([f"training.steps={steps}"])
    simulate(short, out / "simulated")
    # The last push of a run differs: it sends all that is left.
    predicted = {v: e for v, e in _rounds(out / "simulated" / "events.jsonl").items() if finished or e["step"] < steps}
    both = sorted(rounds.keys() & predicted.keys())
    wrong = [version for version in both if rounds[version]["digest"] != predicted[version]["digest"]]
    words = f"{len(both)} versions of {steps} steps compared"
    words += f"; the first that differs: {wrong[0]}" if wrong else ""
    return Check(what, not wrong if both else None, words)


def _rounds(path: Path) -> dict[int, dict[str, Any]]:
    return {entry["version"]: entry for entry in event_log.read(path) if entry["kind"] == "round"}


def _few(found: list[Any], most: int = 8) -> str:
    return ", ".join(map(str, found[:most])) + (" ..." if len(found) > most else "")
