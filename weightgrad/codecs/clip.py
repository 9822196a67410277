"""Clipping in standard deviations, before another codec.

A few outliers set the scale of a max-norm quantizer; cutting them at sigma standard deviations
makes its levels finer for the rest. Biased: what is cut off is lost, unless ef(...) is around.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs.codec import Benchmark, Codec, Stage, State, between, flat32, not_finite
from weightgrad.codecs.floats import Fp32
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.qsgd import Qsgd
from weightgrad.codecs.spec import codec
from weightgrad.errors import SpecError
from weightgrad.kernels.moments import moments


@codec("clip")
@dataclass(frozen=True)
class Clip(Stage):
    """Cut at this many standard deviations, then encode with the next codec."""

    encode_gb_s, decode_gb_s = 1.2, 18.0
    benchmarks = (Benchmark("clip(2.5) > qsgd(bits=4)", 0.6),)

    sigma: float
    then: Codec = dataclasses.field(default_factory=Fp32)

    def __post_init__(self) -> None:
        between("clip", "sigma", self.sigma, 1e-3, 1e6)
        if not isinstance(self.then, Codec):
            raise SpecError(f"clip: expected a codec behind '>', got {self.then!r}")

    @property
    def carries_error(self) -> bool:
        """Whether the next codec keeps its own error."""
        return self.then.carries_error

    def init(self, like: Tensor) -> State:
        """Make the state of the next codec."""
        return self.then.init(like)

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        flat = flat32(x)
        found = moments(flat)
        if not found.finite:
            raise not_finite(flat)
        limit = self.sigma * found.sigma or found.largest
        if limit < found.largest and isinstance(self.then, Qsgd):  # one pass less over memory, and the same bytes
            return self.then.encode_cut(x, float(torch.tensor(limit, dtype=torch.float32)), key, out=out), state
        cut = flat.clamp(-limit, limit) if limit < found.largest else flat
        payload, state = self.then.encode(cut.view(x.shape), state, key, out=out)
        return dataclasses.replace(payload, dtype=x.dtype), state
