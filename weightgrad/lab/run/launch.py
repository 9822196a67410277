"""A recipe on one machine as real processes: the global server, and torchrun for every site.

Certificates are made for the run, so the processes are the same as in a deployment. Every process has a log of its
own; if one fails, the others are ended and the last lines of its log are shown.
"""

from __future__ import annotations

import contextlib
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

from weightgrad import event_log
from weightgrad.errors import RunError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.model_file import read
from weightgrad.lab.run.simulation import chosen_strategy
from weightgrad.lab.run.task import Training, evaluate
from weightgrad.runtime.security import certificates

SITE_RESTARTS = 3
SERVER_RESTARTS = 100
"""How often torchrun starts the processes of a site, or of the server, again after one has ended."""

Popen: TypeAlias = Callable[..., "subprocess.Popen[bytes]"]


@dataclass(frozen=True)
class RunProgress:
    """How far a run with real processes is.

    Attributes:
        steps: Steps by site.
        losses: Last loss by site.
        rounds: Rounds that have closed.
        wan_bytes: Bytes of messages so far.
        seconds: Wall-clock time since the start.
        rates: Present bit/s by "from > to"; empty if not measured.
    """

    steps: dict[str, int]
    losses: dict[str, float]
    rounds: int
    wan_bytes: int
    seconds: float
    rates: dict[str, float] = field(default_factory=dict)


@dataclass
class Processes:
    """The processes of a run by name; they are ended together."""

    logs: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, command: list[str], popen: Popen = subprocess.Popen) -> None:
        """Start a process in a session of its own, with its output in a log file."""
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        environment["GRPC_VERBOSITY"] = environment.get("GRPC_VERBOSITY", "ERROR")
        with open(self.logs / f"{name}.log", "ab") as log:
            self.running[name] = popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def failed(self) -> str | None:
        """The name of a process that has failed; None if there is none."""
        return next((n for n, p in self.running.items() if p.poll() not in (None, 0)), None)

    def all_done(self) -> bool:
        """Whether all processes have ended."""
        return all(p.poll() is not None for p in self.running.values())

    def tail(self, name: str, most: int = 15) -> str:
        """The last lines of a process's log."""
        text = (self.logs / f"{name}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-most:])

    def end(self, grace: float = 5.0) -> None:
        """End all processes: with SIGTERM, and after a grace period with SIGKILL."""
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
    """The commands of all processes by name: those that an operator would type on each machine.

    Args:
        recipe: What is trained.
        out: The directory of the run.
        listen: HOST:PORT on which the server listens.
        address: Gives the address at which a site finds the server.
        extra: Further options for every site.
    """
    python, written = sys.executable, str(out / "recipe.yaml")
    found = {
        "server": [
            python, *_run(recipe.server.processes, SERVER_RESTARTS), "serve", written,
            "--credentials", str(out / "certs"), "--state", str(out / "state" / "server"),
            "--listen", listen, "--metrics", "127.0.0.1:0", "--out", str(out), "--until-finished",
        ]
    }  # fmt: skip
    for site in recipe.site_list:
        found[site.name] = [
            python, *_run(site.workers, SITE_RESTARTS), "train", written,
            "--site", site.name, "--server", address(site.name),
            "--credentials", str(out / "certs"), "--state", str(out / "state" / site.name), *extra,
        ]  # fmt: skip
    return found


def _run(processes: int, restarts: int) -> list[str]:
    """What comes before the subcommand of `weightgrad`, for one process or for several under torchrun."""
    if processes == 1:
        return ["-m", "weightgrad"]
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*run, "--max-restarts", str(restarts), "-m", "weightgrad"]


def with_ranks(command: list[str], ranks: int) -> list[str]:
    """The command of a sharded site for another number of ranks."""
    start = command.index("weightgrad") - 1
    restarts = int(command[command.index("--max-restarts") + 1]) if "--max-restarts" in command else SITE_RESTARTS
    return [command[0], *_run(ranks, restarts), *command[start + 2 :]]


