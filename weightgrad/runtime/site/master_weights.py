"""The master weights of a site that shares updates and has a local server, on the ranks that serve them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from weightgrad.codecs import Payload, decode
from weightgrad.core.layout import Layout
from weightgrad.core.optimizers.substep import Substep
from weightgrad.core.strategies import Strategy
from weightgrad.local.gradient_exchange import GradientExchange
from weightgrad.local.local_server import LocalServer
from weightgrad.local.weight_encoder import WeightEncoder
from weightgrad.runtime.model.module_gradients import read_gradient
from weightgrad.runtime.model.module_weights import ModuleWeights
from weightgrad.runtime.payload_exchange import PayloadExchange
from weightgrad.wire.intervals import Intervals


class MasterWeights:
    """The master weights of the tensors that a rank serves, beside those that the module computes on.

    Memory, in models: the working weights; and of the tensors that are served, the master weights, a gradient, and
    what `LocalServer` keeps.

    Args:
        weights: The parameters of this rank.
        layout: Where they lie in the index space.
        strategy: The strategy of the run, inside the site.
        key: Parent of the keys with which weights are encoded.
        exchange: How gradients come to the ranks that serve them.
    """

    def __init__(
        self, weights: ModuleWeights, layout: Layout, strategy: Strategy, key: int, exchange: GradientExchange
    ) -> None:
        self._layout, self._exchange, self._strategy = layout, exchange, strategy
        self._served = exchange.served_slots()
        self.names = frozenset(layout.slots[place].name for place in self._served)
        """The tensors that are served here."""
        self._by_rank = [
            [place for place, owner in enumerate(exchange.owners or ()) if owner == rank]
            for rank in range(exchange.exchange.size)
        ]
        if exchange.owners is None:
            self._by_rank = [list(range(len(layout.slots)))]
        self._parameters = [one.parameter for one in weights.parameters]
        self._working = torch.empty(layout.numel, dtype=torch.float32)
        self._working.copy_(weights.read(Intervals.whole(layout.numel), torch.empty(layout.numel, dtype=torch.float32)))
        own = layout.of_slots(self._served)
        self._flat = torch.empty(own.numel, dtype=torch.float32)
        for place, view in zip(self._served, own.views(self._flat), strict=True):
            view.copy_(layout.slots[place].of(self._working))
        self._server = LocalServer(
            layout,
            self._flat,
            _NoOptimizer(),
            combine=strategy.combine,
            weight_encoder=WeightEncoder.of(strategy),
            serial_scale=strategy.serial_scale,
            key=key,
            served=self._served,
        )
        self.show()
        self.show_master()

    def show_master(self) -> None:
        """Let the parameters that are served here be the master weights."""
        for place, view in zip(self._served, self._server.layout.views(self._flat), strict=True):
            _let_be(self._parameters[place], view)

    def show(self) -> None:
        """Let the parameters be the weights that workers compute on."""
        for slot, parameter in zip(self._layout.slots, self._parameters, strict=True):
            _let_be(parameter, slot.of(self._working))

    def release(self) -> None:
        """Send the weights to all ranks, and compute on what came from all ranks; called on every rank."""
        self._take_back()  # a round may have moved them
        payloads = self._server.released()
        if payloads is None:
            self.send_again()
            return
        for places, received in zip(self._by_rank, self._ranks.payloads_to_all(payloads), strict=True):
            for place, payload in zip(places, received, strict=True):
                decode(payload, out=self._layout.slots[place].of(self._working))
        self.show()

    def send_again(self) -> None:
        """Send the weights that the last release decodes to, as they are; called on every rank."""
        sent = self._ranks.vectors_to_all(self._server.working_weights())
        for places, vector in zip(self._by_rank, sent, strict=True):
            views = self._layout.of_slots(places).views(vector)
            for place, view in zip(places, views, strict=True):
                self._layout.slots[place].of(self._working).copy_(view)
        self.show()

    @property
    def _ranks(self) -> PayloadExchange:
        assert isinstance(self._exchange.exchange, PayloadExchange)
        return self._exchange.exchange

    def substeps(self, number: int, gradients: ModuleWeights) -> Iterator[tuple[int, Substep]]:
        """The optimizer steps of this step; for each, what is served has its master weights and its gradient.

        Yields:
            How many follow it, and how the options of the optimizer change for it.
        """
        left = self._exchange.exchange.size if self._strategy.combine == "serial" else 1
        for substep in self._server.substeps(self._gathered(number, gradients)):
            left -= 1
            self.show_master()
            self._put_gradient()
            yield left, substep

    def _put_gradient(self) -> None:
        """Give the served parameters the gradient of this substep, and the others none."""
        views = dict(zip(self._served, self._server.layout.views(self._server.gradient), strict=True))
        for place, parameter in enumerate(self._parameters):
            if place not in views:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = views[place].to(parameter, copy=True)
            else:
                parameter.grad.copy_(views[place])

    def _gathered(self, number: int, gradients: ModuleWeights) -> list[Tensor] | list[list[Payload]]:
        """From every rank, its gradient of the tensors that are served here."""
        exchange = self._exchange
        room = torch.empty(
            max((bucket.stop - bucket.start for bucket in exchange.buckets), default=0), dtype=torch.float32
        )
        payloads: list[list[Payload]] = [[] for _ in range(exchange.exchange.size)]
        vectors: list[list[Tensor]] = [[] for _ in payloads]
        for place, bucket in enumerate(exchange.buckets):
            own = read_gradient(gradients, bucket.intervals, room)
            if exchange.encodes:
                received = exchange.gather(place, [exchange.encode(0, place, own, number)], number)
                assert not isinstance(received, Tensor)  # there is a local server, and so no allreduce
                for found, more in zip(payloads, received, strict=True):
                    found += more
            else:
                corrected = exchange.correct(0, place, own, number)
                for one, vector in zip(vectors, exchange.gather_vectors(place, [corrected]), strict=True):
                    one.append(vector.clone())
        return payloads if exchange.encodes else [torch.cat(parts) for parts in vectors]

    def moved(self) -> None:
        """The optimizer has stepped."""
        self._take_back()
        self._server.moved()

    def _take_back(self) -> None:
        """Bring the master weights from parameters on a device, where they are copies and not the same memory."""
        for place, view in zip(self._served, self._server.layout.views(self._flat), strict=True):
            if self._parameters[place].device != view.device:
                view.copy_(self._parameters[place].detach())

    def quantized(self, key: int) -> tuple[Payload, ...] | None:
        """The master weights of all ranks, encoded by the curvature that this site has seen; called on every rank."""
        if (encoder := self._server.weight_encoder) is None:
            return None
        self._take_back()
        states = encoder.init(self._layout, served=self._served)
        curvature = self._server.curvature()
        own = encoder.encode(self._layout, self._flat, curvature, states, key, served=self._served)
        found: dict[int, Payload] = {}
        for places, received in zip(self._by_rank, self._ranks.payloads_to_all(own), strict=True):
            found.update(zip(places, received, strict=True))
        return tuple(found[place] for place in range(len(self._layout.slots)))

    def state(self) -> dict[str, Tensor]:
        """Copies of what is remembered beside the master weights, which a checkpoint has as parameters."""
        return self._server.state()

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        self._server.load(saved)


def _let_be(parameter: nn.Parameter, view: Tensor) -> None:
    """Let a parameter have these values: in this memory, or as a copy if it is on a device."""
    if parameter.device != view.device:
        parameter.detach().copy_(view)
    elif parameter.data_ptr() != view.data_ptr():
        parameter.data = view


class _NoOptimizer:
    """Stands for the user's optimizer, which steps by itself and has its own state."""

    def move(self, gradient: Tensor, lr: float | None, substep: Substep) -> None:
        """Never called: `LocalServer.substeps` leaves the steps to the user's optimizer."""
        raise AssertionError((gradient, lr, substep))

    def state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing."""
        del tensors
