"""The user's optimizer as the other replicas know it.

Where sites share gradients, every replica of the global model takes the optimizer step itself. So a site announces its
optimizer when it joins; afterwards the learning rate goes with every push, and so do other options if they change.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from weightgrad.core.optimizers.learning_rates import rates_of
from weightgrad.core.optimizers.options import numbers_of
from weightgrad.core.optimizers.spec import AT_SITES, TRAINING, OptimizerSpec
from weightgrad.core.strategies import Strategy
from weightgrad.errors import StrategyError
from weightgrad.runtime.optimizer.optimizer_set import set_of

log = logging.getLogger("weightgrad")


class AnnouncedOptimizer:
    """An optimizer of `torch.optim`, or several, and what the global server was told about it."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._set = set_of(optimizer)
        self._announced: list[dict[str, Any]] = []  # switches among the options of each group
        self.numbers: list[float] = []
        """The numbers among the options that were announced; none where updates are shared."""

    @property
    def rate(self) -> float:
        """The learning rate of the first group; 1 if the optimizer has none, or if there are several."""
        return 1.0 if self._set is not None else rates_of(self._optimizer)[0]

    def told(self) -> dict[str, Any]:
        """What the server is told about the optimizer, whether it will step with it or not."""
        if self._set is not None:
            spec = OptimizerSpec.of(self._optimizer, self._parameters, all_=False)
            return {**replace(spec, kind=self._set.kind, path="").dump(), AT_SITES: True}
        try:
            return OptimizerSpec.of(self._optimizer, self._parameters).dump()
        except StrategyError:
            return {**OptimizerSpec.of(self._optimizer, self._parameters, all_=False).dump(), AT_SITES: True}

    def adapt(self, strategy: Strategy, *, say: bool) -> None:
        """Change the options that a strategy overrides, and remember the rest as announced.

        DGC and momentum correction have the momentum inside what is sent: the optimizer must not add it again.

        Args:
            strategy: The strategy of the run.
            say: Whether to log each change.
        """
        for group in self._optimizer.param_groups:
            for name, value in strategy.optimizer_with(group).items():
                if name != "params" and name in self._optimizer.defaults and group[name] != value:
                    if say:
                        log.warning(
                            "%s: %s of the optimizer is now %s (was %s)", strategy.name, name, value, group[name]
                        )
                    group[name] = value
        shared = strategy.shares == "gradients"
        self._announced = self._switches() if shared else []
        self.numbers = self._numbers() if shared else []

    @property
    def has_state(self) -> bool:
        """Whether the optimizer remembers anything of earlier training."""
        return any(float(one.get("step", 1)) for one in self._optimizer.state.values() if one)

    def begin_anew(self, *, say: bool) -> None:
        """Forget what the optimizer remembers of earlier training: the other replicas begin without it.

        Args:
            say: Whether to log it.
        """
        state = self._optimizer.state
        if not self.has_state:
            return
        if say:
            log.warning(
                "%s begins without the state that it had before prepare(): where gradients are shared, all replicas "
                "must begin alike. A site goes on with its optimizer from the state directory of join()",
                type(self._optimizer).__name__ if self._set is None else self._set.kind,
            )
        state.clear()
        for one in self._set.optimizers if self._set is not None else [self._optimizer]:
            if isinstance(one, torch.optim.Adagrad):  # which has a state before its first step
                for group in one.param_groups:
                    for parameter in group["params"]:
                        total = torch.full_like(parameter.detach(), group["initial_accumulator_value"])
                        one.state[parameter] = {"step": torch.tensor(0.0), "sum": total}

    def changed(self) -> tuple[float, ...]:
        """The numbers among the options, where they are not those that were announced; else nothing."""
        if not self.numbers:
            return ()
        now = self._numbers()
        same = len(now) == len(self.numbers) and all(
            math.isclose(one, announced, rel_tol=1e-6) for one, announced in zip(now, self.numbers, strict=True)
        )
        return () if same and self._set is None else tuple(now)

    def _numbers(self) -> list[float]:
        return numbers_of(self._optimizer) if self._set is None else self._set.numbers()

    def check(self) -> None:
        """Compare the optimizer with what was announced.

        Raises:
            StrategyError: There are other groups than before, or switches were turned: the others cannot know.
        """
        if self.numbers and self._switches() != self._announced:
            raise StrategyError(
                "groups or switches of the optimizer are not those that it had in prepare(), and with shared gradients "
                "the other replicas step as it did then. Give it all groups before prepare(), those that wait with a "
                "learning rate of 0; or take a strategy that shares updates, such as weightgrad or diloco"
            )

    def _switches(self) -> list[dict[str, Any]]:
        """What is no number among the options of each group, nor the mode, and how many parameters it has."""
        known = set(self._optimizer.defaults) - {TRAINING}
        return [
            {
                "params": len(group["params"]),
                **{k: v for k, v in group.items() if k in known and (v is None or isinstance(v, bool | str))},
            }
            for group in self._optimizer.param_groups
        ]
