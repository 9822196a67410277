"""What a rank holds where sites share gradients: the local model is the global model, and a result is a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from weightgrad.core.layout import Layout
from weightgrad.core.local_model import LocalModel
from weightgrad.core.pieces import Piece
from weightgrad.core.site.shard import ShardPlan, SiteShard
from weightgrad.core.site.shard_orders import ApplyOrder, LoadOrder, PushOrder
from weightgrad.core.site.state_memory import StateMemory
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import RoundResult, Segment


class GlobalReplica(Protocol):
    """A replica of the global model that steps with shared gradients."""

    def step(self, result: RoundResult) -> None:
        """Take the optimizer step with the gradient that a result holds."""

    def weights(self, intervals: Intervals) -> Tensor:
        """Some weights; not to be written to."""

    def load(self, name: str, segment: Segment) -> None:
        """Store a part of the weights, or of a vector of the optimizer."""

    def end_load(self, scalars: Mapping[str, Tensor], version: int, step: int) -> None:
        """The download is complete."""

    def state(self) -> dict[str, Tensor]:
        """What must survive; not copied."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""


class GradientShard(SiteShard):
    """What a rank holds where sites share gradients.

    Memory, in vectors of what is held: the residual, once something has stayed behind. The global model is the model
    that is trained, and its optimizer is the user's.

    Args:
        replica: takes the optimizer steps.
        memory: where the residual is.
    """

    def __init__(
        self,
        site: str,
        layout: Layout,
        local: LocalModel,
        plan: ShardPlan,
        key: int,
        replica: GlobalReplica,
        memory: StateMemory | None = None,
    ) -> None:
        super().__init__(site, layout, local, plan, key, memory)
        self._replica = replica

    def stepped(self, gradient: LocalModel | None) -> None:
        """Measure the gradient."""
        if self.step_update is not None and gradient is not None:
            self.step_update.made(gradient)

    def squares(self) -> tuple[float, float]:
        """Of the gradients since the last push, and of the last one."""
        return self.step_update.squares(gradients=True) if self.step_update is not None else (0.0, 0.0)

    def _fresh(self, piece: Piece, gradient: LocalModel | None) -> Tensor:
        out = self.scratch.of("fresh", piece.numel)
        if gradient is None:
            return out.zero_()
        return out.copy_(gradient.read(piece.intervals, out))

    def _pushed(self, order: PushOrder, chosen: tuple[Piece, ...]) -> None:
        del order, chosen
        if self.step_update is not None:
            self.step_update.pushed(None)

    def _weights(self, intervals: Intervals) -> Tensor:
        return self._replica.weights(intervals)

    def apply(self, order: ApplyOrder, result: RoundResult) -> None:
        """Take the optimizer step with the result."""
        self._replica.step(self.filled_in(result))
        self.remove_through(order.through)

    def begin_load(self, *, discards: bool) -> None:
        """Discard what the new model may contain."""
        if discards:
            self.residual.clear()
            self.in_flight.clear()

    def load(self, name: str, segment: Segment) -> None:
        """Store a part of the replica."""
        self._replica.load(name, segment)

    def load_result(self, result: RoundResult) -> None:
        """Nothing: the server sends replicas with optimizers at one version."""
        del result

    def end_load(self, order: LoadOrder, scalars: Mapping[str, Tensor]) -> None:
        """The replica is complete."""
        self.remove_through(order.included)
        self._replica.end_load(scalars, order.version, order.step)

    def state(self) -> dict[str, Tensor]:
        """Also the replica."""
        return {**super().state(), **with_prefix("replica.", self._replica.state())}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        super().load_state(state)
        self._replica.load_state(without_prefix("replica.", state))
