"""A long run with random faults: processes are killed and stopped, connections cut, for as many minutes as you like.

    python benchmarks/soak.py --quick
    python benchmarks/soak.py --minutes 60 --seed 7 --strategy diloco

A killed process is started again with the same command. At the end the event logs, the checkpoints and the simulator
show whether an update was lost, counted twice or changed. If so, the exit code is 1. The same seed gives the same
faults, though not at the same instruction.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from deployment.live_run import LiveRun, digits
from deployment.memory_watch import MemoryWatch
from deployment.run_checks import Check, Watcher, check_run, like_simulator
from result_table import ResultTable

from weightgrad.errors import RunError
from weightgrad.lab.cli import recipe_argument
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.machine import measured_on

KINDS = ("server", "site", "worker", "cut", "server and site", "stop")
FURTHER = 12  # steps that no site can do without the server, with any strategy
LIMIT_S = 900.0  # until all sites have done these steps
MOST_REPLAYED = 5000  # steps, in the simulator


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: One of `KINDS`.
        site: The site that it concerns.
        rank: The worker that a fault of kind "worker" kills.
        gap_s: Seconds before the fault.
        away_s: Seconds until the fault is repaired.
        waits: Whether the next fault comes only after the run has recovered from this one.
    """

    kind: str
    site: str
    rank: int
    gap_s: float
    away_s: float
    waits: bool


@dataclass
class FaultInjector:
    """Draws faults from a seed, applies them to a run, and measures how long the run takes to recover."""

    run: LiveRun
    seed: int
    recovered: dict[str, list[float]] = field(default_factory=dict)
    done: list[Fault] = field(default_factory=list)
    failed: str | None = None

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def inject(self, minutes: float) -> None:
        """Apply faults for so many minutes after the first steps, then wait until the run has recovered."""
        try:
            self.run.until(dict.fromkeys(self.run.sites, 1), LIMIT_S)
            until = time.monotonic() + 60 * minutes
            while time.monotonic() < until and not self.run.processes.all_done():
                fault = self._next()
                time.sleep(fault.gap_s)
                began = time.monotonic()
                if self._do(fault):
                    self.done.append(fault)
                if fault.waits:
                    self._recover()
                    self.recovered.setdefault(fault.kind, []).append(time.monotonic() - began)
            self._recover()
        except RunError as error:
            self.failed = str(error)

    def _recover(self) -> None:
        self.run.until({name: step + FURTHER for name, step in self.run.steps().items()}, LIMIT_S)

    def _next(self) -> Fault:
        draw = self._draw
        away = draw.choice([0.0, draw.uniform(0, 1), draw.uniform(0, 5)])
        several = [name for name, workers in self.run.sites.items() if workers > 1]
        kind = draw.choice([kind for kind in KINDS if several or kind != "worker"])
        site = draw.choice(several if kind == "worker" else list(self.run.sites))
        rank = draw.randrange(self.run.sites[site])
        return Fault(kind, site, rank, min(10.0, 0.1 + draw.expovariate(0.5)), away, draw.random() < 0.6)

    def _do(self, fault: Fault) -> bool:
        if fault.kind == "cut":
            self.run.proxies[fault.site].cut(fault.away_s)
            return True
        if fault.kind == "worker":
            return self.run.kill_worker(fault.site, fault.rank)
        if fault.kind == "stop":
            self.run.freeze(fault.site, 4 * fault.away_s)
            return True
        roles = {"server": ["server"], "site": [fault.site], "server and site": ["server", fault.site]}[fault.kind]
        for role in roles:
            if self.run.processes.running[role].poll() == 0:
                return False  # the run has finished
            self.run.kill(role)
        time.sleep(fault.away_s)
        self.run.start(*roles)
        return True


def soak(recipe: Recipe, out: Path, arguments: argparse.Namespace) -> tuple[list[Check], FaultInjector, MemoryWatch]:
    """Run the recipe under faults, then check it.

    Returns:
        The checks, the injector with the faults that it applied, and what was seen of the memory.
    """
    # A machine that is busy with other things takes its time to start a server.
    more = ["--checkpoint-every", "7", "--timeout", "600"]
    if arguments.step_seconds:
        more.append("--emulate-compute")
    with LiveRun(recipe, out, *more) as run:
        with Watcher(out, list(run.sites)) as watcher, MemoryWatch(run) as memory:
            run.start()
            injector = FaultInjector(run, arguments.seed)
            injector.inject(arguments.minutes)
            if arguments.finish and injector.failed is None:
                _finish(run, injector)
            run.stop()
        watcher.look()
        reached = min(run.steps().values())
    recovered = None if injector.failed is None and not injector.done else injector.failed is None
    checks = [Check("every fault was recovered from", recovered, _summary(injector))]
    checks += check_run(out, watcher)
    if arguments.replay:
        checks.append(like_simulator(recipe, out, reached, arguments.replay))
    checks.append(memory.check())
    return checks, injector, memory


