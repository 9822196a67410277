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
_USERS = _SCHEDULED | {"eps"}  # what is the user's in any optimizer; others may write whatever else is there
_TIMES = 100.0
_BELOW_ONE = 1 - 1e-6


def numbers_of(optimizer: Optimizer) -> list[float]:
    """The numbers among the options of an optimizer, as they are now."""
    rates = base_rates_of(optimizer)
    found: list[float] = []
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        for name in _names(optimizer, group):
            if name == "lr":
                found.append(group.get("ratio", rate / rates[0] if rates[0] else 1.0))
            else:
                found += flat_numbers(group[name])
    return found


def problem_with(
    numbers: Sequence[float],
    described: Sequence[tuple[str, float]],
    rate: float,
    most_rate: float,
    *,
    own: bool = True,
) -> str | None:
    """Why no optimizer of this description has these numbers, or None.

    A schedule may change options, but it makes none that is less than 1, such as a beta, 1 or more, and none negative:
    with these, steps of torch's optimizers divide by zero or overflow. Numbers of another count are not stepped with.

    Args:
        numbers: what another process has said that its options are.
        described: the name and value of each, as `OptimizerSpec.numbers` has them.
        rate: the learning rate of the first group.
        most_rate: the largest learning rate of any group.
        own: whether it is one of torch's own, all of whose options are the user's. Another may count its steps there.
    """
    for number, (name, first) in zip(numbers, described, strict=True) if len(numbers) == len(described) else ():
        if not own and name not in _USERS:
            continue
        if name == "lr":
            least, most, number = 0.0, most_rate, number * rate
        elif 0 <= first < 1:
            least = first / _TIMES if name == "eps" else max(0.0, 1 - _TIMES * (1 - first))  # a beta of 0.999: from 0.9
            most = _BELOW_ONE
        else:
            least, most = sorted((first / _TIMES, first * _TIMES))
        if not least <= number <= most:
            return f"{name} = {number:g}, where the optimizer of the run has {first:g}; wanted {least:g} to {most:g}"
    return None


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
            {name: (group[name], flat_numbers(group[name])) for name in _names(optimizer, group)}
            for group in self._groups
        ]
        self._placed: list[dict[str, list[float]]] = []

    def placed(self) -> None:
        """The options of a result are in place; what differs from them later, the step has written."""
        self._placed = [
            {name: flat_numbers(group[name]) for name in own}
            for group, own in zip(self._groups, self._own, strict=True)
        ]

    def restore(self) -> None:
        """The step is done: give the optimizer the user's options back, but for what the step has written."""
        for group, own, placed in zip(self._groups, self._own, self._placed, strict=True):
            for name, (value, numbers) in own.items():
                if placed[name] == numbers or flat_numbers(group[name]) != placed[name]:
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
            {name: flat_numbers(group[name]) for name in _names(optimizer, group)} for group in optimizer.param_groups
        ]

    def tensors(self) -> dict[str, Tensor]:
        """The numbers that have changed, by group and name."""
        found = {}
        for place, (group, first) in enumerate(zip(self._optimizer.param_groups, self._first, strict=False)):
            for name in _names(self._optimizer, group):
                if name not in _SCHEDULED and (now := flat_numbers(group[name])) != first.get(name):
                    found[f"{place}.{name}"] = torch.tensor(now, dtype=torch.float64)
        return found

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` gave; what the optimizer does not have in this form is left out."""
        for key, numbers in saved.items():
            place, name = key.split(".", 1)
            groups = self._optimizer.param_groups
            group = groups[int(place)] if int(place) < len(groups) else {}
            if name in group and len(flat_numbers(group[name])) == numbers.numel():
                group[name] = _like(group[name], iter(numbers.tolist()))
                self._first[int(place)].pop(name, None)  # written, also if it stays as it is now


def _names(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted(optimizer.defaults) if name in group and flat_numbers(group[name])]


def flat_numbers(value: Any) -> list[float]:
    """The numbers of an option; switches and words have none."""
    if isinstance(value, (tuple, list)):
        return [one for part in value for one in flat_numbers(part)]
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        return []
    number = _number(value)
    return [number] if math.isfinite(number) else []


def _number(value: Any) -> float:
    return float(value) if not isinstance(value, Tensor) or value.numel() == 1 else math.nan


def _like(value: Any, numbers: Iterator[float]) -> Any:
    """An option with other numbers: what is equal stays as it is, so that its type does too."""
    if isinstance(value, (tuple, list)):
        made = type(value)(_like(one, numbers) if flat_numbers(one) else one for one in value)
        return value if flat_numbers(made) == flat_numbers(value) else made
    number = next(numbers)
    if _number(value) == number:
        return value
    if isinstance(value, Tensor):
        return value.clone().fill_(number)
    return int(number) if isinstance(value, int) and float(number).is_integer() else number
