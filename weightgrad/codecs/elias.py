"""QSGD with Elias coding: only the levels that are not zero, by distance, sign and size.

The entropy coding of QSGD (Alistarh et al., 2017). With the L2 norm and few levels almost every
level is zero (about sqrt(n) of n are not), so a list of gaps is far shorter than a code for each
element. Levels are those of `qsgd` with the same arguments and key, decoded exactly. Gamma codes
serve for gaps and for levels: the paper's recursive code is no shorter at these sizes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs.codec import Benchmark, Codec, State, between, choose, flat32, joined, not_finite
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.qsgd import check_bucket
from weightgrad.codecs.registry import floats, register, sections, unpack_params
from weightgrad.codecs.spec import codec
from weightgrad.errors import BodyContentError, ParamsError
from weightgrad.kernels import bucket as kernel
from weightgrad.kernels import elias as stream_kernel
from weightgrad.kernels import fixed, native, noise

PARAMS = "<BxxxxxxxQQ"  # bits, bucket, bytes of the stream

_CHUNK = 1 << 20  # elements whose codes are made and then coded: they stay in the cache, and few calls are made


@codec("elias")
@dataclass(frozen=True)
class Elias(Codec):
    """QSGD's levels, Elias-coded: short when most levels are zero."""

    encode_gb_s, decode_gb_s = 2.4, 2.9
    benchmarks = (Benchmark("elias(bits=2)", 0.5),)

    bits: int = 2
    bucket: int = 512
    norm: str = "l2"

    def __post_init__(self) -> None:
        choose("elias", "bits", self.bits, (2, 3, 4, 8))
        check_bucket("elias", self.bucket)
        between("elias", "bucket", self.bucket, 32, stream_kernel.MAX_BUCKET, whole=True)
        choose("elias", "norm", self.norm, ("max", "l2"))

    @property
    def unbiased(self) -> bool:
        """Always True: rounding is stochastic."""
        return True

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        flat = flat32(x)
        n, levels = flat.numel(), 2 ** (self.bits - 1) - 1
        spec = kernel.BucketSpec(self.bucket, 8, levels, self.norm, True)
        scales = torch.empty(-(-n // self.bucket), dtype=torch.float32, device=flat.device)
        step = max(1, _CHUNK // self.bucket) * self.bucket
        streams, lengths = [], []
        for start in range(0, n, step):
            piece = flat[start : start + step]
            codes = fixed.scratch("elias codes", piece, torch.uint8)
            own = scales[start // self.bucket :]
            if kernel.quantize(piece, None, spec, noise.mix(key), codes, own, start) < piece.numel():
                raise not_finite(flat)
            stream, sizes = stream_kernel.elias(codes, self.bucket, levels)
            streams.append(stream)
            lengths.append(sizes.to(torch.int16).view(torch.uint8))
        parts = [scales.view(torch.uint8), *lengths, *streams]
        body = joined(parts, out)
        total = sum(stream.numel() for stream in streams)
        params = struct.pack(PARAMS, self.bits, self.bucket, total)
        return Payload("elias", x.dtype, tuple(x.shape), params, body), state


@register("elias", 5, PARAMS, ("bits", "bucket", "stream_bytes"))
def decode_elias(payload: Payload, out: Tensor, mode: int) -> None:
    """Decode scales, the length of each bucket's stream (u16), and the streams."""
    bits, bucket, total = unpack_params(payload, PARAMS)
    good = bits in (2, 3, 4, 8) and 32 <= bucket <= stream_kernel.MAX_BUCKET and bucket % 32 == 0
    if not good:
        raise ParamsError(f"elias: bits={bits}, bucket={bucket} is not something the encoder writes")
    n, levels = payload.numel, 2 ** (bits - 1) - 1
    buckets = -(-n // bucket)
    scale_bytes, length_bytes, stream = sections(payload, 4 * buckets, 2 * buckets, total)
    scales = floats(scale_bytes)
    pairs = length_bytes.view(-1, 2).to(torch.int32)
    lengths = pairs[:, 0] | pairs[:, 1] << 8
    if int(lengths.sum()) != total:
        raise BodyContentError(f"elias: bucket lengths add up to {int(lengths.sum())} bytes, not {total}")
    if n == 0:
        return
    if mode != fixed.STORE:  # look at all of it before any of it is added
        for _ in _chunks(scales, lengths, stream, n, bucket, levels):
            pass
    for start, codes, own in _chunks(scales, lengths, stream, n, bucket, levels):
        m = codes.numel()
        kernel.dequantize(codes, own, m, bucket, 8, levels, out[start : start + m], mode)


def _chunks(
    scales: Tensor, lengths: Tensor, stream: Tensor, n: int, bucket: int, levels: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first element, codes, scales) of a chunk of buckets at a time."""
    # The reference implementation takes one code of every bucket at a time, so it wants many buckets.
    per = max(1, fixed.CHUNK * (1 if native.library_for(stream) else 16) // bucket)
    at = 0
    for first in range(0, lengths.numel(), per):
        some = lengths[first : first + per]
        size = int(some.sum())
        start = first * bucket
        m = min(n - start, some.numel() * bucket)
        codes = stream_kernel.elias_decode(stream[at : at + size].contiguous(), some, m, bucket, levels)
        if codes is None:
            raise BodyContentError(f"elias: the stream of elements {start}..{start + m} is not a code")
        yield start, codes, scales[first : first + per].contiguous()
        at += size
