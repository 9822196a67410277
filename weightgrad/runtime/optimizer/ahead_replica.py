"""The user's module and optimizer as a replica that goes ahead of the global model.

The module has the local model of `core/site/ahead_model.py`: the global model, after optimizer steps with the site's
own pushes in flight. The global model and its optimizer's state are kept beside it, and put back into the module when a
result comes. All steps are those of the user's own optimizer; the last of them is the one that the user asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from weightgrad.core.optimizers.state import copied
from weightgrad.runtime.model.module_weights import ModuleWeights
from weightgrad.runtime.optimizer.user_replica import UserReplica
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import RoundResult, Segment

InFlight = Callable[[], Mapping[int, tuple[Segment, ...]]]
"""The pushes without a result that this rank has encoded, by round, the oldest first."""


class AheadReplica:
    """The `GlobalReplica` of a rank whose site does not wait for results.

    Memory, beside the module and its optimizer: a copy of the weights and of the optimizer's state, where they are.

    Args:
        inner: the module and the optimizer.
        in_flight: the pushes that the module is ahead by.
        rate: the learning rate of the step that the user is about to take.
    """

    def __init__(self, inner: UserReplica, in_flight: InFlight, rate: Callable[[], float]) -> None:
        self._inner, self._in_flight, self._rate = inner, in_flight, rate
        self._global = _GlobalState(inner.trained, inner.optimizer)
        self._ahead = -1  # the last round whose push the module has taken a step with; -1: it has the global model
        self._rates: dict[int, float] = {}  # of the pushes in flight

    # -- steps -----------------------------------------------------------------------------------

    def step(self, result: RoundResult) -> None:
        """Put the gradient of a result into place, for the global model."""
        self._note_rates()  # before the optimizer has that of the result
        self._go_back()
        self._inner.step(result)

    def before_step(self, number: int = 0) -> bool:
        """The user's own step follows; whether there is a gradient for it."""
        waiting = self._pushes()
        if not waiting:
            return self._inner.before_step(number)
        *first, (round_, segments) = waiting
        self._advance(first)
        self._leave_global_model()
        self._ahead = round_
        return self._inner.put(segments, self._rates[round_])

    def stepped(self) -> None:
        """A step is done: the learning rates are the user's again."""
        self._inner.stepped()

    def settle(self) -> None:
        """Have the global model in the module."""
        self._go_back()
        self._inner.settle()

    def resume_passes(self) -> None:
        """Outside of a step: put the module where it belongs, ahead of the global model that it has been given."""
        parameters = [one.parameter for one in self._inner.trained.parameters]
        self._inner.resume_passes()
        gradients = [parameter.grad for parameter in parameters]
        self._advance(self._pushes())
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient  # the user's next backward adds to it

    @contextmanager
    def at_global_model(self) -> Iterator[None]:
        """Have the global model in the module for a while, outside of a step."""
        self.settle()
        yield
        self.resume_passes()

    def _pushes(self) -> list[tuple[int, tuple[Segment, ...]]]:
        """The pushes that the module has taken no step with, with what other ranks encoded; called on every rank."""
        self._note_rates()
        found = []
        for round_, own in self._in_flight().items():
            if round_ > self._ahead and (segments := self._inner.pass_on(own)):
                found.append((round_, segments))
        return found

    def _note_rates(self) -> None:
        """Remember the learning rate of a push that was just made."""
        rates = self._rates
        self._rates = {round_: rates[round_] if round_ in rates else self._rate() for round_ in self._in_flight()}

    def _advance(self, pushes: list[tuple[int, tuple[Segment, ...]]]) -> None:
        for round_, segments in pushes:
            self._leave_global_model()
            self._ahead = round_
            if self._inner.put(segments, self._rates[round_]):
                self._inner.step_now()

    def _leave_global_model(self) -> None:
        """Keep the global model, which the module is about to leave."""
        if self._ahead < 0:
            self._inner.settle()
            self._global.keep()

    def _go_back(self) -> None:
        if self._ahead >= 0:
            self._ahead = -1
            self._inner.within(self._global.put_back)

    # -- GlobalReplica ---------------------------------------------------------------------------

    def weights(self, intervals: Intervals) -> Tensor:
        """Some weights."""
        return self._inner.weights(intervals)

    def load(self, name: str, segment: Segment) -> None:
        """Store a part of another global model, in place of what the module has."""
        self._ahead = -1
        self._inner.load(name, segment)

    def end_load(self, scalars: Mapping[str, Tensor], version: int, step: int) -> None:
        """The download is complete."""
        self._inner.end_load(scalars, version, step)

    def state(self) -> dict[str, Tensor]:
        """The learning rates of the pushes in flight; the module has the global model while this is written."""
        rates = {f"rate.{round_}": torch.tensor(rate, dtype=torch.float64) for round_, rate in self._rates.items()}
        return {**self._inner.state(), **rates}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; the module has the global model."""
        self._ahead = -1
        self._rates = {int(name[5:]): float(rate) for name, rate in state.items() if name.startswith("rate.")}


class _GlobalState:
    """Copies of a rank's weights and of its optimizer's state."""

    def __init__(self, weights: ModuleWeights, optimizer: Optimizer) -> None:
        self._parameters, self._optimizer = [one.parameter for one in weights.parameters], optimizer
        self._weights: list[Tensor] = []
        self._states: list[dict[str, Any]] = [{} for _ in self._parameters]

    @torch.no_grad()
    def keep(self) -> None:
        """Copy what is there now."""
        self._weights = [
            copied(parameter.detach(), self._weights[place] if self._weights else None)
            for place, parameter in enumerate(self._parameters)
        ]
        for place, parameter in enumerate(self._parameters):
            own = self._optimizer.state.get(parameter, {})
            self._states[place] = {name: copied(value, self._states[place].get(name)) for name, value in own.items()}

    @torch.no_grad()
    def put_back(self) -> None:
        """Give module and optimizer what `keep` has copied."""
        for parameter, weights, saved in zip(self._parameters, self._weights, self._states, strict=True):
            parameter.copy_(weights)
            if not saved:
                self._optimizer.state.pop(parameter, None)
                continue
            before = self._optimizer.state.get(parameter, {})
            self._optimizer.state[parameter] = {name: copied(value, before.get(name)) for name, value in saved.items()}
