"""Whole floats: float32 as it is, float16 and bfloat16 by rounding to nearest.

Half precision is what other codecs are compared with. float16 has 11 bits and ends at 65,504;
bfloat16 has 8 bits and float32's range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs.codec import Benchmark, Codec, State, body_room, flat32, require_finite
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.registry import register, sections, unpack_params
from weightgrad.codecs.spec import codec
from weightgrad.errors import RangeError
from weightgrad.kernels import dense as kernel

# Bits of the largest float32 that still rounds to a finite value.
_LARGEST = {torch.float32: 0x7F7FFFFF, torch.float16: 0x477FEFFF, torch.bfloat16: 0x7F7F7FFF}


def _encode(name: str, dtype: torch.dtype, x: Tensor, out: Tensor | None) -> Payload:
    flat = flat32(x)
    body = body_room(out, flat.numel() * dtype.itemsize, flat.device)
    if kernel.narrow(flat, body.view(dtype)) > _LARGEST[dtype]:
        require_finite(flat)
        place = int(flat.abs().argmax())
        raise RangeError(f"element {place} is {float(flat[place])}, too large for {name}; use bf16 or fp32")
    return Payload(name, x.dtype, tuple(x.shape), b"", body)


def _decode(dtype: torch.dtype, payload: Payload, out: Tensor, mode: int) -> None:
    unpack_params(payload, "<")
    (body,) = sections(payload, payload.numel * dtype.itemsize)
    if body.storage_offset() % dtype.itemsize:
        body = body.clone()
    kernel.widen(body.view(dtype), out, mode)


@codec("fp32")
@dataclass(frozen=True)
class Fp32(Codec):
    """Float32 as it is: 32 bits an element, exact."""

    encode_gb_s, decode_gb_s = 13.2, 14.1
    benchmarks = (Benchmark("fp32"),)

    @property
    def unbiased(self) -> bool:
        """Always True: float32 is exact."""
        return True

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        return _encode("fp32", torch.float32, x, out), state


@codec("fp16")
@dataclass(frozen=True)
class Fp16(Codec):
    """Float16, rounded to nearest: 16 bits, at most 65,504."""

    encode_gb_s, decode_gb_s = 13.7, 17.8
    benchmarks = (Benchmark("fp16"),)

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        return _encode("fp16", torch.float16, x, out), state


@codec("bf16")
@dataclass(frozen=True)
class Bf16(Codec):
    """Bfloat16, rounded to nearest: 16 bits, float32's range."""

    encode_gb_s, decode_gb_s = 14.0, 17.4
    benchmarks = (Benchmark("bf16"),)

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        return _encode("bf16", torch.bfloat16, x, out), state


@register("fp32", 1, "<", ())
def _decode_fp32(payload: Payload, out: Tensor, mode: int) -> None:
    _decode(torch.float32, payload, out, mode)


@register("fp16", 2, "<", ())
def _decode_fp16(payload: Payload, out: Tensor, mode: int) -> None:
    _decode(torch.float16, payload, out, mode)


@register("bf16", 3, "<", ())
def _decode_bf16(payload: Payload, out: Tensor, mode: int) -> None:
    _decode(torch.bfloat16, payload, out, mode)
