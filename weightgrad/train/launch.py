"""Everything of a recipe on one machine, as real processes: the global server, and torchrun for every site.

Certificates are made for the run, so what is tried out here is what runs in the field. Every process has a
log of its own; when one fails, the others are ended and its last lines are shown.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.torch import load_file

from weightgrad import ledger
from weightgrad.errors import RunError
from weightgrad.runtime import issue
from weightgrad.train.recipe import Recipe
from weightgrad.train.run import chosen_strategy
from weightgrad.train.task import Training

Popen: TypeAlias = Callable[..., "subprocess.Popen[bytes]"]


@dataclass(frozen=True)
class Standing:
    """How far the run is: steps and losses by site, and the rounds."""

    steps: dict[str, int]
    losses: dict[str, float]
    rounds: int
    wan_bytes: int
    seconds: float
    rates: dict[str, float] = field(default_factory=dict)  # bit/s now, by "from > to"; empty: not looked


@dataclass
class Processes:
    """The run's processes, by name; ended together."""

    logs: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, command: list[str], popen: Popen = subprocess.Popen) -> None:
        """Start one in a process group of its own, its output into its log."""
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        environment["GRPC_VERBOSITY"] = environment.get("GRPC_VERBOSITY", "ERROR")
        with open(self.logs / f"{name}.log", "ab") as log:
            self.running[name] = popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def failed(self) -> str | None:
        """The name of one that has ended badly."""
        return next((n for n, p in self.running.items() if p.poll() not in (None, 0)), None)

    def all_done(self) -> bool:
        """Whether every one has ended."""
        return all(p.poll() is not None for p in self.running.values())

    def tail(self, name: str, most: int = 15) -> str:
        """The last lines of its log."""
        text = (self.logs / f"{name}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-most:])

    def end(self, grace: float = 5.0) -> None:
        """Ask all to end, then make them."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            left = [p for p in self.running.values() if p.poll() is None]
            for process in left:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    continue
            until = time.monotonic() + grace
            while time.monotonic() < until and any(p.poll() is None for p in left):
                time.sleep(0.05)


def commands(
    recipe: Recipe, out: Path, listen: str, address: Callable[[str], str], extra: Sequence[str] = ()
) -> dict[str, list[str]]:
    """What is started: the same commands that an operator would type on each machine.

    `address` says where a site finds the server; `extra` goes to every site.
    """
    python, written = sys.executable, str(out / "recipe.yaml")
    found = {
        "server": [
            python, "-m", "weightgrad", "serve", written, "--credentials", str(out / "certs"),
            "--state", str(out / "state" / "server"), "--listen", listen, "--metrics", "127.0.0.1:0",
            "--out", str(out), "--until-finished",
        ]
    }  # fmt: skip
    for site in recipe.site_list:
        run = ["-m", "weightgrad"]
        if site.workers > 1:
            run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(site.workers)]
            run += ["--max-restarts", "3", "-m", "weightgrad"]
        found[site.name] = [
            python, *run, "train", written, "--site", site.name, "--server", address(site.name),
            "--credentials", str(out / "certs"), "--state", str(out / "state" / site.name), *extra,
        ]  # fmt: skip
    return found


def launch(recipe: Recipe, out: Path, *, watch: Callable[[Standing], None] | None = None) -> dict[str, Any]:
    """Run it; leaves ledger, base, summary, logs and state in `out`. Returns the summary."""
    chosen_strategy(recipe)
    address = f"127.0.0.1:{free_port()}"
    prepare(recipe, out)
    processes = Processes(out / "logs")
    began = time.monotonic()
    try:
        for name, command in commands(recipe, out, address, lambda _: address).items():
            processes.start(name, command)
        follow(recipe, out, processes, began, watch)
    finally:
        processes.end()
    return finish(recipe, out, time.monotonic() - began)


def prepare(recipe: Recipe, out: Path, names: Sequence[str] = ("localhost",)) -> None:
    """An empty run directory with recipe and certificates; the server's is for these names or addresses."""
    for name in ("certs", "logs", "state"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("ledger.jsonl", "summary.json", "base.safetensors"):
        (out / name).unlink(missing_ok=True)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    (out / "recipe.yaml").write_text(recipe.to_yaml())
    issue.create(out / "certs", list(names), [site.name for site in recipe.site_list])


def follow(
    recipe: Recipe, out: Path, processes: Processes, began: float, watch: Callable[[Standing], None] | None
) -> None:
    """Until all have ended; raises when one has failed."""
    while not processes.all_done():
        if (name := processes.failed()) is not None:
            processes.end()
            raise RunError(
                f"{name} ended with code {processes.running[name].returncode}; the end of {out / 'logs' / name}.log:\n"
                f"{processes.tail(name)}"
            )
        if watch is not None:
            watch(standing(recipe, out, time.monotonic() - began))
        time.sleep(0.2)
    if (name := processes.failed()) is not None:
        raise RunError(f"{name} ended badly; the end of its log:\n{processes.tail(name)}")


def standing(recipe: Recipe, out: Path, seconds: float) -> Standing:
    """What the ledgers say so far."""
    steps: dict[str, int] = {}
    losses: dict[str, float] = {}
    for site in recipe.site_list:
        last = next(
            (e for e in reversed(lines(out / "state" / site.name / "ledger.jsonl")) if e["kind"] == "step"), None
        )
        steps[site.name] = last["step"] if last else 0
        losses[site.name] = last["loss"] if last else float("nan")
    rounds = [e for e in lines(out / "ledger.jsonl") if e["kind"] == "round"]
    wan = sum(e["up_bytes"] + e["down_bytes"] * len(recipe.site_list) for e in rounds)
    return Standing(steps, losses, len(rounds), wan, seconds)


def lines(path: Path) -> list[dict[str, Any]]:
    """Of a ledger; none if there is no ledger yet."""
    return ledger.read(path) if path.exists() else []


def finish(recipe: Recipe, out: Path, seconds: float) -> dict[str, Any]:
    """Judge the base, gather the sites' last lines into the ledger, write the summary."""
    task = Training(recipe)
    tensors = load_file(str(out / "base.safetensors"))
    base = task.initial()
    for slot in task.layout.slots:
        slot.of(base).copy_(tensors[slot.name])
    score = task.evaluate(base)
    where = {site.name: out / "state" / site.name / "ledger.jsonl" for site in recipe.site_list}
    ends = [entry for path in where.values() for entry in lines(path) if entry["kind"] == "site"]
    with ledger.Ledger(out / "ledger.jsonl", append=True) as book:
        for entry in ends:
            book.write("site", entry["t"], **{k: v for k, v in entry.items() if k not in ("kind", "t")})
        book.write("evaluate", seconds, accuracy=score.accuracy, loss=score.loss, step=recipe.training.steps)
    now = standing(recipe, out, seconds)
    summary = {
        "name": recipe.name,
        "strategy": chosen_strategy(recipe).name,
        "seed": recipe.seed,
        "status": "finished",
        "steps": recipe.training.steps,
        "accuracy": score.accuracy,
        "loss": score.loss,
        "wall_seconds": seconds,
        "rounds": now.rounds,
        "wan_bytes": sum(e["up_bytes"] + e["down_bytes"] for e in ends),
        "waiting_seconds": {e["site"]: e["waiting_seconds"] for e in ends},
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n")
    return summary


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
