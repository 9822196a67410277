"""Lines as an SVG file, readable in light and dark: losses over time, cost over the number of sites."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from weightgrad.report.curves import NAME_GAP, apart
from weightgrad.report.runs import Run

Points = list[tuple[float, float]]

COLORS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999933")
OURS = "#d55e00"
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #222; }
  .title { font-size: 16px; font-weight: 600; } .quiet { fill: #777; } .grid { stroke: #ddd; } path { fill: none; }
  @media (prefers-color-scheme: dark) { text { fill: #e6e6e6; } .quiet { fill: #999; } .grid { stroke: #444; } }
"""


class Axis:
    """From values to pixels."""

    def __init__(self, values: Sequence[float], pixels: tuple[float, float], *, log: bool) -> None:
        self._log = log and min(values) > 0
        low, high = self._scaled(min(values)), self._scaled(max(values))
        self._low, self._span = low, (high - low) or 1.0
        self._first, self._last = pixels

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def at(self, value: float) -> float:
        return self._first + (self._last - self._first) * (self._scaled(value) - self._low) / self._span

    def ticks(self) -> list[float]:
        if self._log:
            high = self._low + self._span
            decades = range(math.floor(self._low), math.ceil(high) + 1)
            steps = (1, 3) if self._span > 1.5 else (1, 2, 5)
            found = [s * 10.0**d for d in decades for s in steps]
            return [t for t in found if self._low - 1e-9 <= math.log10(t) <= high + 1e-9]
        step = 10.0 ** math.floor(math.log10(self._span / 3))
        step = next(step * more for more in (1, 2, 5, 10) if self._span / (step * more) <= 6)
        first = math.ceil(self._low / step - 1e-9)
        return [n * step for n in range(first, math.floor((self._low + self._span) / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Frame:
    """The sheet of a chart and its margins."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    @property
    def across(self) -> tuple[float, float]:
        """Where the horizontal axis begins and ends."""
        return self.left, self.width - self.right

    @property
    def up(self) -> tuple[float, float]:
        """The same of the vertical one."""
        return self.height - self.bottom, self.top

    def drawn(self, title: str, about: str, across: Axis, up: Axis, numbers: str = "{:.4g}") -> list[str]:
        """Everything but the data, from `<svg>` on; `numbers` is how those under the chart are written."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img">',
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            f'<text class="title" x="8" y="22">{escape(title)}</text>',
        ]
        for value in up.ticks():
            at = f"{up.at(value):.1f}"
            parts.append(f'<line class="grid" x1="{self.left}" x2="{self.across[1]}" y1="{at}" y2="{at}"/>')
            parts.append(
                f'<text class="quiet" x="{self.left - 8}" y="{at}" dy="4" text-anchor="end">{value:.4g}</text>'
            )
        for value in across.ticks():
            place = f'x="{across.at(value):.1f}" y="{self.up[0] + 20}"'
            parts.append(f'<text class="quiet" {place} text-anchor="middle">{numbers.format(value)}</text>')
        return [*parts, f'<text class="quiet" x="{self.left}" y="{self.height - 8}">{escape(about)}</text>']


FRAME = Frame(900, 400, 64, 170, 44, 48)


def lines(series: Mapping[str, Points], *, title: str, x: str, y: str, log_x: bool = True, log_y: bool = False) -> str:
    """One line a name, names at their ends; empty when there is nothing to draw."""
    kept = {name: [(a, b) for a, b in points if math.isfinite(b)] for name, points in series.items()}
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        return ""
    every = [point for points in kept.values() for point in points]
    across = Axis([a for a, _ in every], FRAME.across, log=log_x)
    up = Axis([b for _, b in every], FRAME.up, log=log_y)
    parts = FRAME.drawn(title, f"{x}; up: {y}", across, up)
    return "\n".join([*parts, *_drawn(kept, across, up), "</svg>", ""])


def _drawn(series: Mapping[str, Points], across: Axis, up: Axis) -> list[str]:
    parts, ends = [], []
    for place, (name, points) in enumerate(series.items()):
        ours = name in ("weightgrad", "auto")
        color = OURS if ours else COLORS[place % len(COLORS)]
        path = " ".join(f"{'L' if n else 'M'}{across.at(a):.1f} {up.at(b):.1f}" for n, (a, b) in enumerate(points))
        dash = ' stroke-dasharray="5 4"' if name in ("baseline", "auto") else ""
        parts.append(f'<path d="{path}" stroke="{color}" stroke-width="{2.8 if ours else 1.6}"{dash}/>')
        ends.append((up.at(points[-1][1]), across.at(points[-1][0]), name, color))
    ends.sort()
    places = apart([height for height, *_ in ends], NAME_GAP, FRAME.up[0])
    for above, (height, end, name, color) in zip(places, ends, strict=True):
        edge = FRAME.across[1] + 6
        lead = f'x1="{end:.1f}" y1="{height:.1f}" x2="{edge}" y2="{above:.1f}"'
        parts.append(f'<line stroke="{color}" {lead} opacity="0.35"/>')
        parts.append(f'<text x="{edge + 4}" y="{above + 4:.1f}" style="fill:{color}">{escape(name)}</text>')
    return parts


def losses(part: Mapping[str, Sequence[Run]], bins: int = 25) -> dict[str, Points]:
    """Mean training loss over virtual time, first seed of every row, in so many pieces of its steps."""
    found: dict[str, Points] = {}
    for name, runs in part.items():
        steps = runs[0].steps
        size = max(1, -(-len(steps) // bins))
        pieces = [steps[start : start + size] for start in range(0, len(steps), size)]
        found[name] = [
            (float(piece[-1]["t"]), statistics.fmean(float(line["loss"]) for line in piece))
            for piece in pieces
            if float(piece[-1]["t"]) > 0
        ]
    return found