def launch(recipe: Recipe, out: Path, *, watch: Callable[[RunProgress], None] | None = None) -> dict[str, Any]:
    """Run server and sites as processes until all have ended.

    Args:
        recipe: What is trained.
        out: The directory to write: event log, global model, summary, logs and checkpoints.
        watch: Called with the progress, several times a second.

    Returns:
        The summary.

    Raises:
        RunError: A process has failed.
    """
    chosen_strategy(recipe)
    address = f"127.0.0.1:{free_port(recipe.server.processes)}"
    prepare(recipe, out)
    processes = Processes(out / "logs")
    began = time.monotonic()
    try:
        for name, command in commands(recipe, out, address, lambda _: address).items():
            processes.start(name, command)
        wait(recipe, out, processes, began, watch)
    finally:
        processes.end()
    return finish(recipe, out, time.monotonic() - began)


def prepare(recipe: Recipe, out: Path, names: Sequence[str] = ("localhost",)) -> None:
    """Make a run directory with the recipe and certificates; `names` are the server's host names or addresses."""
    for name in ("certs", "logs", "state"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("events.jsonl", "faults.jsonl", "summary.json", "model.safetensors", "master.safetensors"):
        (out / name).unlink(missing_ok=True)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    (out / "recipe.yaml").write_text(recipe.to_yaml())
    certificates.create(out / "certs", list(names), [site.name for site in recipe.site_list])


def wait(
    recipe: Recipe, out: Path, processes: Processes, began: float, watch: Callable[[RunProgress], None] | None
) -> None:
    """Wait until all processes have ended.

    Raises:
        RunError: A process has failed.
    """
    while not processes.all_done():
        if (name := processes.failed()) is not None:
            processes.end()
            raise RunError(
                f"{name} ended with code {processes.running[name].returncode}; the end of {out / 'logs' / name}.log:\n"
                f"{processes.tail(name)}"
            )
        if watch is not None:
            watch(progress_of(recipe, out, time.monotonic() - began))
        time.sleep(0.2)
    if (name := processes.failed()) is not None:
        raise RunError(f"{name} failed; the end of its log:\n{processes.tail(name)}")


def progress_of(recipe: Recipe, out: Path, seconds: float) -> RunProgress:
    """The progress of a run, read from its event logs."""
    steps: dict[str, int] = {}
    losses: dict[str, float] = {}
    for site in recipe.site_list:
        last = next(
            (e for e in reversed(read_events(out / "state" / site.name / "events.jsonl")) if e["kind"] == "step"), None
        )
        steps[site.name] = last["step"] if last else 0
        losses[site.name] = last["loss"] if last else float("nan")
    rounds = [e for e in read_events(out / "events.jsonl") if e["kind"] == "round"]
    wan = sum(e["up_bytes"] + e["down_bytes"] * len(recipe.site_list) for e in rounds)
    return RunProgress(steps, losses, len(rounds), wan, seconds)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The entries of an event log; none if it does not exist yet."""
    return event_log.read(path) if path.exists() else []


def finish(recipe: Recipe, out: Path, seconds: float) -> dict[str, Any]:
    """Evaluate the final model, add the sites' last entries to the event log, and write the summary."""
    task = Training(recipe)
    score = evaluate(task, read(out).tensors)
    where = {site.name: out / "state" / site.name / "events.jsonl" for site in recipe.site_list}
    ends = [entry for path in where.values() for entry in read_events(path) if entry["kind"] == "site"]
    with event_log.EventLog(out / "events.jsonl", append=True) as events:
        for entry in ends:
            events.write("site", entry["t"], **{k: v for k, v in entry.items() if k not in ("kind", "t")})
        events.write(
            "evaluate",
            seconds,
            accuracy=score.accuracy,
            loss=score.loss,
            top5_accuracy=score.top5,
            step=recipe.training.steps,
        )
    now = progress_of(recipe, out, seconds)
    summary = {
        "name": recipe.name,
        "strategy": chosen_strategy(recipe).name,
        "seed": recipe.seed,
        "status": "finished",
        "steps": recipe.training.steps,
        "accuracy": score.accuracy,
        "top5_accuracy": score.top5,
        "loss": score.loss,
        "wall_seconds": seconds,
        "rounds": now.rounds,
        "wan_bytes": sum(e["up_bytes"] + e["down_bytes"] for e in ends),
        "waiting_seconds": {e["site"]: e["waiting_seconds"] for e in ends},
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n")
    return summary


def free_port(count: int = 1) -> int:
    """The first of so many TCP ports in a row of this machine that are free now."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                for further in range(1, count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + further))
                return port
