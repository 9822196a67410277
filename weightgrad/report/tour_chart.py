"""The chart of the tour: accuracy against bits for each element.

plotly draws it with fixed colors and a fixed size, so that labels can be placed here where they do
not overlap; a few lines of JavaScript make it follow the reader's light or dark setting.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import NamedTuple

from weightgrad.report.tour import GradientRow, Tour
from weightgrad.train.digits import require

WIDTH, HEIGHT = 1080, 600
_MARGIN = {"l": 70, "r": 30, "t": 20, "b": 60}
_LETTER, _LINE = 6.2, 15  # pixels of the label font
_LOWEST = 0.08  # below the baseline by more than this: drawn at the lower edge


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: _Box) -> float:
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return wide * high if wide > 0 and high > 0 else 0.0


def _around(x: float, y: float, wide: float, high: float) -> _Box:
    return _Box(x - wide / 2, y - high / 2, x + wide / 2, y + high / 2)


@dataclass(frozen=True)
class _Axes:
    """Ranges of the chart, and where a point lies in it, in pixels."""

    low_log: float
    high_log: float
    low: float
    high: float

    def at(self, row: GradientRow) -> tuple[float, float]:
        inner_width = WIDTH - _MARGIN["l"] - _MARGIN["r"]
        inner_height = HEIGHT - _MARGIN["t"] - _MARGIN["b"]
        x = (math.log10(row.bits_per_element) - self.low_log) / (self.high_log - self.low_log)
        y = (self.high - self.shown(row)) / (self.high - self.low)
        return x * inner_width, y * inner_height

    def shown(self, row: GradientRow) -> float:
        """Percent, within the chart."""
        return max(100 * row.accuracy, self.low)


def _axes(rows: list[GradientRow]) -> _Axes:
    logs = [math.log10(row.bits_per_element) for row in rows]
    best = max(row.accuracy for row in rows)
    worst = min((row.accuracy for row in rows if row.accuracy >= rows[0].accuracy - _LOWEST), default=best)
    room = max(100 * (best - worst), 1) * 0.15
    return _Axes(min(logs) - 0.12, max(logs) + 0.25, 100 * worst - room, 100 * best + room)


def _offsets(wide: float) -> list[tuple[float, float]]:
    """Where a label's middle may lie, seen from its point: near places first."""

    def gap(place: tuple[float, float]) -> float:
        return math.hypot(max(0, abs(place[0]) - wide / 2), max(0, abs(place[1]) - _LINE / 2))

    beside = [0, wide / 4, wide / 2, wide / 2 + 10, wide / 2 + 24, wide / 2 + 40]
    places = [(sign * dx, float(dy)) for dx in beside for sign in (1, -1) for dy in range(-112, 113, 8)]
    return sorted((place for place in places if gap(place) >= 9), key=gap)


def place_labels(rows: list[GradientRow], axes: _Axes) -> list[tuple[float, float]]:
    """An offset in pixels for each label. Greedy: the first place that is free, or the least crowded one."""
    inside = _Box(0, 0, WIDTH - _MARGIN["l"] - _MARGIN["r"], HEIGHT - _MARGIN["t"] - _MARGIN["b"])
    spots = [axes.at(row) for row in rows]
    taken = [_around(x, y, 16, 16) for x, y in spots]
    chosen = [(0.0, 0.0)] * len(rows)
    for number in sorted(range(len(rows)), key=lambda i: spots[i]):
        x, y = spots[number]
        wide = _LETTER * len(rows[number].codec) + 6
        others = taken[:number] + taken[number + 1 :]
        best: tuple[float, _Box] | None = None
        for dx, dy in _offsets(wide):
            box = _around(x + dx, y + dy, wide, _LINE)
            line = [_around(x + dx * part, y + dy * part, 4, 4) for part in (0.4, 0.6, 0.8)]
            crowd = sum(one.overlap(other) for one in (box, *line) for other in others)
            crowd += wide * _LINE - box.overlap(inside)
            if best is None or crowd < best[0] - 1e-6:
                best, chosen[number] = (crowd, box), (dx, dy)
            if crowd < 1e-6:
                break
        if best is not None:
            taken.append(best[1])
    return chosen


_THEME = """
const chart = document.getElementById('{plot_id}');
const dark = window.matchMedia('(prefers-color-scheme: dark)');
function theme() {
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const change = {'font.color': css('--ink'),
                  'hoverlabel.bgcolor': css('--panel'), 'hoverlabel.font.color': css('--ink')};
  for (const axis of ['xaxis', 'yaxis']) {
    change[axis + '.gridcolor'] = css('--line');
    change[axis + '.linecolor'] = css('--line');
  }
  chart.layout.annotations.forEach((_, i) => {
    change['annotations[' + i + '].font.color'] = css('--ink');
    change['annotations[' + i + '].arrowcolor'] = css('--soft');
  });
  Plotly.update(chart, {'marker.color': [css('--plain'), css('--kept')]}, change, [0, 1]);
}
theme();
dark.addEventListener('change', theme);
"""


def _symbol(below: bool, ring: bool) -> str:
    return ("triangle-down" if below else "circle") + ("-open" if ring else "")


def chart(tour: Tour) -> str:
    """Accuracy against bits for each element, as HTML with plotly's JavaScript inside."""
    require("plotly", "plotly")
    from plotly import graph_objects

    rows = [row for row in tour.gradients if row.bits_per_element > 0]
    axes = _axes(rows)
    figure = graph_objects.Figure()
    for name, feedback in (("no error feedback", False), ("error feedback", True)):
        some = [row for row in rows if row.feedback == feedback]
        figure.add_scatter(
            x=[row.bits_per_element for row in some],
            y=[axes.shown(row) for row in some],
            mode="markers",
            name=name,
            # Rings, so that a codec shows inside the one with error feedback around it.
            marker={
                "size": 14 if feedback else 8,
                "symbol": [_symbol(100 * row.accuracy < axes.low, feedback) for row in some],
                "line": {"width": 2.5 if feedback else 0},
            },
            customdata=[[row.codec, 100 * row.accuracy, row.times_smaller] for row in some],
            hovertemplate="<b>%{customdata[0]}</b><br>%{x:.3f} bits each, %{customdata[2]:.1f} times smaller"
            "<br>%{customdata[1]:.2f} % of the test images<extra></extra>",
        )
    for row, (dx, dy) in zip(rows, place_labels(rows, axes), strict=True):
        figure.add_annotation(
            x=math.log10(row.bits_per_element),
            y=axes.shown(row),
            text=html.escape(row.codec),
            ax=dx,
            ay=dy,
            arrowwidth=0.8,
            arrowhead=0,
            standoff=8,
            font={"size": 11},
        )
    ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4, 8, 16, 32]
    figure.update_layout(
        width=WIDTH,
        height=HEIGHT,
        margin=_MARGIN,
        font={"family": "system-ui, sans-serif", "size": 13},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        template="none",
        legend={"x": 0.99, "y": 0.02, "xanchor": "right", "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
        xaxis={
            "type": "log",
            "range": [axes.low_log, axes.high_log],
            "title": {"text": "bits per element on the wire (log scale)"},
            "tickvals": ticks,
            "ticktext": [f"{tick:g}" for tick in ticks],
            "zeroline": False,
        },
        yaxis={
            "range": [axes.low, axes.high],
            "title": {"text": "test accuracy, %"},
            "zeroline": False,
        },
    )
    made: str = figure.to_html(
        full_html=False, include_plotlyjs=True, config={"displayModeBar": False}, post_script=_THEME
    )
    return made
