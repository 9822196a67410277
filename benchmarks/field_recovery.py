"""Seconds from kill -9, or from a cut line, until every site trains again."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from field_rehearsal import Rehearsal, digits
from field_sheet import Sheet

STRATEGY = "baseline"
FURTHER = 2  # steps: the answer of one may have been on its way when it happened
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
    settle: int = 70  # steps between two events; a site writes its state every 50


QUICK = Plan(times=1, settle=10)


@dataclass(frozen=True)
class Event:
    """Something that happens to a run, and is put right at once."""

    what: str
    starts: bool  # a process, which has to import everything
    do: Callable[[Rehearsal], None]


def _again(name: str) -> Callable[[Rehearsal], None]:
    def do(run: Rehearsal) -> None:
        run.kill(name)
        run.start(name)

    return do


def _rank(rank: int) -> Callable[[Rehearsal], None]:
    def do(run: Rehearsal) -> None:
        assert run.kill_worker("east", rank)

    return do


def _cut(run: Rehearsal) -> None:
    assert run.wires["east"].cut()


ALONE = (
    Event("kill -9 of the global server, started again at once", True, _again("server")),
    Event("kill -9 of a site of one process, started again at once", True, _again("east")),
    Event("the four connections of a site cut", False, _cut),
)
TORCHRUN = (
    Event("kill -9 of rank 1 of 2, torchrun starts both again", True, _rank(1)),
    Event("kill -9 of rank 0 of 2, torchrun starts both again", True, _rank(0)),
)


def measure(plan: Plan, say: Callable[[str], None]) -> list[Sheet]:
    """One sheet."""
    sheet = Sheet(
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
            with Rehearsal(recipe, Path(name)) as run:
                run.start()
                for event in events:
                    say(f"recovery: {event.what}")
                    found = [_once(run, event, plan) for _ in range(plan.times)]
                    sheet.rows.append(
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
    return [sheet]


def _once(run: Rehearsal, event: Event, plan: Plan) -> float:
    run.until({name: step + plan.settle for name, step in run.steps().items()}, LIMIT_S)
    began = time.monotonic()
    event.do(run)
    run.until({name: step + FURTHER for name, step in run.steps().items()}, LIMIT_S)
    return time.monotonic() - began


def _imports() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import weightgrad.cli"], check=True)
    return time.monotonic() - began
