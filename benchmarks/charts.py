"""The charts of the tables, drawn by matplotlib as SVG files that can be read on a light and on a dark page.

A chart is a frozen dataclass that holds its data. `svg()` draws it, and `to_dict()` puts the data into the JSON file
of the table, so that the chart can be drawn again. matplotlib is in the extra `bench`. A table that is made without
matplotlib has no charts.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import itertools
import math
import re
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from weightgrad.lab.report.page_charts import accuracy
from weightgrad.lab.report.runs import Run

Points = Sequence[tuple[float, float]]

BASELINE = "baseline"
_COLORS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999933")
_HIGHLIGHT, _NEUTRAL = "#d55e00", "#808080"
_TEXT, _GRID = "#222222", "#dddddd"
_DASHES = ("-", ":", "-.")  # when the colors have run out
_LABEL_GAP = 15.0  # points between the labels of two lines, one above the other
_SETTINGS: dict[Any, Any] = {
    "axes.edgecolor": _NEUTRAL,
    "axes.labelcolor": _TEXT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "font.size": 11,
    "grid.color": _GRID,
    "svg.fonttype": "none",  # text stays text: it can be searched, and the page's font is used
    "svg.hashsalt": "weightgrad",  # the same data gives the same file
    "text.color": _TEXT,
    "xtick.color": _NEUTRAL,
    "xtick.labelcolor": _TEXT,
    "ytick.color": _NEUTRAL,
    "ytick.labelcolor": _TEXT,
}
# matplotlib writes colors into the style of each element; only !important is stronger than that.
_DARK = f"""<style>
@media (prefers-color-scheme: dark) {{
  text[style*="{_TEXT}"], g[style*="{_TEXT}"] text {{ fill: #e6e6e6 !important; }}
  path[style*="stroke: {_GRID}"] {{ stroke: #444444 !important; }}
}}
</style>
"""


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@dataclass(frozen=True, kw_only=True)
class Chart(ABC):
    """A chart with its data.

    Attributes:
        title: Stands above the chart.
        x: The label of the horizontal axis.
        y: The label of the vertical axis.
    """

    height: ClassVar[float] = 4.4  # inches
    left: ClassVar[float] = 0.08  # where the axes begin and end, in widths of the figure
    right: ClassVar[float] = 0.79

    title: str
    x: str
    y: str = ""

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Whether there is nothing to draw."""

    @abstractmethod
    def draw(self, axes: Any) -> None:
        """Draw the data on matplotlib's `Axes`."""

    def image(self, kind: str) -> bytes:
        """The chart as a file of this kind, `svg` or `png`, with a transparent background."""
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context(_SETTINGS):
            figure = Figure(figsize=(9.0, self.height))
            axes = figure.subplots(gridspec_kw={"left": self.left, "right": self.right, "top": 0.91, "bottom": 0.14})
            axes.set_title(self.title)
            axes.set_xlabel(self.x)
            axes.set_ylabel(self.y)
            self.draw(axes)
            file = io.BytesIO()
            metadata = {"Date": None, "Title": self.title} if kind == "svg" else {}
            figure.savefig(file, format=kind, transparent=True, metadata=metadata)
        return file.getvalue()

    def svg(self) -> str:
        """The chart as an SVG file whose text is light on a dark page."""
        text = self.image("svg").decode()
        text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
        return re.sub(r"(<svg [^>]*>\n)", lambda found: found[1] + _DARK, text, count=1)

    def to_dict(self) -> dict[str, Any]:
        """The kind of the chart and its data, for a JSON file."""
        return {"kind": type(self).__name__, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    """One line for each name, with the name at its end."""

    series: Mapping[str, Points]
    log_x: bool = True
    log_y: bool = False

    @property
    def _finite(self) -> dict[str, list[tuple[float, float]]]:
        kept = {name: [(a, b) for a, b in points if math.isfinite(b)] for name, points in self.series.items()}
        return {name: points for name, points in kept.items() if points}

    @property
    def empty(self) -> bool:
        """Whether no line has a finite point."""
        return not self._finite

    def draw(self, axes: Any) -> None:
        """Draw every line and its label."""
        series = self._finite
        _scale(axes, "x", log=self.log_x)
        _scale(axes, "y", log=self.log_y)
        axes.grid(axis="y")
        styles = _styles(series)
        for name, points in series.items():
            axes.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) < 10 else "", **styles[name])
        _label_ends(axes, {name: points[-1] for name, points in series.items()}, styles)


@dataclass(frozen=True, kw_only=True)
class Band:
    """A line with its lower and upper bounds."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True, kw_only=True)
class Accuracies(Chart):
    """Accuracy over virtual time: the mean of the seeds, in a band from the lowest to the highest."""

    series: Mapping[str, Band]
    x: str = "virtual seconds, log scale"
    y: str = "accuracy %"

    @classmethod
    def of_runs(cls, groups: Mapping[str, Sequence[Run]], *, title: str) -> Accuracies:
        """The chart of the runs of each strategy, all seeds of a strategy together."""
        bands = {name: _band(runs) for name, runs in groups.items()}
        seeds = max((len(runs) for runs in groups.values()), default=1)
        several = f"; mean of {seeds} seeds, band from the lowest to the highest" if seeds > 1 else ""
        return cls(title=title, x=f"{cls.x}{several}", series={name: band for name, band in bands.items() if band.x})

    @property
    def empty(self) -> bool:
        """Whether nothing was evaluated."""
        return not self.series

    def draw(self, axes: Any) -> None:
        """Draw every mean, its band and its label."""
        _scale(axes, "x", log=True)
        axes.grid(axis="y")
        styles = _styles(self.series)
        for name, band in self.series.items():
            axes.plot(band.x, band.mean, label=name, **styles[name])
            if band.low != band.high:
                axes.fill_between(band.x, band.low, band.high, color=styles[name]["color"], alpha=0.15, linewidth=0)
        _label_ends(axes, {name: (band.x[-1], band.mean[-1]) for name, band in self.series.items()}, styles)


@dataclass(frozen=True)
class Dot:
    """A point, its error up and down, and the text beside it."""

    x: float
    y: float
    error: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Dots(Chart):
    """Labelled dots with error bars over a logarithmic axis, joined by a line within a series.

    Attributes:
        series: The dots by the name of their series.
        horizontal: Reference lines by their label, at these heights.
        vertical: Reference lines by their label, at these places of the horizontal axis.
    """

    height: ClassVar[float] = 4.8

    series: Mapping[str, Sequence[Dot]]
    horizontal: Mapping[str, float] = field(default_factory=dict)
    vertical: Mapping[str, float] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether there is no dot."""
        return not any(self.series.values())

    def draw(self, axes: Any) -> None:
        """Draw reference lines, dots, and then labels where there is room."""
        _scale(axes, "x", log=True)
        axes.grid(axis="y")
        dots = [dot for members in self.series.values() for dot in members]
        wide = [dot.x for dot in dots] + list(self.vertical.values())
        axes.set_xlim(min(wide) / 1.4, max(wide) * 1.4)
        reference = {"color": _NEUTRAL, "linestyle": "--", "linewidth": 1}
        for label, value in self.vertical.items():
            axes.axvline(value, **reference)
            axes.annotate(
                label, (value, 0), xycoords=("data", "axes fraction"), xytext=(5, 5), textcoords="offset points"
            )
        for value in self.horizontal.values():
            axes.axhline(value, **reference)
        colors = itertools.chain((_HIGHLIGHT,), itertools.cycle(_COLORS))
        colored = [(sorted(members, key=lambda dot: dot.x), next(colors)) for members in self.series.values()]
        for members, color in colored:
            x, y, errors = ([getattr(dot, name) for dot in members] for name in ("x", "y", "error"))
            axes.errorbar(x, y, errors, color=color, marker="o", markersize=7, linewidth=1.6, elinewidth=1, alpha=0.8)
        right = axes.get_xlim()[1]
        styles = {label: {"color": _NEUTRAL} for label in self.horizontal}
        _label_ends(axes, {label: (right, value) for label, value in self.horizontal.items()}, styles)
        _label_dots(axes, [(dot, color) for members, color in colored for dot in members], self)


@dataclass(frozen=True)
class Bar:
    """Two values under one label."""

    label: str
    first: float
    second: float


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """Horizontal bars in pairs.

    Attributes:
        bars: The pairs, from top to bottom.
        first: What the first value of each pair is.
        second: What the second value of each pair is.
        mark: The label of a line at 1.
    """

    left: ClassVar[float] = 0.3
    right: ClassVar[float] = 0.95

    bars: Sequence[Bar]
    first: str
    second: str
    mark: str

    @property
    def empty(self) -> bool:
        """Whether there is no bar."""
        return not self.bars

    def draw(self, axes: Any) -> None:
        """Draw the pairs, each bar with its value at its end."""
        places = range(len(self.bars))
        for offset, name, color in ((-0.2, "first", _HIGHLIGHT), (0.2, "second", "#56b4e9")):
            values = [getattr(bar, name) for bar in self.bars]
            rows = [place + offset for place in places]
            drawn = axes.barh(rows, values, 0.36, color=color, label=getattr(self, name))
            axes.bar_label(drawn, fmt="%.2f", padding=4)
        axes.set_yticks(list(places), [bar.label for bar in self.bars])
        axes.invert_yaxis()
        axes.axvline(1, color=_NEUTRAL, linestyle="--", linewidth=1, label=self.mark)
        axes.legend(frameon=False, loc="best")


def losses(part: Mapping[str, Sequence[Run]], bins: int = 25) -> dict[str, Points]:
    """The mean training loss over virtual time of the first seed of each strategy, in so many bins of its steps."""
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


def _band(runs: Sequence[Run]) -> Band:
    found = accuracy(runs)
    rows = zip(*(found[key] for key in ("time", "mean", "low", "high")), strict=True)
    kept = [row for row in rows if None not in row and row[0] > 0]
    x, mean, low, high = ([float(row[place]) for row in kept] for place in range(4))
    return Band(x=x, mean=mean, low=low, high=high)


def _styles(names: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """The baseline is gray and dashed, WeightGrad's own strategies are thick, the first of them in its own color."""
    ours = [name for name in names if name == "auto" or name.startswith("weightgrad")]
    others = itertools.cycle(itertools.product(_DASHES, _COLORS))
    styles: dict[str, dict[str, Any]] = {}
    for name in names:
        if name == BASELINE:
            styles[name] = {"linestyle": "--", "color": _NEUTRAL, "linewidth": 1.6}
        elif ours and name == ours[0]:
            styles[name] = {"linestyle": "-", "color": _HIGHLIGHT, "linewidth": 2.8}
        else:
            dash, color = next(others)
            styles[name] = {"linestyle": dash, "color": color, "linewidth": 2.2 if name in ours else 1.6}
    return styles


def _scale(axes: Any, which: str, *, log: bool) -> None:
    """Make the `x` or `y` axis linear or logarithmic, with numbers that have no exponents."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = {"x": axes.xaxis, "y": axes.yaxis}[which]
    if log:
        axes.set(**{f"{which}scale": "log"})
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _label_ends(axes: Any, ends: Mapping[str, tuple[float, float]], styles: Mapping[str, Mapping[str, Any]]) -> None:
    """A label to the right of the axes for the end of each line, with a thin line to it, none over another."""
    axes.figure.draw_without_rendering()  # so that the limits are final
    points = 72 / axes.figure.dpi
    pixels = {name: axes.transData.transform(end)[1] * points for name, end in ends.items()}
    box = axes.get_window_extent()
    order = sorted(pixels, key=lambda name: pixels[name])
    heights = list(_spread([pixels[name] for name in order], box.y0 * points, box.y1 * points))
    for name, height in zip(order, heights, strict=True):
        color = styles[name]["color"]
        axes.annotate(
            name,
            ends[name],
            xytext=((box.x1 * points + 12) / points, height / points),
            textcoords="figure pixels",
            color=color,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "alpha": 0.4, "shrinkA": 2, "shrinkB": 0},
        )


def _spread(heights: Sequence[float], bottom: float, top: float) -> Iterator[float]:
    """Ascending heights, moved so that each is at least the gap above the one before and none is above the top."""
    places: list[float] = []
    for height in heights:
        places.append(max(height, places[-1] + _LABEL_GAP if places else bottom))
    limit = top
    for place in reversed(range(len(places))):
        places[place] = min(places[place], limit)
        limit = places[place] - _LABEL_GAP
    yield from places


def _label_dots(axes: Any, dots: Sequence[tuple[Dot, str]], chart: Dots) -> None:
    """A label beside each dot, at the place where it covers least of what is drawn already."""
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()
    inside = axes.get_window_extent()
    taken = [_square(axes.transData.transform((dot.x, dot.y)), 8) for dot, _ in dots]
    taken += [
        Bbox([axes.transData.transform((dot.x, dot.y + side * dot.error)) - 2 * side for side in (-1, 1)])
        for dot, _ in dots
    ]
    for members in chart.series.values():
        places = [axes.transData.transform((dot.x, dot.y)) for dot in sorted(members, key=lambda dot: dot.x)]
        for start, end in itertools.pairwise(places):
            taken += [_square(start + (end - start) * part / 40, 2) for part in range(40)]
    for value in chart.horizontal.values():
        height = axes.transData.transform((dots[0][0].x, value))[1]
        taken.append(Bbox.from_extents(inside.x0, height - 1, inside.x1, height + 1))
    for value in chart.vertical.values():
        place = axes.transData.transform((value, dots[0][0].y))[0]
        taken.append(Bbox.from_extents(place - 1, inside.y0, place + 1, inside.y1))
    for dot, color in dots:
        tried: list[tuple[float, int, Any, Any]] = []
        sides = ((10, "left"), (-10, "right"), (0, "center"))
        for up, (right, align) in itertools.product((0, 14, -14, 28, -28, 42, -42), sides):
            label = axes.annotate(
                dot.label, (dot.x, dot.y), (right, up), textcoords="offset points", color=color, ha=align, va="center"
            )
            box = label.get_window_extent()
            covered = sum(_common(box, other) for other in taken)
            outside = box.width * box.height - _common(box, inside)
            tried.append((covered + 10 * outside + abs(up), len(tried), label, box))
        best = min(tried)
        taken.append(best[3])
        for _, number, label, _ in tried:
            if number != best[1]:
                label.remove()


def _square(center: Any, half: float) -> Any:
    """The box around a point in pixels."""
    from matplotlib.transforms import Bbox

    return Bbox.from_extents(center[0] - half, center[1] - half, center[0] + half, center[1] + half)


def _common(one: Any, other: Any) -> float:
    """The area that two boxes share."""
    wide, high = min(one.x1, other.x1) - max(one.x0, other.x0), min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(0.0, wide) * max(0.0, high))
