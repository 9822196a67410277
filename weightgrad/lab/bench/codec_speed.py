"""How fast and how accurate every codec is: the table of `weightgrad bench codecs`.

Speed is the fp32 bytes of the tensor divided by the best time of several interleaved repeats. Beside it
stands the ratio to `torch.Tensor.copy_` of the same tensor in the same repeats, because machines differ and
are shared, and ratios hardly change. Buffers are reused, as in the runtime. The tensor is a square matrix,
because some codecs work on columns, and each repeat has a new one. Codecs that carry their error have
encoded twenty of them before, so that the error has its usual size. What is measured, and which speed it
must reach, stands beside each codec as `benchmarks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from weightgrad import kernels
from weightgrad.codecs import Benchmark, Codec, LossAware, Payload, State, benchmarks, decode, parse
from weightgrad.kernels.threads import get_threads
from weightgrad.wire import frame_bytes

SPECS = tuple(benchmark.spec for benchmark in benchmarks())
TARGETS = {str(parse(benchmark.spec)): benchmark for benchmark in benchmarks()}
REFERENCE_TARGET = 0.03  # what the reference implementations must reach, as a ratio to copy_


@dataclass(frozen=True)
class Row:
    """Speed and accuracy of one codec on one backend."""

    codec: str
    backend: str
    encode_gb_s: float
    decode_gb_s: float
    encode_vs_copy: float
    decode_vs_copy: float
    bits_per_element: float
    relative_error: float

    def as_dict(self) -> dict[str, object]:
        """Return the fields by name, for JSON."""
        return asdict(self)


def seconds(work: Callable[[], object]) -> float:
    """Return how long one call takes: processor time where one thread works, so that other programs count less."""
    clock = time.thread_time if get_threads() == torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


class Stream:
    """Square matrices, or vectors of the same size, of normal values: a new one each time, at no cost.

    They are windows into one long vector at places that differ, so no two share an element at the same index.
    """

    def __init__(self, size_mb: float, *, flat: bool = False, seed: int = 0) -> None:
        self.flat = flat
        self.side = max(8, round((size_mb * 1e6 / 4) ** 0.5 / 8) * 8)
        self.n = self.side**2
        self._long = torch.randn(self.n + 16 * 4096, generator=torch.Generator().manual_seed(seed))

    def __getitem__(self, place: int) -> Tensor:
        start = 16 * (place * 1597 % 4096)
        window = self._long[start : start + self.n]
        return window if self.flat else window.view(self.side, self.side)


class _Subject:
    """A codec with its state and buffers, to be timed again and again."""

    def __init__(self, spec: str, stream: Stream, warm_up: int) -> None:
        self.codec: Codec = parse(spec)
        self.stream = stream
        self.calls = 0
        self.encode_best = self.decode_best = float("inf")
        first = stream[0]
        self.state: State = self.codec.init(first)
        self.room: Tensor | None = None
        self.curvature = stream[1].abs() + 1e-8 if isinstance(self.codec, LossAware) else None
        self.payload: Payload = self._encode()
        self.error = float((decode(self.payload) - first).norm() / first.norm())
        self.bits = 8 * frame_bytes(self.payload) / first.numel()
        self.room = torch.zeros(self.payload.body.numel() * 3 // 2 + 64, dtype=torch.uint8)
        for _ in range(warm_up if self.codec.carries_error else 1):
            self._encode()

    def _encode(self) -> Payload:
        x = self.stream[self.calls]
        self.calls += 1
        if isinstance(self.codec, LossAware):
            given = self.codec.encode(x, self.state, self.calls, curvature=self.curvature)
        else:
            given = self.codec.encode(x, self.state, self.calls, out=self.room)
        self.payload, self.state = given
        return self.payload

    def repeat(self, target: Tensor) -> None:
        """Time one encode and one decode."""
        self.encode_best = min(self.encode_best, seconds(self._encode))
        self.decode_best = min(self.decode_best, seconds(lambda: decode(self.payload, out=target)))


def measure(
    specs: tuple[str, ...],
    *,
    size_mb: float = 100,
    flat: bool = False,
    backends: tuple[str, ...] = ("native",),
    repeats: int = 7,
) -> Iterator[Row]:
    """Measure codecs.

    Args:
        specs: Specs of the codecs.
        size_mb: Megabytes of float32 to encode.
        flat: A vector instead of a square matrix.
        backends: Which of kernels.BACKENDS.
        repeats: Interleaved repeats, of which the best counts.

    Yields:
        One row for each backend and codec, as soon as it is measured.
    """
    stream = Stream(size_mb, flat=flat)
    source = stream[0]
    target, copied = torch.zeros_like(source), torch.zeros_like(source)
    gigabytes = stream.n * 4 / 1e9
    for backend in backends:
        for spec in specs:
            with kernels.use(backend):
                slow = backend == "reference"
                subject = _Subject(spec, stream, warm_up=2 if slow else 20)
                copy = float("inf")
                for _ in range(min(repeats, 3) if slow else repeats):
                    copy = min(copy, seconds(lambda: copied.copy_(source)))
                    subject.repeat(target)
            yield Row(
                str(subject.codec),
                backend,
                gigabytes / subject.encode_best,
                gigabytes / subject.decode_best,
                copy / subject.encode_best,
                copy / subject.decode_best,
                subject.bits,
                subject.error,
            )


def missed(row: Row, threads: int = 1) -> bool:
    """Say whether a row is below its target. Targets are for one thread."""
    if threads != 1:
        return False
    target = TARGETS.get(row.codec, Benchmark(row.codec))
    if row.backend == "reference":
        return target.encode is not None and row.encode_vs_copy < REFERENCE_TARGET
    if row.backend != "native":
        return False
    return (target.encode is not None and row.encode_vs_copy < target.encode) or (
        target.decode is not None and row.decode_vs_copy < target.decode
    )


HEADERS = ("codec", "backend", "encode GB/s", "decode GB/s", "encode / copy_", "decode / copy_", "bits each", "error")
SHORT = ("codec", "backend", "enc\nGB/s", "dec\nGB/s", "enc /\ncopy_", "dec /\ncopy_", "bits\neach", "error")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.codec,
        row.backend,
        f"{row.encode_gb_s:.2f}",
        f"{row.decode_gb_s:.2f}",
        f"{row.encode_vs_copy:.2f}",
        f"{row.decode_vs_copy:.2f}",
        f"{row.bits_per_element:.3f}",
        f"{row.relative_error:.4f}",
    )


def table(rows: list[Row]) -> Table:
    """Format rows for the terminal; those below their target are red."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for place, header in enumerate(SHORT):
        made.add_column(header, justify="left" if place < 2 else "right", no_wrap=place > 0)
    for row in rows:
        made.add_row(*(escape(cell) for cell in _cells(row)), style="red" if missed(row) else None)
    return made


def verdict(rows: list[Row], threads: int) -> str:
    """Say in one line which targets were missed."""
    if threads != 1:
        return "Targets are for one thread."
    bad = [f"{row.codec} ({row.backend})" for row in rows if missed(row, threads)]
    return f"Below target: {', '.join(bad)}" if bad else "Every codec with a target meets it."


def markdown(rows: list[Row], command: str, machine: str, threads: int) -> str:
    """Format rows as a Markdown document."""
    lines = [
        "# Codec speed",
        "",
        f"`{command}`",
        "",
        f"{machine}.",
        "",
        "| " + " | ".join(HEADERS) + " |",
        "|---|---|" + "---:|" * (len(HEADERS) - 2),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(row)) + " |" for row in rows),
        "",
        verdict(rows, threads),
        "",
    ]
    return "\n".join(lines)
