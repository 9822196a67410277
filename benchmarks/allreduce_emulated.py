"""The emulated half of the table: ranks that really speak to each other, beside what the formula says of them.

Every method at every size and number of ranks, medians of several repeats. How many delays a method waits for, one
after the other, is measured apart: by next to nothing over links that are long. What the emulator does not trust is
shown, marked, in no claim, and not kept: the same command measures it again.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import allreduce_hosts as hosts
from allreduce_formula import DEALT, DOUBLING, RING, compute_seconds, formula_delays, network_seconds
from allreduce_ranks import Notebook, vector_bytes
from field_sheet import Row

from weightgrad.emulate.network import Network
from weightgrad.sim.lan import Lan

PLAIN = (RING, DOUBLING, DEALT)
TINY = 0  # in place of a side: so few elements, over links so long, that delays are all there is
TINY_NUMEL, TINY_REPEATS, LONG_S = 1024, 2, 0.1
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
Cell = tuple[str, int]  # method and side


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is emulated."""

    sides: tuple[int, ...]
    workers: tuple[int, ...]
    codecs: tuple[str, ...]
    mbit_s: int
    delay_us: int
    repeats: int

    @property
    def lan(self) -> Lan:
        """As the formula has it."""
        return Lan(self.mbit_s * 1e6, self.delay_us / 1e6)

    def methods(self, workers: int) -> list[str]:
        """In the order of the table."""
        doubles = workers & (workers - 1) == 0
        return [RING, *([DOUBLING] if doubles else []), DEALT, *self.codecs]

    def cells(self, workers: int) -> list[Cell]:
        """What is measured with so many ranks; a codec's way is that of the others."""
        methods = self.methods(workers)
        tiny = [method for method in methods if method not in self.codecs[1:]]
        return [*((method, side) for side in self.sides for method in methods), *((one, TINY) for one in tiny)]

    def link_bit_s(self, method: str, workers: int) -> float:
        """What this method's share of the card is on a link: all, or 1/(n-1) where all links are used at once."""
        return self.mbit_s * 1e6 / (1 if method in (RING, DOUBLING) else workers - 1)

    def burst_seconds(self, method: str, workers: int) -> float:
        """What a link that has rested lets through at once, by the time it would have taken."""
        link = hosts.link(("a", "b"), self.link_bit_s(method, workers), self.lan.delay_seconds)
        return 8 * link.burst_bytes("a") / link.bandwidth_bit_s

    def name(self, method: str, side: int, workers: int) -> str:
        """In the notebook."""
        return f"emulated {method} {side} {workers} {self.mbit_s} Mbit/s {self.delay_us} us {self.repeats}"


@dataclass
class Found:
    """What was measured, what failed, and why there is nothing if there is nothing."""

    rows: list[Row] = field(default_factory=list)
    delays: dict[tuple[str, int], float] = field(default_factory=dict)  # by method and ranks
    failures: list[str] = field(default_factory=list)
    refused: str | None = None

    def delays_rows(self) -> list[Row]:
        """For JSON."""
        return [{"codec": one, "workers": workers, "delays": d} for (one, workers), d in self.delays.items()]


Cost = Callable[[int, int], list[Row]]  # of a rank, for every method, by side and workers


def measure(setup: Setup, notebook: Notebook, cost: Cost, logs: Path) -> Found:
    """Everything that is not in the notebook, and what the formula says to it."""
    found = Found(refused=hosts.refusal())
    if found.refused is not None:
        return found
    for workers in setup.workers:
        cells = setup.cells(workers)
        known = {cell: notebook.known(setup.name(*cell, workers)) for cell in cells}
        rows = {cell: row for cell, row in known.items() if row is not None}
        campaign = _Campaign(setup, workers, logs / f"ranks-{workers}", notebook, rows, found.failures)
        campaign.run([cell for cell in cells if cell not in rows])
        found.delays |= {
            (method, workers): min(rows[method, side]["clock"]) / LONG_S for method, side in rows if not side
        }
        costs = {(one["codec"], side): one for side in setup.sides for one in cost(side, workers)}
        for method, side in (cell for cell in cells if cell in rows and cell[1] != TINY):
            base = costs.get((method, side)) or {**costs[RING, side], "codec": method}
            waits = found.delays.get((method if method in PLAIN else setup.codecs[0], workers))
            found.rows.append(judged(setup, {**base, "measured": rows[method, side]}, waits))
    for row in found.rows:
        row |= _beside_fp32(found.rows, row)
    return found


@dataclass
class _Campaign:
    """All that is measured with so many ranks, by the same processes unless one fails."""

    setup: Setup
    workers: int
    logs: Path
    notebook: Notebook
    rows: dict[Cell, Row]
    failures: list[str]

    def run(self, todo: list[Cell]) -> None:
        """Links of one rate after the other; after a failure, the rest on a new network."""
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
            except Exception as error:  # whatever it is, the other cells are wanted all the same
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
                self.notebook.keep(self.setup.name(method, side, self.workers), row)


def _check(wan: Network) -> Row:
    """What the emulator measures of its links before they are used."""
    print(f"checking {len(wan.links)} links", file=sys.stderr, flush=True)
    found = wan.check()
    return {
        "rate_error": max(abs(one.rate_error) for one in found),
        "round_trip_error": max(abs(one.round_trip_error_s) for one in found),
    }


def judged(setup: Setup, row: Row, delays: float | None) -> Row:
    """With medians, and with both predictions: as in the large table, and with the cores and the network of here."""
    measured, workers = row["measured"], row["workers"]
    clock = statistics.median(measured["clock"])
    formula = network_seconds(row, setup.lan) + compute_seconds(row)
    carried = network_seconds(row, Lan(setup.lan.bandwidth_bit_s, 0.0))
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
        "frames_mb": frames / 1e6 if frames else None,  # what the formula counts with
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
    """How many times as fast as the better of ring and doubling at the same place, and whether all that is trusted."""
    place = (row["side"], row["workers"])
    plain = [r for r in rows if r["codec"] in (RING, DOUBLING) and (r["side"], r["workers"]) == place]
    best = min((float(r["clock"]) for r in plain), default=math.nan)  # where both have failed
    return {"times": best / row["clock"], "fair": bool(plain) and all(r["trusted"] for r in (row, *plain))}
