"""Weights plus a share of a residual, and the distance from them: one pass in C gives what torch gives."""

from __future__ import annotations

import pytest
import torch

from weightgrad.kernels import dense, native

SIZES = (0, 1, 7, 8, 33, 4097)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("share", [0.25, 1.0, 0.3])
@pytest.mark.parametrize("left", [True, False], ids=["residual", "nothing left"])
def test_one_pass_gives_the_same_floats(numel: int, share: float, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    local, weights, residual = (torch.randn(numel, generator=torch.Generator().manual_seed(n)) for n in range(3))
    given = residual if left else None
    reference = dense.reference(weights, given, share, torch.full((numel,), 9.0))
    distance = dense.distance(local, weights, given, share, torch.full((numel,), 9.0))
    monkeypatch.setattr(native, "library_for", lambda _: None)
    assert torch.equal(reference, dense.reference(weights, given, share, torch.empty(numel)))
    assert torch.equal(distance, dense.distance(local, weights, given, share, torch.empty(numel)))
    assert torch.equal(reference, weights + residual * share if left else weights)
    assert torch.equal(distance, local - reference)
