"""WeightGrad's rows: `weightgrad serve` on the first site's host, `weightgrad train` on both, as operators start them.

What is judged is the base, as the first site has it in the checkpoints it writes at the steps where the recipe
evaluates. Writing them takes time, as does TLS, and all of it is counted; rivals write nothing and encrypt nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from rivals.arena import passed, watch
from rivals.outcome import Trace
from rivals.tasks import SITES
from safetensors.torch import load_file
from torch import Tensor

from weightgrad.emulate.network import Network
from weightgrad.train import launch
from weightgrad.train.emulated import PORT
from weightgrad.train.launch import Processes
from weightgrad.train.recipe import Recipe
from weightgrad.train.task import Training

_PREFIX = "rank-0-"


def race(recipe: Recipe, out: Path, wan: Network, patience: float) -> Trace:
    """The first site alone is there when the second starts: the first base does not cross the line."""
    server = wan.host(SITES[0]).address
    launch.prepare(recipe, out, ["localhost", server])
    extra = ["--patience", str(patience), "--paced", "--checkpoint-every", str(recipe.training.evaluate_every)]
    commands = launch.commands(recipe, out, f"{server}:{PORT}", lambda site: wan.reach(site, SITES[0], PORT), extra)
    processes = Processes(out / "logs")
    kept = _Kept(out / "state" / SITES[0], out / "kept")
    until = time.monotonic() + patience
    before = passed(wan)
    try:
        for name in ("server", SITES[0]):
            processes.start(name, commands[name], wan.host(SITES[0]).popen)
        watch(processes, lambda: _joined(out), until)
        processes.start(SITES[1], commands[SITES[1]], wan.host(SITES[1]).popen)

        def over() -> bool:
            kept.look()
            return processes.all_done()

        watch(processes, over, until)
        line_bytes = passed(wan) - before
    finally:
        processes.end()
    kept.look()
    return _trace(recipe, out, kept, line_bytes)


def _joined(out: Path) -> bool:
    return any(entry["kind"] == "site_joined" for entry in launch.lines(out / "ledger.jsonl"))


class _Kept:
    """Links to a site's checkpoints, which the site itself keeps only two of."""

    def __init__(self, source: Path, target: Path) -> None:
        self._source, self._target = source, target
        target.mkdir(parents=True)

    def look(self) -> None:
        """Keep what is new."""
        for path in self._source.glob(f"{_PREFIX}*.safetensors"):
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.link(path, self._target / path.name)

    def bases(self) -> dict[int, Tensor]:
        """By step."""
        paths = self._target.glob(f"{_PREFIX}*.safetensors")
        return {int(path.stem.removeprefix(_PREFIX)): load_file(str(path))["end.base.base"] for path in paths}


def _trace(recipe: Recipe, out: Path, kept: _Kept, line_bytes: int) -> Trace:
    clocks = [_Clock(recipe, launch.lines(out / "state" / name / "ledger.jsonl")) for name in SITES]
    task = Training(recipe)
    final, tensors = task.initial(), load_file(str(out / "base.safetensors"))
    for slot in task.layout.slots:
        slot.of(final).copy_(tensors[slot.name])
    return Trace(
        # The first site was there first and waited; the second has the shorter count, and that is the common time.
        ends=[min(both) for both in zip(*(clock.ends for clock in clocks), strict=True)],
        finished=min(clock.finished for clock in clocks),
        weights=kept.bases(),
        final=final,
        line_bytes=line_bytes,
        late=max(clock.late for clock in clocks),
        notes=tuple(_decisions(out)),
    )


class _Clock:
    """A site's ledger, counted from the beginning of its first pass."""

    def __init__(self, recipe: Recipe, book: list[dict[str, float | str | int]]) -> None:
        steps = [entry for entry in book if entry["kind"] == "step"]
        waited = sum(float(entry["seconds"]) for entry in book if entry["kind"] == "wait" and entry["step"] == 1)
        began = float(steps[0]["t"]) - waited - float(recipe.compute.seconds_per_step)
        self.ends = [float(entry["t"]) - began for entry in steps]
        self.finished = next(float(entry["t"]) for entry in book if entry["kind"] == "site") - began
        counted = next(entry for entry in book if entry["kind"] == "compute")
        self.late = float(counted["late"]) / float(counted["steps"])


def _decisions(out: Path) -> list[str]:
    """What `auto` settled last."""
    found = [entry for entry in launch.lines(out / "ledger.jsonl") if entry["kind"] == "pace"]
    if not found:
        return []
    last = found[-1]
    pace = f"{len(found)} paces; the last, a round every {last['every']} steps, overlap {last['overlap']}"
    return [f"{pace}, {last['up']} up and {last['down']} down: {last['why']}"]
