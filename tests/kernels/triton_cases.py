"""The kernels for GPUs, interpreted on the CPU, beside the C kernels and the reference implementations.

Run as a script in a process with TRITON_INTERPRET=1, which must be set before triton is imported. Writes one line of
JSON for each family of cases: its name, how many results were compared, and what went wrong, if anything did. With a
file as its argument it also writes there how each kernel was launched (`triton_launches.py`).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.codecs.test_contract import CASES, MAY_REFUSE
from tests.kernels import triton_launches

KEY = 0xFEDCBA9876543210
SIZES = (0, 1, 33, 160, 161, 513, 5203)
SPECS = (
    "qsgd(bits=2)", "qsgd(bits=4)", "qsgd(bits=8)", "ef(qsgd(bits=4))", "terngrad(clip=2.5)", "ef(terngrad(clip=2.5))",
    "onebit()", "sign()", "topk(0.1)", "ef(topk(0.05))", "ef(topk(0.05) > sign())", "ef(topk(0.05) > qsgd(bits=4))",
    "dgc(0.05)", "threshold(1.0)", "ef(topk(0.05, exact=False) > sign())", "qsgd(bits=8, bucket=4294967296)",
    "onebit(feedback=False)", "sign(scale='one')", "lossaware(bits='ternary')",
)  # fmt: skip

Work = Callable[[], list[Tensor]]


def values(n: int, seed: int = 0) -> Tensor:
    """Floats of many sizes, with zeros of both signs, ties and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * torch.exp(3 * torch.randn(n, generator=generator))
    x[::17], x[5::23], x[3::29], x[4::31], x[6::37] = 0.0, -0.0, 1.0, -1.0, 1e-41
    return x


