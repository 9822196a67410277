"""The frame of an optimizer with one momentum for each tensor, which `Lars` and `MuonForAll` fill in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class MomentumOptimizer(Optimizer, ABC):
    """Goes through the tensors that have a gradient, each with a momentum that begins with zero.

    Args:
        params: the parameters, or groups of them.
        options: the options that are numbers; none may be negative.
        switches: the other options.

    Raises:
        ValueError: an option is negative.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], options: Mapping[str, float], switches: Mapping[str, bool] | None = None
    ) -> None:
        for name, value in options.items():
            if not value >= 0:
                raise ValueError(f"{name}={value!r} must not be negative")
        super().__init__(params, {**options, **(switches or {})})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step with the present gradients.

        Args:
            closure: computes the loss anew, as in torch.

        Returns:
            The loss of the closure, if there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                self._move(parameter, parameter.grad, state["momentum_buffer"], group)
        return loss

    @abstractmethod
    def _move(self, weights: Tensor, gradient: Tensor, velocity: Tensor, group: Mapping[str, Any]) -> None:
        """Move one tensor and its momentum in place.

        Args:
            weights: the tensor.
            gradient: its gradient.
            velocity: its momentum.
            group: the options of its group.
        """
