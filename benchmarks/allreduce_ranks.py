"""Ranks of a quantized allreduce under measurement: one with its whole work, or all of them in one process.

Seconds are of the processor (`time.process_time`, one thread): what a rank takes on a core of its own, whoever else
is on this machine.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from field_sheet import Row

from weightgrad import codecs, wire
from weightgrad.kernels import derive
from weightgrad.report.machine import processor
from weightgrad.site.allreduce import QuantizedAllreduce


def rank_cost(spec: str, numel: int, workers: int, repeats: int) -> Row:
    """Seconds of one rank for its part of an allreduce, and the bytes of its vector and of its mean, encoded.

    In place of the other ranks' chunks it is given its own, which are drawn alike; so that all are of one size,
    `numel` is rounded down to a multiple of the workers.
    """
    numel -= numel % workers
    vector = _matrix(numel)
    rank = QuantizedAllreduce(workers, numel, codecs.parse(spec), derive(0, workers))
    best: Row = {}
    sizes: Row = {}
    for step in range(repeats + 1):  # the first also warms up caches and error feedback
        times = [time.process_time()]
        payloads = rank.encode_chunks(vector, step)
        times.append(time.process_time())
        mean = rank.reduce(payloads, step)
        times.append(time.process_time())
        rank.gather([mean] * workers)
        times.append(time.process_time())
        parts = dict(zip(("encode", "reduce", "gather"), (b - a for a, b in pairwise(times)), strict=True))
        found: Row = {**parts, "seconds": sum(parts.values())}
        if step and (not best or found["seconds"] < best["seconds"]):
            best = found
        sizes = {"sent_bytes": _frames(payloads), "mean_bytes": wire.frame_bytes(mean)}
        del payloads, mean
    return {**best, **sizes}


@functools.lru_cache(maxsize=1)
def _matrix(numel: int) -> torch.Tensor:
    return _noise(numel, numel)


def vector_bytes(cost: Row, workers: int) -> int:
    """Of one encoded vector, the mean of the way there and of the way back: what a ring carries twice."""
    return int((cost["sent_bytes"] + workers * cost["mean_bytes"]) / 2)


def add_seconds(numel: int, repeats: int) -> float:
    """To add one vector of float32 to another: what fp32 needs in place of a codec."""
    one, other = torch.randn(numel), torch.randn(numel)
    best = math.inf
    for _ in range(repeats + 1):
        began = time.process_time()
        one += other
        best = min(best, time.process_time() - began)
    return best


def exchange(spec: str, numel: int, workers: int, steps: int) -> Row:
    """All ranks in one process: same bits everywhere? How far is the first mean off, and the sum of all in the end?"""
    codec = codecs.parse(spec)
    ranks = [make_rank(spec, numel, workers, place) for place in range(workers)]
    total, exact = torch.zeros(numel), torch.zeros(numel)
    same, first, nbytes = True, math.nan, 0
    for step in range(steps):
        vectors = [vector_of(numel, step, place) for place in range(workers)]
        mean = torch.stack(vectors).mean(0)
        chunks = [rank.encode_chunks(vector, step) for rank, vector in zip(ranks, vectors, strict=True)]
        reduced = [rank.reduce([c[place] for c in chunks], step) for place, rank in enumerate(ranks)]
        results = [rank.gather(reduced) for rank in ranks]
        same = same and all(torch.equal(results[0], other) for other in results[1:])
        nbytes = (_frames(chunks[0]) + _frames(reduced)) // 2
        total, exact = total + results[0], exact + mean
        if not step:
            first = float((total - exact).norm() / exact.norm())
    off = float((total - exact).norm() / exact.norm())
    return {
        "codec": spec,
        "same": "yes" if same else "no",
        "feedback": codec.carries_error,
        "ratio": 4 * numel / nbytes,
        "first": first,
        "sum": off,
    }


def make_rank(spec: str, numel: int, workers: int, place: int) -> QuantizedAllreduce:
    """One of them, with a key of its own."""
    return QuantizedAllreduce(workers, numel, codecs.parse(spec), derive(1, place))


def vector_of(numel: int, step: int, place: int) -> torch.Tensor:
    """What that rank has at that step: normal noise, the same wherever it is drawn."""
    return _noise(numel, derive(2, step, place) >> 1)


def _noise(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def _frames(payloads: Sequence[codecs.Payload]) -> int:
    return sum(wire.frame_bytes(payload) for payload in payloads)


class Notebook:
    """Measurements by name, kept in a file, so that an interrupted table goes on. Those of another machine are not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: dict[str, Row] = {}
        if path.is_file():
            found = json.loads(path.read_text())
            self._kept = found["rows"] if found["machine"] == self._machine() else {}

    @staticmethod
    def _machine() -> str:
        return f"{processor()}; torch {torch.__version__}"

    def get(self, name: str, measure: Callable[[], Row]) -> Row:
        """As kept, or measured now."""
        if name not in self._kept:
            self.keep(name, measure())
        return dict(self._kept[name])

    def known(self, name: str) -> Row | None:
        """As kept; None: not measured yet."""
        return dict(self._kept[name]) if name in self._kept else None

    def keep(self, name: str, row: Row) -> None:
        """From now on it is known."""
        self._kept[name] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"machine": self._machine(), "rows": self._kept}, indent=1) + "\n")
