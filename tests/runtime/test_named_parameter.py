"""Which parameters take part, and by which names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightgrad.core.layout import Layout
from weightgrad.errors import StrategyError
from weightgrad.runtime.model.named_parameter import all_stages, layout_of, trainable
from weightgrad.runtime.process_group import SiteGroup


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_a_wrapped_module_is_the_same_model(wrapper: str) -> None:
    inner = nn.Linear(3, 2)
    wrapped = nn.Module()
    wrapped.add_module(wrapper, inner)
    assert layout_of(trainable(wrapped)) == layout_of(trainable(inner))


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(StrategyError, match="no parameter that is trained"):
        trainable(nn.Linear(2, 2).requires_grad_(False))
    module = nn.Module()
    module.register_parameter("table", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    with pytest.raises(StrategyError, match=r"table is torch.complex64; only floating-point parameters can be shared"):
        trainable(module)


def test_stages_that_share_a_name_are_refused() -> None:
    class Two:
        size = 2

        def exchange(self, blob: Tensor) -> list[Tensor]:
            return [blob, blob]

    own: Any = Two()
    group: SiteGroup = own
    with pytest.raises(StrategyError, match=r"two stages have a parameter weight; let every stage keep the names"):
        all_stages(Layout.of_shapes([("weight", (2,))]), group)


def test_frozen_parameters_take_part_only_if_asked() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    assert [one.name for one in trainable(module)] == ["0.weight", "0.bias"]
    assert [one.name for one in trainable(module, frozen=True)] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_plain_parameter_has_all_rows() -> None:
    (weight, bias) = trainable(nn.Linear(3, 2))
    assert (weight.shape, weight.rows()) == ((2, 3), (0, 6))
    assert (bias.shape, bias.rows()) == ((2,), (0, 2))
