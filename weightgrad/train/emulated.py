"""A recipe in the emulator: the processes of `launch`, each on its own host, over links as the recipe has them.

A worker's pass lasts as long as the recipe's `compute` says (it is really computed, then waited for), so both
worlds mean the same by a step; the WAN, the codecs, the LAN of a site (its loopback) and the processes are real.
The recipe's faults and traces happen here too, counted from the first step of the last site.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
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
from weightgrad.train.scenes import Scene, scenes

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
    processes: Processes = field(init=False)
    commands: dict[str, list[str]] = field(init=False)
    began: float = field(init=False, default=0.0)
    first_step: float | None = field(init=False, default=None)
    absent: set[str] = field(init=False, default_factory=set)
    _passed: dict[tuple[str, str], int] = field(init=False, default_factory=dict)
    _looked: float = field(init=False, default=0.0)
    _cuts: Counter[tuple[str, ...]] = field(init=False, default_factory=Counter)  # that hold at the same time

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

    def host_of(self, name: str) -> str:
        """The host on which a process runs."""
        return self.recipe.server.name if name == "server" else name

    def start(self, name: str) -> None:
        """Start the server or a site, first or again."""
        if name in self.processes.running:
            return  # it was killed twice, and is back
        self.absent.discard(name)
        host = self.wan.host(self.host_of(name))
        self.processes.start(name, self.commands[name], host.popen)

    def kill(self, name: str) -> None:
        """kill -9 of everything on its host."""
        self.absent.add(name)
        self.wan.host(self.host_of(name)).kill_all()
        process = self.processes.running.pop(name, None)
        if process is not None:
            process.wait()

    def run(self) -> dict[str, Any]:
        """Until all have ended. Returns the summary, with what the network says about itself."""
        self.began = time.monotonic()
        plot = scenes(self.recipe)
        self.absent = set(self.recipe.absent_at_start)
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

    def _follow(self, plot: list[Scene]) -> None:
        while plot or self.absent or not self.processes.all_done():
            if (name := self.processes.failed()) is not None:
                raise RunError(
                    f"{name} ended with code {self.processes.running[name].returncode}; the end of its log in "
                    f"{self.out / 'logs'}:\n{self.processes.tail(name)}"
                )
            now = self.standing()
            if self.watch is not None:
                self.watch(now)
            if self.first_step is None and all(s > 0 for n, s in now.steps.items() if n not in self.absent):
                self.first_step = time.monotonic()
            while plot and self.first_step is not None and time.monotonic() >= self.first_step + plot[0].at:
                self._act(plot.pop(0))
            if self.processes.all_done() and not any(scene.starts for scene in plot):
                if self.absent:
                    raise RunError(f"{', '.join(sorted(self.absent))} was killed for good: the run cannot finish")
                break
            time.sleep(_LOOK_SECONDS)

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
        else:
            assert scene.bit_s is not None
            self.wan.set_link(where[0], where[1], bandwidth_bit_s=scene.bit_s * LINE)

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
