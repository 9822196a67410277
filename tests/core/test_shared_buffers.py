"""Buffers of which one site has others: what all sites together have."""

from __future__ import annotations

import math

import pytest
import torch

from weightgrad.core.shared_buffers import combined


@pytest.mark.parametrize("lie", [math.nan, math.inf, -math.inf])
def test_a_buffer_that_is_not_finite_at_one_site_does_not_spoil_the_mean(lie: float) -> None:
    good, bad = {"mean": torch.ones(3)}, {"mean": torch.full((3,), lie)}
    for sites in ([bad, good], [bad, good, good], [good, bad, good]):
        assert torch.equal(combined([(1, one) for one in sites])["mean"], torch.ones(3))


def test_a_mask_is_that_of_most_sites_and_not_of_the_first() -> None:
    good = {"mask": torch.tensor([True, False]), "attention": torch.tensor([0.0, -math.inf])}
    lie = {"mask": torch.tensor([True, True]), "attention": torch.tensor([0.0, 0.0])}
    for sites in ([lie, good, good], [good, lie, good]):
        found = combined([(1, one) for one in sites])
        assert all(torch.equal(found[name], good[name]) for name in good)
    complex_ = {"phase": torch.tensor([1j, 2j])}
    assert torch.equal(combined([(1, complex_)] * 3)["phase"], complex_["phase"])
