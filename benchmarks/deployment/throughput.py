"""Throughput of a global server: sites on loopback with mutual TLS send pushes that were encoded beforehand."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from deployment import clients
from deployment.server_process import Serve, peak_memory, recipe_of
from result_table import ResultTable, Row, parameters
from server_cost import pass_seconds

CODECS = ("qsgd(bits=4)", "ef(topk(0.01))")
COLUMNS = [
    ("codec", "codec", "{}"),
    ("parameters", "shown", "{}"),
    ("sites", "sites", "{:d}"),
    ("rounds/s", "rounds_s", "{:.3g}"),
    ("updates/s", "updates_s", "{:.3g}"),
    ("MB/s encoded", "encoded_mb_s", "{:.3g}"),
    ("GB/s decoded", "decoded_gb_s", "{:.3g}"),
    ("server CPU %", "cpu_percent", "{:.0f}"),
    ("CPU ms an update", "cpu_ms", "{:.3g}"),
    ("passes", "passes", "{:.2f}"),
    ("disk / pushes", "disk_ratio", "{:.2f}"),
    ("peak RSS MB", "peak_mb", "{:.0f}"),
    ("of it since it listened", "grown_mb", "{:.0f}"),
]


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    sites: tuple[int, ...] = (1, 2, 8, 32)
    numels: tuple[int, ...] = (1_000_000, 10_000_000, 64_000_000)
    codecs: tuple[str, ...] = CODECS
    states: tuple[bool, ...] = (True,)
    seconds: float = 2.0
    warm: int = 3
    most_bytes: int = 1_000_000_000  # of all sites' pushes together


QUICK = Plan(sites=(1, 3), numels=(200_000,), codecs=CODECS[:1], states=(True,), seconds=0.3)


def measure(plan: Plan, report: Callable[[str], None]) -> list[ResultTable]:
    """One table for each way to keep state: without a state directory, and with one."""
    return [_table(plan, state, report) for state in plan.states]


def _table(plan: Plan, state: bool, report: Callable[[str], None]) -> ResultTable:
    how = "with `--state` (every round is on disk before its result is sent)" if state else "without `--state`"
    table = ResultTable(
        "throughput-state" if state else "throughput",
        f"Throughput of a global server, {how.split(' (')[0]}",
        f"`weightgrad serve` {how}, in its own process with one thread for the kernels; sites on loopback, mutual TLS, "
        "four connections each for updates, synchronous rounds of updates that were encoded beforehand. The strategy "
        "is diloco with every=1, mean, and the codec in both directions; the guard is on, so every update is decoded "
        "twice. Sites share the machine's cores with the server. Encoded: what sites send; decoded: the float32 "
        "values of it. A pass is `Tensor.copy_` of as many float32 values. Disk: what the server writes to files over "
        "the bytes of the pushes.",
        COLUMNS,
    )
    for numel in plan.numels:
        for codec in plan.codecs:
            for sites in plan.sites:
                if sites * numel > 2 * plan.most_bytes:  # at 4 bits
                    continue
                report(f"throughput: {codec}, {parameters(numel)}, {sites} sites, {'with' if state else 'no'} state")
                table.rows.append(_row(plan, sites, numel, codec, state))
    table.notes += _growth(table.rows)
    return table


def _row(plan: Plan, sites: int, numel: int, codec: str, state: bool) -> Row:
    strategy = {"name": "diloco", "every": 1, "up": codec, "down": codec, "aggregator": "mean"}
    recipe = recipe_of(sites, strategy)
    names = [site.name for site in recipe.site_list]
    count = min(sites, os.cpu_count() or 1)  # processes that play the sites
    groups = [tuple(names[start::count]) for start in range(count)]
    with (
        tempfile.TemporaryDirectory() as directory,
        Serve(Path(directory), recipe, secure=True, state=state) as server,
    ):
        certs = server.certificates
        assert certs is not None
        loads = [
            clients.Load(server.address, certs, group, names[0], numel, codec, plan.warm, plan.seconds)
            for group in groups
        ]
        found = clients.start(loads, [server.pid], multiprocessing.get_context("spawn"))
        peak, rest = peak_memory(server.pid), server.rest_bytes
    updates, cpu = found.rounds * sites, found.cpu[1] - found.cpu[0]
    return {
        "codec": codec,
        "shown": parameters(numel),
        "numel": numel,
        "sites": sites,
        "state": state,
        "rounds": found.rounds,
        "seconds": found.seconds,
        "push_bytes": found.push_bytes,
        "result_bytes": found.result_bytes,
        "rounds_s": found.rounds / found.seconds,
        "updates_s": updates / found.seconds,
        "encoded_mb_s": updates * found.push_bytes / found.seconds / 1e6,
        "decoded_gb_s": updates * numel * 4 / found.seconds / 1e9,
        "cpu_percent": 100 * cpu / found.seconds,
        "cpu_ms": 1000 * cpu / updates,
        "passes": cpu / updates / pass_seconds(numel),
        "disk_ratio": (found.written[1] - found.written[0]) / (updates * found.push_bytes),
        "peak_mb": peak / 1e6,
        "grown_mb": (peak - rest) / 1e6,
    }


def _growth(rows: list[Row]) -> list[str]:
    """For each kind of update, the server memory that one more site costs."""
    notes = []
    for (codec, shown), group in groupby(rows, key=lambda row: (row["codec"], row["shown"])):
        found = list(group)
        few, many = found[0], found[-1]
        if many["sites"] > few["sites"]:
            more = (many["peak_mb"] - few["peak_mb"]) / (many["sites"] - few["sites"])
            notes.append(
                f"{codec}, {shown}: {more:+.2f} MB of memory for each site from {few['sites']} to {many['sites']}; "
                f"an update is {few['push_bytes'] / 1e6:.3g} MB encoded, {4 * few['numel'] / 1e6:.3g} MB decoded."
            )
    return notes
