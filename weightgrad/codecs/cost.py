"""What encoding and decoding cost: as recorded beside each codec for the simulator, or measured on this machine.

`encode_gb_s` and `decode_gb_s` of a codec are float32 bytes a second on one thread with the native kernels, as
`weightgrad bench codecs` printed them on 2026-11-15 on an AMD EPYC. Virtual time may depend neither on the machine
that a simulation runs on nor on the day, so these numbers are fixed; a recipe's `compute.codec_speed` scales them
(0.5: a machine half as fast). A deployment measures instead: `auto` asks whether a link is faster than the codecs.
"""

from __future__ import annotations

import math
import time

import torch

from weightgrad.codecs.codec import Benchmark, Codec
from weightgrad.codecs.error_feedback import ErrorFeedback
from weightgrad.codecs.registry import decode
from weightgrad.codecs.spec import available
from weightgrad.codecs.warmup import WarmUp

_FEEDBACK_ENCODE = 0.65  # error feedback reads and writes the residual too
_ELEMENTS = 1 << 20  # enough that the overhead of a call does not count
_ROUNDS = 5


def benchmarks() -> tuple[Benchmark, ...]:
    """Return what `weightgrad bench codecs` measures: the benchmarks of every codec, by the codec's name."""
    return tuple(one for cls in available().values() for one in cls.benchmarks)


def encode_seconds(codec: Codec, numel: int, speed: float = 1.0) -> float:
    """Say how long a simulated machine takes to encode.

    Args:
        codec: Any codec. A chain costs what its first codec costs, a warm-up what the codec inside costs.
        numel: Elements to encode.
        speed: Speed of the machine as a multiple of the recorded one.

    Returns:
        Virtual seconds.
    """
    share = 1.0
    while isinstance(codec, (ErrorFeedback, WarmUp)):
        share = _FEEDBACK_ENCODE if isinstance(codec, ErrorFeedback) else share
        codec = codec.inner
    return 4 * numel / (codec.encode_gb_s * share * 1e9 * speed)


def decode_seconds(codec: Codec, numel: int, speed: float = 1.0) -> float:
    """Say how long a simulated machine takes to decode; see `encode_seconds`."""
    while isinstance(codec, (ErrorFeedback, WarmUp)):
        codec = codec.inner
    return 4 * numel / (codec.decode_gb_s * 1e9 * speed)


def round_trip_bytes_s(codec: Codec, speed: float = 1.0) -> float:
    """Return the float32 bytes a second that a simulated machine encodes and decodes again."""
    return 4 / (encode_seconds(codec, 1, speed) + decode_seconds(codec, 1, speed))


def measured_round_trip_bytes_s(codec: Codec) -> float:
    """Measure the float32 bytes a second that this machine encodes and decodes again.

    The best of a few rounds counts: it says what the machine can do, also while something else is running on it.

    Args:
        codec: The codec to measure.

    Returns:
        Bytes a second.
    """
    values = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    state, best = codec.init(values), math.inf
    for number in range(_ROUNDS):
        began = time.perf_counter()
        payload, state = codec.encode(values, state, number)
        decode(payload)
        best = min(best, time.perf_counter() - began)
    return 4 * _ELEMENTS / best
