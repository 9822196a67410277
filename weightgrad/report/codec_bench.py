"""How fast and how true every codec is: the table behind `weightgrad bench codecs`.

Speed is fp32 bytes of the tensor divided by the best of several interleaved repeats, and its
ratio to `torch.Tensor.copy_` of the same tensor, taken in the same repeats: machines differ and
are shared, ratios hardly. Buffers are reused, as the runtime does. The tensor is a square matrix,
because some codecs work on columns, and a new one each time; codecs that carry their error have
seen twenty of them before, so that what they carry has its usual size.
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
from weightgrad.codecs import Codec, LossAware, Payload, State, decode, parse
from weightgrad.report.bars import Bar, draw
from weightgrad.wire import frame_bytes

SPECS = (
    "fp32",
    "fp16",
    "bf16",
    "qsgd(bits=2)",
    "qsgd(bits=3)",
    "qsgd(bits=4)",
    "qsgd(bits=8)",
    "qsgd(bits=4, rounding='nearest')",
    "qsgd(bits=4, norm='l2')",
    "elias(bits=2)",
    "terngrad(clip=2.5)",
    "sign()",
    "clip(2.5) > qsgd(bits=4)",
    "ef(qsgd(bits=2))",
    "ef(qsgd(bits=4))",
    "ef(qsgd(bits=8))",
    "ef(terngrad(clip=2.5))",
    "onebit()",
    "adaptive(pi=64)",
    "topk(0.01)",
    "threshold(3.0)",
    "ef(topk(0.01))",
    "ef(topk(0.001))",
    "ef(topk(0.01, exact=False))",
    "ef(topk(0.01) > qsgd(bits=4))",
    "dgc(fraction=0.001)",
    "powersgd(rank=2)",
    "lossaware(bits='ternary')",
    "lossaware(bits=1)",
    "lossaware(bits=4)",
    "codebook(bits=4)",
)
# What the native kernels must reach on one thread, as ratios to copy_: (encode, decode).
TARGETS: dict[str, tuple[float | None, float | None]] = {
    "qsgd(bits=2)": (1.2, 1.4),
    "qsgd(bits=4)": (1.2, 1.4),
    "qsgd(bits=8)": (1.2, 1.4),
    "terngrad(clip=2.5)": (0.6, 1.4),
    "ef(qsgd(bits=2))": (0.65, 1.4),
    "ef(qsgd(bits=4))": (0.65, 1.4),
    "ef(qsgd(bits=8))": (0.65, 1.4),
    "onebit()": (0.75, 1.4),
    "adaptive(pi=64)": (0.75, None),
    "ef(topk(0.01))": (0.75, None),
    "ef(topk(0.001))": (0.75, None),
    "dgc(fraction=0.001)": (0.4, None),
    "lossaware(bits='ternary')": (0.25, 1.4),
}
TWIN_TARGET = 0.05


@dataclass(frozen=True)
class Row:
    """One codec on one backend."""

    codec: str
    backend: str
    encode_gb_s: float
    decode_gb_s: float
    encode_vs_copy: float
    decode_vs_copy: float
    bits_per_element: float
    relative_error: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Stream:
    """Square matrices (or as long vectors) of normal values, a new one each time, without the cost of making it.

    They are windows into one long vector at places that differ, so no two share an element at the
    same index.
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
    """A codec with what it needs to be timed again and again."""

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
        """One timed encode and decode."""
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
    """Rows for these codecs, as they are finished."""
    stream = Stream(size_mb, flat=flat)
    source = stream[0]
    target, copied = torch.zeros_like(source), torch.zeros_like(source)
    gigabytes = stream.n * 4 / 1e9
    for backend in backends:
        for spec in specs:
            with kernels.use(backend):
                slow = backend == "twin"
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
    """Whether a row is below its target. Targets are for one thread."""
    if threads != 1:
        return False
    encode, decode_target = TARGETS.get(row.codec, (None, None))
    if row.backend == "twin":
        return encode is not None and row.encode_vs_copy < TWIN_TARGET
    if row.backend != "native":
        return False
    return (encode is not None and row.encode_vs_copy < encode) or (
        decode_target is not None and row.decode_vs_copy < decode_target
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
    """For the terminal."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for place, header in enumerate(SHORT):
        made.add_column(header, justify="left" if place < 2 else "right", no_wrap=place > 0)
    for row in rows:
        made.add_row(*(escape(cell) for cell in _cells(row)), style="red" if missed(row) else None)
    return made


def verdict(rows: list[Row], threads: int) -> str:
    """One line: which targets were met."""
    if threads != 1:
        return "Targets are for one thread."
    bad = [f"{row.codec} ({row.backend})" for row in rows if missed(row, threads)]
    return f"Below target: {', '.join(bad)}" if bad else "Every codec with a target meets it."


def markdown(rows: list[Row], command: str, machine: str, threads: int) -> str:
    """The table as a document."""
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


def chart(rows: list[Row]) -> str:
    """The native rows as an SVG bar chart."""
    bars = [Bar(row.codec, row.encode_vs_copy, row.decode_vs_copy) for row in rows if row.backend == "native"]
    title = "Speed of a codec, as a multiple of torch's copy_ (one thread; longer is faster)"
    return draw(bars, title=title, first="encode", second="decode", mark="copy_")
