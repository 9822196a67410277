"""Gradients of `nn.Embedding(sparse=True)`: dense while they are exchanged, and sparse again for who needs them so."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer


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


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
