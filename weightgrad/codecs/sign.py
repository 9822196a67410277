"""signSGD: one bit an element, one scale, and the majority's vote.

Bernstein et al., 2018. An element is its sign times the mean magnitude (scale="mean", what
error feedback needs: Karimireddy et al., 2019) or times one (scale="one"). `majority_vote` adds
up signs alone: the sign that most payloads have, zero when they tie. Zero counts as positive.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs.codec import Benchmark, Codec, State, body_room, choose, flat32, not_finite
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.registry import floats, register, sections, unpack_params
from weightgrad.codecs.spec import codec
from weightgrad.errors import DecodeError, ParamsError
from weightgrad.kernels import columns as kernel
from weightgrad.kernels import fixed
from weightgrad.kernels.gaps import Signs
from weightgrad.kernels.moments import moments

SIGN = "<Q"  # elements that share a scale


def sign_sizes(n: int, group: int) -> tuple[int, int]:
    """Bytes of (scales, bits)."""
    return 4 * -(-n // group), -(-n // 8)


@codec("sign")
@dataclass(frozen=True)
class Sign(Codec):
    """The sign of each element and one mean magnitude; majority vote when summed."""

    encode_gb_s, decode_gb_s = 6.4, 18.2
    benchmarks = (Benchmark("sign()"),)

    scale: str = "mean"

    def __post_init__(self) -> None:
        choose("sign", "scale", self.scale, ("mean", "one"))

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        flat = flat32(x)
        found = moments(flat, absolute=True)
        if not found.finite:
            raise not_finite(flat)
        n = flat.numel()
        sizes = sign_sizes(n, max(1, n))
        body = body_room(out, sum(sizes), flat.device)
        if n:
            floats(body[:4]).fill_(found.absolute / n if self.scale == "mean" else 1.0)
            kernel.signs(flat, body[4:])
        return Payload("sign", x.dtype, tuple(x.shape), struct.pack(SIGN, max(1, n)), body), state


@register("sign", 11, SIGN, ("group",))
def decode_sign(payload: Payload, out: Tensor, mode: int) -> None:
    """Decode scales and sign bits: -scale where the bit is set, +scale where it is not."""
    scales, bits, group = _parts(payload)
    n = payload.numel
    if n == 0:
        return
    if group >= n:
        means = torch.stack((scales, -scales)).view(1, 2, 1)
        kernel.onebit_decode(bits, means, kernel.Grid(n, 1, n), out, mode)
        return
    signs = torch.empty(n, dtype=torch.float32, device=out.device)
    _unit_signs(bits, n, signs, fixed.STORE)
    for start in range(0, n, fixed.CHUNK):
        stop = min(n, start + fixed.CHUNK)
        own = torch.arange(start, stop, device=out.device) // group
        fixed.put(out[start:stop], signs[start:stop] * scales[own], mode)


def one_size(payload: Payload) -> Signs | None:
    """The sign bits of a payload and the one magnitude of its elements; None if it has several or no elements."""
    scales, bits, group = _parts(payload)
    return Signs(bits, scales.item()) if 0 < payload.numel <= group else None


def _parts(payload: Payload) -> tuple[Tensor, Tensor, int]:
    (group,) = unpack_params(payload, SIGN)
    if group < 1:
        raise ParamsError("sign: group=0; a scale serves at least one element")
    scale_bytes, bits = sections(payload, *sign_sizes(payload.numel, group))
    return floats(scale_bytes), bits, group


def _unit_signs(bits: Tensor, n: int, out: Tensor, mode: int) -> None:
    units = torch.tensor([1.0, -1.0], device=out.device).view(1, 2, 1)
    kernel.onebit_decode(bits, units, kernel.Grid(n, 1, n), out, mode)


def majority_vote(payloads: Sequence[Payload]) -> Tensor:
    """Find the sign that most payloads give each element.

    Args:
        payloads: Payloads of `sign`, all of one shape.

    Returns:
        -1, 0 (a tie) or +1 for each element.

    Raises:
        DecodeError: There is no payload, or one is of another format or shape.
    """
    if not payloads:
        raise DecodeError("majority_vote needs at least one payload")
    first = payloads[0]
    votes = torch.zeros(first.numel, dtype=torch.float32, device=first.body.device)
    for payload in payloads:
        if payload.codec != "sign" or payload.shape != first.shape:
            raise DecodeError(f"majority_vote takes sign payloads of one shape, got {payload} beside {first}")
        if payload.numel:
            _unit_signs(_parts(payload)[1], payload.numel, votes, fixed.ADD)
    return votes.sign_().view(first.shape)
