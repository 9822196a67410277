"""The tour, for people: two tables for the terminal, and one page that needs no network.

plotly's JavaScript is inside the page. Colors follow the reader's light or dark setting.
"""

from __future__ import annotations

import contextlib
import html
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from weightgrad.report.tour import GRADIENT_SPECS, Tour, Watch
from weightgrad.report.tour_chart import chart
from weightgrad.train.digits import require

GRADIENT_TITLE = "Gradients: the model trained with every codec"
WEIGHT_TITLE = "Weights: the trained model, encoded once, without retraining"
GRADIENT_HEADERS = ("codec", "bits\neach", "times\nsmaller", "error\nstep", "error\nrun", "MB/s", "test\n%", "vs\nfp32")
WEIGHT_HEADERS = ("codec", "bytes", "bits\neach", "times\nsmaller", "error", "test\n%", "vs\nfp32")
WEIGHT_NOTES = [
    "Biases stay fp32, with lossaware the first and last layer too; all is counted in the bytes.",
    "lossaware is made for training with it. Here it only rounds the finished weights once.",
]


def _error(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0e}"


def _points(difference: float) -> str:
    return f"{100 * difference:+.2f}"


def gradient_cells(tour: Tour) -> list[tuple[str, ...]]:
    """The first table, a tuple a row."""
    return [
        (
            row.codec,
            f"{row.bits_per_element:.3f}",
            f"{row.times_smaller:.1f}",
            _error(row.error_of_step),
            _error(row.error_of_run),
            f"{row.codec_mb_s:.0f}",
            f"{100 * row.accuracy:.2f}",
            _points(row.accuracy_minus_fp32) if row.diverged_at_step is None else "lost",
        )
        for row in tour.gradients
    ]


def weight_cells(tour: Tour) -> list[tuple[str, ...]]:
    """The second table, a tuple a row."""
    return [
        (
            row.codec,
            f"{row.frame_bytes:,}",
            f"{row.bits_per_element:.3f}",
            f"{row.times_smaller:.1f}",
            _error(row.error),
            f"{100 * row.accuracy:.2f}",
            _points(row.accuracy_minus_fp32),
        )
        for row in tour.weights
    ]


def gradient_notes(tour: Tour) -> list[str]:
    """How to read the first table."""
    notes = [
        "bits each: whole frames on the wire, headers included, averaged over the run.",
        "error: of the last step's gradient, and of the sum over the run. Error feedback sends later "
        "what a step leaves out: a large error of a step is then small over the run.",
        f"MB/s: encode and decode on {tour.threads} thread{'s' if tour.threads > 1 else ''}. These tensors are "
        f"small (at most {tour.largest_tensor:,} elements): calls cost more than bytes here. "
        "`weightgrad bench codecs` measures large buffers.",
        f"test: {tour.test_images} images; differences below 1 point are mostly chance. All codecs share one learning "
        f"rate ({tour.plan.learning_rate:g}), chosen on these images so that all of them train.",
    ]
    if any(row.codec.startswith("dgc") for row in tour.gradients):
        notes.insert(2, "dgc sends sums of momentum, not gradients: it has no error to compare.")
    if any(row.diverged_at_step is not None for row in tour.gradients):
        notes.append("lost: training diverged, and stopped when a gradient was no longer a number.")
    return notes


def table(title: str, headers: tuple[str, ...], rows: list[tuple[str, ...]], width: int) -> Table:
    """For a terminal of this width."""
    gap = 1 if width < 100 else 3
    made = Table(
        title=title, title_style="bold", title_justify="left", box=None, pad_edge=False, padding=(0, gap, 0, 0)
    )
    for place, header in enumerate(headers):
        made.add_column(
            header, justify="right" if place else "left", no_wrap=True, vertical="bottom", header_style="dim"
        )
    for row in rows:
        made.add_row(*(escape(cell) for cell in row))
    return made


