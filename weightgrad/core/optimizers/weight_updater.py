"""Moves the master weights of a site by a flat gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from weightgrad.core.flat_parameters import attach, parameters_of
from weightgrad.core.layout import Layout
from weightgrad.core.optimizers.learning_rates import set_rate
from weightgrad.core.optimizers.named import build
from weightgrad.core.optimizers.state import load_state_tensors, state_tensors
from weightgrad.core.optimizers.substep import Substep
from weightgrad.errors import StrategyError


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
