"""Memory that training across sites adds: of a site, above its plain training loop, and of the global server.

Two numbers: what is counted, the bytes of all tensors and buffers (`weightgrad/lab/bench/allocations.py`), and resident
memory, which also has what the allocator keeps for later.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployment import memory_formula
from deployment.server_process import Serve, memory, popen, recipe_of, worker
from result_table import ResultTable, Row, parameters

from weightgrad.lab.bench.allocations import Allocations, counted

MODULE = "deployment.memory_process"
PHASES = ("join", "train", "leave")
COLUMNS = [
    ("strategy", "strategy", "{}"),
    ("optimizer", "optimizer", "{}"),
    ("parameters", "shown", "{}"),
    ("ranks", "ranks", "{:d}"),
    ("site: kept", "site_kept", "{:.2f}"),
    ("peak", "site_peak", "{:.2f}"),
    ("peak RSS", "site_rss", "{:.2f}"),
    ("server: kept", "server_kept", "{:.2f}"),
    ("peak", "server_peak", "{:.2f}"),
    ("peak RSS", "server_rss", "{:.2f}"),
    ("a push", "push", "{:.3f}"),
]
OTHERS = [
    ("torchft, DiLoCo", "4 on the host and 4 on the GPU"),
    ("Prime (OpenDiLoCo)", "12 on the host, none on the GPU"),
]


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    numels: tuple[int, ...] = (16_000_000, 64_000_000, 256_000_000)
    strategies: tuple[str, ...] = ("auto", "diloco", "weightgrad", "baseline")
    ranks: tuple[int, ...] = (1,)
    steps: int = 22


QUICK = Plan(numels=(1_000_000, 2_000_000), strategies=("auto",), steps=6)


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        strategy: A preset.
        numel: About how many parameters.
        sites: How many sites.
        ranks: Of each site.
        sharded: Whether FSDP2 shards the model over the ranks; otherwise each has all of it.
        optimizer: "sgd" (with momentum) or "adamw".
        steps: Of each site.
        state: Whether the server has a state directory.
        pause: Seconds between steps, so that sites that do not wait are not ahead of the server.
        join: Further arguments of `weightgrad.join`.
    """

    strategy: str
    numel: int
    sites: int = 1
    ranks: int = 1
    sharded: bool = False
    optimizer: str = "sgd"
    steps: int = 22
    state: bool = True
    pause: float = 0.05
    join: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Party:
    """The memory of one site, over all its ranks, or of the server, in bytes.

    Attributes:
        kept: What is counted at the end of a step; of a site the most at any, of the server the median.
        peaks: The peak of what is counted in each phase.
        rss: The peak of resident memory.
    """

    kept: int
    peaks: dict[str, int]
    rss: int

    @property
    def peak(self) -> int:
        """The highest peak of all phases."""
        return max(self.peaks.values())


@dataclass(frozen=True)
class Memory:
    """What was measured in one run.

    Attributes:
        parameters: Of the model.
        sites: What each site has beyond its plain loop.
        server: What the server has beyond what it had when it listened.
        push: Bytes of a site's push, on average.
        held: The tensors and buffers of rank 0 of the first site, by the paths to them.
    """

    parameters: int
    sites: list[Party]
    server: Party
    push: float
    held: dict[str, int]


