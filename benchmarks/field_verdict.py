"""What must be true of a run whatever was killed: looked at while it goes, judged when it is over.

Answers and checkpoints are removed as newer ones come, so they are collected on the way.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

from weightgrad import ledger
from weightgrad.errors import RunError, WeightGradError
from weightgrad.runtime import saved
from weightgrad.train.recipe import Recipe
from weightgrad.train.run import simulate
from weightgrad.wan.message_bytes import unpack
from weightgrad.wan.messages import Answer


@dataclass(frozen=True)
class Check:
    """One thing that must be true; `good` is None when it could not be looked at."""

    what: str
    good: bool | None
    found: str


class Watcher:
    """Collects, every half second: which pushes each answer took, and the bases that sites have on disk."""

    def __init__(self, out: Path, sites: list[str]) -> None:
        self._out, self._sites = out, sites
        self.taken: dict[int, dict[str, int]] = {}  # by version: the push of each site that is in it
        self.bases: dict[tuple[str, int], str] = {}  # digest by site and version
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
        """Take what is new."""
        for path in sorted((self._out / "state" / "server" / "answers").glob("*.answer")):
            if self._is_new(path) and (answer := _answer(path)) is not None:
                self.taken[answer.version] = dict(answer.taken)
        for site in self._sites:
            for path in saved.generations(self._out / "state" / site, "rank-0"):
                if self._is_new(path) and (found := _saved(path)) is not None:
                    version, digest = int(found.facts["version"]), _digest(found, "end.base.base")
                    self.bases[site, version] = digest

    def _is_new(self, path: Path) -> bool:
        try:
            stamp = path.stat().st_mtime_ns
        except OSError:
            return False  # removed under our eyes
        before, self._seen[path] = self._seen.get(path), stamp
        return before != stamp


def judge(out: Path, watcher: Watcher) -> list[Check]:
    """Of a run that is over."""
    server = saved.newest(out / "state" / "server", "server")
    if server is None:
        return [Check("the server has a state", False, "nothing in its directory")]
    version = int(server.tensors["clock"][0])
    rounds = [entry for entry in ledger.read(out / "ledger.jsonl") if entry["kind"] == "round"]
    digests = {entry["version"]: entry["base"] for entry in rounds}
    own = _digest(server, "base.base")
    return [
        _versions([entry["version"] for entry in rounds], version),
        Check("the server's base is that of its ledger", digests.get(version) == own, f"version {version}: {own}"),
        _bases(watcher, digests),
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
    return Check("every version is once in the ledger", not (twice or missing or later), "; ".join(words))


def _bases(watcher: Watcher, digests: dict[int, str]) -> Check:
    known = {at: digest for at, digest in watcher.bases.items() if at[1] in digests}
    wrong = [f"{site} at {version}" for (site, version), digest in known.items() if digests[version] != digest]
    good = not wrong if known else None
    words = f"{len(known)} bases of sites compared" + (f"; other bits: {_few(wrong)}" if wrong else "")
    return Check("sites have the server's base at every version", good, words)


def _pushes(out: Path, watcher: Watcher, last: int) -> list[Check]:
    """A push is in the base at most once, none is skipped, and none is there that was not sent."""
    twice: list[str] = []
    lost: list[str] = []
    strange: list[str] = []
    sent = taken = 0
    versions = [version for version in sorted(watcher.taken) if version <= last]
    for site in sorted({name for version in versions for name in watcher.taken[version]}):
        book = ledger.read(out / "state" / site / "ledger.jsonl")
        pushed = {int(entry["round"]) for entry in book if entry["kind"] == "push"}
        rounds = {version: watcher.taken[version][site] for version in versions if site in watcher.taken[version]}
        twice += [f"{site} {number}" for number, count in Counter(rounds.values()).items() if count > 1]
        unsent = set(rounds.values()) - pushed
        # The very last may have left the moment before its site was stopped.
        strange += [f"{site} {number}" for number in sorted(unsent) if number < max(pushed, default=0)]
        for before, after in pairwise(sorted(rounds)):
            if after - before == 1:  # nothing between them that was not collected
                missed = range(rounds[before] + 1, rounds[after])
                lost += [f"{site} {number}" for number in missed if number in pushed]
        sent, taken = sent + len(pushed), taken + len(rounds)
    good = bool(versions) or None
    seen = f"{taken} pushes in {len(versions)} of {last} answers, {sent} sent"
    return [
        Check("no update is in the base twice", good and not twice, f"{seen}; twice: {_few(twice) or 'none'}"),
        Check("no update is lost", good and not lost, f"{seen}; lost: {_few(lost) or 'none'}"),
        Check("nothing is in the base that was not sent", good and not strange, f"strange: {_few(strange) or 'none'}"),
    ]


def _refused(out: Path) -> Check:
    found = [entry["why"] for entry in ledger.read(out / "ledger.jsonl") if entry["kind"] == "refused"]
    return Check("no update was refused", not found, f"{len(found)} refused" + (f": {found[0]}" if found else ""))


def like_simulator(recipe: Recipe, out: Path, reached: int, most: int) -> Check:
    """Every version has the simulator's bits: nothing that was pending, in flight or quantized was changed."""
    what = "every version has the simulator's bits"
    rounds = _rounds(out / "ledger.jsonl")
    finished = reached >= recipe.training.steps
    if not finished and (recipe.training.schedule == "cosine" or reached < 2):
        return Check(what, None, "the run was stopped, and its learning rate depends on its length")
    steps = recipe.training.steps if finished else min(reached, most)
    short = recipe.with_settings([f"training.steps={steps}"])
    simulate(short, out / "simulated")
    # The last push of a run is another one: it sends what is left.
    foretold = {v: e for v, e in _rounds(out / "simulated" / "ledger.jsonl").items() if finished or e["step"] < steps}
    both = sorted(rounds.keys() & foretold.keys())
    wrong = [version for version in both if rounds[version]["base"] != foretold[version]["base"]]
    words = f"{len(both)} versions of {steps} steps compared"
    words += f"; the first that differs: {wrong[0]}" if wrong else ""
    return Check(what, not wrong if both else None, words)


def _rounds(path: Path) -> dict[int, dict[str, Any]]:
    return {entry["version"]: entry for entry in ledger.read(path) if entry["kind"] == "round"}


def _answer(path: Path) -> Answer | None:
    try:
        found = unpack(path.read_bytes())
    except (OSError, WeightGradError):
        return None
    return found if isinstance(found, Answer) else None


def _saved(path: Path) -> saved.Saved | None:
    name, number = path.stem.rsplit("-", 1)
    try:
        return saved.exact(path.parent, name, int(number))
    except (OSError, WeightGradError):
        return None


def _digest(found: saved.Saved, name: str) -> str:
    if name not in found.tensors:
        raise RunError(f"a checkpoint without {name}; it has {', '.join(found.tensors)}")
    return xxhash.xxh3_64_hexdigest(found.tensors[name].numpy().tobytes())


def _few(found: list[Any], most: int = 8) -> str:
    return ", ".join(map(str, found[:most])) + (" ..." if len(found) > most else "")
