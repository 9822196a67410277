"""topk: zeros are not sent, and many equal values need no second scan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import unpack_entries
from weightgrad.kernels import select


def few(numel: int, nonzero: int) -> Tensor:
    x = torch.zeros(numel)
    x[:: numel // nonzero][:nonzero] = torch.linspace(1.0, 2.0, nonzero)
    return x


@pytest.mark.parametrize("spec", ["topk(0.5)", "topk(0.5) > sign()", "topk(0.5, exact=False)", "topk(1.0)"])
@pytest.mark.parametrize("numel", [40, 100_000])
def test_zeros_are_not_sent(spec: str, numel: int) -> None:
    x, codec = few(numel, numel // 8), codecs.parse(spec)
    payload, _ = codec.encode(x, codec.init(x), 1)
    assert torch.equal(unpack_entries(payload)[0], x.nonzero().view(-1))
    assert torch.equal(codecs.decode(payload) != 0, x != 0)


def test_nothing_but_zeros() -> None:
    codec = codecs.parse("ef(topk(0.1) > sign())")
    x = torch.zeros(70_000)
    payload, state = codec.encode(x, codec.init(x), 1)
    assert unpack_entries(payload)[0].numel() == 0
    payload, _ = codec.encode(few(70_000, 700), state, 2)
    assert unpack_entries(payload)[0].numel() == 700


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0, 0.0, 1.0], [1.0, -1.0, 3.0], [0.0, 0.5, -0.5, 1.0]])
def test_equal_values_take_one_scan(values: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of pushes that a codec of signs made has a few magnitudes only."""
    generator = torch.Generator().manual_seed(1)
    x = torch.tensor(values)[torch.randint(len(values), (300_000,), generator=generator)]
    scans, scan = [], select.scan

    def count(*arguments: object, **options: object) -> select.Selected:
        scans.append(1)
        return scan(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(select, "scan", count)
    codec = codecs.parse("topk(0.3)")
    payload, _ = codec.encode(x, {}, 1)
    assert len(scans) == 1
    wanted = x.abs().topk(unpack_entries(payload)[0].numel()).values
    assert torch.equal(codecs.decode(payload).abs().sort(descending=True).values[: wanted.numel()], wanted)
