"""The document is enough: a decoder written from it alone gives the same bits, and refuses the same frames."""

from __future__ import annotations

import random
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from weightgrad import codecs, wire
from weightgrad.codecs.payload import Payload
from weightgrad.errors import WeightGradError

from .spec_decoder import RejectedError, decode_frame

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire-format.md"
MAX_ELEMENTS = 1 << 17

SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 5), (1,), (161,), (1003,), (5, 1), (33, 24), (31, 13), (4, 3, 3, 3)]
SPECS = [
    "fp32",
    "fp16",
    "bf16",
    "qsgd(bits=2, bucket=32)",
    "qsgd(bits=3)",
    "qsgd(bits=4, bucket=96, norm='l2')",
    "qsgd(bits=8, rounding='nearest')",
    "elias(bits=2)",
    "elias(bits=3, bucket=32)",
    "elias(bits=4, norm='max')",
    "elias(bits=8, bucket=16384, norm='max')",
    "terngrad",
    "terngrad(clip=0)",
    "terngrad(scaler='shared')",
    "onebit",
    "onebit(feedback=False)",
    "adaptive(pi=3)",
    "adaptive(feedback=False)",
    "topk(0.2)",
    "topk(0.02)",
    "topk(1.0)",
    "topk(0.1, exact=False)",
    "threshold(2.5)",
    "threshold(1e30)",
    "dgc(fraction=0.05)",
    "powersgd(rank=1)",
    "powersgd(rank=5)",
    "sign",
    "sign(scale='one')",
    "codebook(bits=1)",
    "codebook(bits=3)",
    "codebook(bits=8)",
    *[f"lossaware(bits={b!r}, per={per!r})" for b in ("ternary", 1, 2, 3, 5, 8) for per in ("tensor", "row")],
    "lossaware(exact=True)",
    "clip(2.5) > qsgd(bits=4)",
    "ef(qsgd(bits=2))",
    "ef(topk(0.03) > terngrad)",
    "topk(0.3) > qsgd(bits=4)",
    "topk(0.3) > elias(bits=4)",
    "topk(0.3) > sign",
    "topk(0.3) > onebit(feedback=False)",
    "topk(0.3) > adaptive(feedback=False, pi=4)",
    "topk(0.3) > codebook(bits=2)",
    "topk(0.3) > lossaware(bits=6)",
    "topk(0.5) > clip(2.0) > bf16",
    "warmup(1, onebit)",
    "ef(warmup(0, qsgd(bits=4)))",
]
# Smaller than the rest, as each is decoded many times.
FUZZED = [
    "fp16",
    "qsgd(bits=3, bucket=32)",
    "elias(bits=4, bucket=32, norm='max')",
    "terngrad",
    "onebit",
    "adaptive(pi=3)",
    "topk(0.1)",
    "topk(0.9)",
    "topk(0.3) > qsgd(bits=4)",
    "powersgd(rank=1)",
    "lossaware(bits=1, per='row')",
    "codebook(bits=3)",
]


