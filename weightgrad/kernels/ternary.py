"""Ternary values at 1.6 bits: five trits a byte.

Gradients (TernGrad): h is clipped to +-scale and becomes +-scale with probability
|h|/scale, else 0. Weights (loss-aware): the sign where |w| is above a threshold.

Packing: a group of m <= 160 elements takes w = ceil(m/5) bytes; byte j holds elements
j, j+w, .. j+4w, the first in the lowest base-3 place. Only the last group of a tensor
is short.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import CDLL
from typing import NamedTuple

import torch
from torch import Tensor

from weightgrad.kernels import fixed, gpu, native, noise, threads
from weightgrad.kernels.moments import BLOCK, largest_bits

GROUP = 160
_STEP = fixed.CHUNK // GROUP * GROUP


def packed_bytes(n: int) -> int:
    """Return the bytes that n trits take."""
    return n // GROUP * 32 + -(-(n % GROUP) // 5)


def ternary(x: Tensor, residual: Tensor | None, scale: float, key: int, codes: Tensor) -> None:
    """Fill `codes` with stochastic ternary codes of x, or of x + residual, which then keeps the error."""
    lib = native.library_for(x)
    if (kernels := gpu.kernels_for(x, "ternary")) is not None:
        kernels.ternary(x, residual, scale, key, codes)
        return
    if lib is None:
        _ternary_reference(x, residual, scale, key, codes)
        return

    def work(start: int, stop: int) -> None:
        add = None if residual is None else residual.data_ptr() + 4 * start
        at = codes.data_ptr() + start // 5
        lib.wg_ternary(x.data_ptr() + 4 * start, add, stop - start, scale, key, start, at)

    threads.run_split(x.numel(), GROUP, work)


def threshold_codes(w: Tensor, threshold: float, codes: Tensor) -> None:
    """Fill `codes` with sign(w) where |w| > threshold, else 0."""
    lib = native.library_for(w)
    if (kernels := gpu.kernels_for(w, "ternary")) is not None:
        kernels.threshold_codes(w, threshold, codes)
        return
    if lib is None:
        for start in range(0, w.numel(), _STEP):
            piece = w[start : start + _STEP]
            up, down = fixed.compared(piece, ">", threshold, "above"), fixed.compared(piece, "<", -threshold, "below")
            _store(codes, start, up.view(torch.uint8).add_(1).sub_(down.view(torch.uint8)))
        return

    def work(start: int, stop: int) -> None:
        at = codes.data_ptr() + start // 5
        lib.wg_ternary_threshold(w.data_ptr() + 4 * start, stop - start, threshold, at)

    threads.run_split(w.numel(), GROUP, work)


def ternary_decode(codes: Tensor, n: int, scale: float, out: Tensor, mode: int = fixed.STORE) -> None:
    """Write (trit - 1) * scale to `out`, as `mode` says."""
    lib = native.library_for(out)
    if (kernels := gpu.kernels_for(out, "ternary")) is not None:
        kernels.ternary_decode(codes, n, scale, out, mode)
        return
    if lib is None:
        factor = torch.full((), scale, dtype=torch.float32, device=out.device)  # no copy from the host
        for start in range(0, n, _STEP):
            m = min(_STEP, n - start)
            trits = unpack_trits(codes[start // 5 : start // 5 + packed_bytes(m)], m)
            fixed.put(out[start : start + m], (trits.to(torch.float32) - 1.0) * factor, mode)
        return

    def work(start: int, stop: int) -> None:
        at = codes.data_ptr() + start // 5
        lib.wg_ternary_decode(at, stop - start, scale, mode, out.data_ptr() + 4 * start)

    threads.run_split(n, GROUP, work)


class WeightedSums(NamedTuple):
    """Two sums over a tensor and its curvature. `finite` says that both tensors are, and D is not negative."""

    first: float
    second: float
    finite: bool

    @property
    def ratio(self) -> float:
        """first / second, or zero where the second is."""
        return self.first / self.second if self.second > 0 else 0.0


def kept_sums(w: Tensor, curvature: Tensor | None, threshold: float) -> WeightedSums:
    """Return (sum D*|w|, sum D) over |w| > threshold; D is one where there is no curvature."""

    # Magnitudes order like their bits; all are above -1.
    limit = -1 if threshold < 0 else int(torch.tensor(threshold, dtype=torch.float32).view(torch.int32))

    def reference(piece: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        sizes, kept = (fixed.scratch(name, piece, torch.int32) for name in ("sizes", "kept"))
        torch.bitwise_and(piece.view(torch.int32), 0x7FFFFFFF, out=sizes)
        torch.sub(limit, sizes, out=kept).bitwise_right_shift_(31).bitwise_and_(d.view(torch.int32))
        weight = kept.view(torch.float32)
        return torch.mul(weight, sizes.view(torch.float32), out=sizes.view(torch.float32)), weight

    def call(lib: CDLL, w_at: int, d_at: int | None, n: int, sums_at: int) -> int:
        return int(lib.wg_ternary_sums(w_at, d_at, n, threshold, sums_at))

    return _weighted_sums(w, curvature, reference, call)


def level_sums(w: Tensor, curvature: Tensor | None, alpha: float, levels: int) -> WeightedSums:
    """Return (sum D*b*w, sum D*b*b) where b is the level of w, -levels .. levels, on a ruler of +-alpha."""

    def reference(piece: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        rule = fixed.ruler(torch.full((1,), alpha, device=piece.device, dtype=torch.float32), levels)
        b = (fixed.level_of(piece, rule, levels, 0x8000, clamp=True) - levels).to(torch.float32)
        weighted = d * b
        return weighted * piece, weighted * b

    def call(lib: CDLL, w_at: int, d_at: int | None, n: int, sums_at: int) -> int:
        return int(lib.wg_level_sums(w_at, d_at, n, alpha, levels, sums_at))

    return _weighted_sums(w, curvature, reference, call)


def _weighted_sums(
    w: Tensor,
    curvature: Tensor | None,
    reference: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    call: Callable[[CDLL, int, int | None, int, int], int],
) -> WeightedSums:
    """Return two exactly repeatable sums, block by block as in moments.py."""
    n = w.numel()
    partials = torch.zeros(-(-n // BLOCK), 2, dtype=torch.float64)
    lib = native.library_for(w)
    if lib is None:
        good = True
        for start in range(0, n, fixed.CHUNK):
            piece = w[start : start + fixed.CHUNK]
            d = torch.ones_like(piece) if curvature is None else curvature[start : start + fixed.CHUNK]
            low, high = torch.aminmax(d.view(torch.int32))  # a negative float is a negative integer
            good = good and largest_bits(piece) < fixed.INFINITY_BITS > int(high) and int(low) >= 0
            parts = [fixed.padded(part, BLOCK) for part in reference(piece, d)]
            wide = fixed.scratch("wide", parts[0], torch.float64)
            sums = torch.stack([fixed.block_sums(wide.copy_(part), BLOCK) for part in parts])
            partials[start // BLOCK : start // BLOCK + sums.shape[1]] = sums.t().cpu()
    else:

        def work(start: int, stop: int) -> int:
            d = None if curvature is None else curvature.data_ptr() + 4 * start
            return call(lib, w.data_ptr() + 4 * start, d, stop - start, partials.data_ptr() + start // BLOCK * 16)

        good = max(threads.run_split(n, BLOCK, work)) < fixed.INFINITY_BITS
    if not good:
        return WeightedSums(math.nan, math.nan, False)
    first, second = (math.fsum(column) for column in partials.t().tolist())
    return WeightedSums(first, second, True)


def _ternary_reference(x: Tensor, residual: Tensor | None, scale: float, key: int, codes: Tensor) -> None:
    rule = fixed.ruler(torch.full((1,), scale, device=x.device, dtype=torch.float32), 1)
    for start in range(0, x.numel(), _STEP):
        h = x[start : start + _STEP]
        if residual is not None:
            h = torch.add(h, residual[start : start + _STEP], out=fixed.scratch("sum", h))
        grain = noise.noise16(key, start, h.numel(), x.device, fixed.noise_room(h))
        cut = torch.clamp(h, -scale, scale, out=fixed.scratch("cut", h))
        code = fixed.level_of(cut, rule, 1, grain, clamp=False)
        if residual is not None:
            value = fixed.scratch("level", h).copy_(code).sub_(1.0).mul_(rule.scale)
            residual[start : start + _STEP] = torch.sub(h, value, out=value)
        _store(codes, start, code.to(torch.uint8))


def _store(codes: Tensor, start: int, trits: Tensor) -> None:
    packed = pack_trits(trits)
    codes[start // 5 : start // 5 + packed.numel()] = packed


def pack_trits(trits: Tensor) -> Tensor:
    """Pack trits (uint8) into bytes."""
    whole = trits.numel() // GROUP * GROUP
    rest = trits[whole:]
    width = -(-rest.numel() // 5)
    short = fixed.padded(rest, 5 * width or 1).view(1, 5, -1) if width else rest.view(0, 5, 0)
    parts = [_horner(trits[:whole].view(-1, 5, 32)), _horner(short)]
    return torch.cat(parts)


def _horner(digits: Tensor) -> Tensor:
    """(groups, 5, width) trits -> bytes, the first in the lowest place."""
    byte = digits[:, 4]
    for k in range(3, -1, -1):
        byte = byte * 3 + digits[:, k]
    return byte.reshape(-1)


def unpack_trits(codes: Tensor, n: int) -> Tensor:
    """Unpack bytes into n trits (uint8)."""
    groups = n // GROUP
    parts = []
    for part, width, count in (
        (codes[: groups * 32], 32, groups * GROUP),
        (codes[groups * 32 :], codes.numel() - groups * 32, n - groups * GROUP),
    ):
        if count:
            rows = part.view(-1, width)
            digits = torch.stack([rows // 3**k % 3 for k in range(5)], dim=1)
            parts.append(digits.view(-1)[:count])
    return torch.cat(parts) if parts else codes[:0]
