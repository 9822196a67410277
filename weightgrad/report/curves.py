"""Accuracy against virtual time as an SVG file: one line a strategy, time on a log scale, names at their ends.

With several seeds a line is their mean, evaluation by evaluation as far as all of them go, in a band from the least to
the greatest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple, TypeAlias

from weightgrad.report.comparison import BASELINE, foremost, is_ours
from weightgrad.report.page_charts import accuracy
from weightgrad.report.runs import Run

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 420, 56, 150, 48, 48
_LETTER = 7.6  # of a name, on average
_COLORS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999933")
_OURS, _PLAIN = "#d55e00", "#777777"
_DASHED = ' stroke-dasharray="5 4"'
_DASHES = ("", ' stroke-dasharray="2 3"', ' stroke-dasharray="8 3"')
NAME_GAP = 14  # between two names, one above the other
_CORNERS = str.maketrans("", "", "ML")  # of a path, to make it a polygon
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #222; }
  .title { font-size: 16px; font-weight: 600; }
  .quiet { fill: #777; } .grid { stroke: #ddd; }
  path { fill: none; }
  @media (prefers-color-scheme: dark) { text { fill: #e6e6e6; } .quiet { fill: #999; } .grid { stroke: #444; } }
"""


def draw(groups: Mapping[str, Sequence[Run]], *, title: str) -> str:
    """All seeds of every strategy; empty when nothing was evaluated."""
    lines = {name: _line(runs) for name, runs in groups.items()}
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return ""
    times = [point.t for points in lines.values() for point in points]
    heights = [a for points in lines.values() for point in points for a in (point.least, point.greatest)]
    first, last = math.log10(min(times)), math.log10(max(times))
    low, high = math.floor(min(heights) / 5) * 5, math.ceil(max(heights) / 5) * 5

    def x(t: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log10(t) - first) / max(last - first, 1e-9)

    def y(percent: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (percent - low) / max(high - low, 1e-9)

    longest = max(len(name) for name in lines)
    width = max(_WIDTH, _WIDTH - _RIGHT + 12 + math.ceil(_LETTER * longest))  # long names need more room
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text class="title" x="8" y="22">{escape(title)}</text>',
    ]
    for percent in range(low, high + 1, 5 if high - low <= 40 else 10):
        at = f"{y(percent):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="quiet" x="{_LEFT - 8}" y="{at}" dy="4" text-anchor="end">{percent} %</text>')
    for t in _ticks(min(times), max(times)):
        parts.append(
            f'<text class="quiet" x="{x(t):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{t:g} s</text>'
        )
    seeds = max(len(runs) for runs in groups.values())
    several = f"; mean of {seeds} seeds, in a band from the least to the greatest" if seeds > 1 else ""
    parts.append(f'<text class="quiet" x="{_LEFT}" y="{_HEIGHT - 8}">virtual time, log scale{several}</text>')
    parts += _drawn(lines, x, y)
    return "\n".join([*parts, "</svg>", ""])


class Point(NamedTuple):
    """An evaluation, over the seeds."""

    t: float
    accuracy: float
    least: float
    greatest: float


def _line(runs: Sequence[Run]) -> list[Point]:
    found = accuracy(runs)
    line = []
    for t, mean, low, high in zip(*(found[key] for key in ("time", "mean", "low", "high")), strict=True):
        if t is not None and t > 0 and mean is not None and low is not None and high is not None:
            line.append(Point(t, mean, low, high))
    return line


def _ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 3) if high / low > 30 else (1, 2, 5)
    return [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]


Scale: TypeAlias = Callable[[float], float]


def _path(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    return " ".join(f"{'L' if i else 'M'}{x(t):.1f} {y(a):.1f}" for i, (t, a) in enumerate(points))


def apart(heights: Sequence[float], gap: float, bottom: float) -> list[float]:
    """Ascending heights moved as little down as keeps them so far apart, and up again where they pass the bottom."""
    places: list[float] = []
    for height in heights:
        places.append(max(height, places[-1] + gap) if places else height)
    for place in reversed(range(len(places))):
        places[place] = min(places[place], bottom)
        bottom = places[place] - gap
    return places


def _drawn(lines: Mapping[str, list[Point]], x: Scale, y: Scale) -> list[str]:
    """The lines, and their names at the right without overlap."""
    parts, names, first = [], [], foremost(lines)
    known = {BASELINE: (_DASHED, _PLAIN), first: ("", _OURS)}
    others = itertools.cycle(itertools.product(_DASHES, _COLORS))  # the same colors again, in other dashes
    for name, points in lines.items():
        ours, (dash, color) = is_ours(name), known.get(name) or next(others)
        if any(point.least < point.greatest for point in points):
            around = [(p.t, p.greatest) for p in points] + [(p.t, p.least) for p in reversed(points)]
            parts.append(f'<polygon points="{_path(around, x, y).translate(_CORNERS)}" fill="{color}" opacity="0.15"/>')
        path = _path([(p.t, p.accuracy) for p in points], x, y)
        parts.append(f'<path d="{path}" stroke="{color}" stroke-width="{3.2 if ours else 1.6}"{dash}/>')
        names.append((y(points[-1].accuracy), x(points[-1].t), name, color, ours))
    names.sort()
    places = apart([height for height, *_ in names], NAME_GAP, _HEIGHT - _BOTTOM)
    for above, (height, end, name, color, ours) in zip(places, names, strict=True):
        weight = ' font-weight="700"' if ours else ""
        edge = _WIDTH - _RIGHT + 6
        lead = f'x1="{end:.1f}" y1="{height:.1f}" x2="{edge}" y2="{above:.1f}"'
        parts.append(f'<line stroke="{color}" {lead} opacity="0.35"/>')
        parts.append(f'<text x="{edge + 4}" y="{above + 4:.1f}" style="fill:{color}"{weight}>{escape(name)}</text>')
    return parts
