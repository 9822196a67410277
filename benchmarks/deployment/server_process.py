"""A global server as a process of its own, and what the operating system says about a process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightgrad.errors import RunError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.launch import Processes, free_port
from weightgrad.runtime.security import certificates

BENCHMARKS = Path(__file__).parents[1]


def recipe_of(sites: int, strategy: Mapping[str, Any]) -> Recipe:
    """A recipe for a server whose sites bring their own model, over fast links."""
    text = {
        "name": "bench",
        "seed": 3,
        "data": {"name": "digits"},
        "model": {"name": "lenet-digits"},
        "training": {"steps": 1000, "batch": sites, "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}},
        "server": {"name": "hub"},
        "sites": [{"name": "site-{}", "count": sites, "workers": 1}],
        "links": [{"between": ["hub", "site-{}"], "bandwidth": "10 Gbit/s", "delay": "0.1 ms"}],
        "compute": {"seconds_per_step": 0.1},
        "strategy": dict(strategy),
    }
    return Recipe.parse(json.dumps(text), "bench.yaml")


class Serve:
    """A context manager: a global server in its own process, which listens when the block begins and ends with it.

    `command` stands in for `weightgrad serve`, with the same arguments after it.
    """

    def __init__(
        self, directory: Path, recipe: Recipe, *, secure: bool, state: bool = False, command: list[str] | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.address = directory, f"127.0.0.1:{free_port()}"
        self.certificates = directory / "certs" if secure else None
        if secure:
            certificates.create(directory / "certs", ["localhost"], [site.name for site in recipe.site_list])
        written = directory / "recipe.yaml"
        written.write_text(recipe.to_yaml())
        self._command = command or [sys.executable, "-m", "weightgrad", "serve"]
        self._command += [str(written), "--listen", self.address, "--metrics", "127.0.0.1:0"]
        self._command += ["--credentials", str(self.certificates)] if secure else ["--insecure"]
        if state:
            self._command += ["--state", str(directory / "state")]
        self.processes = Processes(directory)

    def __enter__(self) -> Serve:
        self.processes.start("server", self._command, popen)
        until = time.monotonic() + 120
        while not _listens(self.address):
            self.check()
            if time.monotonic() > until:
                raise RunError(f"no server after 120 s:\n{self.processes.tail('server')}")
            time.sleep(0.02)
        self.rest_bytes = memory(self.pid)
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.end()

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self.processes.running["server"].pid

    def check(self) -> None:
        """Raise RunError with the end of its log if a process has failed."""
        if (name := self.processes.failed()) is not None:
            raise RunError(f"{name} failed:\n{self.processes.tail(name, 60)}")

    def wait(self, name: str, seconds: float = 1800.0) -> None:
        """Wait until this process has ended without an error."""
        until = time.monotonic() + seconds
        while self.processes.running[name].poll() is None:
            self.check()
            if time.monotonic() > until:
                raise RunError(f"{name} has not ended after {seconds:g} s:\n{self.processes.tail(name, 60)}")
            time.sleep(0.05)
        self.check()


def worker(module: str, ranks: int, settings: Mapping[str, Any]) -> list[str]:
    """The command that runs a module of this directory, in one process or as ranks under torchrun."""
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *run, "-m", module, json.dumps(settings)]


def popen(command: list[str], env: Mapping[str, str], **keywords: Any) -> subprocess.Popen[bytes]:
    """Start a process that finds the modules of the benchmarks."""
    paths = os.pathsep.join([str(BENCHMARKS), *filter(None, [env.get("PYTHONPATH")])])
    return subprocess.Popen(command, env={**env, "PYTHONPATH": paths}, **keywords)


def memory(pid: int | str = "self") -> int:
    """The resident memory of a process in bytes."""
    return _status(pid, "VmRSS")


def peak_memory(pid: int | str = "self") -> int:
    """The peak of the resident memory in bytes, since the start or since `forget_peak`."""
    return _status(pid, "VmHWM")


def forget_peak(pid: int | str = "self") -> None:
    """Reset the peak of a process to what it has now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_seconds(pid: int) -> float:
    """The processor time that a process has used, all threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))


def file_bytes_written(pid: int | str = "self") -> int:
    """The bytes that a process has written to files; what gRPC sends over sockets is not among them."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def _status(pid: int | str, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def _listens(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), 1.0):
            return True
    except OSError:
        return False
