"""A recipe in the emulator: the processes of `launch`, each on its own host, over links as the recipe has them.

A worker's pass lasts as long as the recipe's `compute` says (it is really computed, then waited for), so both
worlds mean the same by a step; the WAN, the codecs, the LAN of a site (its loopback) and the processes are real.
The recipe's faults and traces happen here too, counted from the first step of the last site.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weightgrad import ledger
from weightgrad.emulate.choose import open_wan
from weightgrad.emulate.network import Network
from weightgrad.emulate.topology import WanLink
from weightgrad.errors import RecipeError, RunError
from weightgrad.train import launch
from weightgrad.train.launch import Processes, Standing
from weightgrad.train.recipe import Recipe
from weightgrad.train.run import chosen_strategy
from weightgrad.train.scenes import Plot, Scene, Timetable

PORT = 7443
LINE = 1514 / 1448  # bits on the line for a bit of a stream; a recipe's bandwidth is what a stream gets
LOOPBACK = "127.0.0.1"
_LOOK_SECONDS = 0.1


def network(recipe: Recipe, *, kind: str = "auto", delay: str = "auto") -> Network:
    """The recipe's hosts and links, not yet open."""
    hosts = [recipe.server.name, *(site.name for site in recipe.site_list)]
    links = [
        WanLink(
            x.between,
            x.bandwidth_bit_s * LINE,
            x.delay_seconds,
            loss=x.loss,
            back_bit_s=x.back_bit_s * LINE if x.back_bit_s is not None else None,
        )
        for x in recipe.link_list
    ]
    return open_wan(hosts, links, kind=kind, delay=delay)


