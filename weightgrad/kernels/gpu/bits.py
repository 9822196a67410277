"""Packed positions: the gaps between sorted indices as low bits and a unary stream, `csrc/bits.c` in Triton.

A program of the low stream makes 1,024 bytes; each bit is fetched from its gap, which lies in the cache because
neighbouring bits come from the same one. The unary stream has one bit for each gap, set in words that start as zeros.
Both together move some 16 bytes an entry; entries are few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightgrad.kernels.gpu.scalar import BLOCK

if TYPE_CHECKING:
    from weightgrad.kernels.bits import GapCode


@triton.jit
def _low(gaps, count, width: tl.constexpr, low, block: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    packed = tl.zeros([block], tl.int32)
    for place in tl.static_range(8):
        bit = byte * 8 + place
        entry = bit // width
        gap = tl.load(gaps + entry, mask=entry < count, other=0)
        packed += (((gap >> (bit % width)) & 1) << place).to(tl.int32)
    tl.store(low + byte, packed.to(tl.uint8), mask=byte * 8 < count * width)


@triton.jit
def _unary(ones, count, words, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = place < count
    bit = tl.load(ones + place, mask=mask, other=0)
    tl.atomic_or(words + bit // 32, (tl.full([block], 1, tl.int32) << (bit % 32).to(tl.int32)), mask=mask)


def pack_gaps(gaps: Tensor, code: GapCode) -> tuple[Tensor, Tensor, GapCode]:
    """Pack gaps into two byte streams; see kernels.bits.pack_gaps."""
    from weightgrad.kernels.bits import GapCode

    count, device = gaps.numel(), gaps.device
    low = torch.empty(code.low_bytes(count), dtype=torch.uint8, device=device)
    if low.numel():
        _low[(-(-low.numel() // BLOCK),)](gaps, count, code.width, low, block=BLOCK, enable_fp_fusion=False)
    if not code.rice:
        return low, low[:0], code
    ones = torch.cumsum((gaps >> code.width) + 1, 0) - 1
    code = GapCode(True, code.width, int(ones[-1]) + 1 if count else 0)
    words = torch.zeros(-(-code.unary_bits // 32), dtype=torch.int32, device=device)
    if count:
        _unary[(-(-count // BLOCK),)](ones, count, words, block=BLOCK, enable_fp_fusion=False)
    return low, words.view(torch.uint8)[: code.unary_bytes], code
