"""One of three sites sends its update times -5: what each strategy and aggregator makes of it.

    python benchmarks/table_poison.py --quick
    python benchmarks/table_poison.py                      # about 10 minutes on one core

Digits, LeNet, three sites of one worker in the simulator, with the guard of a deployment, which lets -5 times pass. The
push is changed on its way to the server; all else is as the strategy has it. "honest" is the same run without it. The
exit code is 1 if with a robust aggregator an honest site, or the global model, ends on something that is not finite.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from result_table import ResultTable, Row

from weightgrad.codecs import Fp32
from weightgrad.codecs.registry import decode_into
from weightgrad.core.guard import Guard
from weightgrad.core.server_outbox import Outbox
from weightgrad.event_log import EventLog
from weightgrad.kernels import fixed
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import simulation_plan
from weightgrad.lab.run.task import Training
from weightgrad.lab.sim.simulator import Simulator
from weightgrad.machine import measured_on
from weightgrad.wire.messages import Message, Push, Segment

RECIPE = """
name: poison
seed: {seed}
data: {{name: digits}}
model: {{name: lenet-digits}}
training: {{steps: {steps}, batch: 96, optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}, evaluate_every: 1000000}}
server: {{name: hub}}
sites: [{{name: east, workers: 1}}, {{name: mallory, workers: 1}}, {{name: west, workers: 1}}]
links:
  - {{between: [hub, east], bandwidth: 100 Mbit/s, delay: 10 ms}}
  - {{between: [hub, mallory], bandwidth: 100 Mbit/s, delay: 10 ms}}
  - {{between: [hub, west], bandwidth: 100 Mbit/s, delay: 10 ms}}
compute: {{seconds_per_step: 0.02}}
strategy: {strategy}
"""
ROWS: list[tuple[str, str | None]] = [
    ("baseline", None),
    ("baseline", "mean(limit=1)"),
    ("baseline", "median"),
    ("baseline", "trimmed_mean(1)"),
    ("diloco", None),
    ("diloco", "outer('nesterov', lr=0.7, momentum=0.5, limit=1)"),
    ("diloco", "outer('nesterov', lr=0.7, momentum=0.5, of='median')"),
    ("diloco", "outer('nesterov', lr=0.7, momentum=0.5, of='trimmed_mean')"),
    ("sparseloco", None),
    ("sparseloco", "sender_mean(limit=1)"),
    ("weightgrad", None),
    ("weightgrad", "mean(limit=1)"),
    ("auto", None),
    ("auto", "mean(limit=1)"),
]
HOSTILE = "mallory"


@dataclass(frozen=True)
class Result:
    """How a run ended: the accuracy of its global model, and whether all honest sites are finite."""

    accuracy: float
    finite: bool


def times(push: Push, factor: float) -> Push:
    """A push with other values in the same places."""
    found = []
    for segment in push.segments:
        values = torch.empty(segment.payload.numel)
        decode_into(segment.payload, values, fixed.STORE)
        payload, _ = Fp32().encode(values * factor, {}, 0)
        found.append(Segment.at(segment.intervals, payload) if values.numel() else segment)
    return replace(push, segments=tuple(found))


def train(strategy: str, aggregator: str | None, seed: int, steps: int, factor: float) -> Result:
    """A run in which the hostile site sends its update times `factor`."""
    part = "" if aggregator is None else f', aggregator: "{aggregator}"'
    chosen = f"{{name: {strategy}{part}}}"
    recipe = Recipe.parse(RECIPE.format(seed=seed, steps=steps, strategy=chosen), "poison.yaml")
    task = Training(recipe)
    with tempfile.TemporaryDirectory() as folder, EventLog(Path(folder) / "events.jsonl") as events:
        simulator = Simulator(simulation_plan(recipe, task), task, events)
        simulator.server.coordinator.checks.guard = Guard()
        receive = simulator.server.receive

        def receive_changed(message: Message, now: float) -> Outbox:
            hostile = isinstance(message, Push) and message.site == HOSTILE and factor != 1
            return receive(times(message, factor) if hostile and isinstance(message, Push) else message, now)

        simulator.server.receive = receive_changed  # type: ignore[method-assign]
        simulator.run()
        models = [site.state.model for site in simulator.sites if site.place.name != HOSTILE]
        models.append(simulator.server.global_model.vector)
        finite = simulator.status == "finished" and all(bool(one.isfinite().all()) for one in models)
        accuracy = simulator.evaluate().global_model if finite else math.nan
    return Result(accuracy, finite)


def main() -> None:
    """Run every row with and without the attack, and print the table."""
    parser = argparse.ArgumentParser(description="One of three sites sends its update times -5.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--factor", type=float, default=-5.0)
    parser.add_argument("--only", help="strategies with this in their names")
    parser.add_argument("--quick", action="store_true", help="40 steps and one seed: whether it works at all")
    given = parser.parse_args()
    if given.quick:
        given.steps, given.seeds = 40, 1
    torch.set_num_threads(1)
    table = ResultTable(
        "poison",
        f"One of three sites sends {given.factor:g} times its update",
        f"Test accuracy of the global model on digits after {given.steps} steps, mean of {given.seeds} seeds. "
        + measured_on(),
        [
            ("strategy", "strategy", "{}"),
            ("aggregator", "aggregator", "{}"),
            ("honest", "honest", "{:.1f}"),
            ("attacked", "attacked", "{:.1f}"),
            ("honest sites finite", "finite", "{}"),
        ],
    )
    bad = False
    for strategy, aggregator in [row for row in ROWS if (given.only or "") in row[0]]:
        pairs = [
            tuple(train(strategy, aggregator, seed, given.steps, factor) for factor in (1.0, given.factor))
            for seed in range(given.seeds)
        ]
        finite = all(one.finite for pair in pairs for one in pair)
        bad = bad or (aggregator is not None and not finite)
        row: Row = {
            "strategy": strategy,
            "aggregator": aggregator or "its own",
            "finite": "yes" if finite else "**NO**",
        }
        for place, name in enumerate(("honest", "attacked")):
            found = statistics.mean(pair[place].accuracy for pair in pairs)
            row[name] = None if math.isnan(found) else 100 * found
        table.rows.append(row)
        print(table.cells(row), file=sys.stderr, flush=True)
    print(table.markdown())
    sys.exit(bad)


if __name__ == "__main__":
    main()
