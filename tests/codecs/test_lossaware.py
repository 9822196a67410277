"""Loss-aware weights: the best of all choices where that can be tried, and close to it elsewhere."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightgrad import codecs, errors, kernels
from weightgrad.codecs.payload import Payload

BACKENDS = kernels.BACKENDS if kernels.status().backend == "native" else ("reference",)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def encode(codec: codecs.LossAware, w: Tensor, d: Tensor | None = None) -> Payload:
    return codec.encode(w, {}, 0, curvature=d)[0]


def objective(w: Tensor, d: Tensor, decoded: Tensor) -> float:
    return float((d.double() * (w.double() - decoded.double()) ** 2).sum())


def scales_of(payload: Payload, count: int) -> Tensor:
    return payload.body[: 4 * count].clone().view(torch.float32)


def best_ternary(w: list[float], d: list[float]) -> float:
    """The least objective over all 3**n patterns, each with its best scale."""
    least = sum(di * wi * wi for wi, di in zip(w, d, strict=True))
    everything = least
    for pattern in itertools.product((-1, 0, 1), repeat=len(w)):
        mass = sum(di for b, di in zip(pattern, d, strict=True) if b)
        moment = sum(b * di * wi for b, wi, di in zip(pattern, w, d, strict=True))
        if mass > 0 and moment > 0:
            least = min(least, everything - moment * moment / mass)
    return least


weights = st.floats(-4, 4, width=32, allow_subnormal=False)
curvatures = st.floats(2.0**-7, 8, width=32)


@settings(max_examples=60, derandomize=True)
@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(*[st.lists(v, min_size=n, max_size=n) for v in (weights, curvatures)])
    )
)
def test_exact_ternary_is_the_best_there_is(case: tuple[list[float], list[float]]) -> None:
    w, d = (torch.tensor(part) for part in case)
    decoded = codecs.decode(encode(codecs.LossAware(exact=True), w, d))
    assert decoded.abs().unique().numel() <= 2
    assert objective(w, d, decoded) <= best_ternary(*case) * (1 + 1e-5) + 1e-9


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n", [7, 8])
def test_exact_ternary_is_the_best_of_eight(seed: int, n: int) -> None:
    w, d = randn(n, seed=seed), rand(n, seed=seed) + 1e-3
    decoded = codecs.decode(encode(codecs.LossAware(exact=True), w, d))
    assert objective(w, d, decoded) <= best_ternary(w.tolist(), d.tolist()) * (1 + 1e-5)


@pytest.mark.parametrize("kind", ["normal", "laplace", "sparse"])
@pytest.mark.parametrize("curvature", ["none", "uniform", "wide"])
def test_approximate_is_within_a_thousandth_of_exact(kind: str, curvature: str) -> None:
    """With more elements than the sample that the search starts from."""
    n = 100_000
    w = randn(n)
    if kind == "laplace":
        w = torch.sign(w) * -torch.log1p(-rand(n, seed=1))
    elif kind == "sparse":
        w = w * (rand(n, seed=1) < 0.05) + 0.01 * randn(n, seed=2)
    d = {"none": torch.ones(n), "uniform": rand(n, seed=3) + 1e-8, "wide": torch.exp(2 * randn(n, seed=4))}[curvature]
    given_d = None if curvature == "none" else d
    exact = codecs.decode(encode(codecs.LossAware(exact=True), w, given_d))
    close = codecs.decode(encode(codecs.LossAware(), w, given_d))
    assert objective(w, d, close) <= objective(w, d, exact) * 1.001


@pytest.mark.parametrize("backend", BACKENDS)
def test_ternary_scale_is_the_mean_of_what_is_kept(backend: str) -> None:
    """Whatever the threshold came to: the scale is the least squares one for the levels sent."""
    w, d = randn(40_001), rand(40_001, seed=1)
    for exact in (True, False):
        with kernels.use(backend):
            payload = encode(codecs.LossAware(exact=exact), w, d)
            decoded = codecs.decode(payload)
        kept = decoded != 0
        scale = float((d[kept] * w[kept].abs()).double().sum() / d[kept].double().sum())
        assert float(scales_of(payload, 1)) == pytest.approx(scale, rel=1e-6)
        assert torch.equal(torch.sign(decoded[kept]), torch.sign(w[kept]))
        # And the levels are the best for that scale, or for one half a percent away.
        assert float(w[kept].abs().min()) >= scale / 2 * 0.995
        assert float(w[~kept].abs().max()) <= scale / 2 * 1.005


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_binary(per: str) -> None:
    w, d = randn(13, 50), rand(13, 50, seed=1) + 1e-8
    decoded = codecs.decode(encode(codecs.LossAware(bits=1, per=per), w, d))
    groups = (w.view(1, -1), d.view(1, -1)) if per == "tensor" else (w, d)
    alpha = (groups[0].abs() * groups[1]).double().sum(1) / groups[1].double().sum(1)
    expected = (torch.sign(groups[0]) * alpha[:, None]).view(13, 50)
    torch.testing.assert_close(decoded, expected.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_scale_of_m_bits_is_the_least_squares_one(bits: int, per: str, backend: str) -> None:
    w, d = randn(9, 217), rand(9, 217, seed=1) + 1e-3
    top, rows = 2 ** (bits - 1) - 1, 9 if per == "row" else 1
    with kernels.use(backend):
        payload = encode(codecs.LossAware(bits=bits, per=per), w, d)
        decoded = codecs.decode(payload).view(rows, -1)
    scales = scales_of(payload, rows)
    b = (decoded / scales[:, None]).round().double()
    torch.testing.assert_close(b.float() * scales[:, None], decoded, rtol=1e-6, atol=0)
    assert float(b.abs().max()) <= top
    weight, value = d.view(rows, -1).double(), w.view(rows, -1).double()
    expected = (weight * b * value).sum(1) / (weight * b * b).sum(1)
    torch.testing.assert_close(scales.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_m_bits_are_no_worse_than_the_usual_scale(bits: int) -> None:
    """Rounding to nearest on a ruler to the largest weight is what one does without the curvature."""
    w, d = randn(5000), torch.exp(randn(5000, seed=1))
    top = 2 ** (bits - 1) - 1
    step = float(w.abs().max()) / top
    usual = (w / step).round() * step
    decoded = codecs.decode(encode(codecs.LossAware(bits=bits), w, d))
    assert objective(w, d, decoded) <= objective(w, d, usual) * 1.001


def test_more_bits_are_closer() -> None:
    w, d = randn(2000), rand(2000, seed=1)
    choices: list[int | str] = [1, "ternary", 3, 4, 5, 6, 7, 8]
    found = [objective(w, d, codecs.decode(encode(codecs.LossAware(bits=bits), w, d))) for bits in choices]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("with_curvature", [True, False])
@pytest.mark.parametrize("codec", [codecs.LossAware(bits=1), codecs.LossAware(exact=True)], ids=str)
def test_a_row_for_itself_is_a_tensor(codec: codecs.LossAware, with_curvature: bool) -> None:
    w, d = randn(11, 5, 3, 3), rand(11, 5, 3, 3, seed=1) + 1e-3
    by_row = codecs.LossAware(bits=codec.bits, exact=codec.exact, per="row")
    together = codecs.decode(encode(by_row, w, d if with_curvature else None))
    for row in range(11):
        alone = codecs.decode(encode(codec, w[row], d[row] if with_curvature else None))
        torch.testing.assert_close(together[row], alone, rtol=1e-6, atol=0)


@pytest.mark.parametrize("codec", [codecs.LossAware(exact=True), codecs.LossAware(), codecs.LossAware(bits=4)], ids=str)
def test_curvature_matters(codec: codecs.LossAware) -> None:
    w = randn(4000)
    d = torch.where(torch.arange(4000) % 2 == 0, 1.0, 1e-3) * (0.1 + w.abs())
    weighted, plain = codecs.decode(encode(codec, w, d)), codecs.decode(encode(codec, w))
    assert objective(w, d, weighted) < objective(w, d, plain)
    assert objective(w, torch.ones(4000), plain) < objective(w, torch.ones(4000), weighted)


@pytest.mark.parametrize("codec", [codecs.LossAware(exact=True), codecs.LossAware(bits=1)], ids=str)
def test_elements_without_curvature_do_not_count(codec: codecs.LossAware) -> None:
    w, d = randn(1000), rand(1000, seed=1) + 1e-3
    d[::3] = 0.0
    some = d > 0
    decoded = codecs.decode(encode(codec, w, d))
    alone = codecs.decode(encode(codec, w[some], d[some]))
    torch.testing.assert_close(decoded[some], alone, rtol=1e-6, atol=0)


ALL = [
    codecs.LossAware(),
    codecs.LossAware(exact=True),
    codecs.LossAware(bits=1),
    codecs.LossAware(bits=4),
    codecs.LossAware(bits=5),
    codecs.LossAware(per="row"),
    codecs.LossAware(bits=1, per="row"),
    codecs.LossAware(bits=5, per="row"),
    codecs.LossAware(fisher=True),
    codecs.LossAware(bits=4, fisher=True),
]


@pytest.mark.parametrize("bits", ["ternary", 1, 3])
@pytest.mark.parametrize("per", ["tensor", "row"])
def test_fisher_is_the_squared_curvature(bits: int | str, per: str) -> None:
    w, d = randn(7, 301), torch.exp2(torch.floor(4 * randn(7, 301, seed=1)))  # powers of two: squares are exact
    squared = encode(codecs.LossAware(bits=bits, per=per), w, d.square())
    torch.testing.assert_close(
        codecs.decode(encode(codecs.LossAware(bits=bits, per=per, fisher=True), w, d)), codecs.decode(squared)
    )
    assert torch.equal(
        encode(codecs.LossAware(bits=bits, per=per, fisher=True), w).body,
        encode(codecs.LossAware(bits=bits, per=per), w).body,
    )


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_no_curvature_anywhere_is_finite(codec: codecs.LossAware) -> None:
    w = randn(7, 30)
    decoded = codecs.decode(encode(codec, w, torch.zeros(7, 30)))
    assert bool(torch.isfinite(decoded).all())


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_the_only_element_that_counts_is_exact(codec: codecs.LossAware) -> None:
    """Even if it is the smallest of all: those without curvature must not set the levels."""
    w, d = 1 + rand(7, 30), torch.zeros(7, 30)
    w[3, 4], d[3, 4] = 0.01, 2.0
    decoded = codecs.decode(encode(codec, w, d))
    assert bool(torch.isfinite(decoded).all())
    torch.testing.assert_close(decoded[3, 4], w[3, 4])


@pytest.mark.parametrize("codec", ALL, ids=str)
@pytest.mark.parametrize("exponent", [-100, -60, -20, 20, 60, 100])
def test_scale_of_the_weights_does_not_matter(codec: codecs.LossAware, exponent: int) -> None:
    """A power of two changes no rounding, so it changes no level."""
    w, d = randn(7, 301), rand(7, 301, seed=1) + 1e-3
    factor = 2.0**exponent
    plain = codecs.decode(encode(codec, w, d))
    scaled = codecs.decode(encode(codec, w * factor, d))
    torch.testing.assert_close(scaled / factor, plain, rtol=1e-5, atol=0)


@pytest.mark.parametrize("codec", ALL, ids=str)
@pytest.mark.parametrize("exponent", [-60, -26, 20, 60])
def test_scale_of_the_curvature_does_not_matter(codec: codecs.LossAware, exponent: int) -> None:
    """Adam's sqrt(v) is 1e-8 or smaller in a model that has converged."""
    w, d = randn(7, 301), rand(7, 301, seed=1) + 1e-3
    plain = codecs.decode(encode(codec, w, d))
    scaled = codecs.decode(encode(codec, w, d * 2.0**exponent))
    torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=0)


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_a_curvature_that_cannot_be_one_is_refused(codec: codecs.LossAware) -> None:
    w = randn(6, 10)
    for wrong in (torch.ones(6, 9), torch.ones(10), torch.tensor(1.0), torch.ones(0)):
        with pytest.raises(errors.EncodeError, match="shaped like the weights"):
            encode(codec, w, wrong)
    negative = torch.ones(6, 10)
    negative[2, 3] = -1e-9
    with pytest.raises(errors.EncodeError, match="negative"):
        encode(codec, w, negative)
    for bad in (math.nan, math.inf):
        not_finite = torch.ones(6, 10)
        not_finite[2, 3] = bad
        with pytest.raises(errors.NonFiniteError, match="element 23"):
            encode(codec, w, not_finite)
    with pytest.raises(errors.EncodeError, match="dtype"):
        encode(codec, w, torch.ones(6, 10, dtype=torch.int64))


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_a_transposed_curvature_is_refused(codec: codecs.LossAware) -> None:
    """It has as many elements, but they are those of other weights."""
    with pytest.raises(errors.EncodeError, match="shaped like the weights"):
        encode(codec, randn(6, 10), torch.ones(10, 6))


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_curvature_may_have_any_layout_and_dtype(codec: codecs.LossAware) -> None:
    w, d = randn(10, 6), rand(6, 10, seed=1) + 0.5
    plain = encode(codec, w, d.t().contiguous())
    before = d.clone()
    assert torch.equal(encode(codec, w, d.t()).body, plain.body)
    assert torch.equal(encode(codec, w, d.t().double()).body, plain.body)
    assert torch.equal(d, before)


def test_formats_and_sizes() -> None:
    w = randn(8, 100)
    cases: list[tuple[codecs.LossAware, str, int]] = [
        (codecs.LossAware(), "ternary", 4 + 160),
        (codecs.LossAware(per="row"), "ternary", 32 + 160),
        (codecs.LossAware(bits=1), "sign", 4 + 100),
        (codecs.LossAware(bits=3), "uniform", 4 + 300),
        (codecs.LossAware(bits=7, per="row"), "uniform", 32 + 700),
    ]
    for codec, name, size in cases:
        payload = encode(codec, w)
        assert (payload.codec, payload.body.numel()) == (name, size)
    assert struct.unpack("<Q", encode(codecs.LossAware(per="row"), w).params) == (100,)
