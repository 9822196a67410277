"""A recipe in the emulator: the processes of `launch`, each on its own host, over links as the recipe describes them.

A worker's forward and backward pass lasts as long as the recipe's `compute` says (it is really computed, then waited
for), so a step means the same in simulator and emulator. The WAN, the codecs, the LAN of a site (its loopback) and the
processes are real. The recipe's faults and traces happen here too, counted from the first step of the last site.
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

from weightgrad import event_log
from weightgrad.errors import RecipeError, RunError
from weightgrad.lab.emulate.choose import open_wan
from weightgrad.lab.emulate.network import Network
from weightgrad.lab.emulate.topology import WanLink
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run import launch
from weightgrad.lab.run.fault_schedule import FaultAction, FaultSchedule, TimedFaultSchedule
from weightgrad.lab.run.launch import Processes, RunProgress
from weightgrad.lab.run.simulation import chosen_strategy

PORT = 7443
LINE = 1514 / 1448  # bits on the line for a bit of a TCP stream; a recipe's bandwidth is that of a stream
LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.1


def network(recipe: Recipe, *, kind: str = "auto", delay: str = "auto") -> Network:
    """Open a network with the recipe's hosts and links.

    Args:
        recipe: Its server and sites are the hosts.
        kind: auto, root, rootless or modelled, as for `open_wan`.
        delay: auto, netem or switch.
    """
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
    """One run on an open network; its processes are killed and started by the fault schedule.

    Attributes:
        recipe: What is trained.
        out: The directory of the run.
        wan: The network.
        emulate_compute: Whether passes last as long as the recipe says.
        watch: Called with the progress, several times a second.
        happened: Called with a line for every action of the fault schedule.
        schedule: The fault schedule; None means the recipe's faults and traces.
    """

    recipe: Recipe
    out: Path
    wan: Network
    emulate_compute: bool = True
    watch: Callable[[RunProgress], None] | None = None
    happened: Callable[[str], None] = lambda line: None
    schedule: FaultSchedule | None = None
    processes: Processes = field(init=False)
    commands: dict[str, list[str]] = field(init=False)
    began: float = field(init=False, default=0.0)
    first_step: float | None = field(init=False, default=None)
    absent: set[str] = field(init=False, default_factory=set)
    _passed: dict[tuple[str, str], int] = field(init=False, default_factory=dict)
    _measured: float = field(init=False, default=0.0)
    _cuts: Counter[tuple[str, ...]] = field(
        init=False, default_factory=Counter
    )  # by link: cuts that hold at the same time
    _slow: dict[tuple[str, ...], list[float]] = field(
        init=False, default_factory=dict
    )  # by link: fractions of its rate that hold at the same time
    _rates: dict[tuple[str, ...], tuple[float, float]] = field(init=False)  # by link: its two rates without faults

    def __post_init__(self) -> None:
        server = self.recipe.server.name
        own = self.wan.host(server).address
        alone = own == LOOPBACK  # a modelled network: all hosts share the ports of this machine
        if alone and self.recipe.server.processes > 1:
            raise RecipeError(
                f"{self.recipe.name}: a modelled network has one relay from each site to the server, which has "
                f"{self.recipe.server.processes} processes; use --kind root or rootless, or server.processes=1"
            )
        launch.prepare(self.recipe, self.out, ["localhost"] if alone else ["localhost", own])
        port = launch.free_port() if alone else PORT
        listen = f"{own}:{port}"
        extra = ["--timeout", "600", *(["--emulate-compute"] if self.emulate_compute else [])]
        self.commands = launch.commands(
            self.recipe, self.out, listen, lambda site: self.wan.reach(site, server, port), extra
        )
        self.processes = Processes(self.out / "logs")
        self._rates = {x.between: (x.bandwidth_bit_s, x.back_bit_s or x.bandwidth_bit_s) for x in self.recipe.link_list}

    def host_of(self, name: str) -> str:
        """The host on which the server or a site runs."""
        return self.recipe.server.name if name == "server" else name

    def start(self, name: str) -> None:
        """Start or restart the server or a site."""
        if name in self.processes.running:
            return  # it was killed twice and is already back
        self.absent.discard(name)
        host = self.wan.host(self.host_of(name))

        def popen(command: Sequence[str], **keywords: Any) -> subprocess.Popen[Any]:
            # A host in a namespace has no name server, and torchrun would wait for one three times, 5 s each.
            known = {} if host.address == LOOPBACK else {"RES_OPTIONS": "attempts:0"}
            return host.popen(command, **{**keywords, "env": {**keywords["env"], **known}})

        self.processes.start(name, self.commands[name], popen)

    def kill(self, name: str) -> None:
        """Kill (-9) every process on the host of the server or a site, unless it has finished."""
        if (known := self.processes.running.get(name)) is not None and known.poll() == 0:
            return
        self.absent.add(name)
        self.wan.host(self.host_of(name)).kill_all()
        process = self.processes.running.pop(name, None)
        if process is not None:
            process.wait()

    def kill_worker(self, site: str, rank: int) -> bool:
        """Kill (-9) one worker; torchrun restarts the site.

        Returns:
            False if there is no such process just now.
        """
        for pid in self.wan.host(site).pids():
            with contextlib.suppress(OSError):
                if f"LOCAL_RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
                    return True
        return False

    def run(self) -> dict[str, Any]:
        """Run until all processes have ended.

        Returns:
            The summary, with the statistics of the network.
        """
        self.began = time.monotonic()
        schedule = self.schedule or TimedFaultSchedule(self.recipe)
        self.absent = set(schedule.absent)
        try:
            for name in self.commands:
                if name not in self.absent:
                    self.start(name)
            self._follow(schedule)
            stats, verdict = self.wan.stats().as_dict(), self.wan.verdict()
        finally:
            self.processes.end()
        summary = launch.finish(self.recipe, self.out, time.monotonic() - self.began)
        late = self._late_steps()
        if late > 0.05:
            verdict = replace(
                verdict, trusted=False,
                reason=f"{late:.0%} of the passes took longer than the recipe's compute time; this machine is too slow",
            )  # fmt: skip
        summary["emulated"] = {**self.wan.describe(), "trusted": verdict.trusted, "verdict": str(verdict)}
        summary["late_steps"] = late
        with event_log.EventLog(self.out / "events.jsonl", append=True) as events:
            events.write("network", summary["wall_seconds"], network=summary["emulated"], **stats)
        (self.out / "summary.json").write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n")
        return summary

    def _follow(self, schedule: FaultSchedule) -> None:
        while True:
            if (name := self.processes.failed()) is not None:
                raise RunError(
                    f"{name} ended with code {self.processes.running[name].returncode}; the end of its log in "
                    f"{self.out / 'logs'}:\n{self.processes.tail(name)}"
                )
            now = self.progress()
            if self.watch is not None:
                self.watch(now)
            if self.first_step is None and all(self._has_begun(n) for n in now.steps if n not in self.absent):
                self.first_step = time.monotonic()
            since = -math.inf if self.first_step is None else time.monotonic() - self.first_step
            while (action := schedule.next(since, now)) is not None:
                self._apply(action)
            if self.processes.all_done() and not schedule.has_pending_start and self.processes.failed() is None:
                if self.absent:
                    raise RunError(
                        f"{', '.join(sorted(self.absent))} was killed and never restarted: the run cannot finish"
                    )
                break
            time.sleep(_POLL_SECONDS)

    def _has_begun(self, site: str) -> bool:
        """Whether a site has done a step, or has pushed and waits for a site that is not there yet."""
        found = launch.read_events(self.out / "state" / site / "events.jsonl")
        return any(entry["kind"] in ("step", "push") for entry in found)

    def _apply(self, action: FaultAction) -> None:
        self.happened(str(action))
        self._write_fault(action)
        what, where = action.what, action.where
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
        elif what == "resize":
            self.kill(name)
            self.commands[name] = launch.with_ranks(self.commands[name], int(where[1]))
        elif what == "kill-worker":
            if not self.kill_worker(where[0], int(where[1])):
                self.happened(f"  {where[0]} had no worker {where[1]} at that moment")
        else:
            self._set_rate(action)

    def _write_fault(self, action: FaultAction) -> None:
        """Note a fault beside the event log, by the server's clock: its last line, and the time since then."""
        log = self.out / "events.jsonl"
        known = launch.read_events(log)
        now = known[-1]["t"] + max(0.0, time.time() - log.stat().st_mtime) if known else 0.0
        with event_log.EventLog(self.out / "faults.jsonl", append=True) as faults:
            faults.write("fault", now, what=action.what, where=list(action.where))

    def _set_rate(self, action: FaultAction) -> None:
        where, slow = action.where, self._slow.setdefault(action.where, [])
        if action.what == "slow":
            slow.append(action.factor)
        elif action.what == "unslow":
            slow.remove(action.factor)
        else:
            assert action.bit_s is not None
            self._rates[where] = (action.bit_s, action.bit_s)
        there, back = (rate * LINE * math.prod(slow) for rate in self._rates[where])
        self.wan.set_link(where[0], where[1], bandwidth_bit_s=there, back_bit_s=back if back != there else None)

    def progress(self) -> RunProgress:
        """The progress of the run, with the present rate of each link."""
        found = launch.progress_of(self.recipe, self.out, time.monotonic() - self.began)
        now = time.monotonic()
        if now - self._measured < 1.0:
            return found
        pairs = {ends: pair.bytes for ends, pair in self.wan.stats().pairs.items()}
        passed = now - self._measured if self._measured else 0.0
        rates = {
            f"{a} > {b}": 8 * (pairs[a, b] - before) / passed
            for (a, b), before in self._passed.items()
            if passed and (a, b) in pairs
        }
        self._passed, self._measured = pairs, now
        return replace(found, rates=rates)

    def _late_steps(self) -> float:
        counted = [
            entry
            for site in self.recipe.site_list
            for entry in launch.read_events(self.out / "state" / site.name / "events.jsonl")
            if entry["kind"] == "compute"
        ]
        steps = sum(entry["steps"] for entry in counted)
        return sum(entry["late"] for entry in counted) / steps if steps else 0.0


def check(recipe: Recipe) -> None:
    """Refuse a recipe that cannot be emulated, before anything is started.

    Raises:
        RecipeError: The recipe has a fault that the emulator cannot bring about.
    """
    chosen_strategy(recipe)
    if any(fault.what == "leave" for fault in recipe.fault_list):
        raise RecipeError(f"{recipe.name}: the emulator cannot make a site leave; use kill, or `weightgrad simulate`")


def emulate(
    recipe: Recipe,
    out: Path,
    wan: Network,
    *,
    emulate_compute: bool = True,
    watch: Callable[[RunProgress], None] | None = None,
    happened: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run a recipe on an open network; the arguments are the attributes of `Emulation`.

    Returns:
        The summary; event log, global model, logs and checkpoints are in `out`.
    """
    check(recipe)
    return Emulation(recipe, out, wan, emulate_compute, watch, happened).run()
