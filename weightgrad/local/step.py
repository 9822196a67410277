"""The step of a simulated site, whose workers live in one process.

    gradients of the workers -> encode -> exchange -> combine -> optimizer -> master weights -> weights for the workers

`LocalStep` puts together what a strategy means inside a site: `GradientExchange` (who encodes what with which key, and
how gradients meet) and `LocalServer` (one step of the master weights, and which weights the workers compute on). In a
deployment the same two parts work around the user's own optimizer (`runtime/site/rank_step.py`). Both take the same
steps, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weightgrad.codecs import Payload
from weightgrad.core.layout import Layout
from weightgrad.core.optimizers.weight_updater import WeightUpdater
from weightgrad.core.random_streams import SiteStream
from weightgrad.core.strategies import Strategy
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.kernels import derive
from weightgrad.local.gradient_exchange import Exchange, GradientExchange
from weightgrad.local.local_server import Combiner, LocalServer
from weightgrad.local.weight_encoder import WeightEncoder


class LocalStep:
    """What a strategy does inside a site, for workers of one process.

    Args:
        layout: Where the parameters lie in the flat vectors.
        weights: The master weights. They are moved in place.
        strategy: The strategy of the run; what does not apply to a site of this size is left out.
        exchange: How gradients reach the other workers.
        optimizer: What moves the master weights, or the name and options to build it from. Not used where sites
            share gradients: then the global model's own optimizer takes the step.
        key: Parent of the keys of this site (`RunStream.LOCAL_STEP`).
        clip_norm: Largest norm of each tensor of a worker's gradient; None does not clip.
        averaged: Whether gradients are averaged by something that knows no strategy, as FSDP2 does.
    """

    def __init__(
        self,
        layout: Layout,
        weights: Tensor,
        strategy: Strategy,
        exchange: Exchange,
        *,
        optimizer: tuple[str, Mapping[str, Any]] | WeightUpdater,
        key: int,
        clip_norm: float | None = None,
        averaged: bool = False,
    ) -> None:
        self.strategy = strategy = strategy.averaged() if averaged else strategy.inside(exchange.size)
        clip_norm = None if averaged else clip_norm
        self.gradients = GradientExchange(layout, strategy, exchange, key=key, clip_norm=clip_norm)
        self._exchange, self._weights = exchange, weights
        self._layout = layout
        self.local_server: LocalServer | None = None
        """The master weights and their optimizer; None where sites share gradients."""
        if strategy.shares == "updates":
            self.local_server = LocalServer(
                layout,
                weights,
                optimizer,
                combine=strategy.combine,
                weight_encoder=WeightEncoder.of(strategy),
                serial_scale=strategy.serial_scale,
                key=derive(key, SiteStream.WEIGHTS),
            )

    @property
    def releases_weights(self) -> bool:
        """Whether the local server sends the workers their weights; otherwise every worker has its own replica."""
        return self.strategy.shares == "updates" and self.strategy.exchange != "allreduce"

    @property
    def weight_encoder(self) -> WeightEncoder | None:
        """How weights are encoded for the workers; None: they go as they are."""
        return self.local_server.weight_encoder if self.local_server is not None else None

    # -- gradients in -----------------------------------------------------------------------

    def step(self, gradients: Iterable[Tensor], number: int, rate: float | None = None) -> Tensor | None:
        """Take one step of the site.

        Args:
            gradients: One for each worker here, in their order. Where it can be, only one is held at a time.
            number: The step's number, which its keys are derived from.
            rate: The learning rate; None leaves it to the optimizer.

        Returns:
            The mean gradient where sites share gradients. None where they share updates: the master weights have
            moved.
        """
        found = self._exchanged(gradients, number)
        if self.local_server is not None:
            self.local_server.step(found, rate)
            return None
        mean = torch.empty_like(self._weights)  # a new one: the caller keeps it until it is pushed
        combiner = Combiner(self._layout, mean.device, room=mean)
        combiner.add_all(found)
        return combiner.mean(out=mean)

    def _exchanged(self, gradients: Iterable[Tensor], number: int) -> Iterable[Tensor | Sequence[Payload]]:
        """The site's gradients in the order of its workers, or their mean alone."""
        own = self.gradients
        if not own.encodes:
            corrected = self._corrected(gradients, number) if own.corrects else gradients
            if own.owners is None:
                return self._exchange.mean(corrected)
            vectors = own.whole_vectors(corrected)
            # Serial steps move the weights, and all gradients are of the weights before.
            return [vector.clone() for vector in vectors] if self.strategy.combine == "serial" else vectors
        encoded = [
            [own.encode(place, bucket, part.of(gradient), number) for bucket, part in enumerate(own.buckets)]
            for place, gradient in enumerate(gradients)
        ]
        gathered = [
            own.gather(bucket, [worker[bucket] for worker in encoded], number) for bucket in range(len(own.buckets))
        ]
        if own.rings:
            means = [mean for mean in gathered if isinstance(mean, Tensor)]
            return [torch.cat(means) if len(means) > 1 else means[0]]
        return [[payload for bucket in gathered for payload in bucket[worker]] for worker in range(self._exchange.size)]

    def _corrected(self, gradients: Iterable[Tensor], number: int) -> Iterator[Tensor]:
        for place, gradient in enumerate(gradients):
            own = gradient.clone()
            for bucket, part in enumerate(self.gradients.buckets):
                self.gradients.correct(place, bucket, part.of(own), number)
            yield own

    # -- weights out ------------------------------------------------------------------------

    def release(self) -> tuple[Payload, ...] | None:
        """Encode the master weights as they are now for the workers; None if they go as they are.

        Every call is a new release, with new noise.
        """
        return self.local_server.released() if self.local_server is not None else None

    def working_weights(self) -> Tensor:
        """The flat weights the workers compute on: the last release, decoded, or the master weights."""
        return self.local_server.working_weights() if self.local_server is not None else self._weights

    # -- checkpoint -------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Copies of all it remembers beside the master weights."""
        found = with_prefix("gradients.", self.gradients.state())
        return found | (
            with_prefix("local_server.", self.local_server.state()) if self.local_server is not None else {}
        )

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        self.gradients.load(without_prefix("gradients.", saved))
        if self.local_server is not None:
            self.local_server.load(without_prefix("local_server.", saved))
