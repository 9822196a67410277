"""A run that is not left in peace: roles killed and lines cut at random moments, for as long as you like.

    python benchmarks/soak.py --quick
    python benchmarks/soak.py --minutes 60 --seed 7 --strategy diloco

What was killed is started again with the same command. At the end the ledgers, the checkpoints and the
simulator are asked whether anything was lost, counted twice or changed. Exit code 1 if so; the seed gives the
same faults again, though not at the same instruction.
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
from field_rehearsal import Rehearsal, digits
from field_sheet import Sheet
from field_verdict import Check, Watcher, judge, like_simulator

from weightgrad.cli import recipe_argument
from weightgrad.errors import RunError
from weightgrad.report.machine import measured_on
from weightgrad.train.recipe import Recipe

KINDS = ("server", "site", "worker", "cut", "server and site")
FURTHER = 12  # steps that no site can do without the server, in any row
LIMIT_S = 300.0  # until all sites are that much further
MOST_REPLAYED = 5000  # steps, in the simulator


@dataclass(frozen=True)
class Fault:
    """What happens next."""

    kind: str
    site: str
    rank: int
    gap_s: float  # before it
    away_s: float  # until it is put right
    patient: bool  # the next comes only when this one is recovered from


@dataclass
class Storm:
    """The faults of a seed, and what became of them."""

    run: Rehearsal
    seed: int
    recovered: dict[str, list[float]] = field(default_factory=dict)
    done: list[Fault] = field(default_factory=list)
    failed: str | None = None

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def blow(self, minutes: float) -> None:
        """So long from the first steps on; then wait until all is well."""
        try:
            self.run.until(dict.fromkeys(self.run.sites, 1), LIMIT_S)
            until = time.monotonic() + 60 * minutes
            while time.monotonic() < until and not self.run.processes.all_done():
                fault = self._next()
                time.sleep(fault.gap_s)
                began = time.monotonic()
                if self._do(fault):
                    self.done.append(fault)
                if fault.patient:
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
            self.run.wires[fault.site].cut(fault.away_s)
            return True
        if fault.kind == "worker":
            return self.run.kill_worker(fault.site, fault.rank)
        roles = {"server": ["server"], "site": [fault.site], "server and site": ["server", fault.site]}[fault.kind]
        for role in roles:
            if self.run.processes.running[role].poll() == 0:
                return False  # the run has finished
            self.run.kill(role)
        time.sleep(fault.away_s)
        self.run.start(*roles)
        return True


def soak(recipe: Recipe, out: Path, arguments: argparse.Namespace) -> tuple[list[Check], Storm]:
    """The storm, then the checks."""
    # Patience: a machine that is busy with other things takes its time to start a server.
    with Rehearsal(recipe, out, "--checkpoint-every", "7", "--patience", "600") as run:
        with Watcher(out, list(run.sites)) as watcher:
            run.start()
            storm = Storm(run, arguments.seed)
            storm.blow(arguments.minutes)
            if arguments.finish and storm.failed is None:
                _finish(run, storm)
            run.stop()
        watcher.look()
        reached = min(run.steps().values())
    recovered = None if storm.failed is None and not storm.done else storm.failed is None
    checks = [Check("every fault was recovered from", recovered, _words(storm))]
    checks += judge(out, watcher)
    if arguments.replay:
        checks.append(like_simulator(recipe, out, reached, arguments.replay))
    return checks, storm


def _finish(run: Rehearsal, storm: Storm) -> None:
    try:
        run.until(dict.fromkeys(run.sites, run.recipe.training.steps + 1), 24 * 3600.0)
    except RunError as error:
        storm.failed = str(error)


def _words(storm: Storm) -> str:
    times = [seconds for found in storm.recovered.values() for seconds in found]
    words = f"{len(storm.done)} faults, {storm.run.steps()} steps"
    if times:
        words += f"; {statistics.median(times):.1f} s to recover, at worst {max(times):.1f} s"
    return words if storm.failed is None else f"{words}; {storm.failed.splitlines()[0]}"


def tables(checks: list[Check], storm: Storm) -> list[Sheet]:
    """The faults and the verdict."""
    faults = Sheet(
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
        found = storm.recovered.get(kind, [])
        row: dict[str, Any] = {"what": kind, "times": sum(fault.kind == kind for fault in storm.done)}
        faults.rows.append(row | ({"median": statistics.median(found), "worst": max(found)} if found else {}))
    verdict = Sheet("verdict", "Verdict", measured_on(), [(name, name, "{}") for name in ("check", "verdict", "found")])
    for check in checks:
        said = {True: "yes", False: "**NO**", None: "not checked"}[check.good]
        verdict.rows.append({"check": check.what, "verdict": said, "found": check.found.replace("|", "/")})
    return [faults, verdict]


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kill and cut at random; nothing may be lost.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long there are faults")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--recipe", help="a recipe file or name; otherwise two sites, of 1 and 2 workers, on digits")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="change that recipe; may be repeated")
    parser.add_argument("--strategy", default="weightgrad", help="of the built-in recipe")
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
    """Soak, print, say by the exit code."""
    arguments = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    torch.set_num_threads(1)
    if arguments.recipe:
        recipe = recipe_argument.load(arguments.recipe, arguments.set)
    else:
        recipe = digits(arguments.strategy, west=2, name="soak")
    out = arguments.out or Path("runs") / f"soak-{arguments.seed}"
    checks, storm = soak(recipe, out.absolute(), arguments)
    print("\n".join(sheet.markdown() for sheet in tables(checks, storm)))
    bad = any(check.good is False for check in checks)
    found = {
        "seed": arguments.seed,
        "minutes": arguments.minutes,
        "recipe": recipe.name,
        "strategy": recipe.strategy.name,
        "good": not bad,
        "checks": [asdict(check) for check in checks],
        "faults": [asdict(fault) for fault in storm.done],
        "recovered_s": storm.recovered,
        "failed": storm.failed,
    }
    text = json.dumps(found)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    if bad:
        print(f"FAILED; seed {arguments.seed} gives the same faults; logs and state are in {out}", file=sys.stderr)
        if storm.failed:
            print(storm.failed, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
