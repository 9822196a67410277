"""Runs one rival on an emulated network of two hosts, to the end or until a timeout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rivals.outcome import Snapshot, Trace
from rivals.spec import INSTALLED, Spec
from rivals.tasks import SITES
from safetensors.torch import load_file

from weightgrad.errors import RunError
from weightgrad.lab.emulate.network import Network
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.launch import Processes

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
ENVIRONMENTS = ROOT / "runs" / "rivals-env"
_POLL_SECONDS = 0.02


def interpreter(spec: Spec) -> str:
    """The Python interpreter that has this rival installed."""
    return str(ENVIRONMENTS / spec.name / "bin" / "python") if spec.name in INSTALLED else sys.executable


def refusal(spec: Spec) -> str | None:
    """Why this rival cannot run here, or None."""
    if spec.name not in INSTALLED or Path(interpreter(spec)).exists():
        return None
    said = ENVIRONMENTS / f"{spec.name}.refused"
    if said.exists():
        return f"not installable here: {said.read_text().strip()}"
    return "not installed: run benchmarks/rivals/install.sh"


def versions(specs: Iterable[Spec]) -> list[str]:
    """A line for the document about each rival with its own environment: the versions in it."""
    found = []
    for name in dict.fromkeys(spec.name for spec in specs if spec.name in INSTALLED):
        path = ENVIRONMENTS / f"{name}.versions"
        lines = path.read_text().splitlines() if path.exists() else []
        said = ", ".join(line for line in lines if line.startswith((f"{name}==", "torch==", "numpy==")))
        found.append(f"{name} runs in an environment of its own: {said or 'it is not there'}.")
    return found


def bytes_sent(wan: Network) -> int:
    """Bytes on the link so far, both directions."""
    return sum(pair.bytes for pair in wan.stats().pairs.values())


def run(spec: Spec, recipe: Recipe, out: Path, wan: Network, timeout: float) -> Trace:
    """Start the two workers of a rival, wait until both are ready, let them train, and read what they wrote.

    Raises:
        RunError: A worker failed, or `timeout` seconds have passed.
    """
    (out / "logs").mkdir(parents=True)
    (out / "recipe.yaml").write_text(recipe.to_yaml())
    processes = Processes(out / "logs")
    addresses = ",".join(wan.host(name).address for name in SITES)
    ranks = range(len(SITES))
    try:
        for rank, name in enumerate(SITES):
            command = [interpreter(spec), "-W", "ignore", "-m", "rivals.worker", spec.text, str(rank), addresses]
            processes.start(name, command, _placed(wan.host(name).popen, out))
        until = time.monotonic() + timeout
        watch(processes, lambda: all((out / f"ready-{rank}").exists() for rank in ranks), until)
        before = bytes_sent(wan)
        (out / "go").touch()
        watch(processes, lambda: all((out / f"worker-{rank}.json").exists() for rank in ranks), until)
        link_bytes = bytes_sent(wan) - before
    finally:
        processes.end(grace=2.0)
    return _trace(out, link_bytes)


def _placed(popen: Callable[..., Any], out: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """A popen that starts in the directory of the run and finds the modules of the benchmarks."""

    def start(command: list[str], env: dict[str, str], **keywords: Any) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(map(str, (BENCHMARKS, ROOT)))
        started: subprocess.Popen[bytes] = popen(command, cwd=out, env={**env, "PYTHONPATH": paths}, **keywords)
        return started

    return start


def watch(processes: Processes, done: Callable[[], bool], until: float) -> None:
    """Wait until `done()`.

    Raises:
        RunError: A process failed, or the time `until` has come.
    """
    while not done():
        if (name := processes.failed()) is not None:
            raise RunError(f"{name} ended with code {processes.running[name].returncode}: {processes.tail(name, 3)}")
        if time.monotonic() > until:
            last = "; ".join(f"{name}: {processes.tail(name, 1)}" for name in processes.running)
            raise RunError(f"not finished in time; last lines: {last}")
        time.sleep(_POLL_SECONDS)


def _trace(out: Path, link_bytes: int) -> Trace:
    said = [json.loads((out / f"worker-{rank}.json").read_text()) for rank in range(len(SITES))]
    kept = [load_file(str(out / f"worker-{rank}.safetensors")) for rank in range(len(SITES))]
    began = max(one["began"] for one in said)
    ends = [max(both) - began for both in zip(*(one["ends"] for one in said), strict=True)]
    mean = {key: torch.stack([one[key] for one in kept]).mean(0) for key in kept[0]}
    steps = sorted(int(key) for key in mean if key != "final")
    apart = max(float((one["final"] - mean["final"]).abs().max()) for one in kept)
    return Trace(
        ends=ends,
        finished=max(one["finished"] for one in said) - began,
        snapshots=[Snapshot(step, ends[step - 1], mean[str(step)]) for step in steps],
        final=mean["final"],
        link_bytes=link_bytes,
        late=max(one["late"] for one in said),
        notes=() if apart == 0 else (f"the two models end up to {apart:.2g} apart; their mean is evaluated",),
    )