def run(case: Run) -> Memory:
    """Start a server and its sites, let them train, and read what they measured."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        counting = counted(directory)
        before = dict(os.environ)
        os.environ.update(counting)  # of the processes that are started here
        try:
            found = _run(case, directory)
        finally:
            for key in counting:
                os.environ.pop(key)
            os.environ.update({key: before[key] for key in counting if key in before})
    return found


def _run(case: Run, directory: Path) -> Memory:
    recipe = recipe_of(case.sites, {"name": case.strategy})
    with Serve(directory, recipe, secure=False, state=case.state) as server:
        idle = {"rss": memory(server.pid), "counted": Allocations(directory, server.pid).now}
        for number in range(1, case.sites + 1):
            settings: Row = {
                "address": server.address,
                "site": f"site-{number}",
                "out": str(directory),
                "join": case.join,
            }
            settings |= {"server_pid": server.pid, "leads": number == 1, "numel": case.numel, "steps": case.steps}
            settings |= {"sharded": case.sharded, "optimizer": case.optimizer, "pause": case.pause}
            server.processes.start(f"site-{number}", worker(MODULE, case.ranks, settings), popen)
        for number in range(1, case.sites + 1):
            server.wait(f"site-{number}")
    every = [
        [json.loads((directory / f"site-{number}-{rank}.json").read_text()) for rank in range(case.ranks)]
        for number in range(1, case.sites + 1)
    ]
    first = every[0][0]
    return Memory(
        parameters=first["parameters"],
        sites=[_site(ranks) for ranks in every],
        server=_server(first, idle),
        push=statistics.mean(sum(rank["push_bytes"] for rank in ranks) for ranks in every),
        held=first["held"],
    )


def _site(ranks: list[Row]) -> Party:
    def kept(rank: Row) -> int:
        return int(max(one["counted"] for one in rank["kept"]) - rank["plain"]["counted"])

    def peak(rank: Row, phase: str, what: str) -> int:
        return int(rank["peaks"][phase][what] - rank["plain_peak"][what])

    peaks = {phase: sum(peak(rank, phase, "counted") for rank in ranks) for phase in PHASES}
    rss = max(sum(peak(rank, phase, "rss") for rank in ranks) for phase in PHASES)
    return Party(sum(kept(rank) for rank in ranks), peaks, rss)


def _server(first: Row, idle: Row) -> Party:
    kept = statistics.median(one["counted"] for one in first["server_kept"]) - idle["counted"]
    peaks = {phase: int(first["server_peaks"][phase]["counted"] - idle["counted"]) for phase in PHASES}
    rss = max(int(first["server_peaks"][phase]["rss"] - idle["rss"]) for phase in PHASES)
    return Party(int(kept), peaks, rss)


def measure(plan: Plan, report: Callable[[str], None]) -> list[ResultTable]:
    """Measure all sizes, say what the memory of the largest consists of, and what larger models would take."""
    table = ResultTable(
        "memory",
        "Memory beyond the plain training loop, in bytes a parameter",
        "One site and a global server, both with everything in float32, a state directory at the server. Of a site: "
        "what it has beyond the same loop without WeightGrad, over all its ranks. Kept: tensors and buffers at the end "
        "of a step, the most at any. Peak: the most at any time from `join` to `leave`, in the middle of a round too. "
        "RSS: the peak of resident memory. Of the server: beyond what it had when it listened; the global model, 4 "
        "bytes, is in it. Encoded pushes and results are in all of it.",
        COLUMNS,
    )
    made = ResultTable(
        "memory-parts",
        "What a site keeps, in bytes a parameter",
        "Tensors and buffers that can be reached from the site after its last step, without the user's own, each once; "
        "of the largest model.",
        [("strategy", "strategy", "{}"), ("what", "what", "{}"), ("bytes a parameter", "bytes", "{:.2f}")],
    )
    for strategy in plan.strategies:
        for ranks in plan.ranks:
            for numel in plan.numels:
                report(f"memory: {strategy}, {parameters(numel)}, {ranks} rank(s)")
                optimizer = "adamw" if strategy == "baseline" else "sgd"
                case = Run(strategy, numel, ranks=ranks, sharded=ranks > 1, optimizer=optimizer, steps=plan.steps)
                found = run(case)
                table.rows.append(row_of(case, found))
                if numel == max(plan.numels) and ranks == plan.ranks[0]:
                    made.rows += [
                        {"strategy": strategy, "what": f"`{name}`", "bytes": size / found.parameters}
                        for name, size in found.held.items()
                    ]
    table.notes += [f"Beside it, a parameter, of a site: {name}: {text}." for name, text in OTHERS]
    return [table, made, *memory_formula.tables(table.rows)]


def row_of(case: Run, found: Memory) -> Row:
    """A row of the table."""
    each, site = found.parameters, found.sites[0]
    return {
        "strategy": case.strategy,
        "optimizer": case.optimizer,
        "shown": parameters(round(each, -5)),
        "numel": each,
        "ranks": case.ranks,
        "site_kept": site.kept / each,
        "site_peak": site.peak / each,
        "site_rss": site.rss / each,
        "server_kept": found.server.kept / each,
        "server_peak": found.server.peak / each,
        "server_rss": found.server.rss / each,
        "push": found.push / each,
        "phases": {"site": site.peaks, "server": found.server.peaks},
    }
