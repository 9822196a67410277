"""Batches are a pure function of key and step, and every epoch has every sample once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightgrad.errors import DataError
from weightgrad.lab.data.shards import Batches


@given(n=st.integers(1, 40), batch=st.integers(1, 90), key=st.integers(0, 2**64 - 1), epochs=st.integers(1, 4))
@settings(max_examples=60)
def test_every_epoch_has_every_sample_once(n: int, batch: int, key: int, epochs: int) -> None:
    indices = torch.arange(n) * 3 + 1
    made = Batches(indices, batch, key)
    stream = torch.cat([made.at(step) for step in range(-(-n * epochs // batch))])
    for epoch in range(epochs):
        assert torch.equal(stream[epoch * n : (epoch + 1) * n].sort().values, indices)


@given(steps=st.lists(st.integers(0, 200), min_size=1, max_size=20))
@settings(max_examples=30)
def test_a_step_does_not_depend_on_what_was_asked_before(steps: list[int]) -> None:
    indices = torch.arange(23)
    made = Batches(indices, 7, 5)
    for step in steps:
        assert torch.equal(made.at(step), Batches(indices, 7, 5).at(step))
        assert made.at(step).shape == (7,)


def test_epochs_and_keys_differ() -> None:
    indices = torch.arange(50)
    made = Batches(indices, 50, 1)
    assert not torch.equal(made.at(0), made.at(1))
    assert not torch.equal(made.at(0), Batches(indices, 50, 2).at(0))


def test_nothing_to_draw_from() -> None:
    with pytest.raises(DataError, match="without samples"):
        Batches(torch.arange(0), 4, 0)
    with pytest.raises(DataError, match="a batch of 0"):
        Batches(torch.arange(3), 0, 0)