def sample(shape: tuple[int, ...], seed: int) -> Tensor:
    """Floats of many sizes, with zeros of both signs and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))
    flat = x.view(-1)
    flat[3::17] = 0.0
    flat[5::23] = -0.0
    flat[6::37] = 1e-41
    return x


def encode(spec: str, x: Tensor) -> list[Payload]:
    """One step; two if the codec keeps state, as the second has an error to carry."""
    codec = codecs.parse(spec)
    state = codec.init(x)
    keeps_state = bool(state)
    first, state = codec.encode(x, state, 1)
    return [first, codec.encode(x * 0.5, state, 2)[0]] if keeps_state else [first]


def same_bits(ours: list[np.float32], theirs: Tensor) -> bool:
    """Equal to the last bit; any NaN is as good as another."""
    expected = theirs.to(torch.float32).contiguous().view(-1).numpy()
    found = np.array(ours, dtype=np.float32)
    both_nan = np.isnan(found) & np.isnan(expected)
    return found.shape == expected.shape and bool((both_nan | (found.view("u4") == expected.view("u4"))).all())


def check(payload: Payload) -> None:
    data = wire.to_bytes(payload)
    shape, values = decode_frame(data, max_elements=MAX_ELEMENTS)
    theirs = codecs.decode(wire.parse(data))
    assert shape == tuple(theirs.shape) == payload.shape
    assert same_bits(values, theirs)


def packed(name: str, params: bytes, shape: tuple[int, ...], floats: list[float], codes: bytes) -> Payload:
    body = struct.pack(f"<{len(floats)}f", *floats) + codes
    return Payload(name, torch.float32, shape, params, torch.frombuffer(bytearray(body), dtype=torch.uint8))


@pytest.mark.parametrize("spec", SPECS)
def test_same_bits_for_every_codec(spec: str) -> None:
    for seed, shape in enumerate(SHAPES):
        for payload in encode(spec, sample(shape, seed)):
            check(payload)


@pytest.mark.parametrize("spec", ["fp32", "qsgd(bits=4)", "ef(topk(0.1) > qsgd(bits=8))"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_values_are_rounded_to_the_dtype_of_the_frame(spec: str, dtype: torch.dtype) -> None:
    for payload in encode(spec, sample((31, 13), 0).to(dtype)):
        assert payload.dtype == dtype
        check(payload)


def test_a_float16_frame_may_overflow() -> None:
    check(Payload("fp32", torch.float16, (2,), b"", torch.tensor([65519.0, 65520.0]).view(torch.uint8)))


@pytest.mark.parametrize("shape", [(32768,), (32769,), (32770, 2)])
@pytest.mark.parametrize("spec", ["onebit", "adaptive(pi=16)"])
def test_columns_taller_than_a_tile(spec: str, shape: tuple[int, ...]) -> None:
    check(encode(spec, sample(shape, 0))[0])


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("group", [1, 7, 32, 256, 2**40])
def test_uniform_with_every_code_and_any_group(bits: int, group: int) -> None:
    n = 259
    codes = random.Random(bits).randbytes(-(-n * bits // 8) - 1) + b"\xff"
    scales = [0.1 * (i + 1) for i in range(-(-n // group))]
    check(packed("uniform", struct.pack("<B7xQ", bits, group), (n,), scales, codes))


@pytest.mark.parametrize("bits", [4, 5])
def test_uniform_with_the_largest_group(bits: int) -> None:
    check(packed("uniform", struct.pack("<B7xQ", bits, 2**64 - 1), (8,), [0.5], b"\xd2" * bits))


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_code_left_over_is_the_level_above_the_top(bits: int) -> None:
    payload = packed("uniform", struct.pack("<B7xQ", bits, 1), (1,), [2.0], b"\xff")
    assert decode_frame(wire.to_bytes(payload))[1] == [2.0 * 2 ** (bits - 1)]
    check(payload)


@pytest.mark.parametrize("n", [1, 4, 5, 6, 159, 160, 161, 163, 324])
@pytest.mark.parametrize("group", [1, 5, 160, 2**64 - 1])
def test_ternary_with_every_byte_and_any_group(n: int, group: int) -> None:
    rng = random.Random(n)
    codes = bytes(rng.randrange(243) for _ in range(32 * (n // 160) + -(-(n % 160) // 5)))
    scales = [(-0.3) ** (i % 5) for i in range(-(-n // group))]
    check(packed("ternary", struct.pack("<Q", group), (n,), scales, codes))


@pytest.mark.parametrize("group", [1, 3, 8, 2**64 - 1])
def test_sign_with_any_group(group: int) -> None:
    scales = [0.7 * (i - 1) for i in range(-(-29 // group))]
    check(packed("sign", struct.pack("<Q", group), (29,), scales, b"\x00\xff\x3c\xd2"))


def test_specs_cover_every_codec_every_format_and_both_gap_codes() -> None:
    assert {name for spec in SPECS for name in re.findall(r"[a-z]\w+", spec)} >= set(codecs.available())
    payloads = [encode(spec, sample((1003,), 0))[0] for spec in SPECS]
    assert {payload.codec for payload in payloads} == {entry.name for entry in codecs.formats()}
    assert {payload.params[16] for payload in payloads if payload.codec == "sparse"} == {0, 1}


def outcome(data: bytes) -> list[np.float32] | str:
    try:
        return decode_frame(data, max_elements=MAX_ELEMENTS)[1]
    except RejectedError as refused:
        return refused.kind


def real_outcome(data: bytes) -> Tensor | str:
    try:
        return codecs.decode(wire.parse(data, limits=wire.Limits(max_elements=MAX_ELEMENTS)))
    except WeightGradError as error:
        return type(error).__name__


def agree(ours: list[np.float32] | str, theirs: Tensor | str) -> bool:
    if isinstance(ours, str) or isinstance(theirs, str):
        return isinstance(ours, str) and isinstance(theirs, str) and ours == theirs
    return same_bits(ours, theirs)


@pytest.mark.parametrize("spec", FUZZED)
def test_both_refuse_the_same_damage(spec: str) -> None:
    """Bits flipped, bytes set, bytes cut out of the body; then a checksum that holds."""
    whole = wire.to_bytes(encode(spec, sample((23, 3), 0))[0])
    rng = random.Random(0)
    for _ in range(100):
        data = bytearray(whole[:-8])
        for _ in range(rng.randint(1, 2)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.3:
            data[rng.randrange(24, len(data))] = rng.choice([0, 1, 2, 127, 128, 255])
        if rng.random() < 0.1:
            del data[-1]
            struct.pack_into("<Q", data, 16, max(0, struct.unpack_from("<Q", data, 16)[0] - 1))
        frame = bytes(data) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data)))
        ours, theirs = outcome(frame), real_outcome(frame)
        assert agree(ours, theirs), frame.hex(" ")


def test_rice_codes_without_a_unary_stream_are_refused() -> None:
    payload = packed("sparse", struct.pack("<QQBBBx", 3, 0, 1, 0, 1), (10,), [1.0, 2.0, 3.0], b"")
    data = wire.to_bytes(payload)
    assert outcome(data) == "ParamsError"
    assert real_outcome(data) == "ParamsError"


def test_worked_body_of_the_document() -> None:
    (block,) = re.findall(r"```text\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    data = bytes.fromhex("".join(line.split("#")[0] for line in block.splitlines()))
    x = torch.zeros(10)
    x[2], x[8] = -2.0, 0.5
    payload, _ = codecs.parse("topk(0.2)").encode(x, {}, 0)
    assert payload.params + bytes(payload.body.tolist()) == data
    assert same_bits(decode_frame(wire.to_bytes(payload))[1], x)


def test_the_document_has_a_section_for_every_format() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for entry in codecs.formats():
        assert f"\n### {entry.name}, id {entry.wire_id}\n" in text
        size = struct.calcsize(entry.params)
        row = re.search(rf"^\| {entry.wire_id} \| \[{entry.name}\].*? \| (.*?) \|", text, re.MULTILINE)
        assert row is not None
        assert row[1].split()[0] == (str(size) if size else "none")
        assert all(field in text for field in entry.fields)
