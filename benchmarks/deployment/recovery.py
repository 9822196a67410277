"""Seconds from a SIGKILL, or from a cut connection, until every site trains again."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deployment.live_run import LiveRun, digits
from result_table import ResultTable

STRATEGY = "baseline"
FURTHER = 2  # steps; the result of one may have been in flight when the fault came
LIMIT_S = 300.0
COLUMNS = [
    ("what happens", "what", "{}"),
    ("median s", "median_s", "{:.2f}"),
    ("best s", "best_s", "{:.2f}"),
    ("worst s", "worst_s", "{:.2f}"),
    ("of it imports s", "imports_s", "{:.2f}"),
    ("times", "times", "{:d}"),
]


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    times: int = 3
    steps_between: int = 70  # steps between two events; a site writes a checkpoint every 50


QUICK = Plan(times=1, steps_between=10)


@dataclass(frozen=True)
class Event:
    """A fault that is repaired at once."""

    what: str
    starts: bool  # whether a process starts, which has to import everything
    do: Callable[[LiveRun], None]


def _again(name: str) -> Callable[[LiveRun], None]:
    def do(run: LiveRun) -> None:
        run.kill(name)
        run.start(name)

    return do


def _rank(rank: int) -> Callable[[LiveRun], None]:
    def do(run: LiveRun) -> None:
        assert run.kill_worker("east", rank)

    return do


def _cut(run: LiveRun) -> None:
    assert run.proxies["east"].cut()


ALONE = (
    Event("kill -9 of the global server, started again at once", True, _again("server")),
    Event("kill -9 of a site of one process, started again at once", True, _again("east")),
    Event("the connections of a site cut", False, _cut),
)
TORCHRUN = (
    Event("kill -9 of rank 1 of 2, torchrun starts both again", True, _rank(1)),
    Event("kill -9 of rank 0 of 2, torchrun starts both again", True, _rank(0)),
)


def measure(plan: Plan, report: Callable[[str], None]) -> list[ResultTable]:
    """Apply every fault several times and measure the recovery."""
    table = ResultTable(
        "recovery",
        "Time to recover",
        f"Two sites on digits, strategy {STRATEGY}, so that every step needs the server and the other site; mutual "
        "TLS, state on disk, a site's every 50 steps. From the signal until every site is "
        f"{FURTHER} steps further than it ever was: steps since the site's last checkpoint are done again within that "
        "time. Imports: what one process needs to import the program, measured by itself.",
        COLUMNS,
    )
    imports = [_imports() for _ in range(min(3, plan.times))]
    for workers, events in ((1, ALONE), (2, TORCHRUN)):
        with tempfile.TemporaryDirectory() as name:
            recipe = digits(STRATEGY, east=workers)
            with LiveRun(recipe, Path(name)) as run:
                run.start()
                for event in events:
                    report(f"recovery: {event.what}")
                    found = [_once(run, event, plan) for _ in range(plan.times)]
                    table.rows.append(
                        {
                            "what": event.what,
                            "median_s": statistics.median(found),
                            "best_s": min(found),
                            "worst_s": max(found),
                            "imports_s": statistics.median(imports) if event.starts else 0.0,
                            "times": len(found),
                            "all_s": found,
                        }
                    )
    return [table]


def _once(run: LiveRun, event: Event, plan: Plan) -> float:
    run.until({name: step + plan.steps_between for name, step in run.steps().items()}, LIMIT_S)
    began = time.monotonic()
    event.do(run)
    run.until({name: step + FURTHER for name, step in run.steps().items()}, LIMIT_S)
    return time.monotonic() - began


def _imports() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import weightgrad.cli"], check=True)
    return time.monotonic() - began
