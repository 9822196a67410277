"""What goes out to the workers: exact where exempt, few bits elsewhere, by the curvature."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.errors import EncodeError, ProtocolError, StrategyError
from weightgrad.local import Layout, WeightEncoder, decode_flat

LAYOUT = Layout.of_shapes(
    [
        ("conv1.weight", (8, 3, 3, 3)),
        ("conv1.bias", (8,)),
        ("conv2.weight", (16, 8, 3, 3)),
        ("norm.weight", (16,)),
        ("fc1.weight", (50, 64)),
        ("fc1.bias", (50,)),
        ("fc2.weight", (10, 50)),
        ("fc2.bias", (10,)),
    ]
)
BODY = {2, 4}


def randn(seed: int = 0) -> Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed))


def release(
    out: WeightEncoder, weights: Tensor, curvature: Tensor | None = None, key: int = 0
) -> tuple[codecs.Payload, ...]:
    return out.encode(LAYOUT, weights, curvature, out.init(LAYOUT), key)


@pytest.mark.parametrize(("spec", "values"), [("lossaware()", 3), ("lossaware(bits=1)", 2), ("lossaware(bits=3)", 7)])
def test_exempt_slots_are_exact_and_the_others_few_values(spec: str, values: int) -> None:
    out = WeightEncoder(codecs.parse(spec))
    weights = randn()
    payloads = release(out, weights, randn(1).abs())
    decoded = decode_flat(LAYOUT, payloads)
    for place, slot in enumerate(LAYOUT.slots):
        if place in BODY:
            assert 1 < len(slot.of(decoded).unique()) <= values
            assert payloads[place].nbytes < slot.numel * 4 / 8
        else:
            assert torch.equal(slot.of(decoded), slot.of(weights))


def test_names_and_patterns_can_be_exempt() -> None:
    assert WeightEncoder(codecs.parse("lossaware()")).exempt_slots(LAYOUT) == set(range(8)) - BODY
    assert WeightEncoder(codecs.parse("lossaware()"), exempt=("*.bias", "conv1.weight")).exempt_slots(LAYOUT) == {
        0,
        1,
        5,
        7,
    }
    assert WeightEncoder(codecs.parse("lossaware()"), exempt=()).exempt_slots(LAYOUT) == set()
    with pytest.raises(StrategyError, match=r"exempt 'fc9\.\*' is none of the slots conv1\.weight"):
        WeightEncoder(codecs.parse("lossaware()"), exempt=("fc9.*",)).exempt_slots(LAYOUT)


def test_the_exempt_codec() -> None:
    out = WeightEncoder(codecs.parse("lossaware()"), exempt_codec=codecs.Bf16())
    weights = randn()
    decoded = decode_flat(LAYOUT, release(out, weights))
    slot = LAYOUT.slots[0]
    assert torch.equal(slot.of(decoded), slot.of(weights).bfloat16().float())


def test_the_curvature_decides() -> None:
    out = WeightEncoder(codecs.parse("lossaware(exact=True)"))
    weights, flat = randn(), torch.ones(LAYOUT.numel)
    steep = flat.clone()
    steep[weights.abs() > 1.5] = 50.0  # large weights matter most: the scale goes up
    slot = LAYOUT.slots[4]
    plain = slot.of(decode_flat(LAYOUT, release(out, weights, flat)))
    other = slot.of(decode_flat(LAYOUT, release(out, weights, steep)))
    nothing = slot.of(decode_flat(LAYOUT, release(out, weights, None)))
    assert torch.equal(plain, nothing)
    assert not torch.equal(plain, other)

    def loss(decoded: Tensor) -> float:
        return float((slot.of(steep) * (slot.of(weights) - decoded) ** 2).sum())

    assert loss(other) < loss(plain)
    assert float(other.max()) > float(plain.max())


@pytest.mark.parametrize("spec", ["fp16()", "codebook(bits=4)", "qsgd(bits=8)", "ef(lossaware())"])
def test_any_codec_will_do(spec: str) -> None:
    out = WeightEncoder(codecs.parse(spec))
    states = out.init(LAYOUT)
    weights = randn()
    for key in range(2):
        decoded = decode_flat(LAYOUT, out.encode(LAYOUT, weights, None, states, key))
        assert float((decoded - weights).norm() / weights.norm()) < 0.6


def test_random_rounding_follows_the_key() -> None:
    out = WeightEncoder(codecs.parse("qsgd(bits=2)"))
    first, same, other = (decode_flat(LAYOUT, release(out, randn(), key=key)) for key in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_mistakes_are_named() -> None:
    with pytest.raises(StrategyError, match="exempt='conv' must be 'default' or a list"):
        WeightEncoder(codecs.parse("lossaware()"), exempt="conv")
    with pytest.raises(StrategyError, match=r"beta2=1\.0"):
        WeightEncoder(codecs.parse("lossaware()"), beta2=1.0)
    with pytest.raises(StrategyError, match=r"codec='lossaware\(\)' is no codec"):
        WeightEncoder("lossaware()")  # type: ignore[arg-type]
    out = WeightEncoder(codecs.parse("lossaware()"))
    bad = randn()
    bad[LAYOUT.slots[2].start] = float("inf")
    with pytest.raises(EncodeError, match=r"conv2\.weight: element 0"):
        release(out, bad)
    payloads = release(out, randn())
    with pytest.raises(ProtocolError, match="7 payloads for 8 slots"):
        decode_flat(LAYOUT, payloads[:-1])
    with pytest.raises(ProtocolError, match=r"payload for conv1\.weight has shape \[10\]"):
        decode_flat(LAYOUT, payloads[::-1])
