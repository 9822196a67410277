"""Whole floats on the wire: float32, float16 and bfloat16, rounded to nearest even."""

from __future__ import annotations

import torch
from torch import Tensor

from weightgrad.kernels import fixed, native, threads
from weightgrad.kernels.moments import largest_bits

_KINDS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 17}


def narrow(x: Tensor, out: Tensor) -> int:
    """out = x in out's dtype. Returns the bits of the largest |x|."""
    lib = native.library_for(x)
    if lib is None or not lib.wg_isa():  # torch's own casts; a chunk at a time, while it is in the cache
        top = 0
        for start in range(0, x.numel(), fixed.CHUNK):
            piece = x[start : start + fixed.CHUNK]
            out[start : start + fixed.CHUNK] = piece
            top = max(top, largest_bits(piece))
        return top

    def work(start: int, stop: int) -> int:
        at = out.data_ptr() + start * out.dtype.itemsize
        return int(lib.wg_narrow(x.data_ptr() + 4 * start, stop - start, _KINDS[out.dtype], at))

    return max(threads.run_split(x.numel(), 16, work))


def widen(x: Tensor, out: Tensor, mode: int = fixed.STORE) -> None:
    """out (mode)= x in float32."""
    lib = native.library_for(out)
    if lib is None or not lib.wg_isa():
        for start in range(0, out.numel(), fixed.CHUNK):
            piece = slice(start, start + fixed.CHUNK)
            fixed.put(out[piece], x[piece].to(torch.float32), mode)
        return

    def work(start: int, stop: int) -> None:
        at = x.data_ptr() + start * x.dtype.itemsize
        lib.wg_widen(at, stop - start, _KINDS[x.dtype], mode, out.data_ptr() + 4 * start)

    threads.run_split(out.numel(), 16, work)


def clear(out: Tensor) -> None:
    """Zeros."""
    lib = native.library_for(out)
    if lib is None:
        out.zero_()
        return
    threads.run_split(out.numel(), 16, lambda start, stop: lib.wg_clear(out.data_ptr() + 4 * start, stop - start))
