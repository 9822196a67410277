"""Packed tensors have the values of their codecs, and their words are those of the specification."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightgrad import codecs
from weightgrad.quantized.packed_tensor import PackedTensor, pack_int32, unpack_int32

SPECS = [
    "lossaware(bits='ternary')",
    "lossaware(bits='ternary', per='row')",
    "lossaware(bits=1)",
    "lossaware(bits=2)",
    "lossaware(bits=3)",
    "lossaware(bits=4, per='row')",
    "lossaware(bits=7)",
    "lossaware(bits=8)",
    "codebook(bits=1)",
    "codebook(bits=4)",
    "codebook(bits=8)",
    "qsgd(bits=4)",
    "qsgd(bits=4, bucket=32)",
    "qsgd(bits=8, bucket=32)",
    "sign()",
    "terngrad()",
]
SHAPES = [(1, 1), (3, 64), (5, 7), (4, 3, 3, 3), (2, 96), (600, 5)]


def encoded(spec: str, shape: tuple[int, ...]) -> codecs.Payload:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    codec = codecs.parse(spec)
    return codec.encode(x, codec.init(x), 7)[0]


@pytest.mark.parametrize("layout", ["auto", "weightgrad"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_the_values_are_those_of_the_codec(spec: str, shape: tuple[int, ...], layout: str) -> None:
    payload = encoded(spec, shape)
    packed = PackedTensor.of("w", payload, layout)
    assert packed is not None
    wanted = codecs.decode(payload)
    assert torch.equal(packed.decode(), wanted)
    assert packed.decode().dtype == wanted.dtype
    assert layout == "auto" or packed.layout == "weightgrad"


@pytest.mark.parametrize(
    ("spec", "layout", "scales"),
    [
        ("lossaware(bits='ternary')", "pack-quantized", (1,)),
        ("lossaware(bits=4, per='row')", "pack-quantized", (3, 1)),
        ("qsgd(bits=8, bucket=32)", "pack-quantized", (3, 2)),
        ("lossaware(bits=3)", "weightgrad", (1,)),
        ("codebook(bits=4)", "weightgrad", (16,)),
        ("lossaware(bits=1)", "weightgrad", (1,)),
        ("qsgd(bits=4)", "pack-quantized", (1,)),
    ],
)
def test_which_layout_is_taken(spec: str, layout: str, scales: tuple[int, ...]) -> None:
    packed = PackedTensor.of("w", encoded(spec, (3, 64)))
    assert packed is not None
    assert (packed.layout, tuple(packed.scales.shape)) == (layout, scales)


@pytest.mark.parametrize("spec", ["topk(0.1)", "fp16", "powersgd()", "adaptive()"])
def test_what_is_no_code_for_every_element_is_not_taken(spec: str) -> None:
    assert PackedTensor.of("w", encoded(spec, (8, 64))) is None


def words_of(levels: list[list[int]], bits: int) -> list[list[int]]:
    """By the specification: a level plus 2**(bits - 1), the first in the lowest bits of a word."""
    found = []
    for row in levels:
        words = []
        for start in range(0, len(row), 32 // bits):
            part = row[start : start + 32 // bits]
            word = sum((level + 2 ** (bits - 1)) << (bits * place) for place, level in enumerate(part))
            words.append(word - 2**32 if word >= 2**31 else word)
        found.append(words)
    return found


@settings(max_examples=60)
@given(st.data(), st.sampled_from([2, 4, 8]), st.integers(1, 4), st.integers(1, 40))
def test_words_are_those_of_the_specification(data: st.DataObject, bits: int, rows: int, columns: int) -> None:
    level = st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    levels = data.draw(st.lists(st.lists(level, min_size=columns, max_size=columns), min_size=rows, max_size=rows))
    words = pack_int32(torch.tensor(levels, dtype=torch.int8), bits)
    assert words.tolist() == words_of(levels, bits)
    assert unpack_int32(words, bits, columns).tolist() == levels
