"""Native AVX-512, native AVX2, native portable and the torch reference implementation agree to the last bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weightgrad import kernels
from weightgrad.kernels import (
    bits,
    bucket,
    columns,
    csc,
    dense,
    elias,
    fixed,
    gaps,
    moments,
    select,
    ternary,
    threads,
)
from weightgrad.kernels.columns import Grid

SIZES = [0, 1, 7, 31, 32, 33, 159, 160, 161, 511, 512, 513, 1000, 4096, 5003, 70001]
KEY = 0x0123456789ABCDEF

needs_native = pytest.mark.skipif(
    kernels.status().backend != "native", reason=f"no native library here: {kernels.status().reason}"
)
pytestmark = needs_native


def values(n: int, seed: int = 0) -> Tensor:
    """Floats of many sizes, with zeros of both signs, ties and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * torch.exp(3 * torch.randn(n, generator=generator))
    x[::17] = 0.0
    x[5::23] = -0.0
    x[3::29] = 1.0
    x[4::31] = -1.0
    x[6::37] = 1e-41
    return x


def all_equal(work: Callable[[], list[Tensor]]) -> None:
    """Run `work` on every backend and compare bytes."""
    results = {}
    for backend in kernels.BACKENDS:
        with kernels.use(backend):
            results[backend] = [t.contiguous().view(-1).view(torch.uint8) for t in work()]
    for backend in kernels.BACKENDS[1:]:
        for place, (ours, theirs) in enumerate(zip(results["native"], results[backend], strict=True)):
            assert torch.equal(ours, theirs), f"{backend} differs from native in result {place}"