@dataclass
class Emulation:
    """One run on an open network: its processes, killed and started as the scenes say."""

    recipe: Recipe
    out: Path
    wan: Network
    paced: bool = True
    watch: Callable[[Standing], None] | None = None
    happened: Callable[[str], None] = lambda line: None
    plot: Plot | None = None  # None: the recipe's faults and traces
    processes: Processes = field(init=False)
    commands: dict[str, list[str]] = field(init=False)
    began: float = field(init=False, default=0.0)
    first_step: float | None = field(init=False, default=None)
    absent: set[str] = field(init=False, default_factory=set)
    _passed: dict[tuple[str, str], int] = field(init=False, default_factory=dict)
    _looked: float = field(init=False, default=0.0)
    _cuts: Counter[tuple[str, ...]] = field(init=False, default_factory=Counter)  # that hold at the same time
    _slow: dict[tuple[str, ...], list[float]] = field(init=False, default_factory=dict)  # shares, as well
    _rates: dict[tuple[str, ...], tuple[float, float]] = field(init=False)  # there and back, without them

    def __post_init__(self) -> None:
        server = self.recipe.server.name
        own = self.wan.host(server).address
        alone = own == LOOPBACK  # no host of its own, so no port of its own
        launch.prepare(self.recipe, self.out, ["localhost"] if alone else ["localhost", own])
        port = launch.free_port() if alone else PORT
        listen = f"{own}:{port}"
        extra = ["--patience", "600", *(["--paced"] if self.paced else [])]
        self.commands = launch.commands(
            self.recipe, self.out, listen, lambda site: self.wan.reach(site, server, port), extra
        )
        self.processes = Processes(self.out / "logs")
        self._rates = {x.between: (x.bandwidth_bit_s, x.back_bit_s or x.bandwidth_bit_s) for x in self.recipe.link_list}

    def host_of(self, name: str) -> str:
        """The host on which a process runs."""
        return self.recipe.server.name if name == "server" else name

    def start(self, name: str) -> None:
        """Start the server or a site, first or again."""
        if name in self.processes.running:
            return  # it was killed twice, and is back
        self.absent.discard(name)
        host = self.wan.host(self.host_of(name))

        def popen(command: Sequence[str], **keywords: Any) -> subprocess.Popen[Any]:
            # A host in namespaces has no name server; torchrun would wait for one three times, 5 s each.
            known = {} if host.address == LOOPBACK else {"RES_OPTIONS": "attempts:0"}
            return host.popen(command, **{**keywords, "env": {**keywords["env"], **known}})

        self.processes.start(name, self.commands[name], popen)

    def kill(self, name: str) -> None:
        """kill -9 of everything on its host; one that has finished its work has nothing left to lose."""
        if (known := self.processes.running.get(name)) is not None and known.poll() == 0:
            return
        self.absent.add(name)
        self.wan.host(self.host_of(name)).kill_all()
        process = self.processes.running.pop(name, None)
        if process is not None:
            process.wait()

    def kill_worker(self, site: str, rank: int) -> bool:
        """kill -9 of one worker; torchrun starts all of the site again. False: it is not there just now."""
        for pid in self.wan.host(site).pids():
            with contextlib.suppress(OSError):
                if f"LOCAL_RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
                    return True
        return False

    def run(self) -> dict[str, Any]:
        """Until all have ended. Returns the summary, with what the network says about itself."""
        self.began = time.monotonic()
        plot = self.plot or Timetable(self.recipe)
        self.absent = set(plot.absent)
        try:
            for name in self.commands:
                if name not in self.absent:
                    self.start(name)
            self._follow(plot)
            stats, verdict = self.wan.stats().as_dict(), self.wan.verdict()
        finally:
            self.processes.end()
        summary = launch.finish(self.recipe, self.out, time.monotonic() - self.began)
        late = self._late_steps()
        if late > 0.05:
            verdict = replace(
                verdict, trusted=False,
                reason=f"{late:.0%} of the passes took longer than the recipe's compute: too much for this machine",
            )  # fmt: skip
        summary["emulated"] = {**self.wan.describe(), "trusted": verdict.trusted, "verdict": str(verdict)}
        summary["late_steps"] = late
        with ledger.Ledger(self.out / "ledger.jsonl", append=True) as book:
            book.write("network", summary["wall_seconds"], network=summary["emulated"], **stats)
        (self.out / "summary.json").write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n")
        return summary

    def _follow(self, plot: Plot) -> None:
        while True:
            if (name := self.processes.failed()) is not None:
                raise RunError(
                    f"{name} ended with code {self.processes.running[name].returncode}; the end of its log in "
                    f"{self.out / 'logs'}:\n{self.processes.tail(name)}"
                )
            now = self.standing()
            if self.watch is not None:
                self.watch(now)
            if self.first_step is None and all(self._has_begun(n) for n in now.steps if n not in self.absent):
                self.first_step = time.monotonic()
            since = -math.inf if self.first_step is None else time.monotonic() - self.first_step
            while (scene := plot.next(since, now)) is not None:
                self._act(scene)
            if self.processes.all_done() and not plot.brings_back and self.processes.failed() is None:
                if self.absent:
                    raise RunError(f"{', '.join(sorted(self.absent))} was killed for good: the run cannot finish")
                break
            time.sleep(_LOOK_SECONDS)

    def _has_begun(self, site: str) -> bool:
        """Whether it has done a step, or waits with its first push for somebody who is not there yet."""
        found = launch.lines(self.out / "state" / site / "ledger.jsonl")
        return any(entry["kind"] in ("step", "push") for entry in found)

    def _act(self, scene: Scene) -> None:
        self.happened(str(scene))
        what, where = scene.what, scene.where
        name = "server" if where[0] == self.recipe.server.name else where[0]
        if what == "kill":
            self.kill(name)
        elif what == "start":
            self.start(name)
        elif what == "cut":
            self._cuts[where] += 1
            self.wan.cut(*where)
        elif what == "heal":
            self._cuts[where] -= 1
            if not self._cuts[where]:
                self.wan.heal(*where)
        elif what == "kill-worker":
            if not self.kill_worker(where[0], int(where[1])):
                self.happened(f"  {where[0]} had no worker {where[1]} just then")
        else:
            self._set_rate(scene)

    def _set_rate(self, scene: Scene) -> None:
        where, slow = scene.where, self._slow.setdefault(scene.where, [])
        if scene.what == "slow":
            slow.append(scene.factor)
        elif scene.what == "unslow":
            slow.remove(scene.factor)
        else:
            assert scene.bit_s is not None
            self._rates[where] = (scene.bit_s, scene.bit_s)
        there, back = (rate * LINE * math.prod(slow) for rate in self._rates[where])
        self.wan.set_link(where[0], where[1], bandwidth_bit_s=there, back_bit_s=back if back != there else None)

    def standing(self) -> Standing:
        """How far it is, with what each link carries now."""
        found = launch.standing(self.recipe, self.out, time.monotonic() - self.began)
        now = time.monotonic()
        if now - self._looked < 1.0:
            return found
        pairs = {ends: pair.bytes for ends, pair in self.wan.stats().pairs.items()}
        passed = now - self._looked if self._looked else 0.0
        rates = {
            f"{a} > {b}": 8 * (pairs[a, b] - before) / passed
            for (a, b), before in self._passed.items()
            if passed and (a, b) in pairs
        }
        self._passed, self._looked = pairs, now
        return replace(found, rates=rates)

    def _late_steps(self) -> float:
        counted = [
            entry
            for site in self.recipe.site_list
            for entry in launch.lines(self.out / "state" / site.name / "ledger.jsonl")
            if entry["kind"] == "compute"
        ]
        steps = sum(entry["steps"] for entry in counted)
        return sum(entry["late"] for entry in counted) / steps if steps else 0.0


def check(recipe: Recipe) -> None:
    """What cannot be emulated is refused before anything is started."""
    chosen_strategy(recipe)
    if any(fault.what == "leave" for fault in recipe.fault_list):
        raise RecipeError(f"{recipe.name}: a leave cannot be told to a process from outside; use kill, or simulate")


def emulate(
    recipe: Recipe,
    out: Path,
    wan: Network,
    *,
    paced: bool = True,
    watch: Callable[[Standing], None] | None = None,
    happened: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run it on an open network; leaves ledger, base, summary, logs and state in `out`. Returns the summary."""
    check(recipe)
    return Emulation(recipe, out, wan, paced, watch, happened).run()
