"""QSGD: a few levels, rounded at random so that the mean is right.

Alistarh et al., 2017. In a bucket of `bucket` elements with norm N and L levels a side,

    level = floor(L*x/N + u),  u uniform in [0, 1)      decoded: level * N/L

With norm "max" N is the largest magnitude (smaller variance, the default); with "l2" it is the
Euclidean norm, as in the paper's analysis, and most levels are zero: see `elias`. Rounding
"nearest" is the biased comparison case. L = 2**(bits-1) - 1 and a level takes `bits` bits.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs.codec import Benchmark, Codec, State, between, body_room, choose, flat32, not_finite
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.registry import floats, register, sections, unpack_params
from weightgrad.codecs.spec import codec
from weightgrad.errors import ParamsError, SpecError
from weightgrad.kernels import bits as bitstream
from weightgrad.kernels import bucket as kernel
from weightgrad.kernels import fixed, noise

UNIFORM = "<BxxxxxxxQ"  # bits, elements that share a scale


def check_bucket(owner: str, bucket: object) -> None:
    """Check that a bucket is a multiple of 32, so that it starts on a byte and in a full vector."""
    between(owner, "bucket", bucket, 32, 2**32, whole=True)
    if isinstance(bucket, int) and bucket % 32:
        raise SpecError(f"{owner}: bucket={bucket} must be a multiple of 32; try {max(32, round(bucket / 32) * 32)}")


def uniform_sizes(n: int, group: int, bits: int) -> tuple[int, int]:
    """Bytes of (scales, codes)."""
    return 4 * -(-n // group), -(-n * bits // 8)


@codec("qsgd")
@dataclass(frozen=True)
class Qsgd(Codec):
    """Few levels a bucket, stochastic or nearest rounding, tightly packed."""

    encode_gb_s, decode_gb_s = 12.1, 15.1
    benchmarks = (
        Benchmark("qsgd(bits=2)", 1.2, 1.4),
        Benchmark("qsgd(bits=3)"),
        Benchmark("qsgd(bits=4)", 1.2, 1.4),
        Benchmark("qsgd(bits=8)", 1.2, 1.4),
        Benchmark("qsgd(bits=4, rounding='nearest')"),
        Benchmark("qsgd(bits=4, norm='l2')"),
        Benchmark("ef(qsgd(bits=2))", 0.65, 1.4),
        Benchmark("ef(qsgd(bits=4))", 0.65, 1.4),
        Benchmark("ef(qsgd(bits=8))", 0.65, 1.4),
    )

    bits: int = 4
    bucket: int = 512
    norm: str = "max"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        choose("qsgd", "bits", self.bits, (2, 3, 4, 8))
        check_bucket("qsgd", self.bucket)
        choose("qsgd", "norm", self.norm, ("max", "l2"))
        choose("qsgd", "rounding", self.rounding, ("stochastic", "nearest"))

    @property
    def unbiased(self) -> bool:
        """Whether rounding is stochastic; rounding to nearest is biased."""
        return self.rounding == "stochastic"

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        return self._encode(x, None, key, out), state

    def encode_cut(self, x: Tensor, limit: float, key: int, *, out: Tensor | None = None) -> Payload:
        """Encode x cut to +-limit, a float32, in the same pass: what `clip(...) > qsgd(...)` does.

        Args:
            x: As for `encode`; every element must be finite.
            limit: Largest magnitude.
            key: As for `encode`.
            out: As for `encode`.

        Returns:
            The payload that `encode` makes of the cut tensor.
        """
        return self._encode(x, None, key, out, limit)

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: int, *, out: Tensor | None = None
    ) -> tuple[Payload, State]:
        """Encode in one pass over x and the residual."""
        return self._encode(x, residual, key, out), state

    def _encode(
        self, x: Tensor, residual: Tensor | None, key: int, out: Tensor | None, limit: float = math.inf
    ) -> Payload:
        flat = flat32(x)
        n, levels = flat.numel(), 2 ** (self.bits - 1) - 1
        sizes = uniform_sizes(n, self.bucket, self.bits)
        body = body_room(out, sum(sizes), flat.device)
        scales, codes = floats(body[: sizes[0]]), body[sizes[0] :]
        spec = kernel.BucketSpec(self.bucket, self.bits, levels, self.norm, self.rounding == "stochastic", limit)
        done = kernel.quantize(flat, residual, spec, noise.mix(key), codes, scales)
        if done < n:
            if residual is not None:  # put back what the buckets before it gave up
                part = residual[:done]
                kernel.dequantize(codes, scales, done, self.bucket, self.bits, levels, part, fixed.ADD)
                part -= flat[:done]
            raise not_finite(flat)
        return Payload("uniform", x.dtype, tuple(x.shape), struct.pack(UNIFORM, self.bits, self.bucket), body)


@register("uniform", 4, UNIFORM, ("bits", "group"))
def decode_uniform(payload: Payload, out: Tensor, mode: int) -> None:
    """(code - L) * scale of its group; codes of 2 to 8 bits in one stream, groups of any length."""
    bits, group = unpack_params(payload, UNIFORM)
    if not 2 <= bits <= 8 or group < 1:
        raise ParamsError(f"uniform: bits={bits}, group={group}; expected 2..8 bits and a group of at least 1")
    n, levels = payload.numel, 2 ** (bits - 1) - 1
    scale_bytes, codes = sections(payload, *uniform_sizes(n, group, bits))
    scales = floats(scale_bytes)
    if n == 0:
        return
    group = min(group, n)
    if bits in (2, 3, 4, 8) and (group % 32 == 0 or group >= n):
        kernel.dequantize(codes, scales, n, -(-group // 32) * 32, bits, levels, out, mode)
        return
    step = fixed.CHUNK
    for start in range(0, n, step):
        m = min(step, n - start)
        at = start // 8 * bits
        level = bitstream.unpack(codes[at : at + -(-m * bits // 8)], m, bits).to(torch.float32) - float(levels)
        own = torch.arange(start, start + m, device=out.device) // group
        fixed.put(out[start : start + m], level * scales[own], mode)
