"""Finding the optimizer that steps inside of what people hand over: wrappers of Accelerate, Lightning and others."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from weightgrad.errors import StrategyError


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer of torch that steps in the end.

    Args:
        optimizer: An optimizer, or something that keeps one as `optimizer` (Accelerate), as `_optimizer` (Lightning)
            or as the only one in a list `optimizers` (torchtitan).

    Returns:
        The innermost optimizer that has the hooks of `torch.optim.Optimizer`.

    Raises:
        StrategyError: There is none, or it is one that cannot be used.
    """
    found, depth = optimizer, 0
    while True:
        inner = getattr(found, "_optimizer", None)
        if isinstance(several := getattr(found, "optimizers", None), list) and several:
            if len(several) > 1:
                raise StrategyError(
                    f"{type(found).__name__} has {len(several)} optimizers, and a site has one; put all parameters "
                    "into one optimizer, in several groups"
                )
            inner = several[0]
        if not isinstance(inner, Optimizer) and "_optimizer_step_pre_hooks" not in getattr(found, "__dict__", {}):
            inner = getattr(found, "optimizer", None)
        if inner is None or inner is found or not hasattr(inner, "param_groups") or depth > 8:
            break
        found, depth = inner, depth + 1
    if not isinstance(found, Optimizer) or "_optimizer_step_pre_hooks" not in found.__dict__:
        raise StrategyError(
            f"{type(optimizer).__name__} is no torch.optim.Optimizer, whose steps could be listened to; let its class "
            "derive from torch.optim.Optimizer and call super().__init__(params, defaults)"
        )
    if isinstance(found, torch.optim.LBFGS):
        raise StrategyError(
            "LBFGS calls its closure many times in a step, and gradients are exchanged once; take an optimizer that "
            "needs one gradient for a step, such as AdamW"
        )
    return found
