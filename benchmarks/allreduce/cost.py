"""What an allreduce costs: the measured work of a rank, and a formula for the network.

Measured seconds are processor time (`time.process_time`) of one thread, so other processes on the machine do not
change them. In the formula a ring has 2(n-1) steps of one n-th of the vector, and recursive doubling has log2 n steps
of the whole vector. Codec and network come one after the other, and there is no congestion.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from result_table import Row

from weightgrad import codecs, wire
from weightgrad.kernels import derive
from weightgrad.lab.sim.local_network import LocalNetwork
from weightgrad.local.allreduce import QuantizedAllreduce

RING, DOUBLING = "fp32, ring", "fp32, recursive doubling"
ALL_TO_ALL = "fp32, all-to-all"  # the way of the codecs without a codec: chunks all-to-all, a local mean, an all-gather
COLUMNS = ", columns"  # behind a codec: a chunk is whole columns of the matrix, as Dryden et al. deal theirs
DELAY = 2e-5  # seconds one way between two machines of a rack


def rank_cost(spec: str, numel: int, workers: int, repeats: int) -> Row:
    """Seconds that one rank works for an allreduce, and the encoded bytes of its vector and of its mean.

    The rank decodes its own chunks in place of those of the other ranks, which have the same distribution. `numel` is
    rounded down to a multiple of the workers (of a matrix, its columns are), so that all chunks have one size.
    """
    shape = matrix_of(spec, numel)
    if shape is not None:
        shape = (shape[0], shape[1] - shape[1] % workers)
        numel = shape[0] * shape[1]
    numel -= numel % workers
    vector = _matrix(numel)
    rank = QuantizedAllreduce(workers, numel, codec_of(spec), derive(0, workers), matrix=shape)
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
    """The bytes of one encoded vector, the mean of both directions: what a ring carries twice."""
    return int((cost["sent_bytes"] + workers * cost["mean_bytes"]) / 2)


def add_seconds(numel: int, repeats: int) -> float:
    """Seconds to add one float32 vector to another, which fp32 needs in place of a codec."""
    one, other = torch.randn(numel), torch.randn(numel)
    best = math.inf
    for _ in range(repeats + 1):
        began = time.process_time()
        one += other
        best = min(best, time.process_time() - began)
    return best


def exchange(spec: str, numel: int, workers: int, steps: int) -> Row:
    """Run all ranks in one process: do they end with the same bits, and what are the errors of the means?"""
    codec = codec_of(spec)
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
    """The allreduce of one rank, with its own random key."""
    return QuantizedAllreduce(workers, numel, codec_of(spec), derive(1, place), matrix=matrix_of(spec, numel))


def codec_of(method: str) -> codecs.Codec:
    """The codec of a method, such as "onebit()" or "onebit(), columns"."""
    return codecs.parse(method.removesuffix(COLUMNS))


def matrix_of(method: str, numel: int) -> tuple[int, int] | None:
    """Rows and columns of the square matrix that a method with columns exchanges; None for one without."""
    side = math.isqrt(numel)
    return (side, numel // side) if method.endswith(COLUMNS) else None


def vector_of(numel: int, step: int, place: int) -> torch.Tensor:
    """The vector of a rank at a step: normal noise, the same in every process."""
    return _noise(numel, derive(2, step, place) >> 1)


def _noise(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def _frames(payloads: Sequence[codecs.Payload]) -> int:
    return sum(wire.frame_bytes(payload) for payload in payloads)


def seconds(row: Row, gbit_s: float, delay: float = DELAY) -> float:
    """Seconds of one allreduce: the measured codec or additions, and the formula for the network."""
    return network_seconds(row, LocalNetwork(gbit_s * 1e9, delay)) + compute_seconds(row)


def network_seconds(row: Row, lan: LocalNetwork) -> float:
    """Seconds until all data has passed every network card."""
    workers, nbytes = row["workers"], 4 * row["side"] ** 2
    if row["codec"] == DOUBLING:  # every round everybody sends everything
        return float(_rounds(workers) * (nbytes * 8 / lan.bandwidth_bit_s + lan.delay_seconds))
    return lan.allreduce(workers, vector_bytes(row, workers) if "sent_bytes" in row else nbytes)


def formula_delays(row: Row) -> int:
    """The number of delays, one after the other, in the formula."""
    return round(network_seconds(row, LocalNetwork(math.inf, 1.0)))


def compute_seconds(row: Row) -> float:
    """Seconds of work of one rank on a core of its own."""
    workers = row["workers"]
    if row["codec"] == DOUBLING:
        return float(_rounds(workers) * row["add"])
    return float(row["seconds"] if "sent_bytes" in row else (workers - 1) / workers * row["add"])


def _rounds(workers: int) -> int:
    return math.ceil(math.log2(workers))
