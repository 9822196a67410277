"""Optimizers with other weights for evaluation: schedule-free ones, whose `eval()` and `train()` exchange them.

They take steps with weights y, and are evaluated with an average x of what they have passed. `eval()` makes x of y and
of the optimizer's own state, in place, and `train()` makes y again, but for rounding. For a site this means:

- `train()` gives back the bits of y: where gradients are shared, the other replicas have them by the same steps, and no
  rounding.
- A site ends in the mode of evaluation: x is what the script saves after `leave()`. Where updates are shared, each site
  has its own average, so that x is made before the last update is; where gradients are shared, every site makes the
  same x of the same weights and state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from weightgrad.core.optimizers.spec import TRAINING
from weightgrad.errors import StrategyError
from weightgrad.runtime.model.frozen_parameters import value_digest


class EvaluationMode:
    """Takes the place of the two methods of one optimizer, until it is released.

    Args:
        optimizer: The optimizer, for which `has_one` is true.
        check: Called before `train()`; raises if other weights were loaded.
    """

    def __init__(self, optimizer: Any, check: Callable[[], None] = lambda: None) -> None:
        self._optimizer, self._check = optimizer, check
        self._eval, self._train = optimizer.eval, optimizer.train
        self._kept: list[tuple[nn.Parameter, Tensor]] = []  # y, while the model has x
        self._shown: list[int] = []  # digests of x
        optimizer.__dict__.update(eval=self.eval, train=self.train)

    @staticmethod
    def has_one(optimizer: Optimizer) -> bool:
        """Whether an optimizer has a mode for evaluation."""
        methods = (getattr(optimizer, name, None) for name in ("eval", "train"))
        return TRAINING in optimizer.param_groups[0] and all(callable(one) for one in methods)

    @property
    def on(self) -> bool:
        """Whether the model has the weights for evaluation."""
        return not self._optimizer.param_groups[0][TRAINING]

    def eval(self) -> None:
        """Give the model the weights for evaluation."""
        if not self.on:
            parameters = [one for group in self._optimizer.param_groups for one in group["params"]]
            self._kept = [(one, one.detach().clone()) for one in parameters]
        self._eval()
        self._shown = [value_digest(one) for one, _ in self._kept]

    def train(self) -> None:
        """Give the model the weights with which it is trained.

        Raises:
            StrategyError: Something has written to the weights for evaluation.
        """
        if self._kept and self.on:
            self._check()
            if self._shown != [value_digest(one) for one, _ in self._kept]:
                raise StrategyError(
                    f"{type(self._optimizer).__name__}.train() makes the weights of training again, and something has "
                    "written to the model since eval(), which would be lost. Write to weights in train mode, or put "
                    "back what they were before train()"
                )
        self._train()
        for one, weights in self._kept:
            one.detach().copy_(weights)
        self._kept = []

    def release(self) -> None:
        """Give the optimizer its own methods back."""
        for name in ("eval", "train"):
            self._optimizer.__dict__.pop(name, None)
        self._kept = []
