"""One of three sites sends wrong updates, such as its own times -5: what each strategy and aggregator makes of it.

    python benchmarks/table_poison.py --quick
    python benchmarks/table_poison.py                      # about 10 minutes on one core
    python benchmarks/table_poison.py --attacks            # the strategies' own aggregators, more attacks
    python benchmarks/table_poison.py --directions --steps 200   # whether directions tell who is hostile

Digits, LeNet, three sites of one worker in the simulator, with the guard of a deployment. The push is changed on its
way to the server; all else is as the strategy has it. "honest" is the same run without it. The exit code is 1 if an
honest site, or the global model, ends on something that is not finite.
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
from torch import Tensor

from weightgrad.codecs import Fp32
from weightgrad.codecs.registry import decode_into
from weightgrad.core.server.guard import Guard
from weightgrad.core.server.outbox import Outbox
from weightgrad.event_log import EventLog
from weightgrad.kernels import fixed
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import simulation_plan
from weightgrad.lab.run.task import Training
from weightgrad.lab.sim.simulator import Simulator
from weightgrad.machine import measured_on
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import Message, Push, Segment

RECIPE = """
name: poison
seed: {seed}
data: {{name: digits, shards: {shards}}}
model: {{name: lenet-digits}}
training: {{steps: {steps}, batch: {batch}, optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}, evaluate_every: 1000000}}
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
class Attack:
    """What the hostile site makes of its updates.

    Attributes:
        factor: what an update is multiplied with.
        samples: what it says it stands for, times so much.
        growth: the factor grows so many times with every push, and begins anew when it is 20.
        noise: the update is replaced by noise of its norm first.
        last: only the last push is changed.
    """

    factor: float = 1.0
    samples: int = 1
    growth: float = 1.0
    noise: bool = False
    last: bool = False

    def change(self, push: Push) -> Push:
        """The push that it sends instead."""
        if self.last and not push.final:
            return push
        grown = self.growth ** (push.round % max(1, int(math.log(20, self.growth)))) if self.growth > 1 else 1.0
        draw = torch.Generator().manual_seed(push.round) if self.noise else None
        return times(replace(push, samples=push.samples * self.samples), self.factor * grown, draw)


HONEST = Attack()
ATTACKS = {
    "times -1": Attack(-1.0),
    "times -1.4": Attack(-1.4),
    "times -5": Attack(-5.0),
    "times -5, 10 times the samples": Attack(-5.0, samples=10),
    "times -1, 10 times the samples": Attack(-1.0, samples=10),
    "times -1, four times as much every time": Attack(-1.0, growth=4.0),
    "noise, times 5": Attack(5.0, noise=True),
    "the last times -100": Attack(-100.0, last=True),
}


@dataclass(frozen=True)
class Result:
    """How a run ended: the accuracy of its global model, and whether all honest sites are finite."""

    accuracy: float
    finite: bool


