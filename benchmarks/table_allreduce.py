"""Dryden et al. (2016), the synthetic allreduce: fp32 against one-bit, adaptive and QSGD, up to 16384² and 128 workers.

    python benchmarks/table_allreduce.py --quick
    python benchmarks/table_allreduce.py                       # about 14 minutes; 6 GB of memory

The whole work of one rank is measured at every size and number of workers: `QuantizedAllreduce` encodes the matrix in
as many chunks as there are ranks, decodes and adds that many chunks, encodes their mean and decodes all means. The
network is a formula. Sizes and ranks that fit on this machine are then emulated (allreduce/emulated.py) and compared
with the same formula; this needs an otherwise idle machine.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

from allreduce import emulated as emulated
from allreduce import report as report
from allreduce.cost import COLUMNS, DOUBLING, RING, add_seconds, exchange, rank_cost, seconds, vector_bytes
from result_table import MeasurementCache, ResultTable, Row, short
from tables import Claim, Document, Options, main, number

CODECS = (
    *("onebit()", "adaptive(pi=16)", "adaptive(pi=64)", "adaptive(pi=256)"),
    *(f"onebit(){COLUMNS}", f"adaptive(pi=64){COLUMNS}"),
    *("qsgd(bits=2)", "qsgd(bits=4)", "qsgd(bits=8)"),
)
PAPER_SPEEDUP = 10.9  # of the exchange, at the largest scale


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes, ranks, codecs and networks."""

    sides: tuple[int, ...] = (1024, 4096, 16384)
    workers: tuple[int, ...] = (2, 8, 32, 128)
    codecs: tuple[str, ...] = CODECS
    networks_gbit_s: tuple[int, ...] = (1, 10, 40)
    repeats: int = number(2, "repeats of each measurement, of which the best counts")
    exact_side: int = number(1024, "side of the matrix all ranks really exchange")
    exact_workers: int = number(8, "and how many ranks do")
    exact_steps: int = number(10, "and how often")
    emulated_sides: tuple[int, ...] = (512, 1024)
    emulated_workers: tuple[int, ...] = (2, 4, 8)
    emulated_mbit_s: int = number(20, "Mbit/s of an emulated rank's card")
    emulated_delay_us: int = number(1000, "microseconds one way between two emulated ranks")
    emulated_repeats: int = number(3, "emulated allreduces of each kind")

    @property
    def emulated(self) -> emulated.Setup:
        """The setup of the emulated half."""
        return emulated.Setup(
            sides=self.emulated_sides,
            workers=self.emulated_workers,
            codecs=self.codecs,
            mbit_s=self.emulated_mbit_s,
            delay_us=self.emulated_delay_us,
            repeats=self.emulated_repeats,
        )


QUICK = Plan(
    sides=(128, 512),
    workers=(2, 16),
    repeats=1,
    exact_side=128,
    exact_workers=4,
    exact_steps=3,
    emulated_sides=(128,),
    emulated_workers=(2,),
    emulated_repeats=1,
)


def ranks(plan: Plan, cache: MeasurementCache, side: int, workers: int) -> list[Row]:
    """The cost of every method for one of so many ranks."""
    add = cache.get(f"add {side} {plan.repeats}", functools.partial(_add, side, plan.repeats))
    place = {"side": side, "workers": workers, **add}
    rows: list[Row] = [{**place, "codec": name} for name in (RING, DOUBLING)]
    for spec in plan.codecs:
        print(f"{spec}, {side} x {side}, {workers} workers", file=sys.stderr, flush=True)
        how = functools.partial(rank_cost, spec, side**2, workers, plan.repeats)
        rows.append({**place, "codec": spec, **cache.get(f"{spec} {side} {workers} {plan.repeats}", how)})
    return rows


def measure(plan: Plan, cache: MeasurementCache) -> list[Row]:
    """Every method at every size and number of workers."""
    rows = [row for side in plan.sides for workers in plan.workers for row in ranks(plan, cache, side, workers)]
    for row in rows:
        row |= {f"seconds_{speed}": seconds(row, speed) for speed in plan.networks_gbit_s}
    for row in rows:
        row |= {
            f"speedup_{speed}": _plain(rows, row, speed) / row[f"seconds_{speed}"] for speed in plan.networks_gbit_s
        }
    return rows


