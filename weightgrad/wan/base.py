"""The base: the one model every site has, bit for bit, moved only by the server's answers.

Two ways to move, a part of the strategy. `updates`: base += answer. `gradients`: the answer is a
gradient and every replica takes the same optimizer step with it, so one site with fp32 is plain
PyTorch, and Adam across sites is Adam on the large batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from weightgrad.errors import ProtocolError
from weightgrad.kernels import fixed
from weightgrad.site import optimizers
from weightgrad.site.described import Described, make
from weightgrad.site.layout import Layout
from weightgrad.wan.aggregators import Accumulator, Mean
from weightgrad.wan.messages import Answer, Share

Rate = Callable[[int], float]
"""The learning rate of a step."""


Source = tuple[str, Mapping[str, Any]] | Described


class Base:
    """A replica of the base, at some version. `optimizer` is what to step with when answers are gradients."""

    def __init__(self, layout: Layout, weights: Tensor, *, optimizer: Source | None, rate: Rate) -> None:
        self.layout = layout
        self.vector = weights.detach().clone()
        self.version = 0
        self.step = 0
        self._rate = rate
        self._optimizer: torch.optim.Optimizer | None = None
        self._room: Tensor | None = None  # where pushes that were handed on add up
        if optimizer is not None:
            parameters = optimizers.parameters_of(layout, self.vector)
            self._gradient = torch.zeros_like(self.vector)
            optimizers.attach(parameters, layout, self._gradient)
            self._optimizer = make(optimizer, parameters)

    @property
    def takes_gradients(self) -> bool:
        """Whether answers are gradients; otherwise they are updates."""
        return self._optimizer is not None

    def apply(self, answer: Answer, mean: Tensor | None = None) -> None:
        """Move by the next answer; `mean` is that of its shares, if it is known already."""
        if answer.version != self.version + 1:
            raise ProtocolError(f"the base is at version {self.version} and was given answer {answer.version}")
        self.version, self.step = answer.version, answer.step
        if self._optimizer is None:
            for part in answer.parts:
                part.into(self.vector, fixed.ADD)
            if answer.shares:
                self.vector += self._mean(answer.shares) if mean is None else mean
        elif answer.parts:
            self._gradient.zero_()
            for part in answer.parts:
                part.into(self._gradient, fixed.STORE)
            rate = self._rate(answer.step - 1) if answer.rate is None else answer.rate
            optimizers.set_rate(self._optimizer, rate)
            self._optimizer.step()

    def _mean(self, shares: Sequence[Share]) -> Tensor:
        """As the server takes it, in the same order: the same bits everywhere."""
        pushes = Accumulator(self.layout.numel, room=self._room)
        for share in shares:
            if share.parts is None:
                raise ProtocolError(f"an answer leaves out {share.site!r}'s push of round {share.round}, needed here")
            pushes.add(share.site, share.parts, share.weight)
        self._room = pushes.total
        return Mean().close(pushes, {})

    def snapshot(self) -> dict[str, Tensor]:
        """All of it, for a site that joins and for checkpoints."""
        found = {"base": self.vector.clone()}
        if self._optimizer is not None:
            own = optimizers.state_tensors(self._optimizer)
            found |= {f"optimizer.{name}": tensor.clone() for name, tensor in own.items()}
        return found

    def restore(self, snapshot: Mapping[str, Tensor], version: int, step: int) -> None:
        """Become that replica."""
        self.vector.copy_(snapshot["base"])
        self.version, self.step = version, step
        if self._optimizer is not None:
            own = {k.removeprefix("optimizer."): v for k, v in snapshot.items() if k.startswith("optimizer.")}
            optimizers.load_state_tensors(self._optimizer, own)

    def digest(self) -> str:
        """A fingerprint of the vector's bytes: equal on every site at the same version."""
        return xxhash.xxh3_64_hexdigest(self.vector.cpu().numpy().data)