def quantize() -> Iterator[Work]:
    from weightgrad.kernels import bucket, fixed

    for n, width, norm, stochastic in product((0, 33, 1100), (2, 4, 8), ("max", "given"), (True, False)):
        x = values(n)
        if n > 300:
            x[:96] *= 1e-38  # a whole bucket of subnormals
            x[96:192] = 0.0

        def work(
            n: int = n, width: int = width, norm: str = norm, stochastic: bool = stochastic, x: Tensor = x
        ) -> list[Tensor]:
            spec = bucket.BucketSpec(96, width, 2 ** (width - 1) - 1, norm, stochastic)
            found = []
            for residual in (None, values(n, 1)):
                codes = torch.zeros(-(-n * width // 8), dtype=torch.uint8)
                scales = torch.full((-(-n // 96),), 0.7)
                assert bucket.quantize(x, residual, spec, KEY, codes, scales, 64) == n
                found += [codes, scales, *([] if residual is None else [residual])]
                for mode in (fixed.STORE, fixed.ADD, fixed.SUBTRACT):
                    out = values(n, 2)
                    bucket.dequantize(codes, scales, n, 96, width, spec.levels, out, mode)
                    found.append(out)
            return found

        yield work


def not_finite() -> Iterator[Work]:
    from weightgrad.kernels import bucket, columns, select

    for bad in (math.nan, math.inf):
        x = values(3000)
        x[2100] = bad

        def work(x: Tensor = x) -> list[Tensor]:
            spec = bucket.BucketSpec(64, 4, 7, "max", True)
            residual, codes, scales = values(3000, 1), torch.zeros(1500, dtype=torch.uint8), torch.zeros(47)
            assert bucket.quantize(x, residual, spec, KEY, codes, scales) == 2100 // 64 * 64
            second = values(3000, 1)
            found = select.scan(x, second, None, 0.0, select.Thresholds.magnitude(2.0), 100)
            assert found.done == 2048
            third, old = values(3000, 1), torch.rand(1, 2, 1, generator=torch.Generator().manual_seed(5))
            grid = columns.matrix_grid((3000,))
            bits, means = torch.zeros(375, dtype=torch.uint8), torch.zeros(1, 2, 1)
            assert not columns.onebit(x, third, old, grid, bits, means)
            assert torch.isfinite(third).all()
            assert not old.any()
            return [codes[: 2048 // 2], residual, second, found.indices.clone(), found.values.clone()]

        yield work


def ternary() -> Iterator[Work]:
    from weightgrad.kernels import fixed
    from weightgrad.kernels import ternary as kernel

    for n, scale in product(SIZES, (0.0, 2.5, 1e-40)):
        x = values(n) * (1e-39 if scale == 1e-40 else 1.0)

        def work(n: int = n, scale: float = float(torch.tensor(scale)), x: Tensor = x) -> list[Tensor]:
            found = []
            for residual in (None, values(n, 1)):
                codes = torch.zeros(kernel.packed_bytes(n), dtype=torch.uint8)
                kernel.ternary(x, residual, scale, KEY, codes)
                found += [codes, *([] if residual is None else [residual])]
            limits = torch.zeros(kernel.packed_bytes(n), dtype=torch.uint8)
            kernel.threshold_codes(x, 0.5, limits)
            for mode in (fixed.STORE, fixed.ADD, fixed.SUBTRACT):
                out = values(n, 2)
                kernel.ternary_decode(codes, n, scale, out, mode)
                found.append(out)
            return [*found, limits]

        yield work


def select() -> Iterator[Work]:
    from weightgrad.kernels import fixed
    from weightgrad.kernels import select as kernel

    for n, moves, clear, room in product((0, 1, 2049), ("none", "x", "momentum"), (False, True), (50, 2049)):
        if moves == "none" and clear:
            continue  # only what is added to is cleared

        def work(n: int = n, moves: str = moves, clear: bool = clear, room: int = room) -> list[Tensor]:
            residual, x = values(n, 1), None if moves == "none" else values(n)
            velocity = values(n, 3) if moves == "momentum" else None
            limits = kernel.Thresholds(2.0, -3.0)
            found = kernel.scan(x, residual, velocity, 0.9, limits, room, clear=clear, keep=True)
            count = torch.tensor([found.total, found.done])
            outs = []
            for mode in (fixed.STORE, fixed.ADD, fixed.SUBTRACT):
                outs.append(values(n, 2))
                kernel.scatter(found.indices, found.values, outs[-1], mode)
            kernel.scatter(found.indices, None, outs[-1])
            return [found.indices, found.values, count, residual, *outs, *([] if velocity is None else [velocity])]

        yield work


def gaps() -> Iterator[Work]:
    from weightgrad.kernels import bits

    for count, spread in product((1, 9, 1500), (1, 3, 100)):
        draw = torch.Generator().manual_seed(count + spread)
        indices = torch.cumsum(torch.randint(1, spread + 1, (count,), generator=draw), 0) - 1

        def work(indices: Tensor = indices) -> list[Tensor]:
            found = []
            for code in (bits.best_gap_code(indices), bits.GapCode(True, 0), bits.GapCode(True, 5)):
                low, unary, full = bits.pack_gaps(indices, code)
                found += [low, unary, torch.tensor([full.unary_bits])]
            return found

        yield work


def onebit() -> Iterator[Work]:
    from weightgrad.kernels import columns, fixed

    grids = [columns.Grid(*sides) for sides in ((1, 1, 32768), (33, 1, 32768), (2500, 1, 1024), (40, 8, 32768))]
    for grid in [*grids, columns.Grid(77, 13, 32768), columns.Grid(70, 130, 64), columns.Grid(1100, 3, 1024)]:

        def work(grid: columns.Grid = grid) -> list[Tensor]:
            n = grid.rows * grid.cols
            found = []
            for residual in (None, torch.zeros(n)):
                means = torch.zeros(grid.tiles, 2, grid.cols)
                for step in range(2):
                    old, means = means, torch.zeros(grid.tiles, 2, grid.cols)
                    packed, plain = torch.zeros(2, -(-n // 8), dtype=torch.uint8)
                    x = values(n, step)
                    assert columns.onebit(x, residual, None if residual is None else old, grid, packed, means)
                    columns.signs(x, plain)
                    out = values(n, 9)
                    columns.onebit_decode(packed, means, grid, out, fixed.ADD)
                    found += [packed, plain, means, out, *([] if residual is None else [residual.clone()])]
            return found

        yield work


def codecs() -> Iterator[Work]:
    """Every tensor of the contract suite, twice, with what the codec remembers in between."""
    from weightgrad.codecs import decode, parse
    from weightgrad.errors import EncodeError

    for spec, case in product(SPECS, CASES):

        def work(spec: str = spec, case: str = case) -> list[Tensor]:
            codec, x = parse(spec), CASES[case]().detach()
            state = codec.init(x)
            found: list[Tensor] = []
            for step in range(2):
                try:
                    payload, state = codec.encode(x, state, KEY + step)
                except EncodeError:
                    assert case in MAY_REFUSE
                    return found  # what is left in the memory of a refused tensor is rounded as each backend undoes it
                found += [payload.body.clone(), decode(payload)]
            return [*found, *state.values()]

        yield work


FAMILIES = (quantize, not_finite, ternary, select, gaps, onebit, codecs)


def compare(work: Work) -> tuple[int, str]:
    """How many results agree to the last bit on all backends, or what does not."""
    from weightgrad import kernels

    results = {}
    for backend in ("triton", "reference", *(["native"] if kernels.status().backend == "native" else [])):
        with kernels.use(backend):
            results[backend] = [t.contiguous().reshape(-1).view(torch.uint8) for t in work()]
    ours = results.pop("triton")
    for backend, theirs in results.items():
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if not torch.equal(one, other):
                return 0, f"{work.__defaults__}: result {place} differs from {backend}"
    return len(ours), ""


def main() -> None:
    torch.set_num_threads(1)
    launches = triton_launches.recorded()
    for family in FAMILIES:
        compared, error = 0, ""
        try:
            for work in family():
                count, error = compare(work)
                compared += count
                if error:
                    break
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        print(json.dumps({"family": family.__name__, "compared": compared, "error": error}), flush=True)
    for file in sys.argv[1:2]:
        Path(file).write_text("\n".join(launches))


if __name__ == "__main__":
    main()
