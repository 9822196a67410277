"""WeightGrad's codecs beside those of other libraries and of plain torch, on the same tensor in the same run.

    python benchmarks/bench_codec_rivals.py --size-mb 100 --threads 1 --out docs/codec-rivals.md

Measured as in `weightgrad bench codecs`: fp32 bytes divided by the best of several repeats, and
the ratio to `torch.Tensor.copy_` in the same repeats. With one thread, time is processor time of
the whole process, because some libraries work in threads of their own. All codecs of a job take turns within each
repeat, so that a disturbance hits all of them; two tensors take turns too. The last column
divides a WeightGrad row by the fastest rival that does at least the same task, whatever that
rival's size and error, taken for encoding and decoding separately: the harshest reading.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from codec_rivals.coder import Coder, Label, Rival
from codec_rivals.registry import libraries, torch_rivals
from rich.console import Console
from rich.table import Table
from torch import Tensor

from weightgrad import codecs, kernels
from weightgrad.errors import EncodeError
from weightgrad.kernels.threads import get_threads
from weightgrad.machine import processor
from weightgrad.wire import frame_bytes

JOBS = ("half precision", "8 bit", "4 bit", "ternary", "one bit", "sparse", "low rank")
OURS = "weightgrad"
SPECS = (
    ("half precision", "fp16", "fp16"),
    ("half precision", "bf16", "bf16"),
    ("8 bit", "stochastic", "qsgd(bits=8)"),
    ("8 bit", "nearest", "qsgd(bits=8, rounding='nearest')"),
    ("4 bit", "stochastic", "qsgd(bits=4)"),
    ("4 bit", "nearest", "qsgd(bits=4, rounding='nearest')"),
    ("4 bit", "nearest, table", "codebook(bits=4)"),
    ("4 bit", "feedback", "ef(qsgd(bits=4))"),
    ("ternary", "stochastic", "terngrad(clip=2.5)"),
    ("ternary", "feedback", "ef(terngrad(clip=2.5))"),
    ("one bit", "sign", "sign()"),
    ("one bit", "means", "onebit(feedback=False)"),
    ("one bit", "feedback", "onebit()"),
    ("sparse", "top 1%", "topk(0.01)"),
    ("sparse", "about 1%", "topk(0.01, exact=False)"),
    ("sparse", "top 1%, feedback", "ef(topk(0.01))"),
    ("sparse", "about 1%, feedback", "ef(topk(0.01, exact=False))"),
    ("sparse", "dgc 0.1%", "dgc(fraction=0.001)"),
    ("low rank", "plain", "powersgd(rank=2, feedback=False)"),
    ("low rank", "feedback", "powersgd(rank=2)"),
)
COLUMNS = ("codec", "library", "task", "enc GB/s", "dec GB/s", "enc/copy", "dec/copy", "bits", "rel. error", "vs rival")


class WeightGradCoder(Coder):
    """A WeightGrad codec with its state and a reused output buffer."""

    def __init__(self, like: Tensor, spec: str) -> None:
        self.codec = codecs.parse(spec)
        self.state = self.codec.init(like)
        self.buffer: Tensor | None = None
        self.payload: codecs.Payload | None = None
        self.key = 0
        # A body is reused where its size is known beforehand; a fresh state keeps the first error honest.
        first, _ = self.codec.encode(like, self.codec.init(like), 0)
        try:
            buffer = torch.zeros(first.body.numel(), dtype=torch.uint8)
            self.codec.encode(like, self.codec.init(like), 0, out=buffer)
            self.buffer = buffer
        except EncodeError:
            pass

    def encode(self, x: Tensor) -> None:
        self.key += 1
        self.payload, self.state = self.codec.encode(x, self.state, self.key, out=self.buffer)

    def decode(self, out: Tensor) -> Tensor:
        assert self.payload is not None
        return codecs.decode(self.payload, out=out)

    def nbytes(self) -> int:
        assert self.payload is not None
        return frame_bytes(self.payload)


def our_rows() -> list[Rival]:
    """WeightGrad's codecs, in the same form as the rivals."""

    def entry(job: str, task: str, spec: str) -> Rival:
        return Rival(Label(job, task, str(codecs.parse(spec)), OURS), lambda like, _: WeightGradCoder(like, spec))

    return [entry(*one) for one in SPECS]


def seconds(work: Callable[[], object]) -> float:
    """Return how long one call takes: processor time of all threads where one is allowed."""
    clock = time.process_time if get_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


