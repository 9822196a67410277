"""The global model: the one model that every site has, bit for bit, moved only by round results.

The strategy says how it moves. With `updates`, a result is added to the global model. With `gradients`, a result is a
gradient, and every replica takes the same optimizer step with it: one site with fp32 is plain PyTorch, and Adam across
sites is Adam on the large batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weightgrad.codecs import Fp32
from weightgrad.core import pieces
from weightgrad.core.flat_parameters import attach, parameters_of
from weightgrad.core.layout import Layout
from weightgrad.core.local_model import Scratch
from weightgrad.core.optimizers.learning_rates import set_rate
from weightgrad.core.optimizers.options import numbers_of, put_numbers
from weightgrad.core.optimizers.spec import OptimizerSpec, make
from weightgrad.core.optimizers.state import copy_state, load_state, state_scalars, state_vectors
from weightgrad.core.parts.aggregators import relayed_shares
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.errors import ProtocolError
from weightgrad.kernels import fixed
from weightgrad.kernels.digest import digest
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import RoundResult, Segment

Rate = Callable[[int], float]
"""The learning rate of a step."""

Source = tuple[str, Mapping[str, Any]] | OptimizerSpec
"""An optimizer as a name with options, or as the description of a user's own."""

WEIGHTS = "weights"


class GlobalModel:
    """A replica of the global model, or of the part of it that one process holds, at some version.

    Memory, in vectors of what is held: `vector`; with an optimizer also a gradient and the optimizer's state.

    Args:
        layout: where the tensors lie in the index space.
        weights: the first weights of the held elements, which are copied.
        optimizer: the optimizer to step with where results are gradients; None where they are updates.
        rate: the learning rate by step, for results without one.
        held: the elements of the replica; None: all.
        gradient: memory for the gradient of a result, which replicas in one process may share, because it is filled
            and used within a step; None: the replica's own.
        elsewhere: results are gradients, and only others can step with them: the weights stay what they were at first.
    """

    def __init__(
        self,
        layout: Layout,
        weights: Tensor,
        *,
        optimizer: Source | None,
        rate: Rate,
        held: Intervals | None = None,
        gradient: Tensor | None = None,
        elsewhere: bool = False,
    ) -> None:
        self.layout = layout
        self.held = Intervals.whole(layout.numel) if held is None else held
        self.vector = weights.detach().clone()
        self.version = 0
        self.step = 0
        self._rate = rate
        self._source = optimizer
        self._scratch = Scratch()
        self._optimizer: torch.optim.Optimizer | None = None
        self._options: list[float] = []  # those that it was made with
        self._parameters: dict[int, nn.Parameter] = {}
        self._rounded: list[tuple[nn.Parameter, nn.Parameter]] = []  # float32 in the vector; of another type
        if optimizer is not None:
            self._parameters = parameters_of(layout, self.vector, self.held)
            self._gradient = torch.zeros_like(self.vector) if gradient is None else gradient
            attach(self._parameters, layout, self._gradient, self.held)
            self._rounded = self._round(optimizer.dtypes if isinstance(optimizer, OptimizerSpec) else {})
            if self._parameters:  # torch has no optimizer of nothing
                self._optimizer = make(optimizer, self._parameters)
                self._options = numbers_of(self._optimizer)
        self.takes_gradients = optimizer is not None or elsewhere
        """Whether results are gradients; otherwise they are updates."""
        self.elsewhere = elsewhere
        """Whether only others step with them, so that the weights here are those of version 0."""
        self.before_move: Callable[[], None] | None = None
        """Called before the replica is written to, by whoever lets others read its memory."""

    def _round(self, dtypes: Mapping[int, str]) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Replace parameters of other types than float32, which sites step with in their own precision."""
        found = []
        for index, name in dtypes.items():
            if index in self._parameters:
                exact = self._parameters[index]
                self._parameters[index] = nn.Parameter(exact.detach().to(getattr(torch, name)))
                found.append((exact, self._parameters[index]))
        return found

    # -- rounds --------------------------------------------------------------------------------

    def apply(self, result: RoundResult) -> None:
        """Move by the next round result.

        Args:
            result: the result of version `version + 1`.

        Raises:
            ProtocolError: the result is of another version, or leaves out a push.
        """
        self.advance(result)
        if not self.takes_gradients:
            self.add(result.segments)
            for segment, share in relayed_shares(result.relayed):
                segment.into(self.vector, fixed.ADD, self.held, share=share)
        elif self.is_step(result):
            self.step_with(result)

    def advance(self, result: RoundResult) -> None:
        """Count a result without moving.

        Raises:
            ProtocolError: the result is of another version.
        """
        if result.version != self.version + 1:
            raise ProtocolError(
                f"the global model is at version {self.version} and cannot apply the result of version {result.version}"
            )
        if self.before_move is not None:
            self.before_move()
        self.version, self.step = result.version, result.step

    def add(self, segments: Sequence[Segment]) -> None:
        """Add what segments decode to."""
        for segment in segments:
            segment.into(self.vector, fixed.ADD, self.held)

    @staticmethod
    def is_step(result: RoundResult) -> bool:
        """Whether the optimizer takes a step with a result; after a round in which nothing was pushed it does not.

        All parts of a model must step together, also those for which the result has no values: momentum and weight
        decay move them too. They know it from the learning rate, which comes with every result that has values
        anywhere. Without one, a single process holds everything, and sees whether there are any.
        """
        return bool(result.segments) or result.rate is not None

    def step_with(self, result: RoundResult) -> None:
        """Take the optimizer step with the gradient of a result."""
        self.step_by(result.segments, result.step, result.rate, result.options)

    def step_by(
        self, segments: Sequence[Segment], step: int, rate: float | None, options: Sequence[float] = ()
    ) -> None:
        """Take an optimizer step with a gradient, and count nothing.

        Args:
            segments: the gradient.
            step: the number of steps after it, which decides the learning rate if none is given.
            rate: the learning rate.
            options: the optimizer's options; without any, those that it was made with.
        """
        if self._optimizer is None:
            return
        put_numbers(self._optimizer, options or self._options)
        self._gradient.zero_()
        for segment in segments:
            segment.into(self._gradient, fixed.STORE, self.held)
        set_rate(self._optimizer, self._rate(step - 1) if rate is None else rate)
        for exact, rounded in self._rounded:
            assert exact.grad is not None
            rounded.data.copy_(exact.data)  # the vector may have been replaced since
            rounded.grad = exact.grad.to(rounded.dtype)
        self._optimizer.step()
        for exact, rounded in self._rounded:
            exact.data.copy_(rounded.data)

    def weights(self, intervals: Intervals) -> Tensor:
        """Some weights; not to be written to."""
        return self._scratch.gather("weights", self.vector, self.held, intervals)

    # -- copies --------------------------------------------------------------------------------

    def copy(self) -> GlobalModel:
        """A copy with an optimizer of its own; both may use the same memory for the gradient of a step."""
        gradient = self._gradient if self.takes_gradients and not self.elsewhere else None
        found = GlobalModel(
            self.layout,
            self.vector,
            optimizer=self._source,
            rate=self._rate,
            held=self.held,
            gradient=gradient,
            elsewhere=self.elsewhere,
        )
        found.copy_from(self)
        return found

    def copy_from(self, other: GlobalModel) -> None:
        """Take over the weights, the optimizer's state and the version of another replica."""
        self.vector.copy_(other.vector)
        self.version, self.step = other.version, other.step
        if self._optimizer is not None and other._optimizer is not None:
            copy_state(other._optimizer, self._optimizer)

    # -- whole models: downloads and checkpoints -----------------------------------------------

    def vectors(self) -> dict[str, Tensor]:
        """Every vector of the replica by name, stored as `held` says: the weights, and those of the optimizer.

        The weights are the replica's own; the others are copies.
        """
        found = {WEIGHTS: self.vector}
        if self._optimizer is not None:
            found |= state_vectors(self._optimizer, self._parameters, self.layout, self.held)
        return found

    def scalars(self) -> dict[str, Tensor]:
        """What the optimizer keeps beside vectors, such as its count of steps."""
        return {} if self._optimizer is None else state_scalars(self._optimizer, self._parameters)

    def replace(self, vectors: Mapping[str, Tensor], scalars: Mapping[str, Tensor], version: int, step: int) -> None:
        """Become another replica.

        Args:
            vectors: what `vectors` of that replica returned.
            scalars: what `scalars` of that replica returned.
            version: its version.
            step: its step.
        """
        if self.before_move is not None:
            self.before_move()
        self.vector.copy_(vectors[WEIGHTS])
        self.version, self.step = version, step
        if self._optimizer is not None:
            own = {name: vector for name, vector in vectors.items() if name != WEIGHTS}
            load_state(self._optimizer, self._parameters, self.layout, self.held, own, scalars)

    def state(self) -> dict[str, Tensor]:
        """The vectors and scalars for a checkpoint; the weights are not copied."""
        return {**with_prefix("vector.", self.vectors()), **with_prefix("scalar.", self.scalars())}

    def load_state(self, state: Mapping[str, Tensor], version: int, step: int) -> None:
        """Restore what `state` returned."""
        self.replace(without_prefix("vector.", state), without_prefix("scalar.", state), version, step)

    def digest(self) -> str:
        """A hash of the elements, equal on every site at the same version; those of parts add up to that of all."""
        return f"{self.digest_value():016x}"

    def digest_value(self) -> int:
        """The digest as a number."""
        return digest_of(self.vector, self.held)