@pytest.mark.parametrize("n", [0, 1, 31, 33, 513, 5003])
@pytest.mark.parametrize("width", [2, 3, 4, 8])
@pytest.mark.parametrize("norm", ["max", "l2", "given"])
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("feedback", [True, False])
def test_quantize(n: int, width: int, norm: str, stochastic: bool, feedback: bool) -> None:
    spec = bucket.BucketSpec(96, width, 2 ** (width - 1) - 1, norm, stochastic)
    x = values(n)
    if n > 300:
        x[:96] *= 1e-38  # a whole bucket of subnormals
        x[96:192] = 0.0

    def work() -> list[Tensor]:
        residual = values(n, 1) if feedback else None
        codes = torch.zeros(-(-n * width // 8), dtype=torch.uint8)
        scales = torch.full((-(-n // 96),), 0.7)
        assert bucket.quantize(x, residual, spec, KEY, codes, scales, 64) == n
        outs = []
        for mode in (fixed.STORE, fixed.ADD, fixed.SUBTRACT):
            out = values(n, 2)
            bucket.dequantize(codes, scales, n, 96, width, spec.levels, out, mode)
            outs.append(out)
        return [codes, scales, *outs, *([] if residual is None else [residual])]

    all_equal(work)


@pytest.mark.parametrize("n", [0, 1, 31, 33, 513, 5003])
@pytest.mark.parametrize("width", [2, 3, 4, 8])
@pytest.mark.parametrize("norm", ["max", "l2", "given"])
def test_quantize_what_is_cut_on_the_way(n: int, width: int, norm: str) -> None:
    limit = float(torch.tensor(0.3))
    plain = bucket.BucketSpec(96, width, 2 ** (width - 1) - 1, norm, True)

    def work() -> list[Tensor]:
        found = []
        cut = dataclasses.replace(plain, limit=limit)
        for x, spec in ((values(n), cut), (values(n).clamp(-limit, limit), plain)):
            codes = torch.zeros(-(-n * width // 8), dtype=torch.uint8)
            scales = torch.full((-(-n // 96),), 0.1)
            assert bucket.quantize(x, None, spec, KEY, codes, scales) == n
            found += [codes, scales]
        assert torch.equal(found[0], found[2])
        assert torch.equal(found[1], found[3])
        return found

    all_equal(work)


def test_quantize_large_and_threaded() -> None:
    n = threads.LARGE + 4097
    x = values(n)
    spec = bucket.BucketSpec(512, 4, 7, "max", True)

    def run(count: int) -> list[Tensor]:
        kernels.set_threads(count)
        residual = values(n, 1)
        codes = torch.zeros(-(-n * 4 // 8), dtype=torch.uint8)
        scales = torch.zeros(-(-n // 512))
        bucket.quantize(x, residual, spec, KEY, codes, scales)
        out = torch.empty(n)
        bucket.dequantize(codes, scales, n, 512, 4, 7, out)
        return [codes, scales, residual, out]

    try:
        one, two = run(1), run(3)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        all_equal(lambda: run(2))
    finally:
        kernels.set_threads(None)


@pytest.mark.parametrize("backend", kernels.BACKENDS)
@pytest.mark.parametrize("feedback", [True, False])
def test_quantize_stops_before_a_bad_bucket(backend: str, feedback: bool) -> None:
    x = values(1000)
    x[700] = float("nan")
    spec = bucket.BucketSpec(64, 4, 7, "max", True)
    residual = values(1000, 1) if feedback else None
    before = None if residual is None else residual.clone()
    codes, scales = torch.zeros(500, dtype=torch.uint8), torch.zeros(16)
    with kernels.use(backend):
        assert bucket.quantize(x, residual, spec, KEY, codes, scales) == 640
    if residual is not None and before is not None:
        assert torch.equal(residual[640:], before[640:])


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("feedback", [True, False])
def test_moments(n: int, feedback: bool) -> None:
    x = values(n)
    residual = values(n, 1) if feedback else None
    all_equal(lambda: [torch.tensor(moments.moments(x, residual, absolute=True), dtype=torch.float64)])


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("scale", [0.0, 2.5, 1e-40])
def test_ternary(n: int, feedback: bool, scale: float) -> None:
    x = values(n) * (1e-39 if scale == 1e-40 else 1.0)
    scale = float(torch.tensor(scale))

    def work() -> list[Tensor]:
        residual = values(n, 1) if feedback else None
        codes = torch.zeros(ternary.packed_bytes(n), dtype=torch.uint8)
        ternary.ternary(x, residual, scale, KEY, codes)
        outs = []
        for mode in (fixed.STORE, fixed.ADD, fixed.SUBTRACT):
            out = values(n, 2)
            ternary.ternary_decode(codes, n, scale, out, mode)
            outs.append(out)
        return [codes, *outs, *([] if residual is None else [residual])]

    all_equal(work)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("weighted", [True, False])
def test_weights(n: int, weighted: bool) -> None:
    w = values(n)
    d = values(n, 1).abs() + 1e-8 if weighted else None

    def work() -> list[Tensor]:
        codes = torch.zeros(ternary.packed_bytes(n), dtype=torch.uint8)
        ternary.threshold_codes(w, 0.5, codes)
        sums = [*ternary.kept_sums(w, d, 0.5), *ternary.level_sums(w, d, 1.5, 7)]
        return [codes, torch.tensor(sums, dtype=torch.float64)]

    all_equal(work)


GRIDS = [
    Grid(1, 1, 32768),
    Grid(33, 1, 32768),
    Grid(70001, 1, 32768),
    Grid(40, 8, 32768),
    Grid(1100, 24, 32768),
    Grid(130, 520, 32768),
    Grid(77, 13, 32768),
    Grid(3000, 3, 1024),
    Grid(3000, 16, 1024),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("feedback", [True, False])
def test_onebit(grid: Grid, feedback: bool) -> None:
    n = grid.rows * grid.cols

    def work() -> list[Tensor]:
        residual = torch.zeros(n) if feedback else None
        means = torch.zeros(grid.tiles, 2, grid.cols)
        kept = []
        for step in range(3):
            old, means = means, torch.zeros(grid.tiles, 2, grid.cols)
            packed = torch.zeros(-(-n // 8), dtype=torch.uint8)
            assert columns.onebit(values(n, step), residual, old if feedback else None, grid, packed, means)
            out = values(n, 9)
            columns.onebit_decode(packed, means, grid, out, fixed.ADD)
            kept += [packed, means, out]
        return [*kept, *([] if residual is None else [residual])]

    all_equal(work)


@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
@pytest.mark.parametrize("backend", kernels.BACKENDS)
def test_onebit_rolls_back(grid: Grid, backend: str) -> None:
    n = grid.rows * grid.cols
    residual, old = values(n, 1), torch.rand(grid.tiles, 2, grid.cols)
    error = columns.lost(residual, old, grid)
    x = values(n)
    x[n // 2] = float("inf")
    with kernels.use(backend):
        packed, means = torch.zeros(-(-n // 8), dtype=torch.uint8), torch.zeros_like(old)
        assert not columns.onebit(x, residual, old, grid, packed, means)
    assert torch.count_nonzero(old) == 0
    step = torch.where(torch.isfinite(x), x.abs(), torch.zeros(())) + error.abs()
    assert bool(((residual - error).abs() <= step * 2.0**-22).all())


@pytest.mark.parametrize("n", SIZES)
def test_signs(n: int) -> None:
    x = values(n)

    def work() -> list[Tensor]:
        packed = torch.zeros(-(-n // 8), dtype=torch.uint8)
        columns.signs(x, packed)
        return [packed]

    all_equal(work)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("form", ["residual", "x", "velocity"])
@pytest.mark.parametrize("thresholds", [select.Thresholds(1.0, -1.0), select.Thresholds(0.5, -2.0)], ids=str)
def test_scan(n: int, form: str, thresholds: select.Thresholds) -> None:
    x = None if form == "residual" else values(n)

    def work() -> list[Tensor]:
        residual = values(n, 1)
        velocity = values(n, 2) if form == "velocity" else None
        got = select.scan(x, residual, velocity, 0.9, thresholds, n // 3)
        assert got.done == n
        after = [residual, *([] if velocity is None else [velocity])]
        count = torch.tensor([got.total])
        keep = got.indices.numel() // 2
        kept = select.keep_largest(got.indices.clone(), got.values.clone(), keep)
        changed = values(n, 3)
        select.scatter(kept[0], kept[1], changed, fixed.SUBTRACT)
        return [got.indices, got.values, count, *after, *kept, changed]

    all_equal(work)


@pytest.mark.parametrize("backend", kernels.BACKENDS)
@pytest.mark.parametrize("where", [10, 1500, 4999])
def test_scan_leaves_a_bad_block_alone(backend: str, where: int) -> None:
    x, residual, velocity = values(5003), values(5003, 1), values(5003, 2)
    x[where] = float("-inf")
    old = residual.clone(), velocity.clone()
    with kernels.use(backend):
        got = select.scan(x, residual, velocity, 0.9, select.Thresholds.magnitude(1.0), 5003)
    assert got.done == where // 1024 * 1024
    assert torch.equal(residual[got.done :], old[0][got.done :])
    assert torch.equal(velocity[got.done :], old[1][got.done :])
    assert bool((got.indices < got.done).all())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_columns_of(grid: Grid) -> None:
    n = grid.rows * grid.cols
    x = values(n)
    chosen = (x.abs() > 2).nonzero().view(-1)

    def work() -> list[Tensor]:
        residual = x.clone()
        got = csc.columns_of(chosen, x[chosen], grid, residual)
        back = csc.entries_of(got, grid)
        assert back is not None
        return [got.counts, got.means, got.entries, residual, *back]

    all_equal(work)


def test_columns_of_when_one_column_has_nearly_all() -> None:
    grid = Grid(3000, 16, 1024)
    x = torch.zeros(grid.rows, grid.cols)
    x[:, 5] = torch.randn(grid.rows, generator=torch.Generator().manual_seed(0))
    x[7, :] = 1.0
    flat = x.view(-1)
    chosen = flat.nonzero().view(-1)

    def work() -> list[Tensor]:
        got = csc.columns_of(chosen, flat[chosen], grid, None)
        back = csc.entries_of(got, grid)
        assert back is not None
        return [got.counts, got.means, got.entries.clone(), *back]

    all_equal(work)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("levels", [1, 3, 7, 127])
def test_elias(n: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(3)
    spread = torch.randn(n, generator=generator) * levels / 3
    codes = (spread.round().clamp(-levels, levels) + levels).to(torch.uint8)

    def work() -> list[Tensor]:
        stream, lengths = elias.elias(codes, 512, levels)
        back = elias.elias_decode(stream, lengths, n, 512, levels)
        assert back is not None
        assert torch.equal(back, codes)
        return [stream, lengths]

    all_equal(work)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("width", range(1, 9))
def test_lookup_and_pack(n: int, width: int) -> None:
    x = values(n)
    table = torch.sort(values(2**width, 5)).values
    borders = (table[1:] + table[:-1]) / 2

    def work() -> list[Tensor]:
        codes = torch.zeros(-(-n * width // 8), dtype=torch.uint8)
        bits.assign(x, borders, width, codes)
        out = torch.empty(n)
        bits.lookup(codes, n, width, table, out)
        flat = bits.unpack(codes, n, width)
        assert torch.equal(bits.pack(flat, width), codes)
        return [codes, out, flat]

    all_equal(work)


@pytest.mark.parametrize("weight", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("n", [0, 1, 17, 5000])
def test_nesterov(n: int, weight: float) -> None:
    def work() -> list[Tensor]:
        total, velocity = values(n, 1), values(n, 2)
        return [dense.nesterov(total, weight, velocity, 0.9, 0.7), velocity]

    all_equal(work)


@pytest.mark.parametrize("count", [0, 1, 2, 9, 127, 128, 129, 5000])
@pytest.mark.parametrize("mode", [fixed.STORE, fixed.ADD, fixed.SUBTRACT])
@pytest.mark.parametrize("step", [1, 9, 5000])
def test_values_at_gaps(step: int, count: int, mode: int) -> None:
    generator = torch.Generator().manual_seed(count)
    indices = torch.cumsum(torch.randint(1, step + 1, (count,), generator=generator), 0) - 1
    values = torch.randn(count, generator=generator)
    n = int(indices[-1]) + 4 if count else 5
    before = torch.randn(n, generator=generator)

    def work() -> list[Tensor]:
        low, unary, code = bits.pack_gaps(indices, bits.best_gap_code(indices))
        out = before.clone()
        streams = gaps.GapStreams(low, unary, count, code, n)
        assert streams.scatter(values, [(0, out)], mode, 0.3)
        cut = before.clone()  # three areas with a hole between them
        third, half = n // 3, n // 2
        areas = [(0, cut[:third]), (third, cut[third:half]), (half + 1, cut[half + 1 :])]
        assert streams.scatter(values, areas, mode, 0.3)
        signs = before.clone()
        bits_set = bits.pack_reference((values < 0).to(torch.uint8), 1)
        assert streams.scatter(gaps.Signs(bits_set, 0.7), [(0, signs)], mode, 0.3)
        return [out, cut, signs]

    all_equal(work)


@pytest.mark.parametrize("rice", [True, False])
@pytest.mark.parametrize("width", [0, 1, 3, 11, 13, 56])
def test_bad_gaps_are_refused_alike(width: int, rice: bool) -> None:
    """Random streams: every backend says the same about them, and writes nothing to places of bad ones."""
    generator = torch.Generator().manual_seed(width)
    verdicts = []
    for trial in range(60):
        count = int(torch.randint(0, 40, (1,), generator=generator))
        code = bits.GapCode(rice, width, 0)
        low = torch.randint(0, 256, (code.low_bytes(count),), generator=generator, dtype=torch.uint8)
        if trial % 2 and low.numel():
            low[-1] &= (1 << (count * width % 8 or 8)) - 1
        unary = torch.randint(0, 256, (count // 4 if rice else 0,), generator=generator, dtype=torch.uint8)
        if trial % 3 and count and rice:  # as many ones as it says
            bits_set = torch.zeros(2 * count, dtype=torch.uint8)
            bits_set[torch.randperm(2 * count, generator=generator)[:count]] = 1
            unary = bits.pack_reference(bits_set, 1)
        n = int(torch.randint(1, 1 << min(60, 9 + width), (1,), generator=generator))
        streams = gaps.GapStreams(low, unary, count, code, n)
        found: list[bool] = []

        def work(streams: gaps.GapStreams = streams, found: list[bool] = found) -> list[Tensor]:
            indices = streams.indices()
            assert streams.good() == (indices is not None)
            found.append(indices is not None)
            if indices is None and streams.numel < 1 << 20:
                out = torch.ones(streams.numel)
                assert not streams.scatter(torch.ones(streams.count), [(0, out)], fixed.ADD)
                assert bool((out == 1).all())
            return [torch.tensor([-1]) if indices is None else indices]

        all_equal(work)
        verdicts += found
    assert any(verdicts)
    assert not all(verdicts)


@pytest.mark.parametrize("step", [1, 2, 3, 100, 2**20, 2**31 + 5])
@pytest.mark.parametrize("count", [0, 1, 2, 9, 1000, 40_000])
def test_gaps(step: int, count: int) -> None:
    generator = torch.Generator().manual_seed(step)
    indices = torch.cumsum(torch.randint(1, step + 1, (count,), generator=generator), 0) - 1
    n = int(indices[-1]) + 1 if count else 5

    def work() -> list[Tensor]:
        low, unary, code = bits.pack_gaps(indices, bits.best_gap_code(indices))
        streams = gaps.GapStreams(low, unary, count, code, n)
        back = streams.indices()
        assert back is not None
        assert torch.equal(back, indices)
        assert streams.good()
        assert not count or dataclasses.replace(streams, numel=n - 1).indices() is None
        return [low, unary, torch.tensor([code.rice, code.width, code.unary_bits])]

    all_equal(work)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_scan_columns(grid: Grid) -> None:
    n = grid.rows * grid.cols
    sent = select.Sent(
        select.Thresholds(1.5, -0.5), values(grid.tiles * 2 * grid.cols, 4).view(grid.tiles, 2, grid.cols)
    )

    def work() -> list[Tensor]:
        residual = values(n, 1)
        got = select.scan_columns(values(n), residual, sent, grid, select.Thresholds(0.5, -2.0), n)
        assert got.done == n
        return [got.indices.clone(), got.values.clone(), residual]

    all_equal(work)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float_casts(n: int, dtype: torch.dtype) -> None:
    x = values(n).clamp(-6e4, 6e4)

    def work() -> list[Tensor]:
        small = torch.zeros(n, dtype=dtype)
        top = dense.narrow(x, small)
        assert torch.equal(small, x.to(dtype))
        outs = []
        for mode in (fixed.STORE, fixed.ADD, fixed.SUBTRACT):
            out = values(n, 2)
            dense.widen(small, out, mode)
            outs.append(out)
        cleared = values(n, 3)
        dense.clear(cleared)
        return [small, torch.tensor([top]), *outs, cleared]

    all_equal(work)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (7, 5), (33, 24), (300, 17)])
@pytest.mark.parametrize("rank", [1, 3])
def test_lowrank(rows: int, cols: int, rank: int) -> None:
    p, q = values(rows * rank).view(rows, rank), values(rank * cols, 1).view(rank, cols)

    def work() -> list[Tensor]:
        outs = []
        for mode in (fixed.STORE, fixed.ADD, fixed.SUBTRACT):
            out = values(rows * cols, 2)
            dense.lowrank(p, q, out, mode)
            outs.append(out)
        return outs

    all_equal(work)
