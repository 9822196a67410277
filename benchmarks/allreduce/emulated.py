"""The emulated half of the table: ranks that exchange data over emulated links, compared with the formula.

Every method is measured at every size and number of ranks, and the median of several repeats counts. The number of
delays that a method waits for is measured separately, with a tiny vector over long links. A run that the emulator does
not trust is shown with a mark, counts in no claim and is not cached, so that the same command measures it again.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from allreduce import hosts as hosts
from allreduce.cost import ALL_TO_ALL, DOUBLING, RING, compute_seconds, formula_delays, network_seconds, vector_bytes
from result_table import MeasurementCache, Row

from weightgrad.lab.emulate.network import Network
from weightgrad.lab.sim.local_network import LocalNetwork

PLAIN = (RING, DOUBLING, ALL_TO_ALL)
TINY = 0  # in place of a side: a vector so small, over links so long, that only delays count
TINY_NUMEL, TINY_REPEATS, LONG_S = 1024, 2, 0.1
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
Cell = tuple[str, int]  # method and side


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is emulated.

    Attributes:
        sides: Sides of the matrices.
        workers: Numbers of ranks.
        codecs: The codecs.
        mbit_s: The rate of the network card of a rank.
        delay_us: The delay of a link in one direction.
        repeats: Measured allreduces of each kind.
    """

    sides: tuple[int, ...]
    workers: tuple[int, ...]
    codecs: tuple[str, ...]
    mbit_s: int
    delay_us: int
    repeats: int

    @property
    def lan(self) -> LocalNetwork:
        """The network as the formula sees it."""
        return LocalNetwork(self.mbit_s * 1e6, self.delay_us / 1e6)

    def methods(self, workers: int) -> list[str]:
        """The methods for so many ranks, in the order of the table."""
        doubles = workers & (workers - 1) == 0
        return [RING, *([DOUBLING] if doubles else []), ALL_TO_ALL, *self.codecs]

    def cells(self, workers: int) -> list[Cell]:
        """What is measured with so many ranks. Delays are measured with one codec, as they are the same for all."""
        methods = self.methods(workers)
        tiny = [method for method in methods if method not in self.codecs[1:]]
        return [*((method, side) for side in self.sides for method in methods), *((one, TINY) for one in tiny)]

    def link_bit_s(self, method: str, workers: int) -> float:
        """The rate of a link: that of the card, or 1/(n-1) of it if the method uses all links at once."""
        return self.mbit_s * 1e6 / (1 if method in (RING, DOUBLING) else workers - 1)

    def burst_seconds(self, method: str, workers: int) -> float:
        """The unshaped first burst of an idle link, as the seconds that it would have taken."""
        link = hosts.link(("a", "b"), self.link_bit_s(method, workers), self.lan.delay_seconds)
        return 8 * link.burst_bytes("a") / link.bandwidth_bit_s

    def name(self, method: str, side: int, workers: int) -> str:
        """The name of a measurement in the cache."""
        return f"emulated {method} {side} {workers} {self.mbit_s} Mbit/s {self.delay_us} us {self.repeats}"


@dataclass
class Found:
    """What was measured and what failed; `refused` says why nothing could be measured."""

    rows: list[Row] = field(default_factory=list)
    delays: dict[tuple[str, int], float] = field(default_factory=dict)  # by method and ranks
    failures: list[str] = field(default_factory=list)
    refused: str | None = None

    def delays_rows(self) -> list[Row]:
        """The delays for the JSON file."""
        return [{"codec": one, "workers": workers, "delays": d} for (one, workers), d in self.delays.items()]


Cost = Callable[[int, int], list[Row]]  # of a rank, for every method, by side and workers


def measure(setup: Setup, cache: MeasurementCache, cost: Cost, logs: Path) -> Found:
    """Measure what is not in the cache, and compare everything with the formula."""
    found = Found(refused=hosts.refusal())
    if found.refused is not None:
        return found
    for workers in setup.workers:
        cells = setup.cells(workers)
        known = {cell: cache.known(setup.name(*cell, workers)) for cell in cells}
        rows = {cell: row for cell, row in known.items() if row is not None}
        campaign = _Campaign(setup, workers, logs / f"ranks-{workers}", cache, rows, found.failures)
        campaign.run([cell for cell in cells if cell not in rows])
        found.delays |= {
            (method, workers): min(rows[method, side]["clock"]) / LONG_S for method, side in rows if not side
        }
        costs = {(one["codec"], side): one for side in setup.sides for one in cost(side, workers)}
        for method, side in (cell for cell in cells if cell in rows and cell[1] != TINY):
            base = costs.get((method, side)) or {**costs[RING, side], "codec": method}
            waits = found.delays.get((method if method in PLAIN else setup.codecs[0], workers))
            found.rows.append(evaluated(setup, {**base, "measured": rows[method, side]}, waits))
    for row in found.rows:
        row |= _beside_fp32(found.rows, row)
    return found


