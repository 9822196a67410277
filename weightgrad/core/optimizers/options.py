"""The numbers among an optimizer's options, as one list: so they can travel with shared gradients while they change.

A schedule may change more than the common learning rate: momentum or betas (`OneCycleLR`), weight decay, the rate of a
group. Where gradients are shared every replica takes the same step, so a site whose options are not those that it
announced sends all numbers among them with its push, and all replicas step with those of the result. The list has, for
each group in order and each of its options by name, its numbers; the learning rate as a share of the first group's.

Some optimizers count their steps there, or keep what they have estimated (schedule-free ones, Prodigy): what a step
writes among the options is the optimizer's, and stays when the user's own options come back (`UserOptions`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from weightgrad.core.optimizers.learning_rates import base_rates_of

MOST = 4096
"""No optimizer has more numbers among its options."""
_SCHEDULED = {"lr", "momentum", "betas", "weight_decay"}  # what the schedules of torch change, and most by hand


def numbers_of(optimizer: Optimizer) -> list[float]:
    """The numbers among the options of an optimizer, as they are now."""
    rates = base_rates_of(optimizer)
    found: list[float] = []
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        for name in _names(optimizer, group):
            if name == "lr":
                found.append(group.get("ratio", rate / rates[0] if rates[0] else 1.0))
            else:
                found += _flat(group[name])
    return found


def put_numbers(optimizer: Optimizer, numbers: Sequence[float]) -> None:
    """Set the options of an optimizer of the same kind; the learning rate of a group becomes its share of the first's.

    An optimizer from an `OptimizerSpec` has the share as `ratio`; any other has it as a multiple of its first rate. A
    list of another length changes nothing: the optimizer has begun or ended to keep numbers there, as all replicas do.
    """
    if len(numbers) != len(numbers_of(optimizer)):
        return
    left, first = iter(numbers), _number(optimizer.param_groups[0].get("lr", 1.0))
    for group in optimizer.param_groups:
        for name in _names(optimizer, group):
            if name == "lr":
                share = next(left)
                if "ratio" in group:
                    group["ratio"] = share
                elif isinstance(group["lr"], Tensor):
                    group["lr"].fill_(first * share)
                else:
                    group["lr"] = first * share
            else:
                group[name] = _like(group[name], left)


class UserOptions:
    """The numbers among an optimizer's options, kept while those of a result are in place for a step.

    Args:
        optimizer: The user's optimizer, which has its own options.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._own = [
            {name: (group[name], _flat(group[name])) for name in _names(optimizer, group)} for group in self._groups
        ]
        self._placed: list[dict[str, list[float]]] = []

    def placed(self) -> None:
        """The options of a result are in place; what differs from them later, the step has written."""
        self._placed = [
            {name: _flat(group[name]) for name in own} for group, own in zip(self._groups, self._own, strict=True)
        ]

    def restore(self) -> None:
        """The step is done: give the optimizer the user's options back, but for what the step has written."""
        for group, own, placed in zip(self._groups, self._own, self._placed, strict=True):
            for name, (value, numbers) in own.items():
                if placed[name] == numbers or _flat(group[name]) != placed[name]:
                    continue
                if isinstance(value, Tensor):
                    value.fill_(numbers[0])
                group[name] = value


class WrittenOptions:
    """What an optimizer has written among its options since it was given to a site, for a checkpoint.

    Options that schedules change are the user's, whose schedule comes back with the user's own state.

    Args:
        optimizer: The user's optimizer, before its first step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._first = [
            {name: _flat(group[name]) for name in _names(optimizer, group)} for group in optimizer.param_groups
        ]

    def tensors(self) -> dict[str, Tensor]:
        """The numbers that have changed, by group and name."""
        found = {}
        for place, (group, first) in enumerate(zip(self._optimizer.param_groups, self._first, strict=False)):
            for name in _names(self._optimizer, group):
                if name not in _SCHEDULED and (now := _flat(group[name])) != first.get(name):
                    found[f"{place}.{name}"] = torch.tensor(now, dtype=torch.float64)
        return found

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` gave; what the optimizer does not have in this form is left out."""
        for key, numbers in saved.items():
            place, name = key.split(".", 1)
            groups = self._optimizer.param_groups
            group = groups[int(place)] if int(place) < len(groups) else {}
            if name in group and len(_flat(group[name])) == numbers.numel():
                group[name] = _like(group[name], iter(numbers.tolist()))
                self._first[int(place)].pop(name, None)  # written, also if it stays as it is now


def _names(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted(optimizer.defaults) if name in group and _flat(group[name])]


def _flat(value: Any) -> list[float]:
    """The numbers of an option; switches and words have none."""
    if isinstance(value, (tuple, list)):
        return [one for part in value for one in _flat(part)]
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        return []
    number = _number(value)
    return [number] if math.isfinite(number) else []


def _number(value: Any) -> float:
    return float(value) if not isinstance(value, Tensor) or value.numel() == 1 else math.nan


def _like(value: Any, numbers: Iterator[float]) -> Any:
    """An option with other numbers: what is equal stays as it is, so that its type does too."""
    if isinstance(value, (tuple, list)):
        made = type(value)(_like(one, numbers) if _flat(one) else one for one in value)
        return value if _flat(made) == _flat(value) else made
    number = next(numbers)
    if _number(value) == number:
        return value
    if isinstance(value, Tensor):
        return value.clone().fill_(number)
    return int(number) if isinstance(value, int) and float(number).is_integer() else number
