"""Damage for messages: what a broken link, a broken writer or a stranger may make of one."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable

import xxhash

from weightgrad import errors, wire

EXTREMES = [0, 1, 2, 7, 8, 9, 64, 65, 2**16, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**63 + 2, 2**64 - 1]


def flip(rng: random.Random, data: bytearray) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, data: bytearray) -> None:
    """A field of the header, or anything at all."""
    at = rng.choice([4, 5, 6, 7, 28, *range(8, 28, 4), rng.randint(0, len(data))])
    width = 1 if at < 8 else rng.choice([1, 4, 8])
    data[at : at + width] = (rng.choice(EXTREMES) & (2 ** (8 * width) - 1)).to_bytes(width, "little")


def before_frame(rng: random.Random, data: bytearray) -> None:
    """Where a segment lies: its start, the number of its intervals, or one of them."""
    found = [match.start() for match in re.finditer(b"WGRD", data)]
    if found:
        at = rng.choice(found) - rng.choice([8, 4, 12, 20, 32])
        data[at : at + 1] = bytes([rng.choice([*range(10), 127, 128, 255])])


def inside_frame(rng: random.Random, data: bytearray) -> None:
    """A field of a frame's header."""
    found = [match.start() for match in re.finditer(b"WGRD", data)]
    if found:
        at = rng.choice(found) + rng.choice([4, 5, 6, 7, 8, 9, 10, 12, 16, 24])
        data[at : at + 1] = bytes([rng.choice(EXTREMES) & 255])


def digit(rng: random.Random, data: bytearray) -> None:
    """A table of scalars that can still be read, if there is one."""
    found = [at for at in range(len(data)) if data[at : at + 1].isalnum()]
    if found:
        data[rng.choice(found)] = rng.choice(b"0123456789abF")


def splice(rng: random.Random, data: bytearray) -> None:
    a, b, c = (rng.randint(0, len(data)) for _ in range(3))
    data[c : c + rng.randrange(9)] = data[min(a, b) : max(a, b)]


def cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randint(0, len(data)) :]


def extend(rng: random.Random, data: bytearray) -> None:
    data += rng.randbytes(rng.randint(1, 16))


MUTATIONS: list[Callable[[random.Random, bytearray], None]] = [
    flip,
    overwrite,
    before_frame,
    inside_frame,
    digit,
    splice,
    cut,
    extend,
]


def reseal(data: bytearray) -> None:
    """Checksums that hold, or they would hide the rest of the reader."""
    for found in list(re.finditer(b"WGRD", data)):
        try:
            end = found.start() + wire.frame_size(data[found.start() : found.start() + 24])
        except errors.FrameError:
            continue
        if end <= len(data):
            data[end - 8 : end] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[found.start() : end - 8])))
