"""How fast a codec is on this machine: float32 encoded and decoded again, by a short look before a run.

`auto` asks whether a link is faster than the codecs are. The best of a few rounds says what the machine can do, also
while something else is running on it.
"""

from __future__ import annotations

import math
import time

import torch

from weightgrad import codecs
from weightgrad.codecs import Codec

_ELEMENTS = 1 << 20  # enough that calls do not count
_ROUNDS = 5


def bytes_a_second(codec: Codec) -> float:
    """Of float32, through `codec` and back."""
    values = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(0))
    state, best = codec.init(values), math.inf
    for number in range(_ROUNDS):
        began = time.perf_counter()
        payload, state = codec.encode(values, state, number)
        codecs.decode(payload)
        best = min(best, time.perf_counter() - began)
    return 4 * _ELEMENTS / best
