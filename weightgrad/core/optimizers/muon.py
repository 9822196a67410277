"""Muon for a whole model: matrices move by an orthogonalized momentum, everything else by the signs of its momentum.

Jordan et al., 2024. With g the gradient of a tensor,

    v = momentum * v + g
    d = g + momentum * v                      Nesterov
    w = w - lr * weight_decay * w - lr * 0.2 * step(d)

For a matrix of r rows and c columns, step(d) is the nearest orthogonal matrix to d (five steps of Newton and Schulz in
float32) times sqrt(max(r, c)): its elements have about the size 1, as in Liu et al., 2025, so that a learning rate of
AdamW fits. More than two dimensions, as those of a convolution, are a matrix with a row for each first index. Vectors
and scalars have step(d) = sign(d). torch.optim.Muon takes matrices alone and leaves the rest to a second optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weightgrad.core.optimizers.momentum_optimizer import MomentumOptimizer

_SIZE = 0.2  # of an element of a step of AdamW, in root mean square
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the polynomial that brings all singular values near 1
_STEPS = 5


class MuonForAll(MomentumOptimizer):
    """Muon for matrices, signs of the momentum for vectors.

    Args:
        params: the parameters, or groups of them.
        lr: the learning rate, as for AdamW.
        momentum: the momentum.
        weight_decay: the weight decay, apart from the momentum; of matrices only.

    Raises:
        ValueError: an option is negative.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _move(self, weights: Tensor, gradient: Tensor, velocity: Tensor, group: Mapping[str, Any]) -> None:
        velocity.mul_(group["momentum"]).add_(gradient)
        direction = gradient.add(velocity, alpha=group["momentum"])
        if weights.dim() > 1:
            weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.sub_(_step_of(direction), alpha=group["lr"] * _SIZE)


def _step_of(direction: Tensor) -> Tensor:
    """A step whose elements have about the size 1."""
    if direction.dim() < 2 or not direction.numel():
        return direction.sign()
    matrix = direction.reshape(direction.shape[0], -1)
    return (orthogonal(matrix) * math.sqrt(max(matrix.shape))).view(direction.shape).to(direction.dtype)


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest orthogonal matrix, in float32; its singular values are between 0.7 and 1.2."""
    a, b, c = _COEFFICIENTS
    wide: Tensor = matrix.float() if matrix.shape[0] <= matrix.shape[1] else matrix.float().T
    wide = wide / (torch.linalg.matrix_norm(wide) + 1e-7)
    for _ in range(_STEPS):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T
