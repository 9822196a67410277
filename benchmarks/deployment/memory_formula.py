"""What a larger model would take: a line through the two smallest measured models, checked on the others."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from result_table import ResultTable, Row

LARGE = {"7 B": 7_000_000_000, "70 B": 70_000_000_000}
WHAT = {
    "site_peak": "site, counted",
    "site_rss": "site, RSS",
    "server_peak": "server, counted",
    "server_rss": "server, RSS",
}


class Line(NamedTuple):
    """Bytes = slope * parameters + start."""

    slope: float
    start: float

    def at(self, numel: int) -> float:
        """The bytes for a model of so many parameters."""
        return self.slope * numel + self.start

    @staticmethod
    def through(small: tuple[int, float], large: tuple[int, float]) -> Line:
        """The line through two points (parameters, bytes)."""
        slope = (large[1] - small[1]) / (large[0] - small[0])
        return Line(slope, small[1] - slope * small[0])


def tables(rows: Iterable[Row]) -> list[ResultTable]:
    """The formula of each strategy, how well it meets the measured sizes, and what it says of larger ones.

    Args:
        rows: With `strategy`, `ranks`, `numel`, and bytes a parameter under the keys of WHAT.

    Returns:
        One table; none if no strategy was measured at two sizes or more.
    """
    table = ResultTable(
        "memory-formula",
        "Memory of larger models",
        "Peaks beyond the plain loop. Bytes = a x parameters + b, through the two smallest models that were measured; "
        "error: of the formula, for the larger ones that were measured. GB for a whole site, over all its ranks, and "
        "for the global server, over all its processes; the server's grows by a push for each further site.",
        [
            ("strategy", "strategy", "{}"),
            ("what", "what", "{}"),
            ("a", "slope", "{:.2f}"),
            ("b MB", "start_mb", "{:.0f}"),
            ("error %", "errors", "{}"),
            *((f"{name}, GB", name, "{:.0f}") for name in LARGE),
        ],
    )
    for (strategy, _), group in groupby(rows, key=lambda row: (row["strategy"], row["ranks"])):
        found = sorted(group, key=lambda row: int(row["numel"]))
        if len(found) < 2:
            continue
        for key, what in WHAT.items():
            points = [(row["numel"], row[key] * row["numel"]) for row in found]
            line = Line.through(points[0], points[1])
            errors = [100 * (line.at(numel) / size - 1) for numel, size in points[2:]]
            row = {"strategy": strategy, "what": what, "slope": line.slope, "start_mb": line.start / 1e6}
            row["errors"] = ", ".join(f"{error:+.1f}" for error in errors) or "not checked"
            table.rows.append(row | {name: line.at(numel) / 1e9 for name, numel in LARGE.items()})
    return [table] if table.rows else []
