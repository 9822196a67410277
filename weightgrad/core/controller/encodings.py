"""What the controller of `auto` may let the sites send: codecs of push and result, and the bits that they take."""

from __future__ import annotations

import math
from typing import NamedTuple

from weightgrad import codecs
from weightgrad.codecs import ErrorFeedback
from weightgrad.codecs.codebook import Codebook
from weightgrad.codecs.qsgd import Qsgd
from weightgrad.codecs.sparse import TopK

_FP32_BITS = 32.0


class Encoding(NamedTuple):
    """How pushes and results are encoded.

    Attributes:
        up: the codec of pushes.
        down: the codec of results.
        up_bits: of an element of a push.
        down_bits: of an element of a result.
    """

    up: str
    down: str
    up_bits: float
    down_bits: float

    @property
    def exact(self) -> bool:
        """Whether nothing is encoded."""
        return self.up == "fp32"


def sparse(density: float, values: str) -> Encoding:
    """The largest entries, by a codec of their values; sites choose different ones, so a result has twice as many."""
    up, down = (f"ef(topk({part:g}) > {values})" for part in (density, min(0.5, 2 * density)))
    return Encoding(up, down, codec_bits(up), codec_bits(down))


def sparse_bits(density: float, value_bits: float = 1.0) -> float:
    """Bits of an element of the model in a sparse push: gaps by Golomb-Rice coding, and a value each."""
    return density * (math.log2(1 / density) + 1.6 + value_bits)


def codec_bits(codec: str) -> float:
    """Bits of an element that a codec of `auto` takes."""
    found = codecs.parse(codec)
    inner = found.inner if isinstance(found, ErrorFeedback) else found
    if isinstance(inner, TopK):
        values = float(inner.then.bits) if isinstance(inner.then, Codebook) else 1.0
        return sparse_bits(inner.fraction, values)
    if isinstance(inner, Qsgd):  # on near lines
        return inner.bits + _FP32_BITS / inner.bucket
    return _FP32_BITS


EXACT = Encoding("fp32", "fp32", _FP32_BITS, _FP32_BITS)
