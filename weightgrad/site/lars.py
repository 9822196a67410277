"""LARS: every tensor's step is a fixed share of its own norm.

You, Gitman & Ginsburg, 2017. With w a tensor of the model and g its gradient,

    ratio = trust * |w| / (|g| + weight_decay * |w| + eps)      1 when |w| or |g| is zero
    v     = momentum * v + lr * ratio * (g + weight_decay * w)
    w     = w - v

The rate is inside the momentum, as in the paper: a change of rate does not touch the steps
already on their way. Biases and norms (vectors and scalars) take the ratio 1 and no weight
decay, as is usual, unless `adapt_vectors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Lars(Optimizer):
    """Layer-wise adaptive rates, for large batches."""

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
        dials = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps}
        for name, value in dials.items():
            if not value >= 0:
                raise ValueError(f"{name}={value!r} must not be negative")
        super().__init__(params, {**dials, "adapt_vectors": adapt_vectors})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step with the gradients that are there."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                velocity = state["momentum_buffer"]
                adapt = p.dim() > 1 or group["adapt_vectors"]
                direction = p.grad
                if adapt and group["weight_decay"]:
                    direction = direction.add(p, alpha=group["weight_decay"])
                if adapt:
                    direction = direction * _ratio(p, p.grad, group["trust"], group["weight_decay"], group["eps"])
                velocity.mul_(group["momentum"]).add_(direction, alpha=group["lr"])
                p.sub_(velocity)
        return loss


def _ratio(w: Tensor, g: Tensor, trust: float, weight_decay: float, eps: float) -> Tensor:
    """A 0-d tensor, so that a GPU need not be waited for."""
    size, slope = torch.linalg.vector_norm(w), torch.linalg.vector_norm(g)
    ratio = trust * size / (slope + weight_decay * size + eps)
    return torch.where((size > 0) & (slope > 0), ratio, torch.ones_like(ratio))
