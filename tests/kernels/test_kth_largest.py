"""The k-th largest value, on every backend, with few and many values and with many that are equal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightgrad.kernels import native, select

BACKENDS = [name for name in native.BACKENDS if name == "reference" or native.status().backend == "native"]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(data=st.data())
def test_it_is_the_one_that_sorting_finds(backend: str, data: st.DataObject) -> None:
    few = data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40))
    repeats = data.draw(st.sampled_from([1, 3, 500]))
    values = torch.tensor(few, dtype=torch.int32).repeat(repeats)
    k = data.draw(st.integers(1, values.numel()))
    with native.use(backend):
        assert select.kth_largest(values, k) == int(values.sort(descending=True).values[k - 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_that_do_not_lie_side_by_side(backend: str) -> None:
    values = torch.arange(20_000, dtype=torch.int32)[::2]
    with native.use(backend):
        assert select.kth_largest(values, 3) == 19_994
