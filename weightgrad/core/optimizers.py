"""The optimizers of a site: torch's own, LARS and Muon, moving one flat vector in place.

Every slot of the layout is a parameter that shares memory with the flat weights, and its gradient is a view of the
flat gradient. So `optimizer.step()` does exactly what PyTorch does to the module, and the flat vector moves with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weightgrad.core.lars import Lars
from weightgrad.core.layout import Layout
from weightgrad.core.muon import MuonForAll
from weightgrad.core.substep import Substep
from weightgrad.core.vector_checks import require_flat, restored
from weightgrad.errors import StateError, StrategyError
from weightgrad.wire.intervals import Intervals

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


def parameters_of(layout: Layout, flat: Tensor, held: Intervals | None = None) -> dict[int, nn.Parameter]:
    """A parameter for each held slot, in the memory of the vector: a step moves the vector itself.

    Args:
        layout: where the slots lie in the index space.
        flat: the weights.
        held: which elements `flat` stores; None: all.

    Returns:
        The parameters by the index of their slot. A slot of which only a part is held is a flat vector.
    """
    if held is None:
        require_flat(layout, flat, "flat weights")
    return {index: nn.Parameter(view) for index, view in _slot_views(layout, flat.detach(), held)}


def _slot_views(layout: Layout, flat: Tensor, held: Intervals | None) -> Iterator[tuple[int, Tensor]]:
    """The held part of each slot, in the slot's shape if it is all of it."""
    stored = Intervals.whole(layout.numel) if held is None else held
    for index, slot in enumerate(layout.slots):
        if held is None:
            yield index, slot.of(flat)
            continue
        own = stored & Intervals(((slot.start, slot.stop),) if slot.numel else ())
        place = stored.slice_of(own) if own else None
        if place is not None:
            yield index, flat[place].view(slot.shape) if own.numel == slot.numel else flat[place]


class WeightUpdater(Protocol):
    """Moves the master weights by a flat gradient."""

    def move(self, gradient: Tensor, lr: float | None, substep: Substep) -> None:
        """Take one optimizer step.

        Args:
            gradient: the flat gradient.
            lr: the learning rate; None for the one that the optimizer has.
            substep: how the options of the optimizer change for this step.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """Copies of the optimizer's state for a checkpoint."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        ...


class FlatWeightUpdater:
    """An optimizer built by name on views of the flat weights, whose gradients are views of `gradient`."""

    def __init__(
        self, layout: Layout, weights: Tensor, gradient: Tensor, name: str, options: Mapping[str, Any]
    ) -> None:
        parameters = parameters_of(layout, weights)
        attach(parameters, layout, gradient)
        self._optimizer = build(name, list(parameters.values()), options)

    def move(self, gradient: Tensor, lr: float | None, substep: Substep) -> None:
        """Take a step by the gradient that the updater was made with, which must be this one."""
        del gradient
        if lr is None:
            raise StrategyError("an optimizer built by name has no learning rate of its own; pass lr")
        set_rate(self._optimizer, lr)
        with substep.within(self._optimizer):
            self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Copies of the optimizer's state for a checkpoint."""
        return state_tensors(self._optimizer)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        load_state_tensors(self._optimizer, tensors)


def attach(
    parameters: Mapping[int, nn.Parameter], layout: Layout, gradient: Tensor, held: Intervals | None = None
) -> None:
    """Make every parameter's gradient a view of the flat one; once is enough if the same vector is refilled."""
    if held is None:
        require_flat(layout, gradient, "flat gradient")
    for index, view in _slot_views(layout, gradient, held):
        parameters[index].grad = view


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


def state_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of an optimizer's state, named `<index of the parameter>.<name>`; learning rates are not part of it.

    Raises:
        StateError: the state holds something other than tensors.
    """
    found = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{index}.{name}"] = value.detach().clone()
            elif value is not None:
                raise StateError(f"{type(optimizer).__name__} keeps {name}={value!r}, which is not a tensor")
    return found


def load_state_tensors(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `state_tensors` returned; no tensors at all are the state before the first step.

    Raises:
        StateError: the tensors belong to another optimizer or model.
    """
    parameters = _parameters(optimizer)
    if not tensors and not isinstance(optimizer, torch.optim.Adagrad):
        optimizer.state.clear()
        return
    if not any(kind.make is type(optimizer) for kind in _KINDS.values()):
        optimizer.state.clear()
        for key, tensor in tensors.items():
            number, name = key.split(".", 1)
            optimizer.state[parameters[int(number)]][name] = tensor.clone()
        return
    names = _state_names(optimizer)
    present = {}
    for index, parameter in enumerate(parameters):
        for name in names:
            like = torch.zeros((), dtype=torch.float32) if name == "step" else parameter.detach()
            present[f"{index}.{name}"] = like
    good = restored(type(optimizer).__name__, present, tensors)
    optimizer.state.clear()
    for index, parameter in enumerate(parameters):
        optimizer.state[parameter] = {name: good[f"{index}.{name}"] for name in names}


