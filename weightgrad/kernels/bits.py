"""Bit streams: small codes, tables looked up by code, and the gaps between sorted indices.

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

from weightgrad.kernels import fixed, gpu, native, threads

MAX_WIDTH = 56


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (uint8) of `bits` bits into bytes."""
    lib = native.library_for(codes)
    if lib is None:
        return pack_reference(codes, bits)
    out = torch.empty(-(-codes.numel() * bits // 8), dtype=torch.uint8)
    lib.wg_pack(codes.data_ptr(), codes.numel(), bits, out.data_ptr())
    return out


def unpack(data: Tensor, n: int, bits: int) -> Tensor:
    """Unpack bytes into n codes (uint8)."""
    lib = native.library_for(data)
    if lib is None:
        return unpack_reference(data, n, bits)
    codes = torch.empty(n, dtype=torch.uint8)
    lib.wg_unpack(data.data_ptr(), n, bits, codes.data_ptr())
    return codes


def _squeeze_steps(bits: int) -> list[tuple[int, int]]:
    """(used, shift) of the three steps that bring eight codes, one a byte, together in a 64-bit word.

    Each step joins neighbours: lanes of 8 bits with `used` in use become lanes of 16 with twice as
    many, then 32, then 64. Read backwards, the same steps spread them out again.
    """
    return [(bits * lane // 8, lane - bits * lane // 8) for lane in (8, 16, 32)]


def _every_other(used: int, lane: int) -> int:
    """A mask of `used` bits at the bottom of every second lane."""
    return sum(((1 << used) - 1) << place for place in range(0, 64, 2 * lane))


def pack_reference(codes: Tensor, bits: int) -> Tensor:
    """Pack codes eight at a time, by way of one 64-bit word (machines here are little-endian)."""
    if bits == 8:
        return codes
    n = codes.numel()
    missing = -n % 8
    if missing or codes.storage_offset() % 8:
        codes = torch.cat((codes, codes.new_zeros(missing)))
    word = codes.view(torch.int64)
    if bits == 1:  # one multiplication brings bit 0 of byte i to bit i of the last byte
        return (word * 0x0102040810204080).view(torch.uint8)[7::8].clone()
    for used, shift in _squeeze_steps(bits):
        low = _every_other(used, used + shift)
        word = (word & low) | ((word >> shift) & (low << used))
    return word.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)[: -(-n * bits // 8)]


def unpack_reference(data: Tensor, n: int, bits: int) -> Tensor:
    """Undo pack_reference."""
    if bits == 8:
        return data[:n]
    words = -(-n // 8)
    room = data.new_zeros(words, 8)
    whole = data.numel() // bits
    room[:whole, :bits] = data[: whole * bits].view(-1, bits)
    if whole < words:
        room[whole, : data.numel() - whole * bits] = data[whole * bits :]
    word = room.view(torch.int64)[:, 0]
    for used, shift in reversed(_squeeze_steps(bits)):
        low = _every_other(used, used + shift)
        word = (word & low) | ((word & (low << used)) << shift)
    return word.view(torch.uint8)[:n]


def assign(x: Tensor, borders: Tensor, bits: int, codes: Tensor) -> None:
    """Fill `codes` with packed codes: how many of the ascending `borders` lie below each element."""
    lib = native.library_for(x)

    def work(start: int, stop: int) -> None:
        if lib is not None:
            target, count = codes.data_ptr() + start // 8 * bits, borders.numel()
            lib.wg_assign(x.data_ptr() + 4 * start, stop - start, borders.data_ptr(), count, bits, target)
            return
        for at in range(start, stop, fixed.CHUNK):
            packed = pack_reference(_codes(x[at : min(stop, at + fixed.CHUNK)], borders), bits)
            codes[at // 8 * bits :][: packed.numel()] = packed

    threads.run_split(x.numel(), fixed.CHUNK, work)


def _codes(x: Tensor, borders: Tensor) -> Tensor:
    """Codes, one a byte. Comparisons are faster than a search while there are few borders."""
    if borders.numel() > 31:
        return torch.bucketize(x, borders).to(torch.uint8)
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for border in borders:
        code += x > border
    return code


def lookup(codes: Tensor, n: int, bits: int, table: Tensor, out: Tensor, mode: int = fixed.STORE) -> None:
    """Write table[code] to `out`, as `mode` says; the table has 2**bits values."""
    lib = native.library_for(out)

    def work(start: int, stop: int) -> None:
        at = start // 8 * bits
        if lib is None:
            for first in range(start, stop, fixed.CHUNK):
                m = min(stop, first + fixed.CHUNK) - first
                place = first // 8 * bits
                code = unpack_reference(codes[place : place + -(-m * bits // 8)], m, bits)
                fixed.put(out[first : first + m], table[code.to(torch.int64)], mode)
        else:
            lib.wg_lookup(codes.data_ptr() + at, stop - start, bits, table.data_ptr(), mode, out.data_ptr() + 4 * start)

    threads.run_split(n, 256, work)


@dataclass(frozen=True)
class GapCode:
    """How gaps are coded: `width` low bits each, and in unary what is above them if `rice`."""

    rice: bool
    width: int
    unary_bits: int = 0

    def low_bytes(self, count: int) -> int:
        """Size of the stream of low bits in bytes."""
        return -(-count * self.width // 8)

    @property
    def unary_bytes(self) -> int:
        """Size of the unary stream in bytes."""
        return -(-self.unary_bits // 8)


def gaps_between(indices: Tensor) -> Tensor:
    """How many places lie between sorted indices, and before the first."""
    before = torch.cat((indices.new_full((1,), -1), indices[:-1]))
    return indices - before - 1


_PROBE = 1 << 15


def best_gap_code(indices: Tensor) -> GapCode:
    """Choose between fixed-width and Rice coding by the size that the first 32,768 of these sorted indices take.

    A Rice code comes without its length: pack_gaps finds that out.
    """
    count = indices.numel()
    if count == 0:
        return GapCode(rice=False, width=0)
    largest, rice = _costs(indices[:_PROBE])
    fixed_width = GapCode(rice=False, width=largest.bit_length())
    some = min(count, _PROBE)
    best = min((fixed_width, *rice), key=lambda code: code.low_bytes(some) + code.unary_bytes)
    if not best.rice and count > some:  # it must hold every gap
        best = GapCode(rice=False, width=_costs(indices)[0].bit_length())
    return best


def _costs(indices: Tensor) -> tuple[int, list[GapCode]]:
    """Find the largest gap, and the three Rice codes around the best one."""
    count = indices.numel()
    mean = (int(indices[-1]) + 1 - count) // count
    start = max(0, min(MAX_WIDTH - 2, mean.bit_length() - 2))
    lib = native.library_for(indices)
    if lib is None:
        gaps = gaps_between(indices)
        largest = int(gaps.max())
        costs = [int((gaps >> (start + i)).sum()) for i in range(3)]
    else:
        room = (ctypes.c_uint64 * 3)()
        largest = lib.wg_gap_costs(indices.data_ptr(), count, start, room)
        costs = list(room)
    return largest, [GapCode(rice=True, width=start + i, unary_bits=count + cost) for i, cost in enumerate(costs)]


def pack_gaps(indices: Tensor, code: GapCode) -> tuple[Tensor, Tensor, GapCode]:
    """Pack sorted int64 indices into two byte streams, low bits and unary; also return the code with its length."""
    count = indices.numel()
    lib = native.library_for(indices)
    if lib is not None:
        low = torch.empty(code.low_bytes(count), dtype=torch.uint8)
        most = count + ((int(indices[-1]) + 1 - count) >> code.width) if code.rice else 0
        unary = torch.zeros(-(-most // 8), dtype=torch.uint8)
        target = unary.data_ptr() if code.rice else None
        bits = lib.wg_pack_gaps(indices.data_ptr(), count, code.width, low.data_ptr(), target)
        code = GapCode(code.rice, code.width, bits)
        return low, unary[: code.unary_bytes], code
    gaps = gaps_between(indices)
    if (kernels := gpu.kernels_for(indices, "bits")) is not None:
        packed: tuple[Tensor, Tensor, GapCode] = kernels.pack_gaps(gaps, code)
        return packed
    places = torch.arange(code.width, device=indices.device)
    low = pack_reference(((gaps[:, None] >> places) & 1).to(torch.uint8).view(-1), 1)
    if not code.rice:
        return low, low[:0], code
    ones = torch.cumsum((gaps >> code.width) + 1, 0) - 1
    code = GapCode(True, code.width, int(ones[-1]) + 1)
    flags = torch.zeros(code.unary_bits, dtype=torch.uint8, device=indices.device)
    flags[ones] = 1
    return low, pack_reference(flags, 1), code
