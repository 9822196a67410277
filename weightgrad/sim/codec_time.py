"""What encoding and decoding cost, from measured speeds.

fp32 bytes a second on one thread, native kernels, as `weightgrad bench codecs` printed them on 2026-11-15
on an AMD EPYC. Virtual time must not depend on the machine the simulation runs on, nor on the day, so the
table is fixed; a recipe's `compute.codec_speed` scales it (0.5: a machine half as fast).
"""

from __future__ import annotations

from weightgrad.codecs import Codec, ErrorFeedback

# name: (encode, decode) in GB/s of float32
SPEEDS: dict[str, tuple[float, float]] = {
    "adaptive": (6.3, 11.9),
    "bf16": (14.0, 17.4),
    "clip": (1.2, 18.0),
    "codebook": (1.2, 15.6),
    "dgc": (5.0, 22.1),
    "elias": (2.4, 2.9),
    "fp16": (13.7, 17.8),
    "fp32": (13.2, 14.1),
    "lossaware": (1.1, 17.5),
    "onebit": (8.3, 19.0),
    "powersgd": (2.4, 17.4),
    "qsgd": (12.1, 15.1),
    "sign": (6.4, 18.2),
    "terngrad": (6.3, 15.8),
    "threshold": (13.0, 19.0),
    "topk": (5.7, 12.8),
}
_FEEDBACK_ENCODE = 0.65  # error feedback reads and writes the residual too


def encode_seconds(codec: Codec, numel: int, speed: float = 1.0) -> float:
    """To encode so many elements."""
    share = 1.0
    while isinstance(codec, ErrorFeedback):
        codec, share = codec.inner, _FEEDBACK_ENCODE
    return 4 * numel / (SPEEDS[codec.spec_name][0] * share * 1e9 * speed)


def decode_seconds(codec: Codec, numel: int, speed: float = 1.0) -> float:
    """To decode so many."""
    while isinstance(codec, ErrorFeedback):
        codec = codec.inner
    return 4 * numel / (SPEEDS[codec.spec_name][1] * 1e9 * speed)


def bytes_a_second(codec: Codec, speed: float = 1.0) -> float:
    """Of float32, encoded and decoded again."""
    return 4 / (encode_seconds(codec, 1, speed) + decode_seconds(codec, 1, speed))
