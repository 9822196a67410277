"""Elias coding of quantized levels, as QSGD does.

For each level that is not zero: gamma(distance from the one before), a sign bit,
gamma(size). A bucket starts on a byte, and its length in bytes is kept beside the stream, so
buckets are decoded side by side. gamma(v): as many zeros as v has bits after its first, a
one, those bits; little-endian throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weightgrad.kernels import fixed, native
from weightgrad.kernels.bits import pack_reference

MAX_BUCKET = 16384  # at most 15 bits a level: a length fits in sixteen bits


def elias(codes: Tensor, bucket: int, levels: int) -> tuple[Tensor, Tensor]:
    """Encode codes (uint8, level + levels) to a stream of bytes; also return the bytes of each bucket as int32."""
    n = codes.numel()
    lib = native.library_for(codes)
    if lib is None:
        return _elias_reference(codes, bucket, levels)
    worst = 2 * n + 8 * (-(-n // bucket))
    out = fixed.scratch("elias", codes.new_empty(1).expand(worst))
    lengths = torch.empty(-(-n // bucket), dtype=torch.int16)
    size = lib.wg_elias(codes.data_ptr(), n, bucket, levels, out.data_ptr(), lengths.data_ptr())
    return out[:size].clone(), lengths.to(torch.int32) & 0xFFFF


def elias_decode(stream: Tensor, lengths: Tensor, n: int, bucket: int, levels: int) -> Tensor | None:
    """Undo elias; None when a bucket is not what `elias` writes. The lengths must add up to the stream."""
    lib = native.library_for(stream)
    if lib is None:
        return _decode_reference(stream, lengths, n, bucket, levels)
    codes = torch.empty(n, dtype=torch.uint8)
    short = lengths.to(torch.int16)
    bad = lib.wg_elias_decode(stream.data_ptr(), short.data_ptr(), n, bucket, levels, codes.data_ptr())
    return None if bad else codes


def _log2(v: Tensor) -> Tensor:
    """Return floor(log2(v)) of small positive integers: exact, because a double holds them."""
    return torch.frexp(v.double()).exponent.to(torch.int64) - 1


def _elias_reference(codes: Tensor, bucket: int, levels: int) -> tuple[Tensor, Tensor]:
    buckets = -(-codes.numel() // bucket)
    place = (codes != levels).nonzero().view(-1)
    own = place // bucket
    before = torch.cat((place.new_full((1,), -1), place[:-1]))[: place.numel()]
    gap = place - torch.maximum(before, own * bucket - 1)
    level = codes[place].to(torch.int64) - levels
    size = level.abs()
    gap_extra, size_extra = _log2(gap), _log2(size)
    length = 2 * gap_extra + 1 + 1 + 2 * size_extra + 1
    bits_each = torch.zeros(buckets, dtype=torch.int64, device=codes.device).index_add_(0, own, length)
    lengths = -(-bits_each // 8)
    base = torch.cumsum(lengths, 0) - lengths
    inside = torch.cumsum(length, 0) - length
    first_inside = torch.cumsum(bits_each, 0) - bits_each
    at = 8 * base[own] + inside - first_inside[own]
    flags = torch.zeros(int(lengths.sum()) * 8, dtype=torch.uint8, device=codes.device)

    def put_gamma(start: Tensor, value: Tensor, extra: Tensor) -> None:
        flags[start + extra] = 1
        for bit in range(int(extra.max()) if extra.numel() else 0):
            chosen = (extra > bit) & ((value >> bit) & 1 == 1)
            flags[(start + extra + 1 + bit)[chosen]] = 1

    put_gamma(at, gap, gap_extra)
    at = at + 2 * gap_extra + 1
    flags[at[level < 0]] = 1
    put_gamma(at + 1, size, size_extra)
    return pack_reference(flags, 1), lengths.to(torch.int32)


def _decode_reference(stream: Tensor, lengths: Tensor, n: int, bucket: int, levels: int) -> Tensor | None:
    """All buckets advance together, one code at a time."""
    device = stream.device
    codes = torch.full((n,), levels, dtype=torch.uint8, device=device)
    size = lengths.to(torch.int64)
    end = torch.cumsum(size, 0) * 8
    at = end - 8 * size
    padded = torch.cat((stream.to(torch.int64), torch.zeros(8, dtype=torch.int64, device=device)))
    word = padded[:-8].clone()
    for k in range(1, 7):
        word |= padded[k : k - 8] << (8 * k)
    word = torch.cat((word, word.new_zeros(1)))
    first = torch.arange(size.numel(), device=device) * bucket
    stop = torch.clamp(first + bucket, max=n)
    place = first - 1

    def window(at: Tensor, end: Tensor) -> Tensor:
        left = torch.clamp(end - at, max=48)
        return (word[torch.clamp(at // 8, max=word.numel() - 1)] >> (at % 8)) & ((1 << left) - 1)

    def gamma(at: Tensor, end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bits = window(at, end)
        lowest = bits & -bits
        extra = _log2(lowest.clamp(min=1))
        good = (bits != 0) & (extra <= 16) & (at + 2 * extra + 1 <= end)
        value = (1 << extra) | ((bits >> (extra + 1)) & ((1 << extra) - 1))
        return value, at + 2 * extra + 1, good

    while True:
        live = (at < end) & ((end - at >= 8) | (window(at, end) != 0))
        if not bool(live.any()):
            return codes
        at, end, place, stop = at[live], end[live], place[live], stop[live]
        gap, at, good = gamma(at, end)
        good &= at < end
        sign = window(at, end) & 1
        level, at, complete = gamma(at + 1, end)
        place = place + gap
        if not bool((good & complete & (level <= levels) & (place < stop)).all()):
            return None
        codes[place] = torch.where(sign == 1, levels - level, levels + level).to(torch.uint8)