def _add(side: int, repeats: int) -> Row:
    return {"add": add_seconds(side**2, repeats)}


def _plain(rows: list[Row], like: Row, speed: int) -> float:
    """Seconds of the faster method with fp32, at the same size and number of workers."""
    place = (like["side"], like["workers"])
    plain = (r for r in rows if r["codec"] in (RING, DOUBLING) and (r["side"], r["workers"]) == place)
    return min(float(r[f"seconds_{speed}"]) for r in plain)


def by_network(plan: Plan, rows: list[Row]) -> ResultTable:
    """The largest matrix and the most workers, on every network."""
    side, workers = max(plan.sides), max(plan.workers)
    table = ResultTable(
        "network",
        f"{side}² on {workers} workers",
        "Seconds of one allreduce, and how many times as fast as the better of the two in fp32.",
        [
            *(("", "codec", "{}"), ("MB a vector", "mb", "{:.4g}")),
            *(("fewer bytes", "ratio", "{:.3g}"), ("codec s", "seconds", "{:.3g}")),
        ],
        notes=[f"All {len(rows)} combinations are in the JSON file."],
    )
    for speed in plan.networks_gbit_s:
        table.columns += [
            (f"s at {speed} Gbit/s", f"seconds_{speed}", "{:.3g}"),
            ("times", f"speedup_{speed}", "{:.2f}"),
        ]
    for row in rows:
        if (row["side"], row["workers"]) == (side, workers):
            nbytes = vector_bytes(row, workers) if "sent_bytes" in row else 4 * side**2
            table.rows.append({**row, "mb": nbytes / 1e6, "ratio": 4 * side**2 / nbytes})
    return table


