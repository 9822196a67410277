"""The step inside a site, written once for the simulator and the runtime.

    gradients of the workers -> encode -> exchange -> combine -> optimizer -> master weights -> weights for the workers

`LocalStep` decides what a strategy means inside a site: who encodes what with which key, how encoded gradients become
one step of the master weights (or, where sites share gradients, one mean), and which weights the workers compute on.
It is pure: no clock, no socket, no process group. How gradients travel between workers is an `Exchange` that the
caller passes in. In the runtime it is the process group of the site and each process has one worker; in the simulator
all workers of a site live in one process and the exchange only counts bytes. Both take the same steps, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from weightgrad.codecs import Fp32, Payload
from weightgrad.core.layout import Layout
from weightgrad.core.optimizers import WeightUpdater
from weightgrad.core.random_streams import SiteStream
from weightgrad.core.strategies import Strategy
from weightgrad.kernels import derive
from weightgrad.local.allreduce import QuantizedAllreduce
from weightgrad.local.gradient_encoder import GradientEncoder
from weightgrad.local.local_server import Combiner, LocalServer
from weightgrad.local.weight_encoder import WeightEncoder

Gradient = Tensor | Sequence[Payload]
"""A worker's gradient: the flat vector, or its payloads if it has been encoded already."""


class Exchange(Protocol):
    """How the gradients of a site's workers reach one another.

    "Here" means in this process: one worker in the runtime, all of them in the simulator. What comes back is in the
    order of the workers. Vectors are valid until the next one is taken, except those of `all_gather_vectors`.
    """

    @property
    def size(self) -> int:
        """Workers of the site."""

    @property
    def workers(self) -> Sequence[int]:
        """The workers that are here."""

    def all_gather(self, own: Iterable[Sequence[Payload]]) -> Iterable[Sequence[Payload]]:
        """Every worker's payloads, from those of the workers here."""

    def all_gather_vectors(self, own: Iterable[Tensor]) -> Iterable[Tensor]:
        """Every worker's vector, each in memory of its own."""

    def mean(self, own: Iterable[Tensor]) -> Iterable[Tensor]:
        """Vectors whose mean is the mean of all workers' vectors: all of them, or the mean alone."""

    def all_to_all(self, own: Sequence[Sequence[Payload]]) -> Sequence[Sequence[Payload]]:
        """For each worker here, what all workers sent to it; payload i of a worker goes to worker i."""


class LocalStep:
    """What a strategy does inside a site, for the workers of one process.

    Args:
        layout: Where the parameters lie in the flat vectors.
        weights: The master weights, the same in every process of the site. They are moved in place.
        strategy: The strategy of the run; what does not apply to a site of this size is left out.
        exchange: How gradients reach the other workers.
        optimizer: What moves the master weights, or the name and options to build it from. Not used where sites
            share gradients: then the global model's own optimizer takes the step.
        key: Parent of the keys of this site (`RunStream.LOCAL_STEP`).
        clip_norm: Largest norm of each tensor of a worker's gradient; None does not clip.
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
    ) -> None:
        self.strategy = strategy = strategy.inside(exchange.size)
        self.gradient_codec = codec = strategy.wan_codec("gradients")
        self._exchange, self._weights = exchange, weights
        self._combiner = Combiner(layout)
        self._mean: Tensor | None = None  # of the allreduce, filled again at every step
        self.local_server: LocalServer | None = None
        """The master weights and their optimizer; None where sites share gradients."""
        self.allreduce: list[QuantizedAllreduce] = []
        """One for each worker here, if the strategy has encoded gradients meet in an allreduce."""
        self.encoders: list[GradientEncoder] = []
        """One for each worker here, if something happens to a gradient before it leaves its worker."""
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
        if self.encodes and strategy.exchange == "allreduce" and exchange.size > 1:
            self.allreduce = [
                QuantizedAllreduce(exchange.size, layout.numel, codec, derive(key, SiteStream.ALLREDUCE, worker))
                for worker in exchange.workers
            ]
        elif self.encodes or clip_norm is not None or strategy.correction:
            keys = [derive(key, SiteStream.GRADIENTS, worker) for worker in exchange.workers]
            self.encoders = [
                GradientEncoder(layout, codec, own, clip_norm=clip_norm, momentum=strategy.correction) for own in keys
            ]

    @property
    def encodes(self) -> bool:
        """Whether gradients are quantized between the workers."""
        return not isinstance(self.gradient_codec, Fp32)

    @property
    def releases_weights(self) -> bool:
        """Whether the local server sends the workers their weights; otherwise every worker has its own replica."""
        return self.strategy.shares == "updates" and self.strategy.exchange != "allreduce"

    @property
    def weight_encoder(self) -> WeightEncoder | None:
        """How weights are encoded for the workers; None: they go as they are."""
        return self.local_server.weight_encoder if self.local_server is not None else None

    # -- gradients in -----------------------------------------------------------------------

    def step(self, gradients: Iterable[Gradient], number: int, rate: float | None = None) -> Tensor | None:
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
        self._combiner.add_all(found)
        return self._combiner.mean()

    def encode(self, place: int, gradient: Gradient, number: int) -> Sequence[Payload]:
        """The payloads of the gradient of worker `place` of those here; unchanged if it is encoded already."""
        if not isinstance(gradient, Tensor):
            return gradient
        if self.allreduce:
            return self.allreduce[place].encode_chunks(gradient, number)
        return self.encoders[place].encode(gradient, number)

    def _exchanged(self, gradients: Iterable[Gradient], number: int) -> Iterable[Gradient]:
        """The site's gradients in the order of its workers, or their mean alone."""
        encoded = (self.encode(place, gradient, number) for place, gradient in enumerate(gradients))
        if self.allreduce:
            return [self._allreduce_mean(list(encoded), number)]
        if self.encoders:
            return self._exchange.all_gather(encoded)
        if self.strategy.combine == "serial":
            return self._exchange.all_gather_vectors(_vectors(gradients))
        return self._exchange.mean(_vectors(gradients))

    def _allreduce_mean(self, chunks: list[Sequence[Payload]], number: int) -> Tensor:
        dealt = self._exchange.all_to_all(chunks)
        reduced = [[ring.reduce(own, number)] for ring, own in zip(self.allreduce, dealt, strict=True)]
        everyones = [payload for (payload,) in self._exchange.all_gather(reduced)]
        self._mean = self.allreduce[0].gather(everyones, out=self._mean)  # whoever takes it copies it
        return self._mean

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
        return {f"{name}.{key}": t for name, owner in self._owners() for key, t in owner.state().items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        for name, owner in self._owners():
            prefix = f"{name}."
            owner.load({key.removeprefix(prefix): t for key, t in saved.items() if key.startswith(prefix)})

    def _owners(self) -> Iterator[tuple[str, LocalServer | QuantizedAllreduce | GradientEncoder]]:
        if self.local_server is not None:
            yield "local_server", self.local_server
        for worker, ring in zip(self._exchange.workers, self.allreduce, strict=False):
            yield f"allreduce {worker}", ring
        for worker, encoder in zip(self._exchange.workers, self.encoders, strict=False):
            yield f"encoder {worker}", encoder


def _vectors(gradients: Iterable[Gradient]) -> Iterator[Tensor]:
    for gradient in gradients:
        assert isinstance(gradient, Tensor), "a gradient that nobody encodes came encoded"
        yield gradient
