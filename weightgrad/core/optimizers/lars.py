"""LARS: the step of every tensor is a fixed fraction of the tensor's norm.

You, Gitman & Ginsburg, 2017. With w a tensor of the model and g its gradient,

    ratio = trust * |w| / (|g| + weight_decay * |w| + eps)      1 when |w| or |g| is zero
    v     = momentum * v + lr * ratio * (g + weight_decay * w)
    w     = w - v

The learning rate is inside the momentum, as in the paper: a change of rate does not scale the velocity. Biases and
norms (vectors and scalars) have the ratio 1 and no weight decay, as is usual, unless `adapt_vectors`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weightgrad.core.optimizers.momentum_optimizer import MomentumOptimizer


class Lars(MomentumOptimizer):
    """Layer-wise adaptive rates for large batches.

    Args:
        params: the parameters, or groups of them.
        lr: the learning rate.
        momentum: the momentum.
        weight_decay: the weight decay.
        trust: the trust coefficient.
        eps: keeps the ratio finite.
        adapt_vectors: whether vectors and scalars are adapted as well.

    Raises:
        ValueError: an option is negative.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        eps: float = 1e-9,
        adapt_vectors: bool = False,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps}
        super().__init__(params, options, {"adapt_vectors": adapt_vectors})

    def _move(self, weights: Tensor, gradient: Tensor, velocity: Tensor, group: Mapping[str, Any]) -> None:
        adapt = weights.dim() > 1 or group["adapt_vectors"]
        direction = gradient
        if adapt and group["weight_decay"]:
            direction = direction.add(weights, alpha=group["weight_decay"])
        if adapt:
            direction = direction * _ratio(weights, gradient, group["trust"], group["weight_decay"], group["eps"])
        velocity.mul_(group["momentum"]).add_(direction, alpha=group["lr"])
        weights.sub_(velocity)


def _ratio(w: Tensor, g: Tensor, trust: float, weight_decay: float, eps: float) -> Tensor:
    """The ratio as a 0-d tensor, so that nothing waits for a GPU."""
    w_norm, g_norm = torch.linalg.vector_norm(w), torch.linalg.vector_norm(g)
    ratio = trust * w_norm / (g_norm + weight_decay * w_norm + eps)
    return torch.where((w_norm > 0) & (g_norm > 0), ratio, torch.ones_like(ratio))