def copy_state(source: Optimizer, target: Optimizer) -> None:
    """Give an optimizer the state of another one of the same kind, over the same parameters in other memory."""
    for own, other in zip(_parameters(target), _parameters(source), strict=True):
        state = source.state.get(other, {})
        if not state:
            target.state.pop(own, None)
            continue
        before = target.state.get(own, {})
        target.state[own] = {name: copied(value, before.get(name)) for name, value in state.items()}


def copied(value: Any, room: Any) -> Any:
    """A copy of a value of an optimizer's state, in memory that is there already if it fits."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(room, Tensor) and room.shape == value.shape and room.dtype == value.dtype:
        return room.copy_(value)
    return value.detach().clone()


def state_vectors(
    optimizer: Optimizer, parameters: Mapping[int, nn.Parameter], layout: Layout, held: Intervals
) -> dict[str, Tensor]:
    """What an optimizer keeps for each element, as vectors by name; none before the first step.

    Args:
        optimizer: the optimizer.
        parameters: its parameters by the index of their slot.
        layout: where the slots lie.
        held: which elements the vectors store.
    """
    found: dict[str, Tensor] = {}
    for index, parameter in parameters.items():
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and _is_vector(value, parameter):
                if name not in found:
                    found[name] = torch.zeros(held.numel)
                found[name][_place(layout, held, index)] = value.detach().flatten()
    return found


def state_scalars(optimizer: Optimizer, parameters: Mapping[int, nn.Parameter]) -> dict[str, Tensor]:
    """What an optimizer keeps beside `state_vectors`, named `<index of the slot>.<name>`; learning rates are not in it.

    Raises:
        StateError: the state holds something other than tensors and numbers.
    """
    found = {}
    for index, parameter in parameters.items():
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                if not _is_vector(value, parameter):
                    found[f"{index}.{name}"] = value.detach().clone()
            elif isinstance(value, (int, float)):
                found[f"{index}.{name}#"] = torch.tensor(float(value), dtype=torch.float64)
            elif value is not None:
                raise StateError(f"{type(optimizer).__name__} keeps {name}={value!r}, which is not a tensor")
    return found


def load_state(
    optimizer: Optimizer,
    parameters: Mapping[int, nn.Parameter],
    layout: Layout,
    held: Intervals,
    vectors: Mapping[str, Tensor],
    scalars: Mapping[str, Tensor],
) -> None:
    """Restore what `state_vectors` and `state_scalars` returned; nothing at all is the state before the first step.

    Raises:
        StateError: the state belongs to another optimizer or model.
    """
    if not vectors and not scalars:
        if not isinstance(optimizer, torch.optim.Adagrad):  # which has a state before its first step
            optimizer.state.clear()
        return
    _check_state_names(optimizer, {*vectors, *(key.split(".", 1)[1].removesuffix("#") for key in scalars)})
    optimizer.state.clear()
    for index, parameter in parameters.items():
        state = optimizer.state[parameter]
        for name, vector in vectors.items():
            if parameter.dim() > 0:
                state[name] = vector[_place(layout, held, index)].view(parameter.shape).to(parameter.dtype, copy=True)
        for key, value in scalars.items():
            number, name = key.split(".", 1)
            if int(number) == index:
                state[name.removesuffix("#")] = float(value) if name.endswith("#") else value.clone()


def _is_vector(value: Tensor, parameter: nn.Parameter) -> bool:
    """Whether it has a number for each element; of a parameter without dimensions, a count of steps looks the same."""
    return value.shape == parameter.shape and parameter.dim() > 0


def _check_state_names(optimizer: Optimizer, names: set[str]) -> None:
    kinds = [kind for kind in _KINDS.values() if kind.make is type(optimizer)]
    if not kinds:
        return
    wanted = set(_state_names(optimizer))
    if names - wanted or wanted - names:
        raise StateError(
            f"{type(optimizer).__name__}: a state with {sorted(names)}, wanted {sorted(wanted)}; it was saved by "
            "another optimizer"
        )


def _place(layout: Layout, held: Intervals, index: int) -> slice:
    slot = layout.slots[index]
    place = held.slice_of(held & Intervals(((slot.start, slot.stop),)))
    assert place is not None
    return place


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _state_names(optimizer: Optimizer) -> tuple[str, ...]:
    (kind,) = [kind for kind in _KINDS.values() if kind.make is type(optimizer)]
    group = optimizer.param_groups[0]
    if isinstance(optimizer, torch.optim.SGD) and not group["momentum"]:
        return ()
    extra = ("max_exp_avg_sq",) if group.get("amsgrad") else ()
    return kind.state + extra