@contextlib.contextmanager
def watching(console: Console, steps: int) -> Iterator[Watch]:
    """A line that shows codec, step and loss while the tour is measured."""
    require("plotly", "plotly")  # before a minute of work, not after
    specs = GRADIENT_SPECS
    columns = (
        TextColumn("{task.fields[place]:>5}  {task.description:29}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("step {task.fields[step]:>4}  loss {task.fields[loss]:.3f}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        task = progress.add_task("loading", total=len(specs) * steps, place="", step=0, loss=0.0)

        def watch(spec: str, step: int, loss: float) -> None:
            number = specs.index(spec)
            progress.update(
                task,
                description=spec,
                completed=number * steps + step,
                place=f"{number + 1}/{len(specs)}",
                step=step,
                loss=loss,
            )

        yield watch


def show(tour: Tour, out: Path, console: Console) -> None:
    """Print both tables with their notes, write the page, and say where everything is."""
    write(tour, out / "tour.html")
    for title, headers, rows, notes in (
        (GRADIENT_TITLE, GRADIENT_HEADERS, gradient_cells(tour), gradient_notes(tour)),
        (WEIGHT_TITLE, WEIGHT_HEADERS, weight_cells(tour), WEIGHT_NOTES),
    ):
        console.print(table(title, headers, rows, console.width))
        console.print()
        for note in notes:
            console.print(Padding(Text(note.replace("`", ""), style="dim"), (0, 2), expand=False))
        console.print()
    console.print(f"Took {tour.seconds:.0f} s. Written:")
    for name, what in (
        ("tour.html", "the same with a chart, for a browser"),
        ("tour.json", "every number"),
        ("gradients.wg", "the frames of one step; look inside with"),
    ):
        console.print(Text.assemble(f"  {out / name!s:28}  ", (what, "dim")), soft_wrap=True)
    command = sys.argv[0] if Path(sys.argv[0]).name == "weightgrad" else "weightgrad"
    console.print(Text(f"\n  {command} inspect {out / 'gradients.wg'}", style="bold"), soft_wrap=True)


_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #6a7383; --line: #dfe3e9; --page: #ffffff;
        --panel: #f5f7fa; --plain: #2f6fde; --kept: #d9622b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #97a1b0; --line: #323945; --page: #14181f; --panel: #1c222b;
          --plain: #6ea8ff; --kept: #ff9a62; }
}
body { margin: 0 auto; max-width: 1080px; padding: 2rem 1.5rem 4rem; background: var(--page); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .6rem; }
p, li { max-width: 46rem; } .soft, li { color: var(--soft); font-size: .9rem; }
ul { padding-left: 1.1rem; } code { font-family: ui-monospace, monospace; font-size: .92em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th { color: var(--soft); font-weight: 500; font-size: .85rem; vertical-align: bottom; }
th, td { padding: .32rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td:first-child { font-family: ui-monospace, monospace; font-size: .88rem; }
tbody tr:hover { background: var(--panel); }
"""


def _html_text(text: str) -> str:
    """Escaped, with `code` in backticks."""
    parts = html.escape(text, quote=False).split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def _html_table(title: str, headers: tuple[str, ...], rows: list[tuple[str, ...]], notes: list[str]) -> str:
    head = "".join(f"<th>{html.escape(header).replace(chr(10), '<br>')}</th>" for header in headers)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    told = "".join(f"<li>{_html_text(note)}</li>" for note in notes)
    return (
        f"<h2>{html.escape(title)}</h2>\n<div class='scroll'><table><thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>\n<ul>{told}</ul>"
    )


def page(tour: Tour) -> str:
    """The whole tour as one HTML document."""
    plan = tour.plan
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>WeightGrad: the tour</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Every codec on a real model</h1>
<p>A network of {tour.parameters:,} parameters learns handwritten digits from {plan.workers} workers, {plan.steps}
steps with {plan.batch} images each. Every gradient is encoded, framed, parsed and decoded; the optimizer sees only
what was decoded. Up and to the left is better.</p>
<div class="scroll">{chart(tour)}</div>
{_html_table(GRADIENT_TITLE, GRADIENT_HEADERS, gradient_cells(tour), gradient_notes(tour))}
{_html_table(WEIGHT_TITLE, WEIGHT_HEADERS, weight_cells(tour), WEIGHT_NOTES)}
<p class="soft">Took {tour.seconds:.0f} s. {html.escape(tour.measured_on)}. Kernels: {html.escape(tour.kernels)}.</p>
</body>
</html>
"""


def write(tour: Tour, path: Path) -> None:
    """Write the page."""
    path.write_text(page(tour), encoding="utf-8")
