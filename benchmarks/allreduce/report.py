"""The emulated half of the table as a document: tables, claims, and how they were measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from allreduce.cost import ALL_TO_ALL, DOUBLING, RING, formula_delays
from allreduce.emulated import CORES, LONG_S, PLAIN, TINY_NUMEL, TINY_REPEATS, Found, Setup
from result_table import ResultTable, Row, short
from tables import Claim

NEAR = 0.25  # a formula within this relative error counts as right


def tables(setup: Setup, found: Found) -> list[ResultTable]:
    """One table with all numbers of the largest size, one with all sizes in short, and one with the delays."""
    if found.refused is not None:
        about = "Real processes on hosts of their own need network namespaces."
        why = {"why": f"Nothing was measured: {found.refused}"}
        return [ResultTable("emulated", "Emulated", about, [("", "why", "{}")], [why])]
    side, workers = max(setup.sides), max(setup.workers)
    largest = ResultTable(
        "emulated",
        f"Emulated: {side}² on {workers} ranks",
        f"{workers} processes on {CORES} cores, each on a host with a card of {setup.mbit_s} Mbit/s, "
        f"{setup.delay_us / 1000:g} ms one way. Seconds of the clock from the common start to the last rank's end: "
        f"median, least and most of {setup.repeats}.",
        [
            *(("", "name", "{}"), ("MB a rank sent", "sent_mb", "{:.4g}"), ("fewer bytes", "fewer", "{:.3g}")),
            *(("s", "clock", "{:.3g}"), ("least", "least", "{:.3g}"), ("most", "most", "{:.3g}")),
            *(("times", "times", "{:.2f}"), ("codec s", "codec_s", "{:.3g}")),
            *(("codec s by the clock", "codec_clock", "{:.3g}"), ("formula s", "formula", "{:.3g}")),
            *(("emulated / formula", "off", "{:.2f}"), ("formula s, as here", "here", "{:.3g}")),
            *(("emulated / that", "off_here", "{:.2f}"), ("same bits", "same", "{}")),
        ],
        [_named(row) for row in found.rows if (row["side"], row["workers"]) == (side, workers)],
        notes=_notes(found),
    )
    return [largest, _in_short(setup, found), _delays(setup, found)]


def _in_short(setup: Setup, found: Found) -> ResultTable:
    places = {f"{side}² on {workers}": (side, workers) for side in setup.sides for workers in setup.workers}
    about = "Seconds; in brackets emulated / formula, and emulated / formula as here."
    columns = [("", "codec", "{}"), *((heading, heading, "{}") for heading in places)]
    table = ResultTable("emulated-places", "Emulated, by size and ranks", about, columns, notes=_notes(found)[:1])
    by = {(row["side"], row["workers"], row["codec"]): row for row in found.rows}
    for method in (*PLAIN, *setup.codecs):
        cells: Row = {"codec": method}
        for heading, place in places.items():
            if (row := by.get((*place, method))) is not None:
                mark = "" if row["trusted"] else " \\*"
                cells[heading] = f"{short(row['clock'])} ({row['off']:.2f}, {row['off_here']:.2f}){mark}"
        table.rows.append(cells)
    return table


def _delays(setup: Setup, found: Found) -> ResultTable:
    about = (
        f"How many delays a method waits for, one after the other: the least time of {TINY_REPEATS} for "
        f"{TINY_NUMEL} elements over links of {LONG_S:g} s one way, in such delays; in brackets what the formula has."
    )
    columns = [("", "codec", "{}"), *((f"{workers} ranks", str(workers), "{}") for workers in setup.workers)]
    table = ResultTable("delays", "Emulated: delays", about, columns)
    for method, name in (*zip(PLAIN, PLAIN, strict=True), (setup.codecs[0], "all codecs")):
        row: Row = {"codec": name}
        for workers in setup.workers:
            if (waits := found.delays.get((method, workers))) is not None:
                counted = formula_delays({"codec": method, "workers": workers, "side": 1})
                row[str(workers)] = f"{waits:.1f} ({counted})"
        table.rows.append(row)
    return table


def _named(row: Row) -> Row:
    return {**row, "name": row["codec"] + ("" if row["trusted"] else " \\*")}


def _notes(found: Found) -> list[str]:
    doubted = [row for row in found.rows if not row["trusted"]]
    why = "; ".join(dict.fromkeys(row["measured"]["verdict"] for row in doubted[:3]))
    marks = f"\\* the emulator does not trust {len(doubted)} of {len(found.rows)} runs, e.g.: {why}." if doubted else ""
    rates = [row["measured"]["rate_error"] for row in found.rows]
    trips = [row["measured"]["round_trip_error"] for row in found.rows]
    checked = f"Before the runs all links were measured: rates within {100 * max(rates, default=0):.1f} %, round trips "
    return [
        marks or f"The emulator trusts all {len(found.rows)} runs.",
        f"{checked}within {1000 * max(trips, default=0):.2f} ms.",
    ]


def claims(setup: Setup, found: Found) -> list[Claim]:
    """Whether the emulated runs confirm what was modelled."""
    rows = [row for row in found.rows if row["trusted"]]
    coded = [row for row in rows if row["codec"] in setup.codecs]
    network = f"{setup.mbit_s} Mbit/s, emulated"
    what = f"Every codec is faster than fp32, at every size and number of ranks; {network}."
    fair = [row for row in coded if row["fair"]]
    slow = [f"{row['codec']} at {row['side']}² on {row['workers']}" for row in fair if row["times"] < 1]
    span = [f"{pick(row['times'] for row in fair):.2f}" for pick in (min, max)] if fair else []
    said = f"{' to '.join(span)} times as fast; slower in {len(slow)} of {len(fair)} cases"
    made = [_claim(found, fair, what, not slow, f"{said}{': ' if slow else ''}{'; '.join(slow[:6])}.")]
    same = [row for row in found.rows if row["same"] == "yes"]
    what = "All ranks end with the same bits, as processes over TCP."
    made.append(_claim(found, found.rows, what, same == found.rows, f"{len(same)} of {len(found.rows)} cases."))
    for kind, some, key in (
        ("Of fp32 by ring and doubling", [row for row in rows if row["codec"] in (RING, DOUBLING)], "off"),
        ("Of fp32 all-to-all", [row for row in rows if row["codec"] == ALL_TO_ALL], "off"),
        ("Of codecs", coded, "off"),
        ("Of codecs, with the cores and the network of here,", coded, "off_here"),
    ):
        near = [row for row in some if 1 / (1 + NEAR) <= row[key] <= 1 + NEAR]
        reach = [f"{pick(row[key] for row in some):.2f}" for pick in (min, statistics.median, max)] if some else []
        said = f"{len(near)} of {len(some)} cases; emulated / formula: least, median, most {', '.join(reach)}."
        what = f"{kind} the formula is right within {NEAR:.0%}; {network}."
        made.append(_claim(found, some, what, len(near) == len(some), said))
    return made


def _claim(found: Found, fair: Sequence[Row], what: str, holds: bool, said: str) -> Claim:
    """A claim that stays open if nothing was measured."""
    if fair:
        return Claim(what, holds, said)
    why = "no run that the emulator trusts" if found.refused is None else "this machine refuses network namespaces"
    return Claim(what, None, f"Not measured: {why}.")


def rests_on(setup: Setup) -> str:
    """The sizes and repeats."""
    sides, workers = ", ".join(f"{s}²" for s in setup.sides), ", ".join(map(str, setup.workers))
    return (
        f"Emulated: matrices of {sides}; {workers} ranks, one process each, on {CORES} cores; cards of "
        f"{setup.mbit_s} Mbit/s, {setup.delay_us / 1000:g} ms one way; median of {setup.repeats} after a first that "
        "is not counted."
    )


MEASURED = [
    "Emulated: every rank is a process in its own network namespace. It does what `LocalStep` does with a gradient "
    "(`encode_chunks`, `deal`, `reduce`, `exchange`, `gather`, with frames and checksums) over Gloo and the kernel's "
    "TCP, with new normal numbers each time. Ring is Gloo's own `all_reduce`, which DDP uses; doubling is made of its "
    "sends and receives; “all-to-all” is `SiteGroup.mean`: the way of a codec without the codec. All ranks begin at "
    "one time of the machine's clock. Bytes are those of the gateways' queues, with headers and acknowledgements, over "
    "all ranks, divided by their number; “fewer” compares them with the 2(n-1)/n of fp32 that a ring must send, "
    "without headers. Bits are compared after every allreduce.",
    "The emulator shapes links pair by pair: a host has no card that its links would share. So a card is divided among "
    "the peers to which a method sends at once: ring and doubling have all of it on each link, all-to-all has 1/(n-1) "
    "of it on each of the n-1. A TCP stream gets the given rate. An idle link lets its first 15 kB through unshaped.",
    "The formula is that of the tables above, with this bit rate and delay, and the codec seconds of one rank alone. "
    "“As here” is the same formula with the conditions of the emulation: ranks share the cores, so while n of them "
    "encode on c cores, each takes n/c times as long by the clock; delays are as many as were measured; and the first "
    "15 kB of a link take no time. “Codec s” is the processor time of a rank, with frames. Gloo's threads, the "
    "kernel's TCP and the emulator's switch use these cores as well, and are in no formula.",
]
