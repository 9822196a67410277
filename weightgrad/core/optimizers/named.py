"""The optimizers that a recipe can name: torch's own, LARS and Muon."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from weightgrad.core.optimizers.lars import Lars
from weightgrad.core.optimizers.muon import MuonForAll
from weightgrad.errors import StrategyError

_SWITCHES = {"nesterov", "amsgrad", "adapt_vectors"}


@dataclass(frozen=True)
class _Kind:
    make: Callable[..., Optimizer]
    options: tuple[str, ...]
    state: tuple[str, ...]  # what it keeps for every parameter after the first step


_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad")
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_KINDS = {
    "adadelta": _Kind(torch.optim.Adadelta, ("lr", "rho", "eps", "weight_decay"), ("step", "square_avg", "acc_delta")),
    "adagrad": _Kind(
        torch.optim.Adagrad, ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"), ("step", "sum")
    ),
    "adam": _Kind(torch.optim.Adam, _ADAM, _MOMENTS),
    "adamw": _Kind(torch.optim.AdamW, _ADAM, _MOMENTS),
    "lars": _Kind(Lars, ("lr", "momentum", "weight_decay", "trust", "eps", "adapt_vectors"), ("momentum_buffer",)),
    "muon": _Kind(MuonForAll, ("lr", "momentum", "weight_decay"), ("momentum_buffer",)),
    "sgd": _Kind(torch.optim.SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov"), ("momentum_buffer",)),
}

OPTIMIZERS: tuple[str, ...] = tuple(_KINDS)
"""Names that `build` knows."""


_LINEAR = ("sgd", "asgd", "lars")


def is_linear(kind: str) -> bool:
    """Whether the mean of several optimizers' steps is the step with the mean of their gradients.

    It is where a step is the gradient, or a mean of gradients, times a number for each tensor. Adam and its relatives
    divide each element by its own history, and Muon makes all directions of a matrix equally long: neither is linear.

    Args:
        kind: the name of an optimizer, as in a recipe or as a class; of several, joined by "+".
    """
    return all(one in _LINEAR for one in kind.lower().split("+"))


def build(name: str, parameters: list[nn.Parameter], options: Mapping[str, Any]) -> Optimizer:
    """Build an optimizer by name.

    Args:
        name: one of `OPTIMIZERS`.
        parameters: what it steps.
        options: torch's options; the others have torch's defaults.

    Returns:
        The optimizer.

    Raises:
        StrategyError: the name or an option is unknown, or a value is not allowed.
    """
    if name not in _KINDS:
        raise StrategyError(f"no optimizer {name!r}; there are {', '.join(OPTIMIZERS)}")
    kind = _KINDS[name]
    for option, value in options.items():
        if option not in kind.options:
            raise StrategyError(f"{name}: no option {option!r}; there are {', '.join(kind.options)}")
        _check_value(name, option, value)
    given = {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}
    try:
        return kind.make(parameters, **given)
    except (TypeError, ValueError) as error:
        raise StrategyError(f"{name}: {error}") from error


def _check_value(name: str, option: str, value: object) -> None:
    if option in _SWITCHES:
        good, wanted = isinstance(value, bool), "true or false"
    elif option == "betas":
        good = isinstance(value, (list, tuple)) and len(value) == 2 and all(_is_number(one) for one in value)
        wanted = "two numbers"
    else:
        good, wanted = _is_number(value), "a finite number (in YAML write 1.0e-3, not 1e-3)"
    if not good:
        raise StrategyError(f"{name}: {option}={value!r} must be {wanted}")


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)


def state_names(optimizer: Optimizer) -> tuple[str, ...] | None:
    """What an optimizer keeps for every parameter after its first step; None if it is not one that `build` makes."""
    kind = next((kind for kind in _KINDS.values() if kind.make is type(optimizer)), None)
    if kind is None:
        return None
    group = optimizer.param_groups[0]
    if isinstance(optimizer, torch.optim.SGD) and not group["momentum"]:
        return ()
    extra = ("max_exp_avg_sq",) if group.get("amsgrad") else ()
    return kind.state + extra
