"""WeightGrad's rows: `weightgrad serve` on the first site's host, `weightgrad train` on both, as operators start them.

What is judged is the server's base. The server writes it to disk in every round before it answers, as it always
does, and the newest are kept here by a second name; so looking costs the run nothing. Times are those of the files:
a ledger's last change is its last line, which ties its clock to the machine's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

from rivals.arena import passed, watch
from rivals.outcome import Look, Trace
from rivals.tasks import SITES
from safetensors.torch import load_file

from weightgrad.emulate.network import Network
from weightgrad.runtime import saved
from weightgrad.train import launch
from weightgrad.train.emulated import PORT
from weightgrad.train.launch import Processes
from weightgrad.train.recipe import Recipe
from weightgrad.train.task import Training


def race(recipe: Recipe, out: Path, wan: Network, patience: float) -> Trace:
    """The first site alone is there when the second starts: the first base does not cross the line."""
    server = wan.host(SITES[0]).address
    launch.prepare(recipe, out, ["localhost", server])
    extra = ["--patience", str(patience), "--paced"]
    commands = launch.commands(recipe, out, f"{server}:{PORT}", lambda site: wan.reach(site, SITES[0], PORT), extra)
    processes = Processes(out / "logs")
    kept = _Kept(out, 0.2 * recipe.training.evaluate_every * float(recipe.compute.seconds_per_step))
    until = time.monotonic() + patience
    before = passed(wan)
    try:
        for name in ("server", SITES[0]):
            processes.start(name, commands[name], wan.host(SITES[0]).popen)
        watch(processes, lambda: _joined(out), until)
        processes.start(SITES[1], commands[SITES[1]], wan.host(SITES[1]).popen)
        watch(processes, lambda: kept.look() or processes.all_done(), until)
        line_bytes = passed(wan) - before
    finally:
        processes.end()
    trace = _trace(recipe, out, kept, line_bytes)
    kept.remove()
    return trace


def _joined(out: Path) -> bool:
    return any(entry["kind"] == "site_joined" for entry in launch.lines(out / "ledger.jsonl"))


class _Kept:
    """Second names of the server's checkpoints, of which it keeps two itself; one in so many seconds is enough."""

    def __init__(self, out: Path, seconds: float) -> None:
        self._source, self._target, self._seconds = out / "state" / "server", out / "kept", seconds
        self._last = 0.0
        self._target.mkdir(parents=True)

    def look(self) -> bool:
        """Keep what is new; false, so that a watch goes on."""
        for path in saved.generations(self._source, "server"):
            with contextlib.suppress(FileNotFoundError):  # it has just been removed
                if (written := path.stat().st_mtime) >= self._last + self._seconds:
                    os.link(path, self._target / path.name)
                    self._last = written
        return False

    def looks(self, began: float, every: int) -> list[Look]:
        """The first base after every so many steps, as often as a rival is looked at; by the machine's clock."""
        found: list[Look] = []
        for path in saved.generations(self._target, "server"):
            state = saved.exact(self._target, "server", int(path.stem.rsplit("-", 1)[1]))
            rounds = state.facts["rounds"]  # none: written for a site that came or went, the base is as it was
            step = rounds[-1]["step"] if rounds else 0
            if step // every > (found[-1].step // every if found else 0):
                found.append(Look(step, path.stat().st_mtime - began, state.tensors["base.base"]))
        return found

    def remove(self) -> None:
        """They are large."""
        shutil.rmtree(self._target)


def _trace(recipe: Recipe, out: Path, kept: _Kept, line_bytes: int) -> Trace:
    clocks = [_Clock(recipe, out / "state" / name / "ledger.jsonl") for name in SITES]
    began = max(clock.began for clock in clocks)  # the first site was there first, and waited
    task = Training(recipe)
    final, tensors = task.initial(), load_file(str(out / "base.safetensors"))
    for slot in task.layout.slots:
        slot.of(final).copy_(tensors[slot.name])
    return Trace(
        ends=[max(both) - began for both in zip(*(clock.ends for clock in clocks), strict=True)],
        finished=max(clock.finished for clock in clocks) - began,
        looks=kept.looks(began, recipe.training.evaluate_every),
        final=final,
        line_bytes=line_bytes,
        late=max(clock.late for clock in clocks),
        notes=tuple(_decisions(out)),
    )


class _Clock:
    """A site's ledger by the machine's clock; it begins with its first pass."""

    def __init__(self, recipe: Recipe, path: Path) -> None:
        book = launch.lines(path)
        zero = path.stat().st_mtime - float(book[-1]["t"])
        steps = _of(book, "step")
        waited = sum(float(entry["seconds"]) for entry in _of(book, "wait") if entry["step"] == steps[0]["step"])
        self.began = zero + float(steps[0]["t"]) - waited - float(recipe.compute.seconds_per_step)
        self.ends = [zero + float(entry["t"]) for entry in steps]
        self.finished = zero + float(_of(book, "site")[-1]["t"])
        counted = _of(book, "compute")[-1]
        self.late = counted["late"] / counted["steps"]


def _of(book: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [entry for entry in book if entry["kind"] == kind]


def _decisions(out: Path) -> list[str]:
    """What `auto` settled last."""
    found = _of(launch.lines(out / "ledger.jsonl"), "pace")
    if not found:
        return []
    last = found[-1]
    pace = f"pace set {len(found)} times, at last a round every {last['every']} steps, overlap {last['overlap']}"
    return [f"{pace}, {last['up']} up and {last['down']} down: {last['why']}"]
