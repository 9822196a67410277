"""Codecs that say they are unbiased are: the mean over many keys is the tensor.

The error of an element, in levels, has mean zero and at most a variance of f(1 - f), where f is how
far the element lies between two levels. Elements are put into bins by f and sign, as a wrong
rounding would show at some f and not at others (and might cancel over all of them). Each bin is
judged by its z: five standard errors is one false alarm in a million. `test_the_test_sees_a_bias`
shows that a bias of one percent of a level would not pass.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs.payload import Payload

SPECS = [
    "fp32()",
    "qsgd(bits=2, bucket=32)",
    "qsgd(bits=3, bucket=64)",
    "qsgd(bits=4)",
    "qsgd(bits=8)",
    "qsgd(bits=2, norm='l2')",
    "qsgd(bits=8, norm='l2')",
    "elias(bits=2)",
    "elias(bits=3, bucket=64, norm='max')",
    "elias(bits=8, bucket=4096)",
    "terngrad(clip=0.0)",
    "warmup(0, qsgd(bits=4))",
]
N, KEYS, BINS = 4096, 600, 10
SHAPE = (32, 128)


def tensor() -> Tensor:
    """Uniform and normal elements, so that every fraction of a level occurs at every scale."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SHAPE, generator=generator)
    x[::2] = 2 * torch.rand(16, 128, generator=generator) - 1
    return x


def level_size(payload: Payload, x: Tensor) -> Tensor:
    """The distance of two levels at each element: the scales come first in these bodies."""
    if payload.codec == "fp32":
        return torch.ones_like(x.view(-1))
    entry = next(entry for entry in codecs.formats() if entry.name == payload.codec)
    fields = entry.describe(payload.params)
    group = fields.get("group", fields.get("bucket"))
    assert isinstance(group, int)
    scales = payload.body[: 4 * -(-N // group)].clone().view(torch.float32)
    return scales.repeat_interleave(group)[:N]


@functools.cache
def errors_in_levels(spec: str) -> tuple[Tensor, Tensor, Tensor]:
    """(mean error of each element in levels, its fraction of a level, its sign)."""
    codec, x = codecs.parse(spec), tensor()
    total = torch.zeros(N, dtype=torch.float64)
    size = level_size(codec.encode(x, codec.init(x), 0)[0], x).double()
    for key in range(KEYS):
        payload, _ = codec.encode(x, codec.init(x), key)
        total += codecs.decode(payload).view(-1)
    place = x.view(-1).double() / size
    error = total / KEYS / size - place
    return error, place - place.floor(), torch.signbit(place)


def worst_z(error: Tensor, fraction: Tensor, negative: Tensor) -> float:
    """The largest |z| of a bin's mean error."""
    variance = (fraction * (1 - fraction)).clamp(min=2.0**-16) / KEYS
    where = (fraction * BINS).long().clamp(max=BINS - 1) + BINS * negative.long()
    sums = torch.zeros(2 * BINS, dtype=torch.float64).index_add_(0, where, error)
    spread = torch.zeros(2 * BINS, dtype=torch.float64).index_add_(0, where, variance)
    used = spread > 0
    return float((sums[used].abs() / spread[used].sqrt()).max())


def test_every_unbiased_codec_is_here() -> None:
    listed = {codecs.parse(spec).spec_name for spec in SPECS}
    for name, cls in codecs.available().items():
        if cls.unbiased is not codecs.Codec.unbiased:
            assert name in listed
    assert all(codecs.parse(spec).unbiased for spec in SPECS)


@pytest.mark.parametrize("spec", SPECS)
def test_mean_over_keys_is_the_tensor(spec: str) -> None:
    error, fraction, negative = errors_in_levels(spec)
    assert worst_z(error, fraction, negative) < 5.0
    # Every element for itself: the largest of 4,096 z stays below 6 but for once in a million runs,
    # and their squares add up to their number, with a standard deviation of sqrt(2n) or less.
    z = error / ((fraction * (1 - fraction)).clamp(min=2.0**-8) / KEYS).sqrt()
    assert float(z.abs().max()) < 6.0
    assert float((z * z).sum()) < N + 6 * math.sqrt(2 * N)


@pytest.mark.parametrize("spec", SPECS[1:])
@pytest.mark.parametrize("tilt", [-0.01, 0.01])
def test_the_test_sees_a_bias(spec: str, tilt: float) -> None:
    error, fraction, negative = errors_in_levels(spec)
    assert worst_z(error + tilt, fraction, negative) > 5.0


@pytest.mark.parametrize("spec", ["qsgd(rounding='nearest')", "sign()", "terngrad()", "topk(0.1)", "clip(2.5)"])
def test_the_biased_do_not_claim_it(spec: str) -> None:
    assert not codecs.parse(spec).unbiased


def test_neighbours_are_rounded_independently() -> None:
    """Two elements share a hash, and near keys are near numbers: neither may show."""
    x = torch.full((64,), 0.5)
    x[0] = 1.0
    codec = codecs.parse("terngrad(clip=0.0)")
    draws = torch.stack([codecs.decode(codec.encode(x, {}, key)[0])[1:] for key in range(2000)]) - 0.5
    correlation = (draws.t() @ draws) / (0.25 * len(draws))
    apart = correlation - torch.diag(torch.diag(correlation))
    assert float(apart.abs().max()) < 6 / math.sqrt(len(draws))
    lagged = (draws[1:] * draws[:-1]).mean(0) / 0.25
    assert float(lagged.abs().max()) < 6 / math.sqrt(len(draws))