@dataclass(frozen=True)
class Row:
    """One measured codec."""

    label: Label
    encode_gb_s: float
    decode_gb_s: float
    encode_vs_copy: float
    decode_vs_copy: float
    bits_per_element: float
    relative_error: float

    def to_dict(self) -> dict[str, object]:
        """The row for a JSON file."""
        return {
            "job": self.label.job,
            "name": self.label.name,
            "library": self.label.library,
            "encode_gb_s": self.encode_gb_s,
            "decode_gb_s": self.decode_gb_s,
            "encode_vs_copy": self.encode_vs_copy,
            "decode_vs_copy": self.decode_vs_copy,
            "bits_per_element": self.bits_per_element,
            "relative_error": self.relative_error,
        }


@dataclass(frozen=True)
class Ratio:
    """A WeightGrad row over the fastest rival of its task."""

    row: Row
    encode: float
    decode: float

    def __str__(self) -> str:
        return f"{self.encode:.2f}x / {self.decode:.2f}x"


def square(size_mb: float, seed: int) -> Tensor:
    """A square matrix of normal values; its side is a multiple of 64, so that buckets and nibbles fill up."""
    side = max(1, round((size_mb * 1e6 / 4) ** 0.5 / 64)) * 64
    return torch.randn(side, side, generator=torch.Generator().manual_seed(seed))


class Subject:
    """A codec under measurement."""

    def __init__(self, rival: Rival, inputs: tuple[Tensor, Tensor], target: Tensor) -> None:
        self.label, self.inputs, self.target = rival.label, inputs, target
        self.encode_best = self.decode_best = float("inf")
        self.calls = 0
        self.coder = rival.make(inputs[0], self._best_chunk(rival))
        self.coder.encode(inputs[0])
        first = self.coder.decode(target)
        self.error = float((first - inputs[0]).norm() / inputs[0].norm())
        self.bits = 8 * self.coder.nbytes() / inputs[0].numel()

    def _best_chunk(self, rival: Rival) -> int:
        def cost(chunk: int) -> float:
            coder = rival.make(self.inputs[0], chunk)

            def work() -> None:
                coder.encode(self.inputs[0])
                coder.decode(self.target)

            return min(seconds(work) for _ in range(2))

        return min(rival.chunks, key=cost) if rival.chunks else self.inputs[0].numel()

    def repeat(self) -> None:
        """Time one encoding and one decoding."""
        self.calls += 1
        x = self.inputs[self.calls % 2]
        self.encode_best = min(self.encode_best, seconds(lambda: self.coder.encode(x)))
        self.decode_best = min(self.decode_best, seconds(lambda: self.coder.decode(self.target)))

    def row(self, copy_best: float) -> Row:
        """The row of the best repeats so far."""
        gigabytes = self.inputs[0].numel() * 4 / 1e9
        return Row(
            self.label,
            gigabytes / self.encode_best,
            gigabytes / self.decode_best,
            copy_best / self.encode_best,
            copy_best / self.decode_best,
            self.bits,
            self.error,
        )


def measure_job(rivals: list[Rival], inputs: tuple[Tensor, Tensor], repeats: int, notes: list[str]) -> list[Row]:
    """The rows of one job. All its codecs take turns."""
    target, copied = torch.zeros_like(inputs[0]), torch.zeros_like(inputs[0])
    subjects = []
    for rival in rivals:
        try:
            subjects.append(Subject(rival, inputs, target))
        except Exception as error:
            if rival.label.library.split()[0] not in ("bitsandbytes", "hivemind", "pi-quant"):
                raise
            notes.append(f"{rival.label.library}: {rival.label.name} does not work here: {error}")
    copy_best = float("inf")
    for _ in range(repeats):
        for subject in subjects:
            copy_best = min(copy_best, seconds(lambda: copied.copy_(inputs[0])))
            subject.repeat()
    return [subject.row(copy_best) for subject in subjects]


def ratios(rows: list[Row]) -> dict[Label, Ratio]:
    """For each WeightGrad row, its speed over the fastest rival that does at least the same task."""
    found = {}
    for row in (row for row in rows if row.label.library == OURS):
        own = row.label
        rivals = [
            other
            for other in rows
            if other.label.library != OURS and other.label.job == own.job and other.label.task.startswith(own.task)
        ]
        if rivals:
            found[own] = Ratio(
                row,
                row.encode_gb_s / max(other.encode_gb_s for other in rivals),
                row.decode_gb_s / max(other.decode_gb_s for other in rivals),
            )
    return found


def closing(found: dict[Label, Ratio]) -> str:
    """A summary: by how much WeightGrad is faster, and where it is slower."""

    def spread(values: list[float]) -> str:
        return f"{min(values):.2f}x to {max(values):.2f}x, median {statistics.median(values):.2f}x"

    behind = [
        f"{ratio.row.label.name} ({side} {value:.2f}x)"
        for ratio in found.values()
        for side, value in (("encode", ratio.encode), ("decode", ratio.decode))
        if value < 1
    ]
    return (
        f"WeightGrad / fastest rival of the same task: encode {spread([r.encode for r in found.values()])}; "
        f"decode {spread([r.decode for r in found.values()])}. "
        f"Behind a rival: {', '.join(behind) if behind else 'nowhere'}."
    )


