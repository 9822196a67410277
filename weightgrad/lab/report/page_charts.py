"""The data of the report's charts as plain values; `page.js` draws them.

Lines are means over the seeds of a strategy, with a band from the smallest to the largest value. Seeds are averaged
point by point, and so are their steps, times and bytes, so that one line can be drawn against any of the three. Long
runs are thinned out.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from weightgrad.lab.report.comparison import BASELINE, Comparison, highlighted_strategy, is_own_strategy
from weightgrad.lab.report.comparison_table import speedup_text
from weightgrad.lab.report.number_text import bytes_text
from weightgrad.lab.report.runs import Line, Run

POINTS = 400  # of a line at most
LINKS = 8  # shown separately at most
TIME_KINDS = (("compute", "compute_seconds"), ("codec", "codec_seconds"), ("LAN", "lan_seconds"))
WAITING = ("waiting", "waiting_seconds")
_COLORS = 7  # --series-0 and following in page.css
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "triangle-down", "pentagon")
_ENDS = {"cut": "heal", "slow": "heal", "kill": "return", "leave": "join"}

Groups = Mapping[str, Sequence[Run]]


def styles(names: Iterable[str]) -> list[dict[str, Any]]:
    """A color and a marker for each strategy: grey for the baseline, the accent color for the highlighted one."""
    made: list[dict[str, Any]] = []
    names = list(names)
    others = 0
    first = highlighted_strategy(names)
    for place, name in enumerate(names):
        own = is_own_strategy(name)
        dash = "solid"
        if name == BASELINE:
            color, dash = "--neutral", "dash"
        elif name == first:
            color = "--accent"
        else:
            color, dash = f"--series-{others % _COLORS}", _DASHES[others // _COLORS % len(_DASHES)]
            others += 1
        symbol = _SYMBOLS[place % len(_SYMBOLS)]
        made.append({"name": name, "color": color, "dash": dash, "own": own, "symbol": symbol})
    return made


def _finite(value: object) -> float | None:
    """A finite number, or None: a loss that diverged is a gap in its line."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def thin(places: Sequence[int], most: int = POINTS) -> list[int]:
    """At most so many of these, evenly spaced, including the first and the last."""
    if len(places) <= most:
        return list(places)
    return [places[round(k * (len(places) - 1) / (most - 1))] for k in range(most)]


def bytes_at(run: Run, times: Sequence[float]) -> list[float]:
    """WAN bytes sent until these times, interpolated linearly between the evaluations."""
    known = [(0.0, 0.0), *((float(line["t"]), float(line["wan_bytes"])) for line in run.evaluations)]
    known.append((float(run.summary["virtual_seconds"]), float(run.summary["wan_bytes"])))
    known.sort()
    found = []
    for time in times:
        place = bisect.bisect_right(known, (time, math.inf))
        (t0, b0), (t1, b1) = known[place - 1], known[min(place, len(known) - 1)]
        found.append(b0 if t1 <= t0 else b0 + (b1 - b0) * (time - t0) / (t1 - t0))
    return found


class Point(NamedTuple):
    """One point of a line."""

    step: float
    time: float
    bytes: float
    value: float | None


def _accuracy(run: Run) -> list[Point]:
    return [
        Point(line["step"], line["t"], line["wan_bytes"], None if line["accuracy"] is None else 100 * line["accuracy"])
        for line in run.evaluations
    ]


def accuracy(runs: Sequence[Run]) -> dict[str, list[float | None]]:
    """Accuracy in percent over steps, virtual time and bytes: mean, lowest and highest of the seeds."""
    return _line([_accuracy(run) for run in runs])


