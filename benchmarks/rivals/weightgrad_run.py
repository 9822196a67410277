"""Runs a strategy of WeightGrad: `weightgrad serve` on the host of the first site, `weightgrad train` on both hosts.

The global model of the server is evaluated. The server writes it to disk in every round before it sends the result, as
it always does; hard links keep the files, so this costs the run nothing. Times are those of the files: the last change
of an event log is its last line, which relates the clock of the log to the clock of the machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

from rivals.emulated_run import bytes_sent, watch
from rivals.outcome import Snapshot, Trace
from rivals.tasks import SITES
from safetensors.torch import load_file

from weightgrad.lab.emulate.network import Network
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run import launch
from weightgrad.lab.run.emulation import PORT
from weightgrad.lab.run.launch import Processes
from weightgrad.lab.run.task import Training
from weightgrad.runtime import checkpoint


def run(recipe: Recipe, out: Path, wan: Network, timeout: float) -> Trace:
    """Run the recipe. The second site starts when the first has joined, so that the link carries no initial model."""
    server = wan.host(SITES[0]).address
    launch.prepare(recipe, out, ["localhost", server])
    extra = ["--timeout", str(timeout), "--emulate-compute"]
    commands = launch.commands(recipe, out, f"{server}:{PORT}", lambda site: wan.reach(site, SITES[0], PORT), extra)
    processes = Processes(out / "logs")
    kept = _KeptCheckpoints(out, 0.2 * recipe.training.evaluate_every * float(recipe.compute.seconds_per_step))
    until = time.monotonic() + timeout
    before = bytes_sent(wan)
    try:
        for name in ("server", SITES[0]):
            processes.start(name, commands[name], wan.host(SITES[0]).popen)
        watch(processes, lambda: _joined(out), until)
        processes.start(SITES[1], commands[SITES[1]], wan.host(SITES[1]).popen)
        watch(processes, lambda: kept.collect() or processes.all_done(), until)
        link_bytes = bytes_sent(wan) - before
    finally:
        processes.end()
    trace = _trace(recipe, out, kept, link_bytes)
    kept.remove()
    return trace


def _joined(out: Path) -> bool:
    return any(entry["kind"] == "site_joined" for entry in launch.read_events(out / "events.jsonl"))


class _KeptCheckpoints:
    """Hard links to the checkpoints of the server, which itself keeps two; at most one in so many seconds."""

    def __init__(self, out: Path, seconds: float) -> None:
        self._source, self._target, self._seconds = out / "state" / "server", out / "kept", seconds
        self._last = 0.0
        self._target.mkdir(parents=True)

    def collect(self) -> bool:
        """Keep what is new. Returns False, so that `watch` goes on."""
        for path in checkpoint.generations(self._source, "server"):
            with contextlib.suppress(FileNotFoundError):  # it has just been removed
                if (written := path.stat().st_mtime) >= self._last + self._seconds:
                    os.link(path, self._target / path.name)
                    self._last = written
        return False

    def snapshots(self, began: float, every: int) -> list[Snapshot]:
        """The first model after every so many steps, as often as for a rival, with its time since `began`."""
        found: list[Snapshot] = []
        for path in checkpoint.generations(self._target, "server"):
            state = checkpoint.exact(self._target, "server", int(path.stem.rsplit("-", 1)[1]))
            rounds = state.facts["rounds"]  # none if it was written because a site joined or left
            step = rounds[-1]["step"] if rounds else 0
            if step // every > (found[-1].step // every if found else 0):
                found.append(Snapshot(step, path.stat().st_mtime - began, state.tensors["global_model.weights"]))
        return found

    def remove(self) -> None:
        """Remove the files, which are large."""
        shutil.rmtree(self._target)


def _trace(recipe: Recipe, out: Path, kept: _KeptCheckpoints, link_bytes: int) -> Trace:
    clocks = [_Clock(recipe, out / "state" / name / "events.jsonl") for name in SITES]
    began = max(clock.began for clock in clocks)  # the first site was there first, and waited
    task = Training(recipe)
    final, tensors = task.initial(), load_file(str(out / "model.safetensors"))
    for slot in task.layout.slots:
        slot.of(final).copy_(tensors[slot.name])
    return Trace(
        ends=[max(both) - began for both in zip(*(clock.ends for clock in clocks), strict=True)],
        finished=max(clock.finished for clock in clocks) - began,
        snapshots=kept.snapshots(began, recipe.training.evaluate_every),
        final=final,
        link_bytes=link_bytes,
        late=max(clock.late for clock in clocks),
        notes=tuple(_decisions(out)),
    )


class _Clock:
    """The times in the event log of a site, by the clock of the machine."""

    def __init__(self, recipe: Recipe, path: Path) -> None:
        entries = launch.read_events(path)
        zero = path.stat().st_mtime - float(entries[-1]["t"])
        steps = _of(entries, "step")
        waited = sum(float(entry["seconds"]) for entry in _of(entries, "wait") if entry["step"] == steps[0]["step"])
        self.began = zero + float(steps[0]["t"]) - waited - float(recipe.compute.seconds_per_step)
        self.ends = [zero + float(entry["t"]) for entry in steps]
        self.finished = zero + float(_of(entries, "site")[-1]["t"])
        counted = _of(entries, "compute")[-1]
        self.late = counted["late"] / counted["steps"]


def _of(entries: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["kind"] == kind]


def _decisions(out: Path) -> list[str]:
    """The last sync schedule that `auto` chose."""
    found = _of(launch.read_events(out / "events.jsonl"), "schedule")
    if not found:
        return []
    last = found[-1]
    schedule = (
        f"sync schedule set {len(found)} times, at last a round every {last['every']} steps, overlap {last['overlap']}"
    )
    return [f"{schedule}, {last['up']} up and {last['down']} down: {last['why']}"]
