"""Shared values: 2**bits values a tensor, found by k-means, and an index for each element.

Gong et al., 2014; Han et al., 2016. For small downloads of a model. One-dimensional k-means on
a sample of at most 65,536 elements, taken at equal distances: Lloyd's steps on the sorted
sample, from quantiles spread towards the tails, until nothing moves.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weightgrad.codecs.codec import Benchmark, Codec, State, between, body_room, flat32, require_finite
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.registry import floats, register, sections, unpack_params
from weightgrad.codecs.spec import codec
from weightgrad.errors import ParamsError
from weightgrad.kernels import bits as kernel

PARAMS = "<Q"  # bits
_SAMPLE = 1 << 16
_ROUNDS = 100


def centres_of(flat: Tensor, count: int) -> Tensor:
    """Find the k-means centres of a flat tensor, ascending; some are equal where there are too few values."""
    stride = -(-flat.numel() // _SAMPLE)
    # NumPy, because its sort is several times as fast as torch's, and so is each of its calls on a few numbers.
    sample = np.sort(flat[::stride].to("cpu", torch.float32).numpy()).astype(np.float64)
    total = np.concatenate(([0.0], np.cumsum(sample)))
    even = (np.arange(count) + 0.5) / count
    quantiles = sample[np.round(even * (sample.size - 1)).astype(np.int64)]
    linear = sample[0] + (sample[-1] - sample[0]) * even
    centres = (quantiles + linear) / 2
    edges = np.zeros(count + 1, dtype=np.int64)
    edges[-1] = sample.size
    for _ in range(_ROUNDS):
        edges[1:-1] = np.searchsorted(sample, (centres[1:] + centres[:-1]) / 2, side="right")
        members, sums = np.diff(edges), np.diff(total[edges])
        moved = np.where(members > 0, sums / np.maximum(members, 1), centres)
        if np.array_equal(moved, centres):
            break
        centres = moved
    return torch.from_numpy(np.sort(centres.astype(np.float32))).to(flat.device)


@codec("codebook")
@dataclass(frozen=True)
class Codebook(Codec):
    """A few shared values by k-means and an index an element: for weights."""

    encode_gb_s, decode_gb_s = 1.2, 15.6
    benchmarks = (Benchmark("codebook(bits=4)", 0.4),)

    bits: int = 4

    def __post_init__(self) -> None:
        between("codebook", "bits", self.bits, 1, 8, whole=True)

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        flat = flat32(x)
        require_finite(flat)
        n, count = flat.numel(), 2**self.bits
        body = body_room(out, 4 * count + -(-n * self.bits // 8), flat.device)
        table = floats(body[: 4 * count])
        table.zero_()
        if n:
            centres = centres_of(flat, count)
            table.copy_(centres)
            borders = ((centres[1:].double() + centres[:-1].double()) / 2).float()
            kernel.assign(flat, borders, self.bits, body[4 * count :])
        return Payload("codebook", x.dtype, tuple(x.shape), struct.pack(PARAMS, self.bits), body), state


@register("codebook", 12, PARAMS, ("bits",))
def decode_codebook(payload: Payload, out: Tensor, mode: int) -> None:
    """Decode the values (2**bits floats) and the indices behind them, `bits` bits each."""
    (bits,) = unpack_params(payload, PARAMS)
    if not 1 <= bits <= 8:
        raise ParamsError(f"codebook: bits={bits}; expected 1 to 8")
    n = payload.numel
    table, codes = sections(payload, 4 * 2**bits, -(-n * bits // 8))
    kernel.lookup(codes, n, bits, floats(table), out, mode)
