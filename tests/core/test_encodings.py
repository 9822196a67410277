"""What `auto` may send takes the bits that its controller counts on."""

from __future__ import annotations

import pytest
import torch

from weightgrad import codecs, wire
from weightgrad.core.controller.encodings import EXACT, Encoding, codec_bits, sparse

NUMEL = 400_000


@pytest.mark.parametrize(
    "encoding",
    [EXACT, *(sparse(part, values) for part in (0.2, 0.01) for values in ("sign()", "codebook(bits=2)"))],
)
def test_bits_are_those_of_real_frames(encoding: Encoding) -> None:
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    for codec, bits in ((encoding.up, encoding.up_bits), (encoding.down, encoding.down_bits)):
        made = codecs.parse(codec)
        payload, _ = made.encode(x, made.init(x), 0)
        assert 8 * wire.frame_bytes(payload) / NUMEL == pytest.approx(bits, rel=0.15)


def test_results_of_sparse_pushes_have_twice_the_entries_but_at_most_half_of_all() -> None:
    assert sparse(0.05, "sign()").down == "ef(topk(0.1) > sign())"
    assert sparse(0.4, "sign()").down == "ef(topk(0.5) > sign())"
    assert codec_bits("fp32") == 32
