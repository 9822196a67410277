"""One rank's part of its site's step: the user's module and optimizer, bound to `LocalStep`.

Every rank is a replica: it gets the same gradients in the same order and takes the same optimizer step, so nothing but
gradients crosses the LAN; quantized weights are computed on each rank from the same master weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weightgrad.core.strategies import Strategy
from weightgrad.local.step import Gradient, LocalStep
from weightgrad.runtime.eager_encoding import EagerEncoder, Pieces
from weightgrad.runtime.flat_parameters import FlatParameters, UserOptimizerUpdater
from weightgrad.runtime.payload_exchange import PayloadExchange
from weightgrad.runtime.process_group import SiteGroup

_UPDATER = "updater."


class RankStep:
    """Moves the site's master weights by the gradients that backward left on this rank and on the others.

    Args:
        flat_parameters: The parameters of the user's module.
        optimizer: The user's optimizer.
        weights: The master weights, the same on every rank; moved in place.
        strategy: The strategy of the run.
        group: The ranks of the site.
        key: Parent of the site's random keys (`RunStream.LOCAL_STEP`).
        clip_norm: Largest norm of each tensor of a rank's gradient; None does not clip.
    """

    def __init__(
        self,
        flat_parameters: FlatParameters,
        optimizer: torch.optim.Optimizer,
        weights: Tensor,
        strategy: Strategy,
        group: SiteGroup,
        key: int,
        clip_norm: float | None = None,
    ) -> None:
        self._flat_parameters, self._weights = flat_parameters, weights
        self._strategy = strategy = strategy.inside(group.size)
        self.updater = UserOptimizerUpdater(flat_parameters, optimizer, weights)
        self._gradient = torch.zeros_like(weights)
        self.eager: EagerEncoder | None = None
        """Encodes gradients while backward runs, where that gives the same bits and a core is idle."""
        self.local_step: LocalStep | None = None
        """None: nothing happens to a gradient between backward and the optimizer, so nothing is copied."""
        alone = group.size == 1 and clip_norm is None and not strategy.correction and strategy.combine == "mean"
        if flat_parameters.partitioned or alone:
            return
        layout, exchange = flat_parameters.layout, PayloadExchange(group)
        self.local_step = LocalStep(
            layout, weights, strategy, exchange, optimizer=self.updater, key=key, clip_norm=clip_norm
        )
        own: list[Pieces] = [*self.local_step.allreduce, *self.local_step.encoders]
        for pieces in own:
            if pieces.pure and flat_parameters.plain and group.idle_core:
                self.eager = EagerEncoder(flat_parameters.parameters, layout, pieces, self._gradient)

    @property
    def not_applied(self) -> str | None:
        """Which parts of the strategy do not apply inside this site, and why; None if all do."""
        strategy = self._strategy
        plain = strategy.gradients == "fp32" and strategy.weights == "fp32" and strategy.combine != "serial"
        if not self._flat_parameters.partitioned or plain:
            return None
        return (
            "the model is partitioned inside the site, which exchanges its own gradients: "
            f"gradients = {strategy.gradients}, weights = {strategy.weights} and combine = {strategy.combine} "
            "have no effect here"
        )

    def step(self, number: int) -> Tensor | None:
        """Take step `number` with the gradients that backward left.

        Returns:
            The site's mean gradient where sites share gradients. None where they share updates: the master weights
            have moved.
        """
        if self.local_step is not None:
            return self.local_step.step([self.own_gradient(number)], number)
        if self._strategy.shares == "gradients":
            self._flat_parameters.read_gradient(self._gradient)
            return self._gradient
        self.updater.move(None, None, 1.0)
        return None

    def own_gradient(self, number: int) -> Gradient:
        """This rank's gradient of step `number`: its payloads if they were encoded during backward, else the vector."""
        eager = self.eager.take(number) if self.eager is not None else None
        if eager is not None:
            return eager
        self._flat_parameters.read_gradient(self._gradient)
        return self._gradient

    def show_weights(self, *, again: bool = False) -> None:
        """Let the module compute on the weights as they are now, quantized if the strategy says so.

        Args:
            again: After a restart: compute on what was released before it, not on a new release.
        """
        if self.local_step is None:
            self._flat_parameters.write_weights(self._weights)
            return
        if not again:
            self.local_step.release()
        self._flat_parameters.write_weights(self.local_step.working_weights())

    def close(self) -> None:
        """End the thread of eager encoding, if there is one: there will be no more steps."""
        if self.eager is not None:
            self.eager.close()

    def state(self) -> dict[str, Tensor]:
        """Copies of what this rank remembers beside the weights."""
        if self.local_step is not None:
            return self.local_step.state()
        if self._strategy.shares == "updates":
            return {f"{_UPDATER}{name}": tensor for name, tensor in self.updater.state().items()}
        return {}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        if self.local_step is not None:
            self.local_step.load(saved)
        elif self._strategy.shares == "updates":
            self.updater.load({k.removeprefix(_UPDATER): v for k, v in saved.items() if k.startswith(_UPDATER)})