@dataclass
class _Campaign:
    """All measurements with so many ranks, in the same processes unless one fails."""

    setup: Setup
    workers: int
    logs: Path
    cache: MeasurementCache
    rows: dict[Cell, Row]
    failures: list[str]

    def run(self, todo: list[Cell]) -> None:
        """Measure the cells in the order of their link rates; after a failure go on with a new network."""
        todo = sorted(todo, key=lambda cell: (-self._rate(cell), cell[1] == TINY))
        while todo:
            ready = False
            try:
                with (
                    hosts.network(self.workers, self._rate(todo[0]), self._delay(todo[0])) as wan,
                    hosts.Ranks(wan, self.logs) as ranks,
                ):
                    ready = True
                    self._measure(wan, ranks, todo)
            except Exception as error:  # the other cells are still measured
                what = f"{todo[0][0]} at {todo[0][1]}²" if ready else "all"
                said = f"{type(error).__name__}: {error}".replace("\n", " ")
                self.failures.append(f"Emulated, {self.workers} ranks, {what}: {said}")
                del todo[: 1 if ready else None]

    def _rate(self, cell: Cell) -> float:
        return self.setup.link_bit_s(cell[0], self.workers)

    def _delay(self, cell: Cell) -> float:
        return LONG_S if cell[1] == TINY else self.setup.lan.delay_seconds

    def _measure(self, wan: Network, ranks: hosts.Ranks, todo: list[Cell]) -> None:
        links, checked = (0.0, 0.0), Row()
        while todo:
            (method, side), wanted = todo[0], (self._rate(todo[0]), self._delay(todo[0]))
            if wanted != links:
                hosts.set_links(wan, *wanted)
                links, checked = wanted, {} if side == TINY else _check(wan)
            size = (TINY_NUMEL, TINY_REPEATS) if side == TINY else (side**2, self.setup.repeats)
            row = {**ranks.measure(method, *size), **checked}
            said = f"{statistics.median(row['clock']):.3f} s, {'' if row['trusted'] else 'NOT '}trusted"
            what = f"{side} x {side}" if side else "delays"
            print(f"{method}, {what}, {self.workers} ranks: {said}", file=sys.stderr, flush=True)
            self.rows[todo.pop(0)] = row
            if row["trusted"]:
                self.cache.keep(self.setup.name(method, side, self.workers), row)


def _check(wan: Network) -> Row:
    """Let the emulator measure its links before they are used."""
    print(f"checking {len(wan.links)} links", file=sys.stderr, flush=True)
    found = wan.check()
    return {
        "rate_error": max(abs(one.rate_error) for one in found),
        "round_trip_error": max(abs(one.round_trip_error_s) for one in found),
    }


def evaluated(setup: Setup, row: Row, delays: float | None) -> Row:
    """The row with medians and two predictions: the formula, and the formula for the cores and network used here."""
    measured, workers = row["measured"], row["workers"]
    clock = statistics.median(measured["clock"])
    formula = network_seconds(row, setup.lan) + compute_seconds(row)
    carried = network_seconds(row, LocalNetwork(setup.lan.bandwidth_bit_s, 0.0))
    carried -= min(carried, setup.burst_seconds(row["codec"], workers))
    waits = formula_delays(row) if delays is None else round(delays)
    here = carried + waits * setup.lan.delay_seconds + compute_seconds(row) * max(1.0, workers / CORES)
    sent = statistics.median(measured["line_bytes"]) / workers
    plain = 2 * (workers - 1) / workers * 4 * row["side"] ** 2
    frames = 2 * (workers - 1) / workers * vector_bytes(row, workers) if "sent_bytes" in row else None
    coded = row["codec"] not in PLAIN
    return {
        **row,
        "clock": clock,
        "least": min(measured["clock"]),
        "most": max(measured["clock"]),
        "sent_mb": sent / 1e6,
        "fewer": plain / sent,
        "frames_mb": frames / 1e6 if frames else None,  # what the formula uses
        "codec_s": statistics.median(measured["codec"]) if coded else None,
        "codec_clock": statistics.median(measured["codec_clock"]) if coded else None,
        "processor": statistics.median(measured["processor"]),
        "formula": formula,
        "off": clock / formula,
        "here": here,
        "off_here": clock / here,
        "same": "yes" if measured["same"] else "no",
        "trusted": measured["trusted"],
    }


def _beside_fp32(rows: Sequence[Row], row: Row) -> Row:
    """The speedup over the faster of ring and doubling at the same size and ranks, and whether all runs are trusted."""
    place = (row["side"], row["workers"])
    plain = [r for r in rows if r["codec"] in (RING, DOUBLING) and (r["side"], r["workers"]) == place]
    best = min((float(r["clock"]) for r in plain), default=math.nan)  # nan if both have failed
    return {"times": best / row["clock"], "fair": bool(plain) and all(r["trusted"] for r in (row, *plain))}
