"""The uniform quantizer over buckets (QSGD) with 2, 4 or 8 bits: `csrc/bucket.c` in Triton.

Bytes an element, with error feedback: the first pass reads x and residual, 8; the second reads both again, from the
cache, and writes the residual and the code, 4.5 at 4 bits. From memory: 12.5, where a device copy of a float is 8; so
at best 0.64 of the speed of a copy, and 1.8 without a residual. Decoding reads half a byte and writes 4: 1.8 of a copy.

Norm "l2", 3 bits and clipping on the way are left to the reference implementation: no strategy for GPUs has them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightgrad.kernels import fixed
from weightgrad.kernels.gpu.scalar import BLOCK, halves, level, magnitude, noise16, put, ruler

if TYPE_CHECKING:
    from weightgrad.kernels.bucket import BucketSpec


def can(spec: BucketSpec) -> bool:
    """Whether these kernels quantize so."""
    return spec.bits in (2, 4, 8) and spec.norm != "l2" and spec.limit == math.inf


@triton.jit
def _norms(x, residual, n, bucket, norms, feedback: tl.constexpr, block: tl.constexpr):
    """The bits of the largest magnitude of each bucket."""
    number = tl.program_id(0).to(tl.int64)
    top = tl.zeros([block], tl.int32)
    for start in range(0, bucket, block):
        place = start + tl.arange(0, block)
        index = number * bucket + place
        mask = (place < bucket) & (index < n)
        h = tl.load(x + index, mask=mask, other=0.0)
        if feedback:
            h = h + tl.load(residual + index, mask=mask, other=0.0)
        top = tl.maximum(top, magnitude(h))
    tl.store(norms + number, tl.max(top, 0))


@triton.jit
def _quantize(
    x, residual, n, bucket, norms, scales, codes, low, high, first,
    feedback: tl.constexpr, stochastic: tl.constexpr, given: tl.constexpr,
    bits: tl.constexpr, levels: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    each: tl.constexpr = 8 // bits  # codes in a byte
    byte = tl.program_id(0).to(tl.int64) * (block // each) + tl.arange(0, block // each)
    index = byte[:, None] * each + tl.arange(0, each)[None, :]
    mask = index < n
    h = tl.load(x + index, mask=mask, other=0.0)
    if feedback:
        h = h + tl.load(residual + index, mask=mask, other=0.0)
    own = index // bucket
    if given:
        scale = tl.load(scales + own, mask=mask, other=0.0)
        norm = scale * levels
    else:
        norm = tl.load(norms + own, mask=mask, other=0)
        scale = tl.div_rn(norm, tl.full([], levels, tl.float32) + tl.zeros_like(norm))
        tl.store(scales + own, scale, mask=mask & (index % bucket == 0))
    before, inverse = ruler(norm, levels)
    grain = 0x8000
    if stochastic:
        grain = noise16(low, high, index + first)
    code = tl.where(mask, level(h, before, inverse, grain, levels, given), 0)
    if feedback:
        tl.store(residual + index, h - (code - levels).to(tl.float32) * scale, mask=mask)
    packed = tl.sum(code << (bits * tl.arange(0, each))[None, :], 1)
    tl.store(codes + byte, packed.to(tl.uint8), mask=byte * each < n)


@triton.jit
def _dequantize(
    codes, scales, n, bucket, out, bits: tl.constexpr, levels: tl.constexpr, mode: tl.constexpr, block: tl.constexpr
):
    each: tl.constexpr = 8 // bits
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = index < n
    byte = tl.load(codes + index // each, mask=mask, other=0).to(tl.int32)
    code = (byte >> ((index % each) * bits).to(tl.int32)) & ((1 << bits) - 1)
    scale = tl.load(scales + index // bucket, mask=mask, other=0.0)
    put(out + index, (code - levels).to(tl.float32) * scale, mask, mode)


def quantize(
    x: Tensor, residual: Tensor | None, spec: BucketSpec, key: int, codes: Tensor, scales: Tensor, first: int
) -> int:
    """Fill `codes` and `scales`; see kernels.bucket.quantize."""
    n, given = x.numel(), spec.norm == "given"
    bucket = min(spec.bucket, max(n, 1))  # a program looks at all places of a bucket, there or not
    buckets = -(-n // bucket)
    if not buckets:
        return 0
    second = x if residual is None else residual  # a pointer that is not used
    norms = torch.empty(buckets, dtype=torch.int32, device=x.device)
    if given:
        norms = (scales[:buckets] * float(spec.levels)).view(torch.int32)
    else:
        _norms[(buckets,)](
            x, second, n, bucket, norms,
            feedback=residual is not None, block=min(BLOCK, triton.next_power_of_2(bucket)), enable_fp_fusion=False,
        )  # fmt: skip
    bad = (norms & 0x7FFFFFFF) >= fixed.INFINITY_BITS
    done = n
    if bool(bad.any()):
        done = int(bad.int().argmax()) * bucket
    if done:
        low, high = halves(key)
        _quantize[(-(-done // BLOCK),)](
            x, second, done, bucket, norms.view(torch.float32), scales, codes, low, high, first,
            feedback=residual is not None, stochastic=spec.stochastic, given=given,
            bits=spec.bits, levels=spec.levels, block=BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    return done


def dequantize(
    codes: Tensor, scales: Tensor, n: int, bucket: int, bits: int, levels: int, out: Tensor, mode: int
) -> None:
    """Write the decoded values to `out`; see kernels.bucket.dequantize."""
    if n:
        _dequantize[(-(-n // BLOCK),)](
            codes, scales, n, bucket, out, bits=bits, levels=levels, mode=mode, block=BLOCK, enable_fp_fusion=False
        )
