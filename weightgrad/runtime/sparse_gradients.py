"""Gradients of `nn.Embedding(sparse=True)`: dense while they are exchanged, and sparse again for who needs them so."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from weightgrad.errors import StrategyError


def make_dense(optimizer: Optimizer) -> None:
    """Turn sparse gradients into dense ones, so that they can be exchanged."""
    for parameter in _parameters(optimizer):
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


def make_sparse(optimizer: Optimizer) -> None:
    """Give an optimizer that takes only sparse gradients the rows that are not zero."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        for parameter in _parameters(optimizer):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_sparse(1)


def check_optimizer(optimizer: Optimizer, strategy: str) -> None:
    """Refuse an optimizer that the replica of the global server, which has dense gradients, cannot step with.

    Raises:
        StrategyError: It takes only sparse gradients.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise StrategyError(
            f"{strategy} shares gradients, which are dense when they come back, and SparseAdam takes only sparse ones; "
            "take a strategy that shares updates, such as weightgrad, or Adagrad, which takes both"
        )


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
