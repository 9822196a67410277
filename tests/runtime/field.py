"""Small recipes and whole runs of them, as real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from weightgrad.train.launch import Processes, commands, free_port, prepare, standing
from weightgrad.train.recipe import Recipe

TINY = """
name: tiny
seed: 3
data: {{name: digits}}
model: {{name: lenet-digits}}
training:
  steps: {steps}
  batch: 32
  optimizer: {{name: {optimizer}}}
  schedule: cosine
  evaluate_every: 1000
server: {{name: hub}}
sites:
  - {{name: east, workers: {workers}}}
  - {{name: west, workers: {workers}}}
lan: {{bandwidth: 900 Mbit/s, delay: 0.1 ms}}
links:
  - {{between: [hub, east], bandwidth: 100 Mbit/s, delay: 5 ms}}
  - {{between: [hub, west], bandwidth: 50 Mbit/s, delay: 10 ms}}
compute: {{seconds_per_step: 0.01}}
strategy: {strategy}
"""

SGD = "sgd, lr: 0.05, momentum: 0.9"


def tiny(strategy: str, *, steps: int = 24, workers: int = 2, optimizer: str = SGD) -> Recipe:
    """Two sites on digits."""
    text = TINY.format(strategy=strategy, steps=steps, workers=workers, optimizer=optimizer)
    return Recipe.parse(text, "tiny.yaml")


def base_of(directory: Path) -> dict[str, torch.Tensor]:
    """The base that a run left, without what the simulator quantizes on top."""
    found = load_file(str(directory / "base.safetensors"))
    return {name: tensor for name, tensor in found.items() if not name.startswith("quantized.")}


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Every tensor, every bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].view(torch.int32), b[name].view(torch.int32)), name


class Rehearsal:
    """A launched run whose processes can be killed and started again with the same commands."""

    def __init__(self, recipe: Recipe, out: Path, *more: str) -> None:
        self.recipe, self.out = recipe, out
        self.address = f"127.0.0.1:{free_port()}"
        prepare(recipe, out)
        self.commands = commands(recipe, out, self.address)
        for name in self.commands:
            if name != "server":
                self.commands[name] += more
        self.processes = Processes(out / "logs")

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.end()

    def start(self, *names: str) -> None:
        for name in names or self.commands:
            self.processes.start(name, self.commands[name])

    def steps(self) -> dict[str, int]:
        return standing(self.recipe, self.out, 0.0).steps

    def until(self, site: str, step: int) -> None:
        """Until that site has done so many steps."""
        self.until_true(lambda: self.steps()[site] >= step)

    def until_true(self, happened: Callable[[], bool], *, seconds: float = 240.0) -> None:
        limit = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < limit, {n: self.processes.tail(n) for n in self.processes.running}
            if (name := self.processes.failed()) is not None:
                raise AssertionError(f"{name}: {self.processes.tail(name, 40)}")
            time.sleep(0.02)

    def kill(self, name: str) -> None:
        """kill -9 of the process and all it has started."""
        process = self.processes.running.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_worker(self, site: str, rank: int) -> None:
        """kill -9 of one worker; torchrun lives and starts the workers again."""
        for directory in Path("/proc").iterdir():
            if not directory.name.isdigit():
                continue
            try:
                variables = (directory / "environ").read_bytes().split(b"\0")
                command = (directory / "cmdline").read_bytes()
            except OSError:
                continue
            mine = f"{self.out}".encode() in command and f"--site\0{site}".encode() in command
            if mine and f"LOCAL_RANK={rank}".encode() in variables:
                os.kill(int(directory.name), signal.SIGKILL)
                return
        raise AssertionError(f"no worker {rank} of {site}")

    def finish(self) -> None:
        self.until_true(self.processes.all_done)
        assert self.processes.failed() is None

    def log(self, name: str) -> str:
        return (self.out / "logs" / f"{name}.log").read_text(errors="replace")
