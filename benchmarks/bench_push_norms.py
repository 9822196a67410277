"""How near honest sites come to what the guard allows one site to add: it must never limit them.

    python benchmarks/bench_push_norms.py --quick
    python benchmarks/bench_push_norms.py                                          # laptop.yaml, every strategy
    python benchmarks/bench_push_norms.py --set 'data.shards={dirichlet: 0.1}'     # different data at the sites

Every strategy runs in the simulator with the guard of a deployment. "used" is by how much the debt of a site grew at
most: while that is less than the credit (`weightgrad/core/server/guard.py`), all pushes count in full. The exit code is
1 if an update was limited or refused.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from result_table import ResultTable

from weightgrad.core.server.guard import CREDIT, Guard, Verdict, Weighed
from weightgrad.core.strategies import available, find
from weightgrad.event_log import EventLog
from weightgrad.lab.cli import recipe_argument
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import simulation_plan
from weightgrad.lab.run.task import Training
from weightgrad.lab.sim.simulator import Simulator
from weightgrad.machine import measured_on


@dataclass
class WatchedGuard:
    """A guard, and what it has said.

    Attributes:
        used: by how much the debt of a site grew at most.
    """

    guard: Guard = field(default_factory=Guard)
    pushes: int = 0
    limited: int = 0
    refused: int = 0
    used: float = 0.0
    _least: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._judge = self.guard.judge
        self.guard.judge = self.judge  # type: ignore[method-assign]

    def judge(self, pushes: Sequence[Weighed], plausible: float = 0.0, *, credit: float = CREDIT["updates"]) -> Verdict:
        """Ask the guard, and note what it says."""
        verdict = self._judge(pushes, plausible, credit=credit)
        self.pushes += sum(one.norm > 0 for one in pushes)
        self.limited += len(verdict.limited)
        self.refused += len(verdict.refused)
        for site, debt in self.guard._debts.items():
            self._least[site] = min(debt, self._least.get(site, debt))
            self.used = max(self.used, debt - self._least[site])
        return verdict


def watch(recipe: Recipe, share: float = 0.75) -> WatchedGuard:
    """Run a recipe; `share` is the guard's."""
    task, watched = Training(recipe), WatchedGuard(Guard(share=share))
    with tempfile.TemporaryDirectory() as folder, EventLog(Path(folder) / "events.jsonl") as events:
        simulator = Simulator(simulation_plan(recipe, task), task, events)
        simulator.server.coordinator.checks.guard = watched.guard
        simulator.run()
    return watched


def main() -> None:
    """Run every strategy, and print the table."""
    parser = argparse.ArgumentParser(description="How near honest sites come to the limits of the guard.")
    parser.add_argument("--recipe", default="recipes/laptop.yaml", help="a recipe file or name")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change it; may be repeated")
    parser.add_argument("--most-share", type=float, default=0.75, help="as of `weightgrad serve`")
    parser.add_argument("--strategies", help="some of them, separated by commas")
    parser.add_argument("--quick", action="store_true", help="20 steps of three strategies: whether it works at all")
    given = parser.parse_args()
    names = given.strategies.split(",") if given.strategies else list(available())
    if given.quick:
        names, given.set = ["baseline", "weightgrad", "diloco"], [*given.set, "training.steps=20"]
    torch.set_num_threads(1)
    table = ResultTable(
        "push_norms",
        "What honest sites use of their credit",
        f"{given.recipe} {' '.join(given.set)}. {measured_on()}",
        [
            ("strategy", "strategy", "{}"),
            ("pushes", "pushes", "{:d}"),
            ("credit", "credit", "{:g}"),
            ("used", "used", "{:.2f}"),
            ("limited", "limited", "{:d}"),
            ("refused", "refused", "{:d}"),
        ],
    )
    bad = False
    for name in names:
        found = watch(recipe_argument.load(given.recipe, [*given.set, f"strategy={name}"]), given.most_share)
        bad = bad or bool(found.limited or found.refused)
        table.rows.append(
            {
                "strategy": name,
                "pushes": found.pushes,
                "credit": CREDIT[find(name).shares],
                "used": found.used,
                "limited": found.limited,
                "refused": found.refused,
            }
        )
        print(table.cells(table.rows[-1]), file=sys.stderr, flush=True)
    print(table.markdown())
    sys.exit(bad)


if __name__ == "__main__":
    main()
