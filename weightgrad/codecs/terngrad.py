"""TernGrad: every element is -s, 0 or +s, with the right mean.

Wen et al., 2017. The gradient is clipped to +-clip*sigma (sigma its standard deviation), s is
the largest magnitude left, and P(+-s) = |x|/s. Workers of one site may share the scaler, the
largest of theirs, so that their sum has few levels: take `scaler="shared"` and put the shared
value into the state with `share`. Five trits a byte: 1.6 bits an element. Unbiased but for
what clipping cuts off.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs.codec import (
    Benchmark,
    Codec,
    State,
    between,
    body_room,
    choose,
    flat32,
    not_finite,
    state_tensor,
)
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.registry import floats, register, sections, unpack_params
from weightgrad.codecs.spec import codec
from weightgrad.errors import BodyContentError, ParamsError
from weightgrad.kernels import fixed, noise
from weightgrad.kernels import ternary as kernel
from weightgrad.kernels.moments import Moments, moments

TERNARY = "<Q"  # elements that share a scale


def ternary_sizes(n: int, group: int) -> tuple[int, int]:
    """Bytes of (scales, trits)."""
    return 4 * -(-n // group), kernel.packed_bytes(n)


@codec("terngrad")
@dataclass(frozen=True)
class TernGrad(Codec):
    """Ternary gradients, clipped in sigmas, 1.6 bits an element."""

    encode_gb_s, decode_gb_s = 6.3, 15.8
    benchmarks = (
        Benchmark("terngrad(clip=2.5)", 0.6, 1.4),
        Benchmark("ef(terngrad(clip=2.5))"),
    )

    clip: float = 2.5
    scaler: str = "own"

    def __post_init__(self) -> None:
        between("terngrad", "clip", self.clip, 0.0, 1e6)
        choose("terngrad", "scaler", self.scaler, ("own", "shared"))

    @property
    def unbiased(self) -> bool:
        """Whether nothing is clipped; with clipping the tails beyond clip*sigma are lost."""
        return self.clip == 0

    def init(self, like: Tensor) -> State:
        """Make an unset shared scaler, or nothing."""
        return {"scale": torch.zeros((), dtype=torch.float32)} if self.scaler == "shared" else {}

    def measure(self, x: Tensor) -> float:
        """Return the scaler of this tensor alone."""
        flat = flat32(x)
        found = moments(flat)
        if not found.finite:
            raise not_finite(flat)
        return self._scale(found)

    def share(self, tensors: Sequence[Tensor]) -> State:
        """Make a state with the scaler that these tensors share, the largest of theirs."""
        scale = max((self.measure(x) for x in tensors), default=0.0)
        return {"scale": torch.tensor(scale, dtype=torch.float32)}

    def _scale(self, found: Moments) -> float:
        limit = self.clip * found.sigma if self.clip else found.largest
        if limit == 0.0:
            limit = found.largest
        return float(torch.tensor(min(limit, found.largest), dtype=torch.float32))

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        return self._encode(x, None, state, key, out), state

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: int, *, out: Tensor | None = None
    ) -> tuple[Payload, State]:
        """Encode in two passes: one for the moments, one that encodes and leaves the error."""
        return self._encode(x, residual, state, key, out), state

    def _encode(self, x: Tensor, residual: Tensor | None, state: State, key: int, out: Tensor | None) -> Payload:
        flat = flat32(x)
        found = moments(flat, residual)
        if not found.finite:
            raise not_finite(flat)
        scale = self._scale(found)
        if self.scaler == "shared":
            given = float(state_tensor(state, "scale", (), self))
            scale = given if given > 0 else scale
        n = flat.numel()
        sizes = ternary_sizes(n, max(1, n))
        body = body_room(out, sum(sizes), flat.device)
        if n:
            floats(body[:4]).fill_(scale)
        kernel.ternary(flat, residual, scale, noise.mix(key), body[sizes[0] :])
        return Payload("ternary", x.dtype, tuple(x.shape), struct.pack(TERNARY, max(1, n)), body)


@register("ternary", 6, TERNARY, ("group",))
def decode_ternary(payload: Payload, out: Tensor, mode: int) -> None:
    """Decode scales and trits: (trit - 1) * scale of its group."""
    (group,) = unpack_params(payload, TERNARY)
    if group < 1:
        raise ParamsError("ternary: group=0; a scale serves at least one element")
    n = payload.numel
    scale_bytes, codes = sections(payload, *ternary_sizes(n, group))
    if n == 0:
        return
    if int(codes.max()) > 242:
        raise BodyContentError(f"ternary: a byte of {int(codes.max())} holds no five trits (at most 242)")
    scales = floats(scale_bytes)
    if group >= n:
        kernel.ternary_decode(codes, n, float(scales[0]), out, mode)
        return
    trits = torch.empty(n, dtype=torch.float32, device=out.device)
    kernel.ternary_decode(codes, n, 1.0, trits)
    for start in range(0, n, fixed.CHUNK):
        stop = min(n, start + fixed.CHUNK)
        own = torch.arange(start, stop, device=out.device) // group
        fixed.put(out[start:stop], trits[start:stop] * scales[own], mode)