def _finish(run: LiveRun, injector: FaultInjector) -> None:
    try:
        run.until(dict.fromkeys(run.sites, run.recipe.training.steps + 1), 24 * 3600.0)
    except RunError as error:
        injector.failed = str(error)


def _summary(injector: FaultInjector) -> str:
    times = [seconds for found in injector.recovered.values() for seconds in found]
    words = f"{len(injector.done)} faults, {injector.run.steps()} steps"
    if times:
        words += f"; {statistics.median(times):.1f} s to recover, at worst {max(times):.1f} s"
    return words if injector.failed is None else f"{words}; {injector.failed.splitlines()[0]}"


def tables(checks: list[Check], injector: FaultInjector, memory: MemoryWatch) -> list[ResultTable]:
    """The faults, the memory and the results of the checks, as tables."""
    faults = ResultTable(
        "faults",
        "Faults",
        f"Seconds until every site was {FURTHER} steps further than ever, where the next fault waited for that.",
        [
            ("what", "what", "{}"),
            ("times", "times", "{:d}"),
            ("median s", "median", "{:.1f}"),
            ("worst s", "worst", "{:.1f}"),
        ],
    )
    for kind in KINDS:
        found = injector.recovered.get(kind, [])
        row: dict[str, Any] = {"what": kind, "times": sum(fault.kind == kind for fault in injector.done)}
        faults.rows.append(row | ({"median": statistics.median(found), "worst": max(found)} if found else {}))
    used = ResultTable(
        "memory",
        "Memory",
        "MB of a role, all of its processes together, in each third of the time: median, and the most.",
        [("role", "role", "{}"), *((f"{name} third", name, "{}") for name in ("first", "second", "last"))],
    )
    for role in sorted(memory.seen):
        shown = [f"{statistics.median(one):.0f}, {max(one):.0f}" if one else None for one in memory.thirds(role)]
        used.rows.append({"role": role} | dict(zip(("first", "second", "last"), shown, strict=True)))
    verdict = ResultTable(
        "verdict", "Verdict", measured_on(), [(name, name, "{}") for name in ("check", "verdict", "found")]
    )
    for check in checks:
        said = {True: "yes", False: "**NO**", None: "not checked"}[check.good]
        verdict.rows.append({"check": check.what, "verdict": said, "found": check.found.replace("|", "/")})
    return [faults, used, verdict]


def read_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Kill and cut at random; nothing may be lost.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long there are faults")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--recipe", help="a recipe file or name; otherwise two sites, of 1 and 2 workers, on digits")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="change that recipe; may be repeated")
    parser.add_argument("--strategy", default="weightgrad", help="of the built-in recipe")
    parser.add_argument(
        "--step-seconds", type=float, help="make a step of the built-in recipe last so long: leaves CPU time"
    )
    parser.add_argument("--finish", action="store_true", help="let the run finish afterwards instead of stopping it")
    parser.add_argument(
        "--replay", type=int, default=MOST_REPLAYED, help="steps compared with the simulator, at most; 0: none"
    )
    parser.add_argument("--out", type=Path, help="directory of the run; default runs/soak-SEED")
    parser.add_argument("--json", type=Path, help="also write the verdict here")
    parser.add_argument("--quick", action="store_true", help="half a minute: whether it works at all")
    given = parser.parse_args()
    if given.quick:
        given.minutes, given.replay = 0.5, min(given.replay, 500)
    return given


def main() -> None:
    """Run, print the result, and exit with 1 if a check failed."""
    arguments = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit normally, so that started processes are ended
    torch.set_num_threads(1)
    if arguments.recipe:
        recipe = recipe_argument.load(arguments.recipe, arguments.set)
    else:
        recipe = digits(arguments.strategy, west=2, name="soak", step_s=arguments.step_seconds or 0.01)
    out = arguments.out or Path("runs") / f"soak-{arguments.seed}"
    checks, injector, memory = soak(recipe, out.absolute(), arguments)
    print("\n".join(table.markdown() for table in tables(checks, injector, memory)))
    bad = any(check.good is False for check in checks)
    found = {
        "seed": arguments.seed,
        "minutes": arguments.minutes,
        "recipe": recipe.name,
        "strategy": recipe.strategy.name,
        "good": not bad,
        "checks": [asdict(check) for check in checks],
        "faults": [asdict(fault) for fault in injector.done],
        "recovered_s": injector.recovered,
        "failed": injector.failed,
    }
    text = json.dumps(found)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    if bad:
        print(f"FAILED; seed {arguments.seed} gives the same faults; logs and state are in {out}", file=sys.stderr)
        if injector.failed:
            print(injector.failed, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
