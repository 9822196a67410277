"""Runs a strategy of WeightGrad: `weightgrad serve` on the host of the first site, `weightgrad train` on both hosts.

The global model of the server is evaluated; `serve_keeping.py` writes it to disk now and then. Times are those of the
files: the last change of an event log is its last line, which relates the clock of the log to the clock of the machine.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rivals.emulated_run import BENCHMARKS, bytes_sent, watch
from rivals.outcome import Snapshot, Trace
from rivals.tasks import SITES
from safetensors.torch import load_file

from weightgrad.lab.emulate.network import Network
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run import launch
from weightgrad.lab.run.emulation import PORT
from weightgrad.lab.run.launch import Processes
from weightgrad.lab.run.task import Training


def run(recipe: Recipe, out: Path, wan: Network, timeout: float) -> Trace:
    """Run the recipe. The second site starts when the first has joined, so that the link carries no initial model."""
    server = wan.host(SITES[0]).address
    launch.prepare(recipe, out, ["localhost", server])
    extra = ["--timeout", str(timeout), "--emulate-compute"]
    commands = launch.commands(recipe, out, f"{server}:{PORT}", lambda site: wan.reach(site, SITES[0], PORT), extra)
    processes = Processes(out / "logs")
    kept = out / "kept"
    kept.mkdir(parents=True)
    place = commands["server"].index("weightgrad")
    keeping = ["rivals.serve_keeping", str(kept), str(recipe.training.evaluate_every)]
    commands["server"][place : place + 1] = keeping
    until = time.monotonic() + timeout
    before = bytes_sent(wan)
    try:
        for name in ("server", SITES[0]):
            processes.start(name, commands[name], _placed(wan.host(SITES[0]).popen))
        watch(processes, lambda: _joined(out), until)
        processes.start(SITES[1], commands[SITES[1]], wan.host(SITES[1]).popen)
        watch(processes, processes.all_done, until)
        link_bytes = bytes_sent(wan) - before
    finally:
        processes.end()
    trace = _trace(recipe, out, kept, link_bytes)
    shutil.rmtree(kept)  # the files are large
    return trace


def _placed(popen: Callable[..., Any]) -> Callable[..., Any]:
    """A popen whose processes find the modules of the benchmarks."""

    def start(command: list[str], env: dict[str, str], **keywords: Any) -> Any:
        paths = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent), *filter(None, [env.get("PYTHONPATH")])])
        return popen(command, env={**env, "PYTHONPATH": paths}, **keywords)

    return start


def _joined(out: Path) -> bool:
    return any(entry["kind"] == "site_joined" for entry in launch.read_events(out / "events.jsonl"))


def _snapshots(directory: Path, began: float) -> list[Snapshot]:
    """The global models that the server has kept, with their times since `began`."""
    return [
        Snapshot(int(path.stem), path.stat().st_mtime - began, load_file(str(path))["weights"])
        for path in sorted(directory.glob("*.safetensors"))
    ]


def _trace(recipe: Recipe, out: Path, kept: Path, link_bytes: int) -> Trace:
    clocks = [_Clock(recipe, out / "state" / name / "events.jsonl") for name in SITES]
    began = max(clock.began for clock in clocks)  # the first site was there first, and waited
    task = Training(recipe)
    final, tensors = task.initial(), load_file(str(out / "model.safetensors"))
    for slot in task.layout.slots:
        slot.of(final).copy_(tensors[slot.name])
    return Trace(
        ends=[max(both) - began for both in zip(*(clock.ends for clock in clocks), strict=True)],
        finished=max(clock.finished for clock in clocks) - began,
        snapshots=_snapshots(kept, began),
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
