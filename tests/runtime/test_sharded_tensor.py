"""What a rank has of a tensor. Tensors that are sharded have their tests in `test_module_weights.py`, with ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightgrad.errors import StrategyError
from weightgrad.runtime.model.sharded_tensor import flat_local, is_sharded, local_part


def test_a_plain_tensor_is_here_and_stays_where_it_is() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    assert not is_sharded(parameter)
    local_part(parameter)[0, 1] = 4.0
    flat_local(parameter)[5] = 7.0
    assert parameter.detach().flatten().tolist() == [0.0, 4.0, 0.0, 0.0, 0.0, 7.0]


def test_memory_that_is_not_contiguous_is_refused_with_the_remedy() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2).T)
    with pytest.raises(StrategyError, match=r"shape \[2, 3\] with strides \(1, 2\) is not contiguous; make it so with"):
        flat_local(parameter)
