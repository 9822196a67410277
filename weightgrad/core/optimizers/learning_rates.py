"""The learning rates of an optimizer's groups of parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer


def set_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the next steps; groups of an optimizer from an OptimizerSpec keep their ratios."""
    put_rates(optimizer, [lr * group.get("ratio", 1.0) for group in optimizer.param_groups])


def rates_of(optimizer: Optimizer) -> list[float]:
    """The learning rate of each group; 1 where an optimizer has none."""
    return [float(group.get("lr", 1.0)) for group in optimizer.param_groups]


def base_rates_of(optimizer: Optimizer) -> list[float]:
    """The learning rates in whose ratios groups differ: before a warm-up that begins with 0, those it leads to."""
    rates = rates_of(optimizer)
    if rates and not rates[0]:
        return [float(group.get("initial_lr", 0.0)) for group in optimizer.param_groups]
    return rates


def put_rates(optimizer: Optimizer, rates: Sequence[float]) -> None:
    """Set the learning rate of each group; one that is a tensor stays that tensor, and groups without one have none."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group.get("lr"), Tensor):
            group["lr"].fill_(rate)
        elif "lr" in group:
            group["lr"] = rate
