"""How fast codecs are here, and who is told."""

from __future__ import annotations

import math

import pytest

from weightgrad import codecs
from weightgrad.runtime import codec_speed
from weightgrad.sim import codec_time


@pytest.mark.parametrize("spec", ["fp32", "ef(topk(0.01) > sign())", "onebit()"])
def test_it_is_a_speed(spec: str) -> None:
    found = codec_speed.bytes_a_second(codecs.parse(spec))
    assert 0 < found < math.inf


def test_the_simulator_takes_it_from_its_table() -> None:
    codec = codecs.parse("ef(topk(0.01) > sign())")
    usual = codec_time.bytes_a_second(codec)
    seconds = codec_time.encode_seconds(codec, 250_000_000) + codec_time.decode_seconds(codec, 250_000_000)
    assert usual == pytest.approx(1e9 / seconds)
    assert codec_time.bytes_a_second(codec, 0.5) == pytest.approx(usual / 2)
