"""A run of real processes that can be killed and started again, and whose connections can be cut."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from deployment.tcp_proxy import TcpProxy

from weightgrad.errors import RunError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.launch import Processes, commands, free_port, prepare

DIGITS = """
name: {name}
seed: 3
data: {{name: digits}}
model: {{name: lenet-digits}}
training:
  steps: {steps}
  batch: 24
  optimizer: {{name: sgd, lr: 0.02, momentum: 0.9}}
  evaluate_every: 1000000
server: {{name: hub}}
sites:
  - {{name: east, workers: {east}}}
  - {{name: west, workers: {west}}}
links:
  - {{between: [hub, east], bandwidth: 100 Mbit/s, delay: 5 ms}}
  - {{between: [hub, west], bandwidth: 50 Mbit/s, delay: 10 ms}}
compute: {{seconds_per_step: {step_s}}}
strategy: {{name: {strategy}, t_global: 3600}}
"""
RESTARTS = "1000000"  # of torchrun; more than a soak needs


def digits(
    strategy: str,
    *,
    steps: int = 1_000_000,
    east: int = 1,
    west: int = 1,
    name: str = "bench",
    step_s: float = 0.01,
) -> Recipe:
    """A recipe of two sites on digits. The learning rate is constant, so a shorter run has the same first steps."""
    text = DIGITS.format(name=name, strategy=strategy, steps=steps, east=east, west=west, step_s=step_s)
    return Recipe.parse(text, f"{name}.yaml")


class Steps:
    """Reads the steps in a site's event log while the log grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self.last = self.highest = 0

    def read(self) -> int:
        """Read the new entries and return the highest step so far."""
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(self._at)
                whole, _, _ = file.read().rpartition(b"\n")  # an incomplete line is read next time
            self._at += len(whole) + 1 if whole else 0
            for line in whole.splitlines():
                if b'"kind":"step"' in line:
                    self.last = int(json.loads(line)["step"])
                    self.highest = max(self.highest, self.last)
        return self.highest


class LiveRun:
    """The server and all sites of a recipe. Every site reaches the server through a proxy of its own.

    Args:
        recipe: What is run.
        out: The directory of the run.
        more: Further arguments of `weightgrad train`.
    """

    def __init__(self, recipe: Recipe, out: Path, *more: str) -> None:
        self.recipe, self.out = recipe, out
        self.sites = {site.name: site.workers for site in recipe.site_list}
        prepare(recipe, out)
        address = f"127.0.0.1:{free_port()}"
        self.commands = commands(recipe, out, address, lambda _: address)
        self.proxies = {name: TcpProxy(address) for name in self.sites}
        for name in self.sites:
            command = [self.proxies[name].address if word == address else word for word in self.commands[name]]
            if "--max-restarts" in command:
                command[command.index("--max-restarts") + 1] = RESTARTS
            self.commands[name] = [*command, *more]
        self.processes = Processes(out / "logs")
        self.event_logs = {name: Steps(out / "state" / name / "events.jsonl") for name in self.sites}

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all processes, including workers that torchrun could not end itself."""
        below = [pid for process in self.processes.running.values() for pid in descendants(process.pid)]
        self.processes.end()
        _kill(below)
        for proxy in self.proxies.values():
            proxy.close()

    def start(self, *names: str) -> None:
        """Start these roles, or all of them."""
        for name in names or self.commands:
            self.processes.start(name, self.commands[name])

    def kill(self, name: str) -> None:
        """Send SIGKILL to the process of a role and to all of its descendants."""
        process = self.processes.running.pop(name)
        _kill([process.pid, *descendants(process.pid)])
        process.wait()

    def freeze(self, name: str, seconds: float) -> None:
        """Stop the process of a role and all of its descendants with SIGSTOP, and let them go on after a while."""
        process = self.processes.running[name]
        stopped = [process.pid, *descendants(process.pid)]
        _signal(stopped, signal.SIGSTOP)
        time.sleep(seconds)
        _signal(stopped, signal.SIGCONT)

    def kill_worker(self, site: str, rank: int) -> bool:
        """Send SIGKILL to one worker, which torchrun starts again. False if the worker is not running."""
        for pid in descendants(self.processes.running[site].pid):
            if f"LOCAL_RANK={rank}".encode() in _variables(pid):
                _kill([pid])
                return True
        return False

    def steps(self) -> dict[str, int]:
        """The highest step that each site has reached."""
        return {name: events.read() for name, events in self.event_logs.items()}

    def until(self, wanted: dict[str, int], seconds: float) -> None:
        """Wait until every site has reached its step.

        Raises:
            RunError: A process failed, or it took more than so many seconds; the message has the ends of the logs.
        """
        limit = time.monotonic() + seconds
        while any(step < wanted[name] for name, step in self.steps().items()):
            if (name := self.processes.failed()) is not None:
                raise RunError(f"{name} ended with {self.processes.running[name].returncode}:\n{self.tails(name)}")
            if time.monotonic() > limit:
                raise RunError(f"after {seconds:g} s at {self.steps()}, not at {wanted}:\n{self.tails()}")
            if self.processes.all_done():
                return
            time.sleep(0.01)

    def tails(self, *names: str) -> str:
        """The ends of the logs of these roles, or of all."""
        return "\n".join(f"--- {n}\n{self.processes.tail(n, 25)}" for n in names or self.processes.running)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have started."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in path.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def _kill(pids: list[int]) -> None:
    _signal(pids, signal.SIGKILL)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _variables(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
