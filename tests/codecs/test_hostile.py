"""Payloads from a stranger: each decodes to a tensor of its shape, or is a WeightGradError.

The fuzz runs in a process of its own, so that a crash in native code is a failed test and not the
end of all tests. `python tests/codecs/test_hostile.py SEED COUNT` runs it by hand.
"""

from __future__ import annotations

import json
import math
import random
import re
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from weightgrad import codecs, errors, kernels
from weightgrad.codecs.payload import Payload

MUTANTS = 40_000
COMPARED = 10  # one mutant in so many is decoded on every backend, with equal outcomes
MAX_ELEMENTS = 100_000
MAX_BODY = 400_000
BACKENDS = kernels.BACKENDS if kernels.status().backend == "native" else ("reference",)
EXTREMES = [0, 1, 2, 7, 31, 32, 33, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63]
EXTREMES += [2**64 - 32, 2**64 - 31, 2**64 - 2, 2**64 - 1]

SPECS = [
    "fp32",
    "fp16",
    "bf16",
    "qsgd(bits=2, bucket=32)",
    "qsgd(bits=3, bucket=64)",
    "qsgd(bits=4)",
    "qsgd(bits=8)",
    "lossaware(bits=5)",
    "lossaware(bits=6, per='row')",
    "elias(bits=2, bucket=64)",
    "elias(bits=4, bucket=32, norm='max')",
    "terngrad()",
    "lossaware(per='row')",
    "onebit(feedback=False)",
    "adaptive(pi=4, feedback=False)",
    "topk(0.1)",
    "topk(0.5)",
    "threshold(0.0)",
    "topk(0.1) > qsgd(bits=4, bucket=32)",
    "topk(0.2) > elias(bucket=32)",
    "topk(0.3) > terngrad()",
    "topk(0.3) > sign()",
    "powersgd(2)",
    "sign()",
    "lossaware(bits=1, per='row')",
    "codebook(bits=3)",
    "codebook(bits=8)",
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (37,), (200,), (12, 17), (4, 3, 5, 5), (3, 0), (700, 2)]


@dataclass(frozen=True)
class Draft:
    """A payload in parts that can be changed."""

    codec: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    params: bytes
    body: bytes

    def payload(self) -> Payload:
        body = torch.frombuffer(bytearray(self.body), dtype=torch.uint8) if self.body else torch.empty(0)
        return Payload(self.codec, self.dtype, self.shape, self.params, body.to(torch.uint8))


def drafts() -> list[Draft]:
    """Valid payloads of every format."""
    found = []
    for number, (spec, shape) in enumerate((spec, shape) for spec in SPECS for shape in SHAPES):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        codec = codecs.parse(spec)
        payload, _ = codec.encode(x, codec.init(x), number)
        found.append(Draft(payload.codec, payload.dtype, payload.shape, payload.params, payload.body.numpy().tobytes()))
    return found


def flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwrite(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    if changed:
        at = rng.randrange(len(changed))
        for i in range(at, min(len(changed), at + rng.randint(1, 9))):
            changed[i] = rng.choice([0, 255, rng.randrange(256)])
    return bytes(changed)


def resize(rng: random.Random, data: bytes) -> bytes:
    by = rng.choice([-8, -4, -2, -1, 1, 2, 4, 8, rng.randint(-len(data), 64)])
    return data[: len(data) + by] if by < 0 else data + rng.randbytes(by)


def field(rng: random.Random, params: bytes) -> bytes:
    """An extreme number in a place where a number of that width may be."""
    width = rng.choice([1, 8, 8])
    places = range(0, len(params) - width + 1, width)
    if not places:
        return params
    at = rng.choice(places)
    value = rng.choice(EXTREMES) if rng.random() < 0.7 else rng.randrange(300)
    number = value & ((1 << 8 * width) - 1)
    return params[:at] + number.to_bytes(width, "little") + params[at + width :]


def reshape(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = list(shape)
    for _ in range(rng.randint(1, 2)):
        change = rng.randrange(4)
        if change == 0 or not sizes:
            sizes.insert(rng.randint(0, len(sizes)), rng.choice([0, 1, 2, 3]))
        elif change == 1:
            del sizes[rng.randrange(len(sizes))]
        else:
            sizes[rng.randrange(len(sizes))] = rng.choice([0, 1, 2, 3, 40, 40_000, rng.randrange(400)])
    return tuple(sizes) if math.prod(max(1, size) for size in sizes) <= MAX_ELEMENTS else shape


Mutation = Callable[[random.Random, Draft], Draft]
NAMES = [entry.name for entry in codecs.formats()]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
MUTATIONS: list[Mutation] = [
    lambda rng, d: replace(d, params=flip(rng, d.params)),
    lambda rng, d: replace(d, params=field(rng, d.params)),
    lambda rng, d: replace(d, params=field(rng, d.params)),
    lambda rng, d: replace(d, params=resize(rng, d.params)),
    lambda rng, d: replace(d, body=flip(rng, d.body)),
    lambda rng, d: replace(d, body=overwrite(rng, d.body)),
    lambda rng, d: replace(d, body=resize(rng, d.body)),
    lambda rng, d: replace(d, body=rng.randbytes(len(d.body))),
    lambda rng, d: replace(d, shape=reshape(rng, d.shape)),
    lambda rng, d: replace(d, codec=rng.choice(NAMES)),
    lambda rng, d: replace(d, dtype=rng.choice(DTYPES)),
]


def outcome(draft: Draft) -> tuple[str, Tensor | None, str]:
    """(name, tensor, message) of decoding it; anything but a WeightGradError is raised."""
    try:
        decoded = codecs.decode(draft.payload())
    except errors.WeightGradError as error:
        return type(error).__name__, None, str(error)
    assert tuple(decoded.shape) == draft.shape
    assert decoded.dtype == draft.dtype
    return "Tensor", decoded, ""


def same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Equal floats; a NaN is a NaN."""
    if ours is None or theirs is None:
        return ours is theirs
    return bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())


def fuzz(seed: int, count: int) -> Counter[str]:
    """How often each outcome came."""
    rng = random.Random(seed)
    originals = drafts()
    outcomes: Counter[str] = Counter()
    for number in range(count):
        draft = rng.choice(originals)
        for _ in range(rng.randint(1, 3)):
            draft = rng.choice(MUTATIONS)(rng, draft)
        try:
            name, decoded, message = outcome(draft)
            # The right length opens the door to what lies behind that check.
            wanted = re.search(r"expected (\d+)$", message)
            if name == "BodyLengthError" and wanted and int(wanted[1]) <= MAX_BODY and rng.random() < 0.7:
                missing = int(wanted[1]) - len(draft.body)
                draft = replace(draft, body=(draft.body + rng.randbytes(max(0, missing)))[: int(wanted[1])])
                outcomes[name] += 1
                name, decoded, _ = outcome(draft)
            outcomes[name] += 1
            if number % COMPARED == 0:
                for backend in BACKENDS[1:]:
                    with kernels.use(backend):
                        other, theirs, _ = outcome(draft)
                    assert (other, same(decoded, theirs)) == (name, True), f"{backend}: {other}, not {name}"
        except Exception as error:
            raise AssertionError(f"mutant {number} of seed {seed}: {draft}"[:2000]) from error
    return outcomes


def test_no_mutant_escapes() -> None:
    command = [sys.executable, "-X", "faulthandler", __file__, "1", str(MUTANTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = json.loads(done.stdout)
    assert sum(outcomes.values()) >= MUTANTS
    # It is only worth something if it comes to every check, and past the last one.
    reached = {"Tensor", "ParamsError", "BodyLengthError", "BodyContentError"}
    assert {name for name in reached if outcomes.get(name, 0) < 500} == set(), outcomes
    assert set(outcomes) == reached


# One test a check, by hand.


def payload_of(spec: str, *shape: int) -> Payload:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codec = codecs.parse(spec)
    return codec.encode(x, codec.init(x), 1)[0]


def refused(payload: Payload, error: type[errors.DecodeError], match: str, **changes: object) -> None:
    """Decoding it with these changes is this error on every backend, also onto a tensor."""
    changed = replace(payload, **changes)  # type: ignore[arg-type]
    for backend in BACKENDS:
        with kernels.use(backend):
            with pytest.raises(error, match=match):
                codecs.decode(changed)
            with pytest.raises(error, match=match):
                codecs.decode_add(changed, torch.zeros(changed.shape))


def body_with(payload: Payload, at: int, *values: int) -> Tensor:
    body = payload.body.clone()
    body[at : at + len(values)] = torch.tensor(values, dtype=torch.uint8)
    return body


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "topk" not in spec and "threshold" not in spec])
def test_params_of_another_length(spec: str) -> None:
    payload = payload_of(spec, 12, 17)
    for params in (payload.params + b"\0", payload.params[:-1]):
        if params != payload.params:
            refused(payload, errors.ParamsError, "bytes of parameters, expected", params=params)


@pytest.mark.parametrize(
    ("spec", "layout", "fields", "match"),
    [
        ("qsgd(bits=4)", "<BxxxxxxxQ", (1, 512), "bits=1"),
        ("qsgd(bits=4)", "<BxxxxxxxQ", (9, 512), "bits=9"),
        ("qsgd(bits=4)", "<BxxxxxxxQ", (4, 0), "group=0"),
        ("elias()", "<BxxxxxxxQQ", (5, 512, 0), "bits=5"),
        ("elias()", "<BxxxxxxxQQ", (2, 0, 0), "bucket=0"),
        ("elias()", "<BxxxxxxxQQ", (2, 33, 0), "bucket=33"),
        ("elias()", "<BxxxxxxxQQ", (2, 32768, 0), "bucket=32768"),
        ("terngrad()", "<Q", (0,), "group=0"),
        ("sign()", "<Q", (0,), "group=0"),
        ("codebook()", "<Q", (0,), "bits=0"),
        ("codebook()", "<Q", (9,), "bits=9"),
        ("codebook()", "<Q", (2**64 - 1,), "bits="),
        ("powersgd()", "<Q", (13,), "rank 13 of a 12 x 17"),
        ("powersgd()", "<Q", (2**64 - 1,), "rank"),
        ("topk(0.1)", "<QQBBBx", (205, 0, 0, 8, 1), "205 entries of 204"),
        ("topk(0.1)", "<QQBBBx", (2**64 - 1, 0, 0, 8, 1), "entries of 204"),
        ("topk(0.1)", "<QQBBBx", (20, 0, 0, 57, 1), "width 57"),
        ("topk(0.1)", "<QQBBBx", (20, 0, 2, 8, 1), "rice 2"),
        ("topk(0.1)", "<QQBBBx", (20, 9, 0, 8, 1), "not something the encoder writes"),
        ("topk(0.1)", "<QQBBBx", (20, 0, 0, 8, 0), "values format 0"),
        ("topk(0.1)", "<QQBBBx", (20, 0, 0, 8, 255), "values format 255"),
    ],
)
def test_params_out_of_range(spec: str, layout: str, fields: tuple[int, ...], match: str) -> None:
    refused(payload_of(spec, 12, 17), errors.ParamsError, match, params=struct.pack(layout, *fields))


def test_params_of_sparse_that_are_too_short() -> None:
    refused(payload_of("topk(0.1)", 12, 17), errors.ParamsError, "expected at least 20", params=bytes(19))


@pytest.mark.parametrize("spec", SPECS)
def test_a_body_of_another_length(spec: str) -> None:
    payload = payload_of(spec, 12, 17)
    one = torch.zeros(1, dtype=torch.uint8)
    for body in (torch.cat((payload.body, one)), payload.body[:-1], payload.body[:0]):
        with pytest.raises(errors.DecodeError) as caught:
            codecs.decode(replace(payload, body=body))
        assert isinstance(caught.value, errors.BodyLengthError)


@pytest.mark.parametrize("group", [2**63, 2**64 - 32, 2**64 - 1])
@pytest.mark.parametrize("bits", range(2, 9))
def test_a_group_larger_than_the_tensor_is_one_group(group: int, bits: int) -> None:
    """All that a group must do is to cover the tensor; no sum with it may wrap around."""
    codes = bytes(range(-(-50 * bits // 8)))
    wide = Draft("uniform", torch.float32, (50,), struct.pack("<BxxxxxxxQ", bits, group), b"\0\0\x80\x3f" + codes)
    tight = replace(wide, params=struct.pack("<BxxxxxxxQ", bits, 50))
    for backend in BACKENDS:
        with kernels.use(backend):
            assert torch.equal(codecs.decode(wide.payload()), codecs.decode(tight.payload()))


def test_a_byte_that_holds_no_trits() -> None:
    payload = payload_of("terngrad()", 12, 17)
    refused(payload, errors.BodyContentError, "a byte of 243", body=body_with(payload, 10, 243))


def test_elias_lengths_that_do_not_add_up() -> None:
    payload = payload_of("elias(bucket=64)", 200)
    at = 4 * 4  # behind four scales
    length = int(payload.body[at])
    refused(payload, errors.BodyContentError, "add up to", body=body_with(payload, at, length + 1))


@pytest.mark.parametrize(
    "stream",
    [
        [0, 0],  # a bucket of more than seven zero bits
        [0b0000_0001],  # a gap without a level
        [0b0001_0001],  # a level of which half is missing
        [0b0000_1101, 0b0000_0000],  # zeros behind the last code
        [0b1111_0001, 0b0000_0000, 0b0000_0010],  # a level above the largest
        [0, 0b0001_0000, 0, 0b0000_0011],  # a gap beyond the bucket
    ],
)
def test_elias_streams_that_no_encoder_writes(stream: list[int]) -> None:
    head = struct.pack("<BxxxxxxxQQ", 2, 32, len(stream))
    body = struct.pack("<fH", 1.0, len(stream)) + bytes(stream)
    refused(Draft("elias", torch.float32, (32,), head, body).payload(), errors.BodyContentError, "is not a code")


def sparse_of(indices: bytes, count: int, width: int, *, n: int = 10, unary: bytes = b"", rice: int = 0) -> Payload:
    """A sparse payload of float32 ones with this index stream."""
    params = struct.pack("<QQBBBx", count, 8 * len(unary), rice, width, 1)
    streams = indices + unary
    body = streams + bytes(-len(streams) % 8) + struct.pack(f"<{count}f", *[1.0] * count)
    return Draft("sparse", torch.float32, (n,), params, body).payload()


def test_a_sparse_payload_by_hand() -> None:
    """Gaps 0, 2 and 5 in four bits each: indices 0, 3 and 9."""
    expected = torch.zeros(10)
    expected[torch.tensor([0, 3, 9])] = 1.0
    assert torch.equal(codecs.decode(sparse_of(bytes([0x20, 0x05]), 3, 4)), expected)
    # The same by Rice: one low bit each (0, 0, 1), quotients 0, 1 and 2 in unary.
    rice = sparse_of(bytes([0b100]), 3, 1, unary=bytes([0b100101]), rice=1)
    assert torch.equal(codecs.decode(rice), expected)


@pytest.mark.parametrize(
    "payload",
    [
        sparse_of(bytes([0x20, 0x06]), 3, 4),  # the last index is 10
        sparse_of(bytes([0x20, 0x15]), 3, 4),  # a bit set behind the last gap
        sparse_of(b"\xff" * 21, 3, 56),  # a sum that wraps around
        sparse_of(bytes([0b100]), 3, 1, unary=bytes([0b1100101]), rice=1),  # four ones for three gaps
        sparse_of(bytes([0b100]), 3, 1, unary=bytes([0b101]), rice=1),  # two
        sparse_of(bytes([0b100]), 3, 1, unary=bytes([0b100101, 0]), rice=1),  # a byte too many
        sparse_of(b"\0" * 21, 3, 56, unary=bytes([0b1011]), rice=1),  # a quotient above what fits
    ],
)
def test_index_streams_that_no_encoder_writes(payload: Payload) -> None:
    refused(payload, errors.BodyContentError, "does not hold 3 ascending indices below 10")


def test_padding_of_a_sparse_body_is_zero() -> None:
    payload = sparse_of(bytes([0x20, 0x05]), 3, 4)
    refused(payload, errors.BodyContentError, "index stream", body=body_with(payload, 5, 1))


def test_values_of_a_sparse_payload_are_checked_too() -> None:
    payload = payload_of("topk(0.5) > terngrad()", 12, 17)
    refused(payload, errors.BodyContentError, "ternary", body=body_with(payload, payload.body.numel() - 1, 255))


def test_sparse_inside_sparse_is_refused() -> None:
    """Values are chosen once; nested, a small frame could ask for a deep recursion."""
    head, last = (struct.pack("<QQBBBx", 0, 0, 0, 0, inner) for inner in (9, 1))
    nested = Draft("sparse", torch.float32, (10,), head * 50 + last, b"").payload()
    refused(nested, errors.ParamsError, "values format 9")
    flat = replace(nested, params=last)
    assert torch.equal(codecs.decode(flat), torch.zeros(10))


def adaptive_of(entries: list[int], counts: list[int], used: int, *, shape: tuple[int, ...] = (4, 3)) -> Payload:
    params = struct.pack("<QQ", len(entries), used)
    body = struct.pack(f"<{2 * used}f", *[1.0, -1.0] * used)
    body += struct.pack(f"<{len(counts)}H", *counts) + struct.pack(f"<{len(entries)}H", *entries)
    return Draft("adaptive", torch.float32, shape, params, body).payload()


def test_an_adaptive_payload_by_hand() -> None:
    decoded = codecs.decode(adaptive_of([0, 2 | 1 << 15, 3], [2, 0, 1], 2))
    expected = torch.tensor([[1.0, 0, 0], [0, 0, 0], [-1.0, 0, 0], [0, 0, 1.0]])
    assert torch.equal(decoded, expected)


@pytest.mark.parametrize(
    ("payload", "match"),
    [
        (adaptive_of([0, 2, 3], [2, 0, 2], 2), "do not add up"),
        (adaptive_of([0, 2, 3], [2, 0, 1], 3), "do not add up"),
        (adaptive_of([0, 2, 4], [2, 0, 1], 2), "outside its column"),
        (adaptive_of([2, 2, 3], [2, 0, 1], 2), "rows do not ascend"),
        (adaptive_of([2, 1, 3], [2, 0, 1], 2), "rows do not ascend"),
        (adaptive_of([0, 0x7FFF], [1, 0, 1], 2), "outside its column"),
    ],
)
def test_columns_that_no_encoder_writes(payload: Payload, match: str) -> None:
    refused(payload, errors.BodyContentError, match)


def test_a_format_that_is_not_there() -> None:
    payload = replace(payload_of("fp32", 3), codec="zip")
    with pytest.raises(errors.UnknownCodecError, match="there are adaptive, bf16, codebook"):
        codecs.decode(payload)


@pytest.mark.parametrize(
    "spec", ["topk(0.5) > terngrad()", "terngrad()", "elias(bits=4)", "adaptive(pi=2, feedback=False)"]
)
def test_what_was_refused_has_not_touched_the_sum(spec: str) -> None:
    """A server adds payloads of many workers in one buffer: a bad one must not spoil it."""
    payload = payload_of(spec, 600, 500)  # more than decoders work on at a time
    end = payload.body.numel()
    broken = replace(payload, body=body_with(payload, end - 3, 255, 255, 255))
    total = torch.ones(600, 500)
    with pytest.raises(errors.BodyContentError):
        codecs.decode_add(broken, total)
    assert torch.equal(total, torch.ones(600, 500))


def main() -> None:
    torch.set_num_threads(1)
    seed, count = (int(argument) for argument in sys.argv[1:3])
    print(json.dumps(fuzz(seed, count)))


if __name__ == "__main__":
    main()
