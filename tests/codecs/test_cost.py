"""Every codec says what it costs; the simulator takes that, a deployment measures."""

from __future__ import annotations

import math

import pytest

from weightgrad import codecs
from weightgrad.codecs import cost


@pytest.mark.parametrize("name", sorted(set(codecs.available()) - {"ef", "warmup"}))
def test_every_codec_has_its_cost_and_benchmarks_beside_it(name: str) -> None:
    cls = codecs.available()[name]
    assert 0.1 < cls.encode_gb_s < 100
    assert 0.1 < cls.decode_gb_s < 100
    assert cls.benchmarks
    for benchmark in cls.benchmarks:
        assert name in str(codecs.parse(benchmark.spec))


def test_a_codec_that_is_only_a_class_is_found() -> None:
    """Benchmarks come from the registry, so that a codec is added in one file."""
    assert {b for cls in codecs.available().values() for b in cls.benchmarks} == set(codecs.benchmarks())
    assert len(codecs.benchmarks()) == len({b.spec for b in codecs.benchmarks()})


@pytest.mark.parametrize("spec", ["fp32", "ef(topk(0.01) > sign())", "onebit()"])
def test_what_is_measured_is_a_speed(spec: str) -> None:
    assert 0 < cost.measured_round_trip_bytes_s(codecs.parse(spec)) < math.inf


def test_the_simulated_speed_is_that_of_encoding_and_decoding() -> None:
    codec = codecs.parse("ef(topk(0.01) > sign())")
    usual = cost.round_trip_bytes_s(codec)
    seconds = cost.encode_seconds(codec, 250_000_000) + cost.decode_seconds(codec, 250_000_000)
    assert usual == pytest.approx(1e9 / seconds)
    assert cost.round_trip_bytes_s(codec, 0.5) == pytest.approx(usual / 2)


def test_a_warm_up_costs_what_the_codec_inside_costs() -> None:
    for spec in ("onebit()", "qsgd(bits=4)"):
        plain, warmed = codecs.parse(spec), codecs.parse(f"warmup(9, {spec})")
        assert cost.encode_seconds(warmed, 1000) == cost.encode_seconds(plain, 1000)
        assert cost.decode_seconds(warmed, 1000) == cost.decode_seconds(plain, 1000)
    one, other = codecs.parse("ef(warmup(9, qsgd(bits=4)))"), codecs.parse("ef(qsgd(bits=4))")
    assert cost.encode_seconds(one, 1000) == cost.encode_seconds(other, 1000)


def test_error_feedback_makes_encoding_dearer_and_decoding_not() -> None:
    plain, wrapped = codecs.parse("qsgd(bits=4)"), codecs.parse("ef(qsgd(bits=4))")
    assert cost.encode_seconds(wrapped, 1000) == pytest.approx(cost.encode_seconds(plain, 1000) / 0.65)
    assert cost.decode_seconds(wrapped, 1000) == cost.decode_seconds(plain, 1000)
