"""Dots as an SVG file, readable in light and dark: what was reached against what it cost, lines to compare with."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from table_charts import COLORS, OURS, Axis, Frame

from weightgrad.report.curves import apart

FRAME = Frame(900, 440, 64, 170, 48, 48)
_LEFT, _EDGE = FRAME.across
_FLOOR, _TOP = FRAME.up
_LETTER, _LINE = 6.7, 15.0  # of a label: width of a letter, height

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Dot:
    """Where it is, how far up and down it may be, and what stands beside it."""

    x: float
    y: float
    error: float
    label: str


def dots(
    series: Mapping[str, Sequence[Dot]],
    *,
    title: str,
    x: str,
    y: str,
    across: Mapping[str, float],
    upright: Mapping[str, float],
) -> str:
    """One color a name, its dots joined by a line, x on a log scale; marks `across` at heights, `upright` at x."""
    every = [dot for members in series.values() for dot in members]
    if not every:
        return ""
    heights = [*(dot.y + side * dot.error for dot in every for side in (-1, 1)), *across.values()]
    room = 0.06 * ((max(heights) - min(heights)) or 1.0)
    widths = [dot.x for dot in every] + list(upright.values())
    horizontal = Axis([min(widths) / 1.4, max(widths) * 1.4], FRAME.across, log=True)
    vertical = Axis([min(heights) - room, max(heights) + room], FRAME.up, log=False)
    parts = FRAME.drawn(title, f"{x}; up: {y}", horizontal, vertical, "{:,.0f}")
    parts += _marks(across, upright, horizontal, vertical)
    lines: list[Box] = [(_LEFT, vertical.at(value) - 1, _EDGE, vertical.at(value) + 1) for value in across.values()]
    lines += [(horizontal.at(value) - 1, _TOP, horizontal.at(value) + 1, FRAME.height) for value in upright.values()]
    return "\n".join([*parts, *_drawn(series, horizontal, vertical, lines), "</svg>", ""])


def _marks(across: Mapping[str, float], upright: Mapping[str, float], horizontal: Axis, vertical: Axis) -> list[str]:
    parts: list[str] = []
    edge = _EDGE
    dashed = 'stroke="#888" stroke-dasharray="5 4"'
    for name, value in upright.items():
        place = f"{horizontal.at(value):.1f}"
        parts.append(f'<line {dashed} x1="{place}" x2="{place}" y1="{_TOP}" y2="{_FLOOR}"/>')
        parts.append(f'<text class="quiet" x="{place}" y="{_TOP - 6}" text-anchor="middle">{escape(name)}</text>')
    heights = sorted((vertical.at(value), name) for name, value in across.items())
    for above, (at, name) in zip(apart([at for at, _ in heights], _LINE, _FLOOR), heights, strict=True):
        parts.append(f'<line {dashed} x1="{_LEFT}" x2="{edge}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<line stroke="#888" x1="{edge}" x2="{edge + 8}" y1="{at:.1f}" y2="{above:.1f}"/>')
        parts.append(f'<text class="quiet" x="{edge + 12}" y="{above:.1f}" dy="4">{escape(name)}</text>')
    return parts


def _drawn(series: Mapping[str, Sequence[Dot]], horizontal: Axis, vertical: Axis, taken: list[Box]) -> list[str]:
    """Lines, dots and what they may be off by; then labels, where `taken` and these leave room."""
    shapes, labels = [], []
    for number, members in enumerate(series.values()):
        color = OURS if number == 0 else COLORS[(number - 1) % len(COLORS)]
        points = [(horizontal.at(dot.x), vertical.at(dot.y), dot) for dot in sorted(members, key=lambda dot: dot.x)]
        path = " ".join(f"{'L' if n else 'M'}{x:.1f} {y:.1f}" for n, (x, y, _) in enumerate(points))
        shapes.append(f'<path d="{path}" stroke="{color}" stroke-width="1.6" opacity="0.6"/>')
        for (x1, y1, _), (x2, y2, _) in itertools.pairwise(points):
            between = [(x1 + (x2 - x1) * part / 40, y1 + (y2 - y1) * part / 40) for part in range(40)]
            taken += [(x - 2, y - 2, x + 2, y + 2) for x, y in between]
        for x, y, dot in points:
            high, low = vertical.at(dot.y + dot.error), vertical.at(dot.y - dot.error)
            ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{high:.1f}" y2="{low:.1f}"'
            shapes.append(f'<line stroke="{color}" opacity="0.35" {ends}/>')
            shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{color}"/>')
            taken += [(x - 1, high, x + 1, low), (x - 7, y - 7, x + 7, y + 7)]
            labels.append((x, y, dot.label, color))
    for x, y, label, color in labels:
        box = _free(x, y, _LETTER * len(label), taken)
        taken.append(box)
        shapes.append(f'<text x="{box[0]:.1f}" y="{box[3] - 4:.1f}" style="fill:{color}">{escape(label)}</text>')
    return shapes


def _free(x: float, y: float, width: float, taken: Sequence[Box]) -> Box:
    """A place for a label near its dot that covers the least of what is there."""
    found = []
    for away in (0, -1, 1, -2, 2, -3, 3):
        for left in (x + 9, x - 9 - width, x - width / 2):
            top = y + away * (_LINE - 3) - _LINE / 2
            box = (left, top, left + width, top + _LINE)
            out = box[0] < _LEFT or box[2] > _EDGE + 60 or box[1] < _TOP or box[3] > _FLOOR
            found.append((sum(_common(box, other) for other in taken) + 20 * abs(away) + 10_000 * out, box))
    return min(found)[1]


def _common(one: Box, other: Box) -> float:
    """The area of both."""
    wide, high = min(one[2], other[2]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, wide) * max(0.0, high)
