"""A decoder written from docs/wire-format.md alone: no torch, nothing of WeightGrad.

    shape, values = decode_frame(data)      # values: float32, already rounded to the frame's dtype

It is slow and plain on purpose: each function is one section of the document. What the document
says must be refused raises `RejectedError`, whose `kind` is the name of the error in the document.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import xxhash

Shape = tuple[int, ...]
Values = list[np.float32]

TILE = 32768
ZERO = np.float32(0.0)


class RejectedError(Exception):
    """A frame, or what it holds, that a reader must refuse."""

    def __init__(self, kind: str, why: str = "") -> None:
        super().__init__(f"{kind}: {why}")
        self.kind = kind


def require(good: bool, kind: str, why: str = "") -> None:
    if not good:
        raise RejectedError(kind, why)


# The frame.


class Frame(NamedTuple):
    """A frame that has passed every check of the frame; whether its body is good, the decoder finds out."""

    shape: Shape
    codec: int
    dtype: int
    params: bytes
    body: bytes
    size: int  # of the whole frame

    def values(self) -> Values:
        """The elements, in row-major order."""
        with np.errstate(all="ignore"):
            return [DTYPES[self.dtype](value) for value in FORMATS[self.codec](self.params, self.body, self.shape)]


def decode_frame(data: bytes, *, max_elements: int = 2**32, max_body_bytes: int = 2**32) -> tuple[Shape, Values]:
    """The shape and the elements, in row-major order, of exactly one frame."""
    frame = read_frame(data, max_elements=max_elements, max_body_bytes=max_body_bytes)
    return frame.shape, frame.values()


def read_frame(data: bytes, *, max_elements: int, max_body_bytes: int, alone: bool = True) -> Frame:
    """The frame that starts `data`; nothing follows it if it is alone."""
    require(data[:4] == b"WGRD"[: len(data)], "MagicError")
    require(len(data) >= 24, "TruncatedError")
    version, codec, dtype, ndim, params_len, reserved2, reserved4, body_len = struct.unpack_from("<BBBBHHIQ", data, 4)
    require(version == 1, "VersionError")
    require(reserved2 == reserved4 == 0, "ReservedError")
    require(ndim <= 16, "ShapeError")
    require(params_len <= 1024, "SizeLimitError", "params")
    require(body_len <= max_body_bytes, "SizeLimitError", "body")
    require(codec in FORMATS, "UnknownCodecError")
    require(dtype in DTYPES, "UnknownDtypeError")
    params_at = 24 + 8 * ndim
    body_at = params_at + up(params_len, 8) * 8
    end = body_at + body_len
    require(len(data) >= end + 8, "TruncatedError")
    shape: Shape = struct.unpack_from(f"<{ndim}Q", data, 24)
    require(math.prod(max(1, size) for size in shape) <= max_elements, "SizeLimitError", "elements")
    require(not any(data[params_at + params_len : body_at]), "ReservedError", "padding")
    require(len(data) == end + 8 or not alone, "TrailingBytesError")
    (checksum,) = struct.unpack_from("<Q", data, end)
    require(xxhash.xxh3_64_intdigest(data[:end]) == checksum, "ChecksumError")
    return Frame(shape, codec, dtype, data[params_at : params_at + params_len], data[body_at:end], end + 8)


def to_bfloat16(value: np.float32) -> np.float32:
    """The nearest float32 whose lower half is zero, ties to even."""
    if np.isnan(value):
        return value
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    return floats(struct.pack("<I", bits & 0xFFFF0000))[0]


DTYPES: dict[int, Callable[[np.float32], np.float32]] = {
    1: lambda value: value,
    2: lambda value: np.float32(np.float16(value)),
    3: to_bfloat16,
    4: lambda value: value,
}


# Notation, bits, sections.


def up(a: int, b: int) -> int:
    return -(-a // b)


def count(shape: Shape) -> int:
    return math.prod(shape)


def floats(section: bytes) -> Values:
    return [np.float32(value) for value in struct.unpack(f"<{len(section) // 4}f", section)]


def code_at(stream: bytes, i: int, b: int) -> int:
    """Code i of a stream of b-bit codes."""
    first, last = i * b, i * b + b
    window = int.from_bytes(stream[first // 8 : up(last, 8)], "little")
    return window >> first % 8 & (1 << b) - 1


def unpack(layout: str, params: bytes) -> tuple[int, ...]:
    require(len(params) == struct.calcsize(layout), "ParamsError", "size")
    return struct.unpack(layout, params)


def cut(body: bytes, *sizes: int) -> Iterator[bytes]:
    """The sections of a body, which are all of it."""
    require(sum(sizes) == len(body), "BodyLengthError", f"{len(body)} bytes, not {sum(sizes)}")
    at = 0
    parts = []
    for size in sizes:
        parts.append(body[at : at + size])
        at += size
    return iter(parts)


def matrix(shape: Shape) -> tuple[int, int]:
    """(rows, cols)."""
    n = count(shape)
    return (shape[0], n // shape[0]) if len(shape) >= 2 and n > 0 else (n, 1)


# One function a format.


def fp32(params: bytes, body: bytes, shape: Shape) -> Values:
    unpack("<", params)
    (elements,) = cut(body, 4 * count(shape))
    return floats(elements)


def fp16(params: bytes, body: bytes, shape: Shape) -> Values:
    unpack("<", params)
    (elements,) = cut(body, 2 * count(shape))
    return [np.float32(value) for value in struct.unpack(f"<{count(shape)}e", elements)]


def bf16(params: bytes, body: bytes, shape: Shape) -> Values:
    unpack("<", params)
    (elements,) = cut(body, 2 * count(shape))
    return floats(b"".join(b"\0\0" + elements[i : i + 2] for i in range(0, len(elements), 2)))


def uniform(params: bytes, body: bytes, shape: Shape) -> Values:
    b, group = unpack("<B7xQ", params)
    require(2 <= b <= 8 and group >= 1, "ParamsError")
    n, top = count(shape), 2 ** (b - 1) - 1
    scale_bytes, codes = cut(body, 4 * up(n, group), up(n * b, 8))
    scales = floats(scale_bytes)
    return [np.float32(code_at(codes, i, b) - top) * scales[i // group] for i in range(n)]


class BitReader:
    """One bucket's stream of `elias`."""

    def __init__(self, stream: bytes) -> None:
        self.stream, self.at, self.end = stream, 0, 8 * len(stream)

    def bit(self) -> int:
        require(self.at < self.end, "BodyContentError", "an entry is cut off")
        self.at += 1
        return code_at(self.stream, self.at - 1, 1)

    def gamma(self) -> int:
        zeros = 0
        while self.bit() == 0:
            zeros += 1
            require(zeros <= 16, "BodyContentError", "a gamma code with more than 16 zeros")
        return (1 << zeros) + sum(self.bit() << k for k in range(zeros))

    @property
    def ended(self) -> bool:
        rest = range(self.at, self.end)
        return len(rest) < 8 and not any(code_at(self.stream, place, 1) for place in rest)