def by_place(plan: Plan, rows: list[Row]) -> list[ResultTable]:
    """The largest matrix by workers, the most workers by size, on the network in the middle."""
    side, workers = max(plan.sides), max(plan.workers)
    speed = sorted(plan.networks_gbit_s)[len(plan.networks_gbit_s) // 2]
    by = {(r["side"], r["workers"], r["codec"]): r for r in rows}
    about = f"At {speed} Gbit/s: seconds, and in brackets how many times as fast as the better one in fp32."
    made = []
    for key, title, places in (
        ("workers", f"{side}² by workers", {f"{w} workers": (side, w) for w in plan.workers}),
        ("sizes", f"{workers} workers by size", {f"{s}²": (s, workers) for s in plan.sides}),
    ):
        table = ResultTable(key, title, about, [("", "codec", "{}"), *((heading, heading, "{}") for heading in places)])
        for name in (RING, DOUBLING, *plan.codecs):
            found = {heading: by[place[0], place[1], name] for heading, place in places.items()}
            cells = {h: f"{short(r[f'seconds_{speed}'])} ({r[f'speedup_{speed}']:.2f})" for h, r in found.items()}
            table.rows.append({"codec": name, **cells})
        made.append(table)
    return made


def exact(plan: Plan) -> ResultTable:
    """All ranks exchange their data in one process."""
    table = ResultTable(
        "exact",
        "All ranks exchanging, in one process",
        f"{plan.exact_workers} ranks with {plan.exact_side}² elements each, {plan.exact_steps} times, normal noise: "
        "the hardest case, as nothing in it is smooth or sparse. Errors are relative (L2): of the first mean, and of "
        "the sum of all means, which error feedback brings down.",
        [
            *(("", "codec", "{}"), ("same bits on all ranks", "same", "{}"), ("fewer bytes", "ratio", "{:.3g}")),
            *(("error, once", "first", "{:.3f}"), ("error, sum", "sum", "{:.3f}")),
        ],
    )
    for spec in ("fp32", *plan.codecs):
        table.rows.append(exchange(spec, plan.exact_side**2, plan.exact_workers, plan.exact_steps))
    return table


def claims(plan: Plan, rows: list[Row], real: list[Row]) -> list[Claim]:
    """The claims of Dryden et al."""
    place = (max(plan.sides), max(plan.workers))
    largest = {r["codec"]: r for r in rows if (r["side"], r["workers"]) == place and r["codec"] in plan.codecs}
    made = []
    for speed in plan.networks_gbit_s:
        order = sorted(largest, key=lambda name: -float(largest[name][f"speedup_{speed}"]))
        times = {name: float(largest[name][f"speedup_{speed}"]) for name in order}
        adaptive = next((name for name in order if name.startswith("adaptive")), order[0])
        what = f"Adaptive quantization is {PAPER_SPEEDUP} times as fast as fp32 at the largest scale; {speed} Gbit/s."
        said = f"{adaptive}: {times[adaptive]:.2f} times; the fastest is {order[0]} with {times[order[0]]:.2f}."
        made.append(Claim(what, times[adaptive] >= PAPER_SPEEDUP, said))
        coded = [r for r in rows if r["codec"] in plan.codecs]
        slow = [r for r in coded if r[f"speedup_{speed}"] < 1]
        where = "; ".join(f"{r['codec']} at {r['side']}² on {r['workers']}" for r in slow[:6])
        what = f"Every codec is faster than fp32, at every size and number of workers; {speed} Gbit/s."
        made.append(Claim(what, not slow, f"Slower in {len(slow)} of {len(coded)} cases{': ' if slow else ''}{where}."))
    same = [row for row in real if row["same"] == "yes"]
    made.append(Claim("All ranks end with the same bits.", len(same) == len(real), f"{len(same)} of {len(real)}."))
    kept = [row for row in real if row["feedback"]]
    nearer = [row for row in kept if row["sum"] < row["first"]]
    what = "What error feedback holds back comes later: the sum of all means is nearer than the first mean."
    return [*made, Claim(what, len(nearer) == len(kept), f"{len(nearer)} of the {len(kept)} codecs that have it.")]


def rests_on(plan: Plan) -> list[str]:
    """Sizes and repeats, here and in the paper."""
    sides, workers = ", ".join(f"{s}²" for s in plan.sides), ", ".join(map(str, plan.workers))
    return [
        f"Here: matrices of {sides} normal numbers; {workers} workers; best of {plan.repeats} on one thread. QSGD's "
        "way there has no error feedback, its way back has, as in `QuantizedAllreduce`.",
        f"The paper: up to 16384² on up to 128 nodes; {PAPER_SPEEDUP} times at the largest scale. Our notes of it have "
        "neither its number of repeats nor its network.",
    ]


MEASURED = [
    "Measured: the seconds under “codec s” (processor time of one rank's `encode_chunks`, `reduce`, `gather` over "
    "the whole matrix, one thread), the bytes of real frames, the additions of fp32 (one pass, counted as often as "
    "the algorithm makes it), and the whole exchange of the table in one process, all ranks with data of their own.",
    "Modelled: the network, by `LocalNetwork` of the simulator at the given bit rate and 20 µs one way: a ring of "
    "2(n-1) steps for fp32 and for the codecs, log2 n steps with the whole vector for recursive doubling. Codec and "
    "network come one after the other, nothing overlaps, there is no congestion, and no two processes exchange data.",
    "For one rank's cost the chunks of the others are its own: alike in distribution and in bytes, not the same "
    "numbers. Chunks are vectors, so one-bit and adaptive have a pair of means for each 32,768 elements; with "
    "“columns” a chunk is whole columns of the matrix and has a pair for each of them, as Dryden has.",
]


def make(plan: Plan, options: Options) -> Document:
    """Measure what is missing, and make the document."""
    cache = MeasurementCache(options.runs / options.name / "measured.json")
    rows = measure(plan, cache)
    real = exact(plan)
    setup = plan.emulated
    found = emulated.measure(setup, cache, functools.partial(ranks, plan, cache), options.runs / options.name)
    return Document(
        title="Dryden's synthetic allreduce",
        rests_on=[*rests_on(plan), report.rests_on(setup)],
        tables=[by_network(plan, rows), *by_place(plan, rows), real, *report.tables(setup, found)],
        claims=[*claims(plan, rows, real.rows), *report.claims(setup, found)],
        measured=[*MEASURED, *report.MEASURED],
        failures=found.failures,
        numbers={"all": rows, "emulated": found.rows, "delays": found.delays_rows()},
    )


if __name__ == "__main__":
    main(Plan(), QUICK, __doc__ or "", make)
