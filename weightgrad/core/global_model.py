"""The global model: the one model that every site has, bit for bit, moved only by round results.

The strategy says how it moves. With `updates`, a result is added to the global model. With `gradients`, a result is a
gradient, and every replica takes the same optimizer step with it: one site with fp32 is plain PyTorch, and Adam across
sites is Adam on the large batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from weightgrad.core import optimizers
from weightgrad.core.aggregators import Accumulator, Mean
from weightgrad.core.layout import Layout
from weightgrad.core.optimizer_spec import OptimizerSpec, make
from weightgrad.errors import ProtocolError
from weightgrad.kernels import fixed
from weightgrad.wire.messages import RelayedPush, RoundResult

Rate = Callable[[int], float]
"""The learning rate of a step."""

Source = tuple[str, Mapping[str, Any]] | OptimizerSpec
"""An optimizer as a name with options, or as the description of a user's own."""


class GlobalModel:
    """A replica of the global model at some version.

    Memory, in vectors of the model's size: `vector`; with an optimizer also a gradient and the optimizer's state; where
    pushes are relayed, one for their sum.

    Args:
        layout: where the tensors lie in the flat vector.
        weights: the first weights, which are copied.
        optimizer: the optimizer to step with where results are gradients; None where they are updates.
        rate: the learning rate by step, for results without one.
    """

    def __init__(self, layout: Layout, weights: Tensor, *, optimizer: Source | None, rate: Rate) -> None:
        self.layout = layout
        self.vector = weights.detach().clone()
        self.version = 0
        self.step = 0
        self._rate = rate
        self._optimizer: torch.optim.Optimizer | None = None
        self._relayed_sum: Tensor | None = None  # reused from round to round
        if optimizer is not None:
            parameters = optimizers.parameters_of(layout, self.vector)
            self._gradient = torch.zeros_like(self.vector)
            optimizers.attach(parameters, layout, self._gradient)
            self._optimizer = make(optimizer, parameters)

    @property
    def takes_gradients(self) -> bool:
        """Whether results are gradients; otherwise they are updates."""
        return self._optimizer is not None

    def apply(self, result: RoundResult, mean: Tensor | None = None) -> None:
        """Move by the next round result.

        Args:
            result: the result of version `version + 1`.
            mean: the weighted mean of its relayed pushes, if the caller has computed it already.

        Raises:
            ProtocolError: the result is of another version, or leaves out a push.
        """
        if result.version != self.version + 1:
            raise ProtocolError(
                f"the global model is at version {self.version} and cannot apply the result of version {result.version}"
            )
        self.version, self.step = result.version, result.step
        if self._optimizer is None:
            for segment in result.segments:
                segment.into(self.vector, fixed.ADD)
            if result.relayed:
                self.vector += self._mean(result.relayed) if mean is None else mean
        elif result.segments:
            self._gradient.zero_()
            for segment in result.segments:
                segment.into(self._gradient, fixed.STORE)
            rate = self._rate(result.step - 1) if result.rate is None else result.rate
            optimizers.set_rate(self._optimizer, rate)
            self._optimizer.step()

    def _mean(self, relayed: Sequence[RelayedPush]) -> Tensor:
        """The mean as the server computes it, in the same order: the same bits on every site."""
        pushes = Accumulator(self.layout.numel, reuse=self._relayed_sum)
        for push in relayed:
            if push.segments is None:
                raise ProtocolError(
                    f"a round result leaves out the push of {push.site!r} for round {push.round}, which is needed here"
                )
            pushes.add(push.site, push.segments, push.weight)
        self._relayed_sum = pushes.total
        return Mean().close(pushes, {})

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the weights and the optimizer's state, for downloads and checkpoints."""
        found = {"weights": self.vector.clone()}
        if self._optimizer is not None:
            own = optimizers.state_tensors(self._optimizer)
            found |= {f"optimizer.{name}": tensor.clone() for name, tensor in own.items()}
        return found

    def restore(self, snapshot: Mapping[str, Tensor], version: int, step: int) -> None:
        """Become another replica.

        Args:
            snapshot: what `snapshot` of that replica returned.
            version: its version.
            step: its step.
        """
        self.vector.copy_(snapshot["weights"])
        self.version, self.step = version, step
        if self._optimizer is not None:
            own = {k.removeprefix("optimizer."): v for k, v in snapshot.items() if k.startswith("optimizer.")}
            optimizers.load_state_tensors(self._optimizer, own)

    def digest(self) -> str:
        """A hash of the vector's bytes, equal on every site at the same version."""
        return xxhash.xxh3_64_hexdigest(self.vector.cpu().numpy().data)
