"""What an optimizer keeps beside the weights: as named tensors, and as vectors in the index space of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weightgrad.core.layout import Layout
from weightgrad.core.optimizers.named import state_names
from weightgrad.core.vector_checks import restored
from weightgrad.errors import StateError
from weightgrad.wire.intervals import Intervals


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
    names = state_names(optimizer)
    if names is None:
        optimizer.state.clear()
        for key, tensor in tensors.items():
            number, name = key.split(".", 1)
            optimizer.state[parameters[int(number)]][name] = tensor.clone()
        return
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
                    found[name] = torch.zeros(held.numel, dtype=torch.float32)
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
    known = state_names(optimizer)
    if known is None:
        return
    wanted = set(known)
    if names != wanted:
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
