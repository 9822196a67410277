"""Finding the optimizer that steps inside of what people hand over: wrappers of Accelerate, Lightning and others."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from weightgrad.errors import StrategyError

_DEPTH = 8  # so many wrappers around each other are more than anybody has


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer of torch that steps in the end.

    Args:
        optimizer: An optimizer, or something that keeps one and steps it: wrappers (Accelerate, Lightning, torchtitan,
            a class with a schedule of its own), and optimizers that do more than the one inside them (SAM, Lookahead).

    Returns:
        The innermost optimizer that has the hooks of `torch.optim.Optimizer`.

    Raises:
        StrategyError: There is none, or it is one that cannot be used.
    """
    found = optimizer
    for _ in range(_DEPTH):
        if (inner := _kept(found)) is None:
            break
        found = inner
    if not _has_hooks(found):
        raise StrategyError(
            f"{type(optimizer).__name__} is no torch.optim.Optimizer, whose steps could be listened to; let its class "
            "derive from torch.optim.Optimizer and call super().__init__(params, defaults). A loop that moves weights "
            "by hand needs an optimizer that does it, such as torch.optim.SGD"
        )
    stepping: Optimizer = found
    if isinstance(stepping, torch.optim.LBFGS):
        raise StrategyError(
            "LBFGS calls its closure many times in a step, and gradients are exchanged once; take an optimizer that "
            "needs one gradient for a step, such as AdamW"
        )
    return stepping


def _has_hooks(one: Any) -> bool:
    """Whether steps of an object can be listened to."""
    return isinstance(one, Optimizer) and "_optimizer_step_pre_hooks" in one.__dict__


def _kept(outer: Any) -> Any | None:
    """The one optimizer that an object keeps and steps; None if it steps by itself."""
    if isinstance(several := getattr(outer, "optimizers", None), list) and several:
        if len(several) > 1:
            raise _have_many(outer, len(several))
        return several[0]
    names = ("_optimizer", "optimizer", *getattr(outer, "__dict__", {}))
    kept = {id(one): one for name in names if _is_optimizer(one := getattr(outer, name, None)) and one is not outer}
    if _has_hooks(outer):  # an optimizer by itself: what it keeps does its steps only if it has all of its parameters
        kept = {key: one for key, one in kept.items() if _has_hooks(one) and _parameters(one) == _parameters(outer)}
    elif len(kept) > 1:
        raise _have_many(outer, len(kept))
    return next(iter(kept.values())) if len(kept) == 1 else None


def _have_many(outer: Any, count: int) -> StrategyError:
    return StrategyError(
        f"{type(outer).__name__} has {count} optimizers; give prepare() these themselves, in a list, or put all "
        "parameters into one optimizer, in several groups"
    )


def _is_optimizer(one: Any) -> bool:
    return callable(getattr(one, "step", None)) and isinstance(getattr(one, "param_groups", None), list)


def _parameters(optimizer: Any) -> set[int]:
    return {id(one) for group in optimizer.param_groups for one in group["params"]}
