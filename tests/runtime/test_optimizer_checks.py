"""Optimizers that do not fit a model or a strategy, without a server."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer, SparseAdam

from weightgrad.core import strategies
from weightgrad.errors import StrategyError
from weightgrad.runtime.model.named_parameter import trainable
from weightgrad.runtime.optimizer.optimizer_checks import check_averaged, check_parameters, check_several, why_apart


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def test_an_optimizer_of_the_model_fits() -> None:
    model = two_layers()
    found, optimizer = trainable(model), sgd(model)
    check_parameters(found, optimizer)
    check_averaged(found, [optimizer])
    check_several(strategies.find("onebit"), [optimizer])
    assert why_apart(found, optimizer, "same") is None


def test_parameters_that_the_model_has_not_are_refused_unless_they_are_frozen() -> None:
    model, stranger = two_layers(), nn.Parameter(torch.zeros(2))
    optimizer = SGD([*model.parameters(), stranger], lr=0.1)
    with pytest.raises(StrategyError, match="parameters that the model has not"):
        check_parameters(trainable(model), optimizer)
    stranger.requires_grad_(False)
    check_parameters(trainable(model), optimizer)


def test_several_optimizers_need_rounds_that_are_about_one_of_them() -> None:
    model = two_layers()
    optimizers = [sgd(model[0]), sgd(model[1])]
    for name in ("baseline", "qsgd", "terngrad", "dgc", "powersgd", "diloco", "auto", "weightgrad"):
        check_several(strategies.find(name), optimizers)
    for name in ("onebit", "adaptive", "ahead"):
        with pytest.raises(StrategyError, match=f"2 optimizers, and {name} shares gradients"):
            check_several(strategies.find(name), optimizers)


def test_an_optimizer_that_may_step_before_gradients_are_averaged_is_refused() -> None:
    model = two_layers()
    with pytest.raises(StrategyError, match=r"0\.weight is trained by another optimizer, which may step before"):
        check_averaged(trainable(model), [sgd(model[0]), sgd(model[1])])


def test_why_a_site_cannot_share_gradients() -> None:
    model = two_layers()
    found = trainable(model)
    assert "SparseAdam takes only sparse ones" in str(why_apart(found, SparseAdam(list(model.parameters())), "same"))
    assert 'frozen="shared"' in str(why_apart(found, sgd(model), "shared"))
    assert "1.weight is trained by another optimizer" in str(why_apart(found, sgd(model[0]), "same"))
    wide = two_layers().double()
    assert "0.weight is float64" in str(why_apart(trainable(wide), sgd(wide), "same"))
