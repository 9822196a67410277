"""pi-quant (the package pypiquant) as a rival: Prime Intellect's quantizer, with one scale and zero point for all."""

from __future__ import annotations

from typing import Any

import torch
from codec_rivals.coder import Coder
from torch import Tensor


class PiQuant(Coder):
    """A pass for the smallest and the largest value, one that quantizes; memory is used again, as for our codecs.

    Args:
        like: a tensor of the size to come.
        library: the imported module.
        threads: of its context.
        bits: 2, 4 or 8.
        rounding: "NEAREST" or "STOCHASTIC".
    """

    def __init__(self, like: Tensor, library: Any, threads: int, bits: int, rounding: str) -> None:
        self._library, self._context = library, library.Context(threads)
        self._kind = getattr(library.DataType, f"UINT{bits}")
        self._rounding = getattr(library.RoundMode, rounding)
        self._codes = torch.zeros(-(-like.numel() * bits // 8), dtype=torch.uint8)
        self._scale, self._zero_point = 1.0, 0

    def encode(self, x: Tensor) -> None:
        n, context, floats = x.numel(), self._context, self._library.DataType.F32
        self._scale, self._zero_point = context.compute_quant_params_ptr_float32(x.data_ptr(), self._kind, n)
        context.quantize_ptr(
            x.data_ptr(),
            floats,
            self._codes.data_ptr(),
            self._kind,
            n,
            self._scale,
            self._zero_point,
            self._rounding,
        )

    def decode(self, out: Tensor) -> Tensor:
        self._context.dequantize_ptr(
            self._codes.data_ptr(),
            self._kind,
            out.data_ptr(),
            self._library.DataType.F32,
            out.numel(),
            self._scale,
            self._zero_point,
            self._library.ReduceOp.SET,
        )
        return out

    def nbytes(self) -> int:
        return self._codes.numel() + 12  # and a float32 and an int64