def cells(row: Row, found: dict[Label, Ratio]) -> list[str]:
    """A row as text."""
    return [
        row.label.name,
        row.label.library,
        row.label.task,
        f"{row.encode_gb_s:.2f}",
        f"{row.decode_gb_s:.2f}",
        f"{row.encode_vs_copy:.2f}",
        f"{row.decode_vs_copy:.2f}",
        f"{row.bits_per_element:.3f}",
        f"{row.relative_error:.4f}",
        str(found[row.label]) if row.label in found else "",
    ]


def by_job(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Rows in the order of the jobs, tasks together, WeightGrad first in each."""
    grouped = []
    for job in JOBS:
        mine = [row for row in rows if row.label.job == job]
        tasks = list(dict.fromkeys(row.label.task for row in mine))
        mine.sort(key=lambda row: (tasks.index(row.label.task), row.label.library != OURS))
        if mine:
            grouped.append((job, mine))
    return grouped


def table_of(rows: list[Row], found: dict[Label, Ratio], title: str) -> Table:
    """The table for a terminal."""
    table = Table(title=title, caption="vs rival: encode / decode speed over the fastest rival of the same task")
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if place < 3 else "right", no_wrap=True)
    for job, mine in by_job(rows):
        table.add_row(f"[bold]{job}[/bold]")
        for row in mine:
            style = "green" if row.label.library == OURS else None
            table.add_row(*cells(row, found), style=style)
        table.add_section()
    return table


def markdown(rows: list[Row], found: dict[Label, Ratio], notes: list[str], arguments: argparse.Namespace) -> str:
    """The table as a dated Markdown file."""
    lines = [
        "# Codecs beside their rivals",
        "",
        f"- Date: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        f"- Machine: {processor()}; {arguments.threads} thread(s) used",
        f"- torch {torch.__version__}; WeightGrad's kernels: {kernels.status()}",
        f"- Command: `python benchmarks/bench_codec_rivals.py --size-mb {arguments.size_mb:g} "
        f"--threads {arguments.threads} --repeats {arguments.repeats}`",
        "",
    ]
    for job, mine in by_job(rows):
        lines += [f"## {job.capitalize()}", "", "| " + " | ".join(COLUMNS) + " |"]
        lines.append("|" + "---|" * 3 + "--:|" * (len(COLUMNS) - 3))
        lines += ["| " + " | ".join(cells(row, found)) + " |" for row in mine]
        lines.append("")
    lines.append(closing(found))
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def read_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="WeightGrad's codecs beside their rivals.")
    parser.add_argument("--size-mb", type=float, default=100, help="float32 megabytes of the tensor")
    parser.add_argument("--threads", type=int, default=1, help="threads for torch, WeightGrad and the libraries")
    parser.add_argument("--repeats", type=int, default=5, help="the best of this many counts")
    parser.add_argument("--job", action="append", choices=JOBS, help="only this job; may be given again")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of the table")
    parser.add_argument("--out", type=Path, help="also write a Markdown file")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = read_arguments()
    warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")  # deprecated, and still the fastest int8
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # hivemind only reads it
    torch.set_num_threads(arguments.threads)
    kernels.set_threads(arguments.threads)
    torch.manual_seed(12345)  # not a seed of the tensors: the noise must not depend on the data
    imported, notes = libraries(arguments.threads)
    torch.set_num_threads(arguments.threads)  # an import may have changed it
    inputs = (square(arguments.size_mb, 0), square(arguments.size_mb, 1))
    everything = our_rows() + torch_rivals() + imported
    rows: list[Row] = []
    errors = Console(stderr=True)
    for job in arguments.job or JOBS:
        errors.print(f"measuring: {job}", style="dim")
        mine = [rival for rival in everything if rival.label.job == job]
        rows += measure_job(mine, inputs, arguments.repeats, notes)
    found = ratios(rows)
    if arguments.out:
        arguments.out.write_text(markdown(rows, found, notes, arguments))
    if arguments.json:
        json.dump([row.to_dict() for row in rows], sys.stdout, indent=1)
        print()
        for note in notes:
            errors.print(note, style="yellow", soft_wrap=True)
        return
    megabytes = inputs[0].numel() * 4 / 1e6
    console = Console() if sys.stdout.isatty() else Console(width=170)
    console.print(table_of(rows, found, f"{megabytes:.0f} MB of float32, {arguments.threads} thread(s), {processor()}"))
    for note in notes:
        console.print(note, style="yellow", soft_wrap=True)
    console.print(closing(found), soft_wrap=True)


if __name__ == "__main__":
    main()