class Directions:
    """How the push of each site lies to the sum of the others': round by round, and of sums of 25 rounds."""

    def __init__(self, numel: int) -> None:
        self._numel, self._round, self._rounds = numel, 0, list[dict[str, Tensor]]()

    def take(self, push: Push) -> None:
        """Note a push."""
        if push.round != self._round:
            self._round = push.round
            self._rounds.append({})
        values = self._rounds[-1].setdefault(push.site, torch.zeros(self._numel))
        for segment in push.segments:
            segment.into(values, fixed.ADD, Intervals.whole(self._numel))

    def cosines(self, site: str) -> tuple[list[float], list[float]]:
        """The mean cosine in each quarter of the run, and those of sums of 25 rounds."""
        whole = [one for one in self._rounds if len(one) == 3]
        each = [_cosine(one, site) for one in whole]
        quarter = max(1, len(each) // 4)
        quarters = [statistics.mean(each[at : at + quarter]) for at in range(0, 4 * quarter, quarter)]
        windows = [whole[at : at + 25] for at in range(0, len(whole) - 24, 25)]
        sums = [{name: torch.stack([one[name] for one in window]).sum(0) for name in window[0]} for window in windows]
        return quarters, [_cosine(one, site) for one in sums]


def _cosine(pushes: dict[str, Tensor], site: str) -> float:
    others = torch.stack([values for name, values in pushes.items() if name != site]).sum(0)
    return float(torch.nn.functional.cosine_similarity(pushes[site], others, dim=0))


def times(push: Push, factor: float, draw: torch.Generator | None = None) -> Push:
    """A push with other values in the same places: its own, or if `draw` is given noise of their norm, times factor."""
    found = []
    for segment in push.segments:
        values = torch.empty(segment.payload.numel)
        decode_into(segment.payload, values, fixed.STORE)
        if draw is not None:
            noise = torch.randn(values.shape, generator=draw)
            values = noise * (values.norm() / noise.norm().clamp_min(1e-12))
        payload, _ = Fp32().encode(values * factor, {}, 0)
        found.append(Segment.at(segment.intervals, payload) if values.numel() else segment)
    return replace(push, segments=tuple(found))


def train(
    strategy: str,
    aggregator: str | None,
    seed: int,
    steps: int,
    attack: Attack,
    share: float = 0.75,
    *,
    shards: str = "iid",
    batch: int = 96,
    seen: list[Directions] | None = None,
) -> Result:
    """A run in which the hostile site sends what the attack makes of its updates; `share` is the guard's.

    Args:
        strategy: the strategy.
        aggregator: its aggregator; None: its own.
        seed: of the run.
        steps: of each site.
        attack: what the hostile site does.
        share: the `share` of the guard.
        shards: of the data.
        batch: of all sites together.
        seen: gets how the pushes lie to each other.
    """
    part = "" if aggregator is None else f', aggregator: "{aggregator}"'
    chosen = f"{{name: {strategy}{part}}}"
    text = RECIPE.format(seed=seed, steps=steps, strategy=chosen, shards=shards, batch=batch)
    recipe = Recipe.parse(text, "poison.yaml")
    task = Training(recipe)
    with tempfile.TemporaryDirectory() as folder, EventLog(Path(folder) / "events.jsonl") as events:
        simulator = Simulator(simulation_plan(recipe, task), task, events)
        simulator.server.coordinator.checks.guard = Guard(share=share)
        receive = simulator.server.receive
        if seen is not None:
            seen.append(Directions(simulator.server.global_model.vector.numel()))

        def receive_changed(message: Message, now: float) -> Outbox:
            if isinstance(message, Push) and message.site == HOSTILE and attack != HONEST:
                message = attack.change(message)
            if isinstance(message, Push) and seen is not None:
                seen[-1].take(message)
            return receive(message, now)

        simulator.server.receive = receive_changed  # type: ignore[method-assign]
        simulator.run()
        models = [site.state.model for site in simulator.sites if site.place.name != HOSTILE]
        models.append(simulator.server.global_model.vector)
        finite = simulator.status == "finished" and all(bool(one.isfinite().all()) for one in models)
        accuracy = simulator.evaluate().global_model if finite else math.nan
    return Result(accuracy, finite)


def measured(strategy: str, aggregator: str | None, given: argparse.Namespace, attack: Attack) -> tuple[float, bool]:
    """The mean accuracy over the seeds, in percent, and whether all ended finite."""
    found = [train(strategy, aggregator, seed, given.steps, attack, given.most_share) for seed in range(given.seeds)]
    return 100 * statistics.mean(one.accuracy for one in found), all(one.finite for one in found)


def aggregators(given: argparse.Namespace) -> ResultTable:
    """Every aggregator, with and without one attack."""
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
    for strategy, aggregator in [row for row in ROWS if (given.only or "") in row[0]]:
        honest, _ = measured(strategy, aggregator, given, HONEST)
        attacked, finite = measured(strategy, aggregator, given, Attack(given.factor))
        row: Row = {"strategy": strategy, "aggregator": aggregator or "its own", "finite": _said(finite)}
        row |= {"honest": honest, "attacked": None if math.isnan(attacked) else attacked}
        table.rows.append(row)
        print(table.cells(row), file=sys.stderr, flush=True)
    return table


def attacks(given: argparse.Namespace) -> ResultTable:
    """Every attack on every strategy with its own aggregator."""
    names = [name for name, own in ROWS if own is None and (given.only or "") in name]
    table = ResultTable(
        "attacks",
        "One of three sites sends wrong updates",
        f"Test accuracy of the global model on digits after {given.steps} steps, mean of {given.seeds} seeds. "
        + measured_on(),
        [("attack", "attack", "{}"), *((name, name, "{:.1f}") for name in names), ("finite", "finite", "{}")],
    )
    for what, attack in [one for one in {"none": HONEST, **ATTACKS}.items() if (given.attack or "") in one[0]]:
        found = {name: measured(name, None, given, attack) for name in names}
        row: Row = {"attack": what, "finite": _said(all(finite for _, finite in found.values()))}
        row |= {name: None if math.isnan(accuracy) else accuracy for name, (accuracy, _) in found.items()}
        table.rows.append(row)
        print(table.cells(row), file=sys.stderr, flush=True)
    return table


def directions(given: argparse.Namespace) -> ResultTable:
    """Who is opposed to the others: honest sites with similar and with different data, and a hostile one."""
    table = ResultTable(
        "directions",
        "The cosine of each site's pushes with the sum of the others'",
        f"Of {given.only or 'baseline'} on digits, {given.steps} steps, one seed: of single rounds in each quarter of "
        "the run (mean), and of sums of 25 rounds (least to most). " + measured_on(),
        [("run", "run", "{}"), ("site", "site", "{}"), ("rounds", "quarters", "{}"), ("25 rounds", "sums", "{}")],
    )
    runs: list[tuple[str, Attack, str, int]] = [
        ("honest, similar data", HONEST, "iid", 96),
        ("honest, different data", HONEST, "{dirichlet: 0.1}", 96),
        ("honest, different data, batches of 768", HONEST, "{dirichlet: 0.1}", 768),
        ("mallory times -1.4", Attack(-1.4), "iid", 96),
    ]
    for what, attack, shards, batch in runs:
        seen: list[Directions] = []
        steps = given.steps if batch == 96 else max(30, given.steps * 3 // 10)
        found = train(given.only or "baseline", None, 0, steps, attack, shards=shards, batch=batch, seen=seen)
        for site in ("east", HOSTILE, "west"):
            quarters, sums = seen[0].cosines(site)
            row: Row = {"run": what, "site": site, "finite": _said(found.finite)}
            row["quarters"] = ", ".join(f"{one:.2f}" for one in quarters)
            row["sums"] = f"{min(sums):.2f} to {max(sums):.2f}" if sums else ""
            table.rows.append(row)
            print(table.cells(row), file=sys.stderr, flush=True)
    return table


def _said(finite: bool) -> str:
    return "yes" if finite else "**NO**"


def main() -> None:
    """Run every row with and without the attack, and print the table."""
    parser = argparse.ArgumentParser(description="One of three sites sends wrong updates.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--factor", type=float, default=-5.0)
    parser.add_argument("--most-share", type=float, default=0.75, help="as of `weightgrad serve`")
    parser.add_argument("--only", help="strategies with this in their names")
    parser.add_argument("--attacks", action="store_true", help="more attacks, the strategies' own aggregators")
    parser.add_argument("--directions", action="store_true", help="how pushes lie to each other")
    parser.add_argument("--attack", help="attacks with this in their names")
    parser.add_argument("--quick", action="store_true", help="40 steps and one seed: whether it works at all")
    given = parser.parse_args()
    if given.quick:
        given.steps, given.seeds = 40, 1
    torch.set_num_threads(1)
    chosen = directions if given.directions else attacks if given.attacks else aggregators
    table = chosen(given)
    print(table.markdown())
    sys.exit(any(row["finite"] != "yes" for row in table.rows))


if __name__ == "__main__":
    main()