def elias(params: bytes, body: bytes, shape: Shape) -> Values:
    b, bucket, stream_bytes = unpack("<B7xQQ", params)
    require(b in (2, 3, 4, 8) and 32 <= bucket <= 16384 and bucket % 32 == 0, "ParamsError")
    n, top = count(shape), 2 ** (b - 1) - 1
    buckets = up(n, bucket)
    scale_bytes, length_bytes, streams = cut(body, 4 * buckets, 2 * buckets, stream_bytes)
    lengths = struct.unpack(f"<{buckets}H", length_bytes)
    require(sum(lengths) == stream_bytes, "BodyContentError", "lengths")
    values: Values = []
    at = 0
    for first, length, scale in zip(range(0, n, bucket), lengths, floats(scale_bytes), strict=True):
        levels = [0] * min(bucket, n - first)
        reader, place = BitReader(streams[at : at + length]), -1
        while not reader.ended:
            place += reader.gamma()
            negative = reader.bit()
            size = reader.gamma()
            require(size <= top and place < len(levels), "BodyContentError", "a size or a place")
            levels[place] = -size if negative else size
        values += [np.float32(level) * scale for level in levels]
        at += length
    return values


def ternary(params: bytes, body: bytes, shape: Shape) -> Values:
    (group,) = unpack("<Q", params)
    require(group >= 1, "ParamsError")
    n = count(shape)
    scale_bytes, codes = cut(body, 4 * up(n, group), 32 * (n // 160) + up(n % 160, 5))
    require(max(codes, default=0) <= 242, "BodyContentError", "a byte above 242")
    scales = floats(scale_bytes)
    values: Values = []
    for i in range(n):
        run, within = divmod(i, 160)
        width = up(min(160, n - 160 * run), 5)
        place, j = divmod(within, width)
        trit = codes[32 * run + j] // 3**place % 3
        values.append(np.float32(trit - 1) * scales[i // group])
    return values


def onebit(params: bytes, body: bytes, shape: Shape) -> Values:
    unpack("<", params)
    n, (rows, cols) = count(shape), matrix(shape)
    mean_bytes, bits = cut(body, 8 * up(rows, TILE) * cols, up(n, 8))
    means = floats(mean_bytes)
    return [means[(i // cols // TILE * 2 + code_at(bits, i, 1)) * cols + i % cols] for i in range(n)]


def adaptive(params: bytes, body: bytes, shape: Shape) -> Values:
    entries, columns_used = unpack("<QQ", params)
    rows, cols = matrix(shape)
    slots = up(rows, TILE) * cols
    mean_bytes, count_bytes, entry_bytes = cut(body, 8 * columns_used, 2 * slots, 2 * entries)
    counts = struct.unpack(f"<{slots}H", count_bytes)
    require(sum(counts) == entries, "BodyContentError", "counts")
    require(sum(1 for c in counts if c) == columns_used, "BodyContentError", "columns_used")
    means = iter(floats(mean_bytes))
    listed = iter(struct.unpack(f"<{entries}H", entry_bytes))
    values = [ZERO] * count(shape)
    for slot in range(slots):
        if counts[slot] == 0:
            continue
        pair = next(means), next(means)
        before = -1
        for _ in range(counts[slot]):
            entry = next(listed)
            row = entry & 0x7FFF
            require(row > before, "BodyContentError", "rows do not ascend")
            before = row
            row += slot // cols * TILE
            require(row < rows, "BodyContentError", "a row outside the matrix")
            values[row * cols + slot % cols] = pair[entry >> 15]
    return values


def sparse(params: bytes, body: bytes, shape: Shape) -> Values:
    require(len(params) >= 20, "ParamsError", "size")
    entries, unary_bits, rice, w, values_format = struct.unpack("<QQBBBx", params[:20])
    n = count(shape)
    require(entries <= n and rice <= 1 and w <= 56 and values_format in FORMATS, "ParamsError")
    require(values_format != 9, "ParamsError", "nested")
    require(unary_bits >= entries if rice else unary_bits == 0, "ParamsError")
    low_bytes, unary_bytes = up(entries * w, 8), up(unary_bits, 8)
    values_at = up(low_bytes + unary_bytes, 8) * 8
    require(len(body) >= values_at, "BodyLengthError")
    low, unary = body[:low_bytes], body[low_bytes : low_bytes + unary_bytes]
    require(not any(body[low_bytes + unary_bytes : values_at]), "BodyContentError", "padding")
    require(int.from_bytes(low, "little") >> entries * w == 0, "BodyContentError", "padding of the low bits")
    highs = unary_runs(unary, n >> w) if rice else [0] * entries
    require(len(highs) == entries, "BodyContentError", "unary stream")
    indices, index = [], -1
    for j, high in enumerate(highs):
        index += 1 + (high << w) + code_at(low, j, w)
        require(index < n, "BodyContentError", "an index outside the tensor")
        indices.append(index)
    found = FORMATS[values_format](params[20:], body[values_at:], (entries,))
    values = [ZERO] * n
    for index, value in zip(indices, found, strict=True):
        values[index] = value
    return values


def unary_runs(stream: bytes, most: int) -> list[int]:
    """How many zeros there are before each one."""
    ones = [place for place in range(8 * len(stream)) if code_at(stream, place, 1)]
    last_byte = ones[-1] // 8 if ones else -1
    require(last_byte == len(stream) - 1, "BodyContentError", "the last one is not in the last byte")
    runs = [place - before - 1 for before, place in zip([-1, *ones], ones, strict=False)]
    require(max(runs, default=0) <= most, "BodyContentError", "too many zeros before a one")
    return runs


def lowrank(params: bytes, body: bytes, shape: Shape) -> Values:
    (rank,) = unpack("<Q", params)
    n, (rows, cols) = count(shape), matrix(shape)
    require(rank <= min(rows, cols), "ParamsError")
    if rank == 0:
        (elements,) = cut(body, 4 * n)
        return floats(elements)
    p, q = (floats(section) for section in cut(body, 4 * rows * rank, 4 * cols * rank))
    values: Values = []
    for i in range(n):
        r, c = divmod(i, cols)
        value = p[r * rank] * q[c * rank]
        for k in range(1, rank):
            value = value + p[r * rank + k] * q[c * rank + k]
        values.append(value)
    return values


def sign(params: bytes, body: bytes, shape: Shape) -> Values:
    (group,) = unpack("<Q", params)
    require(group >= 1, "ParamsError")
    n = count(shape)
    scale_bytes, bits = cut(body, 4 * up(n, group), up(n, 8))
    scales = floats(scale_bytes)
    return [-scales[i // group] if code_at(bits, i, 1) else scales[i // group] for i in range(n)]


def codebook(params: bytes, body: bytes, shape: Shape) -> Values:
    (b,) = unpack("<Q", params)
    require(1 <= b <= 8, "ParamsError")
    n = count(shape)
    table_bytes, codes = cut(body, 4 * 2**b, up(n * b, 8))
    table = floats(table_bytes)
    return [table[code_at(codes, i, b)] for i in range(n)]


FORMATS: dict[int, Callable[[bytes, bytes, Shape], Values]] = {
    1: fp32,
    2: fp16,
    3: bf16,
    4: uniform,
    5: elias,
    6: ternary,
    7: onebit,
    8: adaptive,
    9: sparse,
    10: lowrank,
    11: sign,
    12: codebook,
}
