"""The user's module and optimizer as the replica that steps with shared gradients.

A round result is a gradient. It is put into `.grad` of the parameters, and the user's own `optimizer.step()` steps with
it; so any optimizer that the global server can build, too, works, and nothing of it is kept twice. Results beyond one
for each step of the user (asynchronous strategies) are stepped with here, and so are those of another optimizer than
the one that the user steps with (`runtime/optimizer/optimizer_set.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weightgrad.core.global_model import GlobalModel
from weightgrad.core.layout import Layout
from weightgrad.core.optimizers.learning_rates import put_rates, rates_of
from weightgrad.core.optimizers.options import UserOptions, put_numbers
from weightgrad.core.site.state_memory import HostMemory, StateMemory
from weightgrad.kernels import fixed
from weightgrad.runtime.model.module_gradients import write_gradient
from weightgrad.runtime.model.module_weights import ModuleWeights
from weightgrad.runtime.model.replicas import ReplicaExchange
from weightgrad.runtime.optimizer.optimizer_set import set_of
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import RoundResult, Segment


class UserReplica:
    """The `GlobalReplica` of a rank of a deployment.

    Args:
        weights: the parameters of this rank.
        gradients: their gradients.
        optimizer: the user's optimizer.
        layout: where the parameters lie in the index space.
        exchange: brings results and weights that other ranks hold to this one.
        step_now: takes an optimizer step now, without the hooks of this package.
        announced: the numbers among the optimizer's options that the others know.
        memory: where results are decoded.
    """

    def __init__(
        self,
        weights: ModuleWeights,
        gradients: ModuleWeights,
        optimizer: Optimizer,
        layout: Layout,
        exchange: ReplicaExchange,
        step_now: Callable[[], None],
        announced: Sequence[float] = (),
        memory: StateMemory | None = None,
    ) -> None:
        self._weights, self._gradients, self._optimizer, self._layout = weights, gradients, optimizer, layout
        self.trained, self.optimizer = weights, optimizer
        """The parameters and the optimizer, for who keeps copies of them."""
        self._exchange = exchange
        self._step_now = step_now
        self._memory: StateMemory = HostMemory() if memory is None else memory
        self._waiting = False  # a gradient is in place that nobody has stepped with
        self._own: list[UserOptions] = []  # the user's options, while those of a result are in place
        self._announced = announced
        self._set = set_of(optimizer)
        self._elements = self._set.elements(weights.parameters, layout) if self._set is not None else []
        self._incoming: dict[str, Tensor] = {}

    # -- steps -----------------------------------------------------------------------------------

    def step(self, result: RoundResult) -> None:
        """Put the gradient of a result into place; the one before it is stepped with now."""
        self.settle()
        result = replace(result, segments=self.pass_on(result.segments))
        if GlobalModel.is_step(result):
            self._waiting = self.put(result.segments, result.rate, result.options or self._announced)

    def pass_on(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """Give the other ranks of the site what they need of these, and get what they have; called on every rank."""
        return self._exchange.pass_on(segments)

    def put(self, segments: Sequence[Segment], rate: float | None, options: Sequence[float] = ()) -> bool:
        """Put a gradient into place, for the next step of the optimizer, and its learning rate if it has one.

        Args:
            segments: the gradient.
            rate: the learning rate; None keeps the user's.
            options: the numbers among the optimizer's options; none keeps the user's.

        Returns:
            Whether there is a gradient to step with.
        """
        for parameter in self._stepping(segments):
            parameter.grad = torch.zeros_like(parameter)
        inside = self._weights.redistributed
        self._gradients.begin()
        for segment in self._memory.arrive(segments):
            own = segment.intervals & self._gradients.available
            values = torch.zeros(own.numel, device=self._memory.device, dtype=torch.float32)
            segment.into(values, fixed.STORE, own)
            write_gradient(self._gradients, own, values)
        if not inside:
            self._gradients.end(changed=True)
        if rate is not None:
            self._set_rate(rate, options)
        return self._set is None or bool(self._set.active)

    def _stepping(self, segments: Sequence[Segment]) -> list[nn.Parameter]:
        """The parameters that a gradient is for; of several optimizers, those step that it has values for."""
        if self._set is None:
            return [one.parameter for one in self._gradients.parameters]
        touched = Intervals.of(span for segment in segments for span in segment.intervals.spans)
        self._set.active = frozenset(number for number, own in enumerate(self._elements) if own & touched)
        return [parameter for number in self._set.active for parameter in self._set.parameters(number)]

    def settle(self) -> None:
        """Step with a gradient that is in place, if the user does not."""
        if self._waiting:
            self._waiting = False
            self.step_now()

    def step_now(self) -> None:
        """Step with the gradient that is in place."""
        self.within(self._step_now)
        self.stepped()

    def within(self, work: Callable[[], None]) -> None:
        """Do something to module and optimizer that needs all of them, also while a round has them redistributed."""
        inside = self._weights.redistributed
        for one in (self._weights, self._gradients) if inside else ():
            one.end(changed=True)
        work()
        for one in (self._weights, self._gradients) if inside else ():
            one.begin()

    def before_step(self, number: int = 0) -> bool:
        """The user's own step follows; whether there is a gradient for it.

        Args:
            number: which of several optimizers steps. Others that have a gradient step now.
        """
        waiting, self._waiting = self._waiting, False
        if self._set is not None and waiting:
            waiting = number in self._set.active
            self._set.active -= {number}
            if self._set.active:
                self.within(self._step_now)
            if not waiting:
                self.stepped()
        return waiting

    def stepped(self) -> None:
        """A step is done: the learning rates are the user's again."""
        for own in self._own:
            own.restore()
        self._own = []

    def _set_rate(self, rate: float, options: Sequence[float]) -> None:
        optimizers = [self._optimizer] if self._set is None else self._set.optimizers
        self._own = [UserOptions(one) for one in optimizers]
        if self._set is None:
            rates = rates_of(self._optimizer)
            put_rates(self._optimizer, [rate * (one / rates[0] if rates[0] else 1.0) for one in rates])
            put_numbers(self._optimizer, options)
        else:
            self._set.put(options)
        for own in self._own:
            own.placed()

    def resume_passes(self) -> None:
        """Outside of a step: step with the last result, if a site that joined late has been sent those it missed."""
        if self._waiting:
            self.settle()
            for one in self._weights.parameters:
                one.parameter.grad = None  # the user's next backward must not add to it

    @contextmanager
    def at_global_model(self) -> Iterator[None]:
        """Have the global model in the module: it is there."""
        yield

    # -- GlobalReplica ---------------------------------------------------------------------------

    def weights(self, intervals: Intervals) -> Tensor:
        """Some weights."""
        return self._weights.read(
            intervals, torch.empty(intervals.numel, device=self._memory.device, dtype=torch.float32)
        )

    def load(self, name: str, segment: Segment) -> None:
        """Store weights at once, and keep the optimizer's vectors until all of them are here."""
        held = self._weights.held
        if name == "weights":
            values = torch.zeros((segment.intervals & held).numel, dtype=torch.float32)
            segment.into(values, fixed.STORE, segment.intervals & held)
            self._weights.write(segment.intervals & held, values)
            return
        if name not in self._incoming:
            self._incoming[name] = torch.zeros(held.numel, dtype=torch.float32)
        segment.into(self._incoming[name], fixed.STORE, held)

    def end_load(self, scalars: Mapping[str, Tensor], version: int, step: int) -> None:
        """Give the optimizer its state, and the other ranks what they have of it."""
        del version, step
        self._exchange.share()
        incoming, self._incoming = self._incoming, {}
        self._load_optimizer(incoming, scalars)

    def _load_optimizer(self, vectors: Mapping[str, Tensor], scalars: Mapping[str, Tensor]) -> None:
        places = {slot.name: index for index, slot in enumerate(self._layout.slots)}
        self._optimizer.state.clear()
        for name in sorted(self._exchange.names(list(vectors))):
            for one in self._weights.parameters:
                self._optimizer.state[one.parameter][name] = torch.zeros_like(one.parameter)
            own = ModuleWeights(
                self._weights.parameters,
                self._layout,
                self._weights.held,
                source=lambda parameter, name=name: self._optimizer.state[parameter][name],  # type: ignore[misc]
            )
            own.begin()
            if name in vectors:
                own.write(self._weights.held, vectors[name])
            self._exchange.of(own).share()
            own.end(changed=True)
        for one in self._weights.parameters:
            for key, value in scalars.items():
                number, name = key.split(".", 1)
                if int(number) == places[one.name]:
                    state = self._optimizer.state[one.parameter]
                    state[name.removesuffix("#")] = float(value) if name.endswith("#") else value.clone()

    def state(self) -> dict[str, Tensor]:
        """Nothing: module and optimizer are in the checkpoint of the rank."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Nothing."""
        del state
