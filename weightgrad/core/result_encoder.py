"""How the global server encodes the result of a round: with its own error feedback, or by relaying the pushes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import Codec, Fp32
from weightgrad.core.controller import Controller
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.residual import Residual
from weightgrad.core.selectors import All, Interval, Selector, View
from weightgrad.wire.messages import Segment


class ResultEncoder:
    """Encodes the vector that moves the global model.

    Memory, in vectors of the model's size: the residual, which is what the codec of results has lost so far.

    Args:
        global_model: the server's global model.
        down: the codec of results, where no controller sets it.
        selector: chooses what of a result is sent; used only if it looks at the residual.
        flush: the codec of the last result, which sends what earlier ones lost; None to keep it back.
        controller: sets the codec of results under `auto`.
        key: the key of the random stream of the codec.
        per_tensor: whether tensors are encoded one by one.
        keep_loss: whether what the codec loses stays in the residual.
        relay_limit: with so many sites or fewer, pushes are relayed instead of encoded again.
    """

    def __init__(
        self,
        global_model: GlobalModel,
        *,
        down: Codec,
        selector: Selector,
        flush: Codec | None,
        controller: Controller | None,
        key: int,
        per_tensor: bool,
        keep_loss: bool,
        relay_limit: int,
    ) -> None:
        self.residual = Residual(global_model.layout, down, key, per_tensor=per_tensor, keep_loss=keep_loss)
        self._global_model = global_model
        self._down = down
        self._selector = selector
        self._flush = flush if keep_loss and not isinstance(down, Fp32) else None
        self._controller = controller
        self._per_tensor = per_tensor
        self._relay_limit = relay_limit
        self._has_residual = False  # whether results may have lost something

    @property
    def down(self) -> Codec:
        """The codec of the next result."""
        return self._down if self._controller is None else codecs.parse(self._controller.now.down)

    def relays(self, sites: int) -> bool:
        """Whether pushes are relayed: few sites, a codec that would lose something, and nothing lost before."""
        return sites <= self._relay_limit and not self._has_residual and not isinstance(self.down, Fp32)

    def encode(self, update: Tensor, sent: list[Interval], round_: int, *, last: bool) -> tuple[Segment, ...]:
        """Encode the update of a round.

        Args:
            update: the vector that moves the global model.
            sent: the intervals that the sites sent.
            round_: the round's number, part of the key of the random stream.
            last: whether all sites have finished.

        Returns:
            The segments of the result; none if there is nothing to send.
        """
        step, vector = self._global_model.step, self._global_model.vector
        if last and self._flush is not None and (sent or bool(self.residual.vector.any())):
            # All have finished: what the codec of results would lose, or has lost, goes out too.
            return self.residual.take(update, All(), vector, step=step, count=round_, codec=self._flush)
        if not sent:
            return ()
        self._has_residual = self._has_residual or not isinstance(self.down, Fp32)
        selector = self._selector
        if not selector.needs_residual:
            selector = _Intervals(sent if self._per_tensor else [interval.flat() for interval in sent])
        codec = None if self._controller is None else self.down
        return self.residual.take(update, selector, vector, step=step, count=round_, codec=codec)

    def state(self) -> dict[str, Tensor]:
        """Copies of the residual and the codec's state for a checkpoint."""
        return self.residual.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.residual.load(state)
        self._has_residual = bool(self.residual.vector.any())


class _Intervals(Selector):
    """Chooses the intervals that the sites sent."""

    def __init__(self, chosen: list[Interval]) -> None:
        self._chosen = chosen

    def choose(self, view: View) -> list[Interval]:
        """The given intervals, whatever the values."""
        del view
        return self._chosen
