"""Several optimizers of one site as one.

Where updates are shared, others only read groups and read and write states of it. Where gradients are shared, every
site takes the same steps: a result is the gradient of the parameters of one of the optimizers, sometimes of several,
and those step with it, with the options that all sites have agreed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from weightgrad.core.layout import Layout
from weightgrad.core.optimizers.learning_rates import put_rates, rates_of
from weightgrad.core.optimizers.options import numbers_of, put_numbers
from weightgrad.runtime.model.named_parameter import NamedParameter
from weightgrad.wire.intervals import Intervals


class OptimizerSet:
    """Several optimizers, none of which has a parameter of another.

    Args:
        optimizers: The optimizers.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.defaults: dict[str, Any] = {name: value for one in optimizers for name, value in one.defaults.items()}
        self.state = _States(self.optimizers)
        self.active: frozenset[int] = frozenset()
        """The optimizers that step next, by number."""

    @property
    def kind(self) -> str:
        """The names of their classes, in order."""
        return "+".join(type(one).__name__ for one in self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for one in self.optimizers for group in one.param_groups]

    def parameters(self, number: int) -> list[nn.Parameter]:
        """The parameters of one optimizer."""
        return [one for group in self.optimizers[number].param_groups for one in group["params"]]

    def elements(self, parameters: Sequence[NamedParameter], layout: Layout) -> list[Intervals]:
        """For each optimizer, where its parameters lie in the index space."""
        slots = {slot.name: slot for slot in layout.slots}
        places = {id(one.parameter): (slots[one.name].start, slots[one.name].stop) for one in parameters}
        return [
            Intervals.of(places[id(one)] for one in self.parameters(number) if id(one) in places)
            for number in range(len(self.optimizers))
        ]

    @contextmanager
    def alone(self, number: int) -> Iterator[None]:
        """Hide the gradients of the other optimizers: a loop may have left some that they step with later."""
        others = [p for other in range(len(self.optimizers)) if other != number for p in self.parameters(other)]
        kept = [parameter.grad for parameter in others]
        for parameter in others:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(others, kept, strict=True):
                parameter.grad = gradient

    def step(self) -> None:
        """Step with those that are active."""
        for number in sorted(self.active):
            self.optimizers[number].step()

    # -- options --------------------------------------------------------------------------------

    def numbers(self) -> list[float]:
        """For each optimizer, its first learning rate and the numbers among its options, as one list."""
        return [number for one in self.optimizers for number in (rates_of(one)[0], *numbers_of(one))]

    def put(self, numbers: Sequence[float]) -> None:
        """Have the numbers that `numbers` of another site returned; those of other optimizers change nothing."""
        if len(numbers) != len(self.numbers()):
            return
        place = 0
        for one in self.optimizers:
            rates, size = rates_of(one), len(numbers_of(one))
            put_rates(one, [numbers[place] * (rate / rates[0] if rates[0] else 1.0) for rate in rates])
            put_numbers(one, numbers[place + 1 : place + 1 + size])
            place += 1 + size


def set_of(optimizer: Any) -> OptimizerSet | None:
    """What stands for an optimizer, if it is several."""
    return optimizer if isinstance(optimizer, OptimizerSet) else None


class _States:
    """The states of several optimizers, by parameter."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, parameter: Tensor) -> dict[Any, Any]:
        for one in self._optimizers:
            if any(parameter is other for group in one.param_groups for other in group["params"]):
                return one.state
        return {}

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._of(parameter)[parameter]

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """What is kept for a parameter."""
        return self._of(parameter).get(parameter, default)

    def values(self) -> Iterator[Any]:
        """What is kept for each parameter."""
        return (state for one in self._optimizers for state in one.state.values())

    def clear(self) -> None:
        """Forget everything."""
        for one in self._optimizers:
            one.state.clear()
