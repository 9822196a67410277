"""The uniform quantizer over buckets (QSGD), with or without error feedback.

norm  = max|h| or ||h||_2 of the bucket        h = x, or x cut to +-limit, or x + residual
code  = floor(L*h/norm + L + noise)            0 .. 2L, noise uniform in [0, 1)
value = (code - L) * (norm / L)
residual = h - value
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.kernels import fixed, gpu, native, noise, threads
from weightgrad.kernels.bits import pack_reference, unpack_reference
from weightgrad.kernels.fixed import noise_room

NORMS = {"max": 0, "l2": 1, "given": 2}


@dataclass(frozen=True)
class BucketSpec:
    """How to quantize: `levels` is L; codes are stored in `bits` bits."""

    bucket: int
    bits: int
    levels: int
    norm: str  # "max", "l2", or "given": the scales are input
    stochastic: bool
    limit: float = math.inf  # x is cut to +-limit first; only where there is no residual, and x is finite


def quantize(
    x: Tensor, residual: Tensor | None, spec: BucketSpec, key: int, codes: Tensor, scales: Tensor, first: int = 0
) -> int:
    """Fill `codes` and `scales`, and leave the error in `residual`.

    Returns how many elements were encoded: x.numel(), or the start of the first bucket with a
    NaN, an Inf or a sum that overflows; that bucket and the later ones are untouched.
    """
    lib = native.library_for(x)
    if (kernels := gpu.kernels_for(x, "bucket")) is not None and kernels.can(spec):
        return int(kernels.quantize(x, residual, spec, key, codes, scales, first))
    if lib is None:
        return _quantize_reference(x, residual, spec, key, codes, scales, first)

    def work(start: int, stop: int) -> int:
        q = native.Quantizer(
            spec.bucket, spec.bits, spec.levels, NORMS[spec.norm], int(spec.stochastic), key, first + start, spec.limit
        )
        done: int = lib.wg_quantize(
            x.data_ptr() + 4 * start,
            None if residual is None else residual.data_ptr() + 4 * start,
            stop - start,
            ctypes.byref(q),
            codes.data_ptr() + start // 8 * spec.bits,
            scales.data_ptr() + start // spec.bucket * 4,
        )
        return start + done if done < stop - start else x.numel()

    return min(threads.run_split(x.numel(), spec.bucket, work))


def dequantize(
    codes: Tensor, scales: Tensor, n: int, bucket: int, bits: int, levels: int, out: Tensor, mode: int = fixed.STORE
) -> None:
    """Write the decoded values to `out`, as `mode` says."""
    lib = native.library_for(out)
    if bits in (2, 4, 8) and (kernels := gpu.kernels_for(out, "bucket")) is not None:
        kernels.dequantize(codes, scales, n, bucket, bits, levels, out, mode)
        return
    if lib is None:
        _dequantize_reference(codes, scales, n, bucket, bits, levels, out, mode)
        return

    def work(start: int, stop: int) -> None:
        lib.wg_dequantize(
            codes.data_ptr() + start // 8 * bits,
            scales.data_ptr() + start // bucket * 4,
            stop - start,
            bucket,
            bits,
            levels,
            mode,
            out.data_ptr() + 4 * start,
        )

    threads.run_split(n, bucket, work)


def _norms(h: Tensor, kind: str) -> Tensor:
    """Norm of each row of (buckets, bucket); a NaN or Inf in the row makes it NaN or Inf."""
    if kind == "max":
        sizes = torch.bitwise_and(h.view(torch.int32), 0x7FFFFFFF, out=fixed.scratch("code", h, torch.int32))
        return sizes.amax(1).view(torch.float32)
    wide = h.double()
    lanes = fixed.add_groups((wide * wide).view(h.shape[0], -1, 8), 8)
    return fixed.fold_lanes(lanes).sqrt().float()


def _quantize_reference(
    x: Tensor, residual: Tensor | None, spec: BucketSpec, key: int, codes: Tensor, scales: Tensor, first: int
) -> int:
    n, bucket = x.numel(), spec.bucket
    bucket = min(bucket, -(-n // 32) * 32) or bucket
    step = max(1, fixed.CHUNK // bucket) * bucket
    for start in range(0, n, step):
        stop = min(n, start + step)
        piece = x[start:stop]
        if residual is not None:
            piece = torch.add(piece, residual[start:stop], out=fixed.scratch("sum", piece))
        elif spec.limit < math.inf:
            piece = torch.clamp(piece, -spec.limit, spec.limit, out=fixed.scratch("cut", piece))
        h = fixed.padded(piece, bucket).view(-1, bucket)
        own = scales[start // bucket : start // bucket + h.shape[0]]
        norm = own * float(spec.levels) if spec.norm == "given" else _norms(h, spec.norm)
        bad = fixed.magnitude_bits(norm) >= fixed.INFINITY_BITS
        done = stop
        if bool(bad.any()):
            good = int(bad.int().argmax())
            h, norm, own = h[:good], norm[:good], own[:good]
            done = start + good * bucket
        if done > start:
            rule = fixed.ruler(norm, spec.levels)
            scale = own.clone() if spec.norm == "given" else rule.scale
            rows = fixed.Ruler(rule.before[:, None], rule.inverse[:, None], scale[:, None])
            grain: Tensor | int = 0x8000
            if spec.stochastic:
                grain = noise.noise16(key, first + start, h.numel(), x.device, noise_room(h)).view_as(h)
            code = fixed.level_of(h, rows, spec.levels, grain, clamp=spec.norm == "given")
            own.copy_(scale)
            if residual is not None:
                value = fixed.scratch("level", h).copy_(code).sub_(float(spec.levels)).mul_(rows.scale)
                residual[start:done] = torch.sub(h, value, out=value).view(-1)[: done - start]
            packed = pack_reference(code.view(-1)[: done - start].to(torch.uint8), spec.bits)
            at = start // 8 * spec.bits
            codes[at : at + packed.numel()] = packed
        if done < stop:
            return done
    return n


def _dequantize_reference(
    codes: Tensor, scales: Tensor, n: int, bucket: int, bits: int, levels: int, out: Tensor, mode: int
) -> None:
    bucket = min(bucket, -(-n // 32) * 32) or bucket
    step = max(1, fixed.CHUNK // bucket) * bucket
    for start in range(0, n, step):
        stop = min(n, start + step)
        at = start // 8 * bits
        code = unpack_reference(codes[at : at + -(-(stop - start) * bits // 8)], stop - start, bits)
        level = fixed.padded(code.to(torch.float32).sub_(float(levels)), bucket).view(-1, bucket)
        own = scales[start // bucket : start // bucket + level.shape[0]]
        fixed.put(out[start:stop], level.mul_(own[:, None]).view(-1)[: stop - start], mode)
