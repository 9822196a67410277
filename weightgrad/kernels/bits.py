"""Bit streams: small codes, and the gaps between sorted indices.

Streams are little-endian: bit 0 of byte 0 comes first. A code of b bits at place i takes
bits [i*b, (i+1)*b). A gap is index - previous index - 1; its low `width` bits go to one
stream, and with Rice coding the rest to a second stream in unary: that many zeros, a one.
Keeping the two apart costs nothing and lets a decoder find every index with plain vector
operations.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.kernels import native

MAX_WIDTH = 56


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (uint8) of `bits` bits -> bytes."""
    lib = native.library_for(codes)
    if lib is None:
        return pack_twin(codes, bits)
    out = torch.empty(-(-codes.numel() * bits // 8), dtype=torch.uint8)
    lib.wg_pack(codes.data_ptr(), codes.numel(), bits, out.data_ptr())
    return out


def unpack(data: Tensor, n: int, bits: int) -> Tensor:
    """Bytes -> n codes (uint8)."""
    lib = native.library_for(data)
    if lib is None:
        return unpack_twin(data, n, bits)
    codes = torch.empty(n, dtype=torch.uint8)
    lib.wg_unpack(data.data_ptr(), n, bits, codes.data_ptr())
    return codes


def pack_twin(codes: Tensor, bits: int) -> Tensor:
    """Eight codes make `bits` bytes, by way of one 64-bit word."""
    n = codes.numel()
    if bits == 8:
        return codes
    if bits in (1, 2, 4):  # whole codes in a byte: stay in bytes
        per = 8 // bits
        missing = -n % per
        rows = (torch.cat((codes, codes.new_zeros(missing))) if missing else codes).view(-1, per)
        byte = rows[:, 0].clone()
        for j in range(1, per):
            byte |= rows[:, j] << (j * bits)
        return byte
    missing = -n % 8
    rows = (torch.cat((codes, codes.new_zeros(missing))) if missing else codes).view(-1, 8)
    word = rows[:, 0].to(torch.int64)
    for j in range(1, 8):
        word |= rows[:, j].to(torch.int64) << (j * bits)
    data = torch.stack([((word >> (8 * k)) & 255).to(torch.uint8) for k in range(bits)], dim=1)
    return data.view(-1)[: -(-n * bits // 8)]


def unpack_twin(data: Tensor, n: int, bits: int) -> Tensor:
    """The opposite of pack_twin."""
    if bits == 8:
        return data[:n]
    mask = (1 << bits) - 1
    if bits in (1, 2, 4):
        per = 8 // bits
        return torch.stack([(data >> (j * bits)) & mask for j in range(per)], dim=1).view(-1)[:n]
    missing = -data.numel() % bits
    rows = (torch.cat((data, data.new_zeros(missing))) if missing else data).view(-1, bits)
    word = rows[:, 0].to(torch.int64)
    for k in range(1, bits):
        word |= rows[:, k].to(torch.int64) << (8 * k)
    codes = torch.stack([((word >> (j * bits)) & mask).to(torch.uint8) for j in range(8)], dim=1)
    return codes.view(-1)[:n]


@dataclass(frozen=True)
class GapCode:
    """How gaps are coded: `width` low bits each, and in unary what is above them if `rice`."""

    rice: bool
    width: int
    unary_bits: int = 0

    def low_bytes(self, count: int) -> int:
        """Size of the stream of low bits."""
        return -(-count * self.width // 8)

    @property
    def unary_bytes(self) -> int:
        """Size of the unary stream."""
        return -(-self.unary_bits // 8)


def _gaps(indices: Tensor) -> Tensor:
    before = torch.cat((indices.new_full((1,), -1), indices[:-1]))
    return indices - before - 1


def best_gap_code(indices: Tensor) -> GapCode:
    """The smaller of fixed-width and Rice coding for these sorted int64 indices."""
    count = indices.numel()
    if count == 0:
        return GapCode(rice=False, width=0)
    mean = (int(indices[-1]) + 1 - count) // count
    start = max(0, min(MAX_WIDTH - 2, mean.bit_length() - 2))
    lib = native.library_for(indices)
    if lib is None:
        gaps = _gaps(indices)
        largest = int(gaps.max())
        costs = [int((gaps >> (start + i)).sum()) for i in range(3)]
    else:
        room = (ctypes.c_uint64 * 3)()
        largest = lib.wg_gap_costs(indices.data_ptr(), count, start, room)
        costs = list(room)
    rice = [GapCode(rice=True, width=start + i, unary_bits=count + cost) for i, cost in enumerate(costs)]
    options = [GapCode(rice=False, width=largest.bit_length()), *rice]
    return min(options, key=lambda code: code.low_bytes(count) + code.unary_bytes)


def pack_gaps(indices: Tensor, code: GapCode) -> tuple[Tensor, Tensor]:
    """Sorted int64 indices -> (low bits, unary), both bytes."""
    count = indices.numel()
    unary = torch.zeros(code.unary_bytes, dtype=torch.uint8, device=indices.device)
    lib = native.library_for(indices)
    if lib is not None:
        low = torch.empty(code.low_bytes(count), dtype=torch.uint8)
        target = unary.data_ptr() if code.rice else None
        lib.wg_pack_gaps(indices.data_ptr(), count, code.width, low.data_ptr(), target)
        return low, unary
    gaps = _gaps(indices)
    bits = torch.arange(code.width, device=indices.device)
    low = pack_twin(((gaps[:, None] >> bits) & 1).to(torch.uint8).view(-1), 1)
    if code.rice:
        flags = torch.zeros(code.unary_bits, dtype=torch.uint8, device=indices.device)
        flags[torch.cumsum((gaps >> code.width) + 1, 0) - 1] = 1
        unary = pack_twin(flags, 1)
    return low, unary


def unpack_gaps(low: Tensor, unary: Tensor, count: int, code: GapCode, n: int) -> Tensor | None:
    """The opposite of pack_gaps; None when the streams do not hold `count` indices below n."""
    lib = native.library_for(low)
    if lib is not None:
        indices = torch.empty(count, dtype=torch.int64)
        target = unary.data_ptr() if code.rice else None
        bad = lib.wg_unpack_gaps(low.data_ptr(), target, unary.numel(), count, code.width, n, indices.data_ptr())
        return None if bad else indices
    flags = unpack_twin(low, low.numel() * 8, 1)
    used = count * code.width
    if bool(flags[used:].any()):
        return None
    powers = torch.arange(code.width, device=low.device)
    gaps = (flags[:used].view(count, code.width).to(torch.int64) << powers).sum(1)
    if code.rice:
        ones = unpack_twin(unary, unary.numel() * 8, 1).nonzero().view(-1)
        if ones.numel() != count or -(-(int(ones[-1]) + 1 if count else 0) // 8) != unary.numel():
            return None
        quotients = _gaps(ones)
        if count and int(quotients.max()) > n >> code.width:
            return None
        gaps += quotients << code.width
    # Checked in floats first: a hostile sum could wrap around.
    if count and float(gaps.double().sum()) + count > 2.0**62:
        return None
    indices = torch.cumsum(gaps + 1, 0) - 1
    if count and int(indices[-1]) >= n:
        return None
    return indices
