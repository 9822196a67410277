"""What must be true of a run, whatever was killed: collected during the run, checked after it.

The server and the sites remove old round results and checkpoints, so these are collected during the run.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

from weightgrad import event_log
from weightgrad.errors import RunError, WeightGradError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import simulate
from weightgrad.runtime import checkpoint
from weightgrad.wire.message_bytes import unpack
from weightgrad.wire.messages import RoundResult


@dataclass(frozen=True)
class Check:
    """One thing that must be true, and what was found. `good` is None if it could not be checked."""

    what: str
    good: bool | None
    found: str


class Watcher:
    """Collects, every half second, the pushes in each round result and the global models in the sites' checkpoints."""

    def __init__(self, out: Path, sites: list[str]) -> None:
        self._out, self._sites = out, sites
        self.taken: dict[int, dict[str, int]] = {}  # by version, the push of each site in it
        self.global_models: dict[tuple[str, int], str] = {}  # digest by site and version
        self._seen: dict[Path, int] = {}
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
        """Collect the files that are new."""
        for path in sorted((self._out / "state" / "server" / "results").glob("*.result")):
            if self._is_new(path) and (result := _result(path)) is not None:
                self.taken[result.version] = dict(result.included)
        for site in self._sites:
            for path in checkpoint.generations(self._out / "state" / site, "rank-0"):
                if self._is_new(path) and (found := _checkpoint(path)) is not None:
                    version, digest = int(found.facts["version"]), _digest(found, "state.global_model.weights")
                    self.global_models[site, version] = digest

    def _is_new(self, path: Path) -> bool:
        try:
            stamp = path.stat().st_mtime_ns
        except OSError:
            return False  # removed since it was listed
        before, self._seen[path] = self._seen.get(path), stamp
        return before != stamp


def check_run(out: Path, watcher: Watcher) -> list[Check]:
    """Check a run that has ended.

    Args:
        out: The directory of the run.
        watcher: What was collected during the run.
    """
    server = checkpoint.newest(out / "state" / "server", "server")
    if server is None:
        return [Check("the server has a state", False, "nothing in its directory")]
    version = int(server.tensors["clock"][0])
    rounds = [entry for entry in event_log.read(out / "events.jsonl") if entry["kind"] == "round"]
    digests = {entry["version"]: entry["digest"] for entry in rounds}
    own = _digest(server, "global_model.weights")
    return [
        _versions([entry["version"] for entry in rounds], version),
        Check(
            "the server's global model is that of its event log",
            digests.get(version) == own,
            f"version {version}: {own}",
        ),
        _past_models(watcher, digests),
        *_pushes(out, watcher, version),
        _refused(out),
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


def _pushes(out: Path, watcher: Watcher, last: int) -> list[Check]:
    """Each push is in the global model at most once, none is skipped, and all of them were sent."""
    twice: list[str] = []
    lost: list[str] = []
    unsent: list[str] = []
    sent = taken = 0
    versions = [version for version in sorted(watcher.taken) if version <= last]
    for site in sorted({name for version in versions for name in watcher.taken[version]}):
        book = event_log.read(out / "state" / site / "events.jsonl")
        pushed = {int(entry["round"]) for entry in book if entry["kind"] == "push"}
        rounds = {version: watcher.taken[version][site] for version in versions if site in watcher.taken[version]}
        twice += [f"{site} {number}" for number, count in Counter(rounds.values()).items() if count > 1]
        missing = set(rounds.values()) - pushed
        # The last push may have left just before its site was stopped.
        unsent += [f"{site} {number}" for number in sorted(missing) if number < max(pushed, default=0)]
        for before, after in pairwise(sorted(rounds)):
            if after - before == 1:  # no round result between them is missing
                missed = range(rounds[before] + 1, rounds[after])
                lost += [f"{site} {number}" for number in missed if number in pushed]
        sent, taken = sent + len(pushed), taken + len(rounds)
    good = bool(versions) or None
    seen = f"{taken} pushes in {len(versions)} of {last} round results, {sent} sent"
    return [
        Check("no update is in the global model twice", good and not twice, f"{seen}; twice: {_few(twice) or 'none'}"),
        Check("no update is lost", good and not lost, f"{seen}; lost: {_few(lost) or 'none'}"),
        Check(
            "nothing is in the global model that was not sent",
            good and not unsent,
            f"unsent: {_few(unsent) or 'none'}",
        ),
    ]


def _refused(out: Path) -> Check:
    found = [entry["why"] for entry in event_log.read(out / "events.jsonl") if entry["kind"] == "refused"]
    return Check("no update was refused", not found, f"{len(found)} refused" + (f": {found[0]}" if found else ""))


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


def _result(path: Path) -> RoundResult | None:
    try:
        found = unpack(path.read_bytes())
    except (OSError, WeightGradError):
        return None
    return found if isinstance(found, RoundResult) else None


def _checkpoint(path: Path) -> checkpoint.Checkpoint | None:
    name, number = path.stem.rsplit("-", 1)
    try:
        return checkpoint.exact(path.parent, name, int(number))
    except (OSError, WeightGradError):
        return None


def _digest(found: checkpoint.Checkpoint, name: str) -> str:
    if name not in found.tensors:
        raise RunError(f"a checkpoint without {name}; it has {', '.join(found.tensors)}")
    return xxhash.xxh3_64_hexdigest(found.tensors[name].numpy().tobytes())


def _few(found: list[Any], most: int = 8) -> str:
    return ", ".join(map(str, found[:most])) + (" ..." if len(found) > most else "")
