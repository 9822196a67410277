"""What `prepare` adds to a step: a plain and a prepared copy of a model take steps in turn, in one process."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployment.server_process import Serve, popen, recipe_of, worker
from result_table import ResultTable, Row, parameters

MODULE = "deployment.overhead_process"
COLUMNS = [
    ("model", "model", "{}"),
    ("batch", "batch", "{:d}"),
    ("parameters", "shown", "{}"),
    ("strategy", "strategy", "{}"),
    ("plain ms", "plain_ms", "{:.1f}"),
    ("prepared ms", "ours_ms", "{:.1f}"),
    ("ratio", "ratio", "{:.3f}"),
    ("95 %", "interval", "{}"),
    ("typical step", "typical", "{:.3f}"),
    ("waiting ms", "waiting_ms", "{:.1f}"),
    ("steps", "steps", "{:d}"),
]


@dataclass(frozen=True)
class Subject:
    """A model and its batch."""

    model: str
    batch: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    subjects: tuple[Subject, ...] = (Subject("cifarnet", 64), Subject("mlp", 128, {"width": 1024}))
    strategies: tuple[str, ...] = ("baseline", "diloco", "weightgrad", "auto")
    ranks: tuple[int, ...] = (1, 2)
    seconds: float = 10.0
    blocks: int = 8  # at least


QUICK = Plan((Subject("mlp", 32, {"width": 256}),), ("baseline", "weightgrad"), seconds=1.0, blocks=4)


def measure(plan: Plan, report: Callable[[str], None]) -> list[ResultTable]:
    """Measure one process against plain PyTorch, and two ranks against DDP, in a table each."""
    return [_table(plan, ranks, report) for ranks in plan.ranks]


def _table(plan: Plan, ranks: int, report: Callable[[str], None]) -> ResultTable:
    reference = "plain PyTorch" if ranks == 1 else f"DDP over Gloo, {ranks} ranks"
    table = ResultTable(
        f"overhead-{ranks}",
        f"Step time against {reference}",
        "One site and a server on the same machine, without TLS, one thread a process; two copies of the model, a step "
        "of one and a step of the other in turn. The ratio is that of ten steps of each, so a round every ten steps is "
        "in it: the median over all tens, with a bootstrap interval of it. A typical step is the median ratio of "
        "single steps. Waiting is what a prepared step spends, on average, on results of the server, which here has "
        "the other cores of the machine, and a network that costs nothing.",
        COLUMNS,
    )
    for subject in plan.subjects:
        for strategy in plan.strategies:
            report(f"overhead: {subject.model}, {strategy}, {ranks} rank(s)")
            table.rows.append(_row(plan, subject, strategy, ranks))
    return table


def _row(plan: Plan, subject: Subject, strategy: str, ranks: int) -> Row:
    with tempfile.TemporaryDirectory() as name:
        with Serve(Path(name), recipe_of(1, {"name": strategy}), secure=False) as server:
            settings = {"address": server.address, "model": subject.model, "batch": subject.batch}
            settings |= {"options": subject.options, "seconds": plan.seconds, "blocks": plan.blocks}
            server.processes.start("site", worker(MODULE, ranks, {**settings, "out": f"{name}/times.json"}), popen)
            server.wait("site")
        found = json.loads(Path(name, "times.json").read_text())
    times, block = found["times"], found["block"]
    sums = [[sum(side) for side in zip(*times[at : at + block], strict=True)] for at in range(0, len(times), block)]
    ratios = [ours / plain for plain, ours in sums]
    low, high = bootstrap(ratios)
    return {
        "model": subject.model,
        "batch": subject.batch,
        "shown": parameters(round(found["parameters"], -4)),
        "parameters": found["parameters"],
        "strategy": strategy,
        "ranks": ranks,
        "plain_ms": 1000 * statistics.median(plain for plain, _ in sums) / block,
        "ours_ms": 1000 * statistics.median(ours for _, ours in sums) / block,
        "ratio": statistics.median(ratios),
        "interval": f"{low:.3f} to {high:.3f}",
        "typical": statistics.median(ours / plain for plain, ours in times),
        "waiting_ms": 1000 * found["waited"] / len(times),
        "steps": len(times),
        "ratios": ratios,
    }


def bootstrap(values: list[float], times: int = 4000) -> tuple[float, float]:
    """The interval that holds 95 % of the medians of samples drawn from the values."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(times))
    return medians[int(0.025 * times)], medians[int(0.975 * times) - 1]
