"""A hundred thousand damaged frames: each is a payload or a WeightGradError, never anything else.

Half of the mutants get a checksum that holds, or the checksum would hide the rest of the parser.
A mutant that is accepted must give back its own bytes when written again: no two frames mean the
same payload, so there is no room to hide anything in one.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable

import torch
import xxhash

from weightgrad import codecs, errors, wire
from weightgrad.codecs.payload import Payload

MUTANTS = 120_000
LIMITS = wire.Limits(max_elements=4096, max_body_bytes=512)
EXTREMES = [0, 1, 7, 8, 512, 513] + [2**bits + by for bits in (8, 16, 31, 32, 63) for by in (-1, 0)] + [2**64 - 1]
# Offset and width of every field of the header, and of the first two dimensions.
FIELDS = [(0, 4), (4, 1), (5, 1), (6, 1), (7, 1), (8, 2), (10, 2), (12, 4), (16, 8), (24, 8), (32, 8)]

Mutation = Callable[[random.Random, bytearray], None]


def seeds(rng: random.Random) -> list[bytes]:
    """Valid frames of many sizes, ranks and dtypes."""
    shapes: list[tuple[int, ...]] = [(), (0,), (2,), (3, 5), (1,) * 16]
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    names = [entry.name for entry in codecs.formats()]
    return [
        wire.to_bytes(
            Payload(
                codec=rng.choice(names),
                dtype=dtype,
                shape=shape,
                params=rng.randbytes(rng.randrange(20)),
                body=torch.tensor(list(rng.randbytes(rng.randrange(60))), dtype=torch.uint8),
            )
        )
        for shape in shapes
        for dtype in dtypes
    ]


def flip_bits(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.randint(1, 4)):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite_field(rng: random.Random, data: bytearray) -> None:
    offset, width = rng.choice(FIELDS)
    value = rng.choice(EXTREMES) & (2 ** (8 * width) - 1)
    data[offset : offset + width] = value.to_bytes(width, "little")


def nudge_field(rng: random.Random, data: bytearray) -> None:
    """A length that is off by little passes the limits and moves everything behind it."""
    offset = rng.choice([7, 8, 16, 24])
    if offset < len(data):
        data[offset] = (data[offset] + rng.randint(-9, 9)) % 256


def splice(rng: random.Random, data: bytearray) -> None:
    """Copy one interval of the frame over another, of any length."""
    a, b, c = (rng.randint(0, len(data)) for _ in range(3))
    data[c : c + rng.randrange(9)] = data[min(a, b) : max(a, b)]


def truncate(rng: random.Random, data: bytearray) -> None:
    del data[rng.randint(0, len(data)) :]


def extend(rng: random.Random, data: bytearray) -> None:
    data += rng.randbytes(rng.randint(1, 16))


MUTATIONS: list[Mutation] = [flip_bits, overwrite_field, nudge_field, splice, truncate, extend]


def mutant(rng: random.Random, frames: list[bytes]) -> bytearray:
    reseal = rng.random() < 0.5
    data = bytearray(rng.choice(frames))
    if reseal:
        del data[-8:]
    for _ in range(rng.randint(1, 3)):
        rng.choice(MUTATIONS)(rng, data)
    if reseal:
        data += struct.pack("<Q", xxhash.xxh3_64_intdigest(data))
    return data


def fuzz(count: int, consume: Callable[[Payload], None], *, seed: int) -> Counter[str]:
    """How often each outcome came. `consume` may raise a WeightGradError of its own."""
    rng = random.Random(seed)
    frames = seeds(rng)
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        data = mutant(rng, frames)
        try:
            payload = wire.parse(data if rng.random() < 0.5 else bytes(data), limits=LIMITS)
            assert wire.to_bytes(payload) == data
            consume(payload)
            outcomes["Payload"] += 1
        except errors.WeightGradError as error:
            outcomes[type(error).__name__] += 1
    return outcomes


def stays_within_limits(payload: Payload) -> None:
    assert payload.body.dtype == torch.uint8
    assert payload.body.numel() <= LIMITS.max_body_bytes
    assert payload.numel <= LIMITS.max_elements
    assert len(payload.params) <= 1024
    assert len(payload.shape) <= 16
    assert payload.body.data_ptr() % 8 == 0
    # Raises if torch cannot hold the shape at all, elements or none.
    torch.empty(payload.shape, dtype=payload.dtype, device="meta")


def test_no_mutant_escapes() -> None:
    outcomes = fuzz(MUTANTS, stays_within_limits, seed=20)
    assert outcomes.total() == MUTANTS
    # The fuzz is only worth something if it comes to every check, and past the last one.
    reached = {error.__name__ for error in errors.FrameError.__subclasses__()} | {"Payload"}
    assert {name for name in reached if outcomes[name] < 100} == set(), outcomes


def test_no_noise_escapes() -> None:
    """Streams that hold several frames, cut and joined anywhere."""
    rng = random.Random(7)
    frames = seeds(rng)
    for _ in range(2_000):
        stream = b"".join(bytes(mutant(rng, frames)) if rng.random() < 0.3 else rng.choice(frames) for _ in range(4))
        taken = 0
        try:
            for payload in wire.frames(stream, limits=LIMITS):
                taken += wire.frame_bytes(payload)
        except errors.FrameError:
            assert taken < len(stream)
        else:
            assert taken == len(stream)
