"""A run of real processes whose roles can be killed and started again, and whose lines can be cut."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from field_proxy import Proxy

from weightgrad.errors import RunError
from weightgrad.train.launch import Processes, commands, free_port, prepare
from weightgrad.train.recipe import Recipe

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
compute: {{seconds_per_step: 0.01}}
strategy: {{name: {strategy}, t_global: 3600}}
"""
RESTARTS = "1000000"  # of torchrun; more than a soak needs


def digits(strategy: str, *, steps: int = 1_000_000, east: int = 1, west: int = 1, name: str = "bench") -> Recipe:
    """Two sites on digits, with more steps than will be done. Learning rate constant: its first steps are any run's."""
    text = DIGITS.format(name=name, strategy=strategy, steps=steps, east=east, west=west)
    return Recipe.parse(text, f"{name}.yaml")


class Steps:
    """The steps in a site's ledger, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self.last = self.highest = 0

    def read(self) -> int:
        """The highest so far."""
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(self._at)
                whole, _, _ = file.read().rpartition(b"\n")  # a torn line is read when it is whole
            self._at += len(whole) + 1 if whole else 0
            for line in whole.splitlines():
                if b'"kind":"step"' in line:
                    self.last = int(json.loads(line)["step"])
                    self.highest = max(self.highest, self.last)
        return self.highest


class Rehearsal:
    """The server and all sites of a recipe; every site reaches the server by a wire of its own."""

    def __init__(self, recipe: Recipe, out: Path, *more: str) -> None:
        self.recipe, self.out = recipe, out
        self.sites = {site.name: site.workers for site in recipe.site_list}
        prepare(recipe, out)
        address = f"127.0.0.1:{free_port()}"
        self.commands = commands(recipe, out, address, lambda _: address)
        self.wires = {name: Proxy(address) for name in self.sites}
        for name in self.sites:
            command = [self.wires[name].address if word == address else word for word in self.commands[name]]
            if "--max-restarts" in command:
                command[command.index("--max-restarts") + 1] = RESTARTS
            self.commands[name] = [*command, *more]
        self.processes = Processes(out / "logs")
        self.ledgers = {name: Steps(out / "state" / name / "ledger.jsonl") for name in self.sites}

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End everything, the workers of a torchrun that had no time to do so too."""
        below = [pid for process in self.processes.running.values() for pid in descendants(process.pid)]
        self.processes.end()
        _kill(below)
        for wire in self.wires.values():
            wire.close()

    def start(self, *names: str) -> None:
        """Those, or all."""
        for name in names or self.commands:
            self.processes.start(name, self.commands[name])

    def kill(self, name: str) -> None:
        """kill -9 of a role: its process and all below it."""
        process = self.processes.running.pop(name)
        _kill([process.pid, *descendants(process.pid)])
        process.wait()

    def kill_worker(self, site: str, rank: int) -> bool:
        """kill -9 of one worker, which torchrun starts again; False if it is not running just now."""
        for pid in descendants(self.processes.running[site].pid):
            if f"LOCAL_RANK={rank}".encode() in _variables(pid):
                _kill([pid])
                return True
        return False

    def steps(self) -> dict[str, int]:
        """How far each site ever was."""
        return {name: ledger.read() for name, ledger in self.ledgers.items()}

    def until(self, wanted: dict[str, int], seconds: float) -> None:
        """Until every site has been so far; RunError with the ends of the logs when it takes too long."""
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
        """The ends of the logs."""
        return "\n".join(f"--- {n}\n{self.processes.tail(n, 25)}" for n in names or self.processes.running)


def descendants(pid: int) -> list[int]:
    """Processes below one, at this moment."""
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
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _variables(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