def _loss(run: Run) -> list[Point]:
    """Training loss, averaged over the sites and over the steps that make one point."""
    steps = sorted({int(line["step"]) for line in run.steps})
    width = max(1, math.ceil(len(steps) / POINTS))
    bins: dict[int, list[Line]] = {}
    for line in run.steps:
        bins.setdefault((int(line["step"]) - steps[0]) // width, []).append(line)
    points = []
    for _, lines in sorted(bins.items()):
        last = max(int(line["step"]) for line in lines)
        time = statistics.fmean(float(line["t"]) for line in lines)
        points.append(Point(last, time, bytes_at(run, [time])[0], _mean(line["loss"] for line in lines)))
    return points


def _mean(values: Iterable[object]) -> float | None:
    known = [value for one in values if (value := _finite(one)) is not None]
    return statistics.fmean(known) if known else None


def _line(seeds: Sequence[Sequence[Point]]) -> dict[str, list[float | None]]:
    """Mean and range over the seeds, point by point, up to the shortest run."""
    made: dict[str, list[float | None]] = {key: [] for key in ("step", "time", "bytes", "mean", "low", "high")}
    seeds = [points for points in seeds if points]
    for place in thin(range(min(map(len, seeds), default=0))):
        points = [seed[place] for seed in seeds]
        values = [value for point in points if (value := _finite(point.value)) is not None]
        made["step"].append(statistics.fmean(point.step for point in points))
        made["time"].append(statistics.fmean(point.time for point in points))
        made["bytes"].append(statistics.fmean(point.bytes for point in points) or None)
        made["mean"].append(_mean(values))
        made["low"].append(min(values, default=None))
        made["high"].append(max(values, default=None))
    return made


def _links(groups: Groups) -> dict[str, Any]:
    """Bytes over each direction of each link; if there are many, over each link, and the least busy together."""
    directed = len({tuple(line["between"]) for runs in groups.values() for run in runs for line in run.links}) <= 4
    sent: dict[str, dict[str, float]] = {}
    for strategy, runs in groups.items():
        sent_by_link = sent.setdefault(strategy, {})
        for run in runs:
            for line in run.links:
                (a, b), (to_a, to_b) = line["between"], line["bytes"]
                named = {f"{b} → {a}": to_a, f"{a} → {b}": to_b} if directed else {f"{a} – {b}": to_a + to_b}  # noqa: RUF001
                for name, count in named.items():
                    sent_by_link[name] = sent_by_link.get(name, 0.0) + count / len(runs)
    names = list(dict.fromkeys(name for sent_by_link in sent.values() for name in sent_by_link))
    if len(names) > LINKS:
        busiest = sorted(names, key=lambda name: -max(sent_by_link.get(name, 0.0) for sent_by_link in sent.values()))[
            : LINKS - 1
        ]
        rest = f"{len(names) - len(busiest)} others"
        for sent_by_link in sent.values():
            sent_by_link[rest] = sum(count for name, count in sent_by_link.items() if name not in busiest)
        names = [*busiest, rest]
    return {
        "names": names,
        "bytes": {strategy: [sent_by_link.get(name, 0.0) for name in names] for strategy, sent_by_link in sent.items()},
        "totals": {
            strategy: bytes_text(sum(sent_by_link.get(n, 0.0) for n in names))
            for strategy, sent_by_link in sent.items()
        },
    }


def _sites(groups: Groups) -> dict[str, Any]:
    """Seconds of each activity, by site and strategy; first the mean of all sites."""
    keys = [key for _, key in (*TIME_KINDS, WAITING)]
    spent: dict[str, dict[str, list[float]]] = {}
    for strategy, runs in groups.items():
        lines = [line for run in runs for line in run.sites]
        names = list(dict.fromkeys(str(line["site"]) for line in lines))
        if len(names) > 1:
            spent.setdefault("mean of all sites", {})[strategy] = _mean_seconds(lines, keys)
        for name in names:
            mine = [line for line in lines if str(line["site"]) == name]
            spent.setdefault(name, {})[strategy] = _mean_seconds(mine, keys)
    return {"kinds": [kind for kind, _ in (*TIME_KINDS, WAITING)], "seconds": spent}


def _mean_seconds(lines: Sequence[Line], keys: Sequence[str]) -> list[float]:
    return [statistics.fmean(_finite(line[key]) or 0.0 for line in lines) for key in keys]


def faults(groups: Groups) -> list[dict[str, Any]]:
    """Begin and end of each fault; the event that ends a fault belongs to it. `to` is None if there is none."""
    events = {
        (float(line["t"]), str(line["what"]), _where(line["where"]))
        for runs in groups.values()
        for line in (runs[0].faults if runs else ())
    }
    found: list[dict[str, Any]] = []
    for time, what, where in sorted(events):
        opened = [f for f in found if f["to"] is None and f["where"] == where and _ENDS.get(f["what"]) == what]
        if opened:
            opened[-1]["to"] = time
        else:
            found.append({"from": time, "to": None, "what": what, "where": where})
    return found


def _where(where: object) -> str:
    return " – ".join(map(str, where)) if isinstance(where, (list, tuple)) else str(where)  # noqa: RUF001


def _rounds(groups: Groups) -> dict[str, list[dict[str, float]]]:
    """The rounds of the first seed; rounds that follow each other closely are one interval."""
    longest = max((float(runs[0].summary["virtual_seconds"]) for runs in groups.values()), default=0.0)
    made = {}
    for strategy, runs in groups.items():
        intervals: list[dict[str, float]] = []
        for time in sorted(float(line["t"]) for line in runs[0].rounds):
            if intervals and time - intervals[-1]["to"] < longest / POINTS:
                intervals[-1]["to"] = time
                intervals[-1]["count"] += 1
            else:
                intervals.append({"from": time, "to": time, "count": 1})
        made[strategy] = intervals
    return made


def charts(groups: Groups, comparison: Comparison) -> dict[str, Any]:
    """All data that `page.js` needs, ready for JSON."""
    names = [row.strategy for row in comparison.rows]
    groups = {name: groups[name] for name in names}
    longest = max((row.virtual_seconds for row in comparison.rows), default=0.0)
    unit, factor = ("s", 1) if longest < 600 else ("min", 60) if longest < 3 * 3600 else ("h", 3600)
    fault_intervals = faults(groups)
    return {
        "strategies": styles(names),
        "reference": comparison.reference,
        "time": {"unit": unit, "seconds": factor},
        "accuracy": {name: accuracy(runs) for name, runs in groups.items()},
        "loss": {name: _line([_loss(run) for run in runs]) for name, runs in groups.items()},
        "speedup": [
            {"strategy": row.strategy, "value": row.speedup_to_accuracy, "text": speedup_text(row)}
            for row in comparison.rows
        ],
        "links": _links(groups),
        "sites": _sites(groups),
        "faults": fault_intervals,
        "rounds": _rounds(groups) if fault_intervals else {},
    }
