"""What `prepare` adds to a step: a plain and a prepared copy of a model take steps in turn, in one process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployment.server_process import Serve, popen, recipe_of, worker
from result_table import ResultTable, Row, parameters

MODULE = "deployment.overhead_process"
COLUMNS = [
    ("model", "model", "{}"),
    ("parameters", "shown", "{}"),
    ("optimizer", "optimizer", "{}"),
    ("strategy", "strategy", "{}"),
    ("plain ms", "plain_ms", "{:.1f}"),
    ("between rounds", "between", "{:.3f}"),
    ("95 %", "between_interval", "{}"),
    ("with rounds", "with_rounds", "{:.3f}"),
    ("of ten steps", "ratio", "{:.3f}"),
    ("95 %", "interval", "{}"),
    ("CPU with rounds", "cpu_with_rounds", "{:.3f}"),
    ("push ms", "push_ms", "{:.1f}"),
    ("result ms", "result_ms", "{:.1f}"),
    ("waiting ms", "waiting_ms", "{:.1f}"),
    ("steps", "steps", "{:d}"),
    ("rounds", "rounds", "{:d}"),
]


@dataclass(frozen=True)
class Subject:
    """A model, its batch and its optimizer."""

    model: str
    batch: int
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"


MLP = Subject("mlp", 128, {"width": 1024})
GPT = Subject("gpt", 4, {"width": 512, "layers": 8, "heads": 8}, "adamw")


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    alone: tuple[Subject, ...] = (MLP, GPT)
    ddp: tuple[Subject, ...] = (MLP,)
    fsdp: tuple[Subject, ...] = (GPT,)
    strategies: tuple[str, ...] = ("auto", "diloco", "weightgrad", "baseline")
    gpt_strategies: tuple[str, ...] = ("auto",)  # its steps take seconds
    seconds: float = 40.0
    blocks: int = 8  # at least
    warm: int = 30  # steps


QUICK = Plan(
    (Subject("mlp", 32, {"width": 256}),),
    (),
    (Subject("gpt", 2, {"width": 64, "layers": 2, "heads": 2}, "adamw"),),
    ("auto",),
    seconds=0.5,
    blocks=2,
    warm=10,
)


def measure(plan: Plan, report: Callable[[str], None]) -> list[ResultTable]:
    """Measure one process against plain PyTorch, and two ranks against DDP and FSDP2, in a table each."""
    return [
        _table(plan, name, reference, subjects, ranks, report)
        for name, reference, subjects, ranks in (
            ("alone", "plain PyTorch", plan.alone, 1),
            ("ddp", "DDP over Gloo, 2 ranks", plan.ddp, 2),
            ("fsdp2", "FSDP2 over Gloo, 2 ranks", plan.fsdp, 2),
        )
        if subjects
    ]


def _table(
    plan: Plan, name: str, reference: str, subjects: tuple[Subject, ...], ranks: int, report: Callable[[str], None]
) -> ResultTable:
    table = ResultTable(
        f"overhead-{name}",
        f"Step time against {reference}",
        "One site and a server on the same machine, without TLS, one thread in each process; two copies of the model, "
        "a step of one and a step of the other in turn. Between rounds: the median ratio of steps in which no round "
        "starts or ends, with a bootstrap interval. With rounds: what all steps take, by the medians of steps without "
        "a round, with a push and with a result, as often as they came. Of ten steps: the median ratio of ten steps "
        "of each, with everything in it that disturbed them. CPU with rounds: as with rounds, but of the processor "
        "time of the training thread alone, which other programs on the machine change little. Push and result: what "
        "a step with one takes more. The site is told that the round trip is 80 ms: without distance `auto` would "
        "exchange everything. Where a site is one process, its training has a core to itself, and the server and the "
        "connections have the others. Waiting: what a prepared step spends, on average, on results of the server, "
        "over a network that costs nothing.",
        COLUMNS,
    )
    for subject in subjects:
        for strategy in plan.gpt_strategies if subject.model == "gpt" else plan.strategies:
            report(f"overhead: {subject.model}, {strategy}, {reference}")
            table.rows.append(_row(plan, subject, strategy, ranks, sharded=name == "fsdp2"))
    return table


def _row(plan: Plan, subject: Subject, strategy: str, ranks: int, *, sharded: bool) -> Row:
    cores = sorted(os.sched_getaffinity(0))
    alone = ranks == 1 and len(cores) > 1
    with tempfile.TemporaryDirectory() as name, _on(cores[1:] if alone else cores):
        with Serve(Path(name), recipe_of(1, {"name": strategy}), secure=False) as server:
            settings = {"address": server.address, "model": subject.model, "batch": subject.batch, "warm": plan.warm}
            settings |= {"options": subject.options, "seconds": plan.seconds, "blocks": plan.blocks}
            settings |= {"optimizer": subject.optimizer, "sharded": sharded, "out": f"{name}/times.json"}
            settings["core"] = cores[0] if alone else None
            server.processes.start("site", worker(MODULE, ranks, settings), popen)
            server.wait("site")
        found = json.loads(Path(name, "times.json").read_text())
    times, kinds, block = found["times"], found["kinds"], found["block"]
    sums = [[sum(side) for side in zip(*times[at : at + block], strict=True)] for at in range(0, len(times), block)]
    ratios = [ours / plain for plain, ours in sums]
    low, high = bootstrap(ratios)
    row: Row = {
        "model": subject.model,
        "batch": subject.batch,
        "optimizer": subject.optimizer,
        "shown": parameters(round(found["parameters"], -4)),
        "parameters": found["parameters"],
        "strategy": strategy,
        "ranks": ranks,
        "ratio": statistics.median(ratios),
        "interval": f"{low:.3f} to {high:.3f}",
        "waiting_ms": 1000 * found["waited"] / len(times),
        "steps": len(times),
        "rounds": sum(pushed for pushed, _ in kinds),
    }
    row["cpu_with_rounds"] = _by_kind(found["cpu"], kinds)["with_rounds"]
    return row | _by_kind(times, kinds)


@contextlib.contextmanager
def _on(cores: list[int]) -> Iterator[None]:
    """Run on these cores, with all processes that are started meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _by_kind(times: list[tuple[float, float]], kinds: list[tuple[bool, bool]]) -> Row:
    """Compare steps without a round, with a push, with a result, and with both."""
    plain = statistics.median(one for one, _ in times)
    groups: dict[tuple[bool, bool], list[float]] = {}
    for (one, ours), (pushed, moved) in zip(times, kinds, strict=True):
        groups.setdefault((pushed, moved), []).append(ours / one)
    middles = {kind: statistics.median(ratios) for kind, ratios in groups.items()}
    ordinary = groups.get((False, False), [])
    base = middles.get((False, False), 1.0)
    row: Row = {
        "plain_ms": 1000 * plain,
        "with_rounds": sum(middles[kind] * len(ratios) for kind, ratios in groups.items()) / len(times),
        "push_ms": 1000 * plain * (middles[True, False] - base) if (True, False) in middles else None,
        "result_ms": 1000 * plain * (middles[False, True] - base) if (False, True) in middles else None,
        "between": statistics.median(ordinary) if ordinary else None,
        "between_interval": None,
    }
    if ordinary:
        low, high = bootstrap(ordinary)
        row["between_interval"] = f"{low:.3f} to {high:.3f}"
    return row


def bootstrap(values: list[float], times: int = 4000) -> tuple[float, float]:
    """The interval that holds 95 % of the medians of samples drawn from the values."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(times))
    return medians[int(0.025 * times)], medians[int(0.975 * times) - 1]
