"""Shared values: an element is the index of its value in a short table."""

from __future__ import annotations

import torch
from torch import Tensor

from weightgrad.kernels import fixed, native, threads
from weightgrad.kernels.bits import pack_twin, unpack_twin


def assign(x: Tensor, borders: Tensor, bits: int, codes: Tensor) -> None:
    """Codes, packed: how many of the ascending `borders` lie below each element."""
    lib = native.library_for(x)

    def work(start: int, stop: int) -> None:
        for at in range(start, stop, fixed.CHUNK):
            piece = x[at : min(stop, at + fixed.CHUNK)]
            target = codes[at // 8 * bits :]
            if lib is None:
                packed = pack_twin(_codes(piece, borders), bits)
                target[: packed.numel()] = packed
            else:
                flat = torch.empty(piece.numel(), dtype=torch.uint8)
                lib.wg_assign(piece.data_ptr(), piece.numel(), borders.data_ptr(), borders.numel(), flat.data_ptr())
                lib.wg_pack(flat.data_ptr(), piece.numel(), bits, target.data_ptr())

    threads.run_split(x.numel(), fixed.CHUNK, work)


def _codes(x: Tensor, borders: Tensor) -> Tensor:
    """Comparisons are faster than a search while there are few borders."""
    if borders.numel() > 31:
        return torch.bucketize(x, borders).to(torch.uint8)
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for border in borders:
        code += x > border
    return code


def lookup(codes: Tensor, n: int, bits: int, table: Tensor, out: Tensor, mode: int = fixed.STORE) -> None:
    """out (mode)= table[code]; the table has 2**bits values."""
    lib = native.library_for(out)

    def work(start: int, stop: int) -> None:
        at = start // 8 * bits
        if lib is None:
            for first in range(start, stop, fixed.CHUNK):
                m = min(stop, first + fixed.CHUNK) - first
                place = first // 8 * bits
                code = unpack_twin(codes[place : place + -(-m * bits // 8)], m, bits)
                fixed.put(out[first : first + m], table[code.to(torch.int64)], mode)
        else:
            lib.wg_lookup(codes.data_ptr() + at, stop - start, bits, table.data_ptr(), mode, out.data_ptr() + 4 * start)

    threads.run_split(n, 256, work)
