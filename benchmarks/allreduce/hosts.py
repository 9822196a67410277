"""Ranks as processes, each on its own emulated host.

The emulator shapes links pair by pair, while on a real host all links share a network card. So the rate of the card is
divided among the peers to which a method sends at the same time: a method that sends to one peer at a time (ring,
doubling) has the whole rate on every link, a method that sends to all at once has 1/(n-1) of it.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from result_table import Row
from tables import HERE, ROOT

from weightgrad.errors import NamespacesRefusedError, RunError
from weightgrad.lab.emulate.choose import open_wan
from weightgrad.lab.emulate.network import Network
from weightgrad.lab.emulate.topology import WanLink
from weightgrad.lab.run.emulation import LINE

_PORT = 29500
_TIMEOUT_S = 300.0  # longer than the timeout of a rank, whose error says what it waited for
_LEAD_S, _LEAD_RANK_S = 0.03, 0.005  # until the start, so that every rank has its request by then
_QUIET_S = 0.1  # after which the last acknowledgements are through, also delayed ones


@functools.cache
def refusal() -> str | None:
    """Why ranks cannot have emulated hosts here, or None. Gloo cannot use the relays of a modelled network."""
    with open_wan(["lone"], []) as wan:
        return wan.reason if wan.describe()["kind"] == "modelled" else None


def names(workers: int) -> list[str]:
    """The names of the hosts."""
    return [f"rank{place}" for place in range(workers)]


def network(workers: int, bit_s: float, delay: float) -> Network:
    """A network that links every pair of hosts; a TCP stream gets this rate on each link."""
    if (why := refusal()) is not None:
        raise NamespacesRefusedError(f"ranks need hosts of their own, and this machine has none: {why}")
    pairs = itertools.combinations(names(workers), 2)
    return open_wan(names(workers), [link(pair, bit_s, delay) for pair in pairs])


def link(between: tuple[str, str], bit_s: float, delay: float) -> WanLink:
    """A link of the emulator, whose rate is higher than what a TCP stream gets."""
    return WanLink(between, bit_s * LINE, delay)


def set_links(wan: Network, bit_s: float, delay: float) -> None:
    """Set all links to the same rate and delay."""
    for one in wan.links:
        wan.set_link(*one.between, bandwidth_bit_s=bit_s * LINE, delay_seconds=delay)


class Ranks:
    """A context manager: one process on every host, all killed when the block ends."""

    def __init__(self, wan: Network, logs: Path) -> None:
        self._wan, self._logs = wan, logs
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Ranks:
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            for place, name in enumerate(self._wan.hosts):
                self._processes[name] = self._start(name, place)
            for name in self._wan.hosts:
                self._reply(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.communicate()

    def _start(self, name: str, place: int) -> subprocess.Popen[str]:
        group = {"RANK": place, "WORLD_SIZE": len(self._wan.hosts), "MASTER_PORT": _PORT, "OMP_NUM_THREADS": 1}
        environment = {
            **os.environ,
            **{key: str(value) for key, value in group.items()},
            "MASTER_ADDR": self._wan.host(self._wan.hosts[0]).address,
            "PYTHONPATH": os.pathsep.join(map(str, (HERE, ROOT))),
        }
        command = [sys.executable, "-W", "ignore", "-m", "allreduce.rank_process"]
        with open(self._log(name), "wb") as log:
            return self._wan.host(name).popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def ask(self, request: Row) -> list[Row]:
        """Send a request to all ranks at once and return their replies in the order of the ranks."""
        for process in self._processes.values():
            try:
                print(json.dumps(request), file=_pipe(process.stdin), flush=True)
            except BrokenPipeError:
                continue  # it has ended; reading its reply raises the reason
        return [self._reply(name) for name in self._processes]

    def _reply(self, name: str) -> Row:
        out = _pipe(self._processes[name].stdout)
        if not select.select([out], [], [], _TIMEOUT_S)[0]:
            raise RunError(f"{name} has not replied for {_TIMEOUT_S:g} s; the end of its log: {self._tail(name)}")
        line = out.readline()
        if not line:
            raise RunError(f"{name} has ended; the end of its log: {self._tail(name)}")
        found: Row = json.loads(line)
        return found

    def _tail(self, name: str) -> str:
        lines = self._log(name).read_text(errors="replace").splitlines()
        return "; ".join(lines[-3:]) or "empty"

    def measure(self, method: str, numel: int, repeats: int) -> Row:
        """Time several allreduces after a first one, which opens connections and fills the error feedback."""
        self.ask({"method": method, "numel": numel})
        self._wan.reset_stats()
        rounds = [self._round(step) for step in range(repeats + 1)]
        verdict = self._wan.verdict()
        kept = {key: [one[key] for one in rounds[1:]] for key in rounds[0] if key != "same"}
        same = all(one["same"] for one in rounds)
        return {**kept, "same": same, "trusted": verdict.trusted, "verdict": verdict.reason}

    def _round(self, step: int) -> Row:
        self.ask({"step": step})
        before = self._passed()
        at = time.monotonic() + _LEAD_S + _LEAD_RANK_S * len(self._processes)
        replies = self.ask({"at": at})
        time.sleep(_QUIET_S)
        return {
            "clock": max(one["end"] for one in replies) - at,
            "line_bytes": self._passed() - before,
            **{key: mean([one[key] for one in replies]) for key in ("processor", "codec", "codec_clock")},
            "same": len({one["digest"] for one in replies}) == 1,
            "digest": replies[0]["digest"],
        }

    def _passed(self) -> int:
        return sum(pair.bytes for pair in self._wan.stats().pairs.values())


def mean(numbers: Sequence[float]) -> float:
    """The mean over the ranks."""
    return sum(numbers) / len(numbers)


def _pipe(stream: IO[Any] | None) -> IO[Any]:
    assert stream is not None
    return stream