def check_complete(held: Intervals, missing: Intervals | None) -> None:
    """Check that all weights of a download have come.

    Args:
        held: the elements that are to come.
        missing: those that have not come; None: no download has begun.

    Raises:
        ProtocolError: some are missing.
    """
    came = 0 if missing is None else held.numel - missing.numel
    if came < held.numel:
        raise ProtocolError(
            f"a download with {came} of the {held.numel} weights that are held here; both ends must train the same "
            "model"
        )


def digest_of(vector: Tensor, held: Intervals) -> int:
    """The digest of elements that a holder stores in a vector."""
    total = 0
    for run in held.runs(Intervals.whole(held.end)):
        total += digest(vector[run.mine : run.mine + run.count], run.theirs)
    return total % 2**64


class Replica:
    """A `GlobalModel` as the replica of a `GradientShard`.

    Args:
        model: takes the steps.
    """

    def __init__(self, model: GlobalModel) -> None:
        self._model = model
        self._incoming: dict[str, Tensor] = {}
        self._missing = model.held

    def step(self, result: RoundResult) -> None:
        """Take the step."""
        self._model.apply(result)

    def weights(self, intervals: Intervals) -> Tensor:
        """Some weights."""
        return self._model.weights(intervals)

    def load(self, name: str, segment: Segment) -> None:
        """Store a part of a vector."""
        if name not in self._incoming:
            self._incoming[name] = torch.zeros_like(self._model.vector)
        segment.into(self._incoming[name], fixed.STORE, self._model.held)
        if name == WEIGHTS:
            self._missing = self._missing - segment.intervals

    def end_load(self, scalars: Mapping[str, Tensor], version: int, step: int) -> None:
        """Become what was loaded.

        Raises:
            ProtocolError: a part of the weights has not come.
        """
        check_complete(self._model.held, self._missing)
        incoming, self._incoming, self._missing = self._incoming, {}, self._model.held
        self._model.replace(incoming, scalars, version, step)

    def state(self) -> dict[str, Tensor]:
        """The model's state, with its version and step."""
        return {**self._model.state(), "clock": torch.tensor([self._model.version, self._model.step])}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        version, step = (int(number) for number in state["clock"])
        self._model.load_state(state, version, step)


def segments_of(vector: Tensor, held: Intervals, cut: Sequence[pieces.Piece]) -> Iterator[Segment]:
    """A vector as exact segments, made when they are asked for.

    Args:
        vector: what is stored.
        held: which elements the vector stores.
        cut: the pieces that become segments.
    """
    scratch = Scratch()
    for piece in cut:
        values = scratch.gather("piece", vector, held, piece.intervals)
        yield Segment.at(piece.intervals, Fp32().encode(values, {}, 0)[0])
