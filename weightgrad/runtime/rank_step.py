"""One rank's part of its site's step, around the user's own `optimizer.step()`.

    before()                 gradients are exchanged with the other ranks, where nobody else does that
    optimizer.step()         the user's own, in its own place
    after()                  the optimizer has stepped; rounds work on the weights as they are now
    for_passes()             weights for the next pass, where the strategy quantizes them

Who averages gradients inside a site: FSDP2, HSDP and tensor parallelism (DTensors) and DistributedDataParallel do it by
themselves; then nothing happens here. Otherwise this rank and the others exchange them, plain or quantized, bucket by
bucket. In an allreduce every rank gets the mean, in `.grad`. With a local server, a rank gets the mean of the tensors
that it serves (`local/serving.py`), and of no other.

A site that shares updates and has a local server keeps its master weights there: a rank has those of the tensors that
it serves, and its optimizer steps with these alone. `before` puts them into the parameters, the optimizer moves them,
and `for_passes` sends them to all ranks, encoded where the strategy says so, and puts what came from all ranks into the
parameters. Parameters that a rank does not serve have no gradient when its optimizer steps, so optimizers pass over
them, and keep no state for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weightgrad.codecs import Payload, decode
from weightgrad.core.layout import Layout
from weightgrad.core.random_streams import SiteStream
from weightgrad.core.strategies import Strategy
from weightgrad.core.substep import Substep
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.kernels import derive
from weightgrad.local.gradient_exchange import GradientExchange
from weightgrad.local.local_server import LocalServer
from weightgrad.local.weight_encoder import WeightEncoder
from weightgrad.runtime.module_weights import ModuleWeights, gradients_of
from weightgrad.runtime.payload_exchange import PayloadExchange
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.sharded_tensor import is_sharded
from weightgrad.wire.intervals import Intervals


class RankStep:
    """What happens to gradients and weights on one rank around an optimizer step.

    Args:
        weights: The parameters of this rank.
        optimizer: The user's optimizer.
        layout: Where the parameters lie in the index space.
        strategy: The strategy of the run.
        group: The ranks of the site.
        key: Parent of the site's random keys (`RunStream.LOCAL_STEP`).
        clip_norm: Largest norm of each tensor of a rank's gradient; None does not clip.
        averaged: Whether something else averages gradients over the ranks.
    """

    def __init__(
        self,
        weights: ModuleWeights,
        optimizer: Optimizer,
        layout: Layout,
        strategy: Strategy,
        group: SiteGroup,
        key: int,
        *,
        clip_norm: float | None = None,
        averaged: bool = False,
    ) -> None:
        self._averaged = averaged and group.size > 1
        self.not_applied = _not_applied(strategy, clip_norm) if self._averaged else []
        """The parts of the strategy that do not apply inside this site, since something else averages gradients."""
        self._strategy = strategy = strategy.averaged() if self._averaged else strategy.inside(group.size)
        self._weights, self._optimizer, self._layout = weights, optimizer, layout
        self.gradients = gradients_of(weights, layout)
        self.busy = False
        """Whether the optimizer steps because this object asked it to."""
        self._number = 0
        self._options: list[dict[str, Any]] | None = None  # the optimizer's own, while it takes a substep
        nothing = clip_norm is None and not strategy.correction
        self._exchange: GradientExchange | None = None
        if not self._averaged and not (group.size == 1 and nothing and strategy.combine == "mean"):
            self._exchange = GradientExchange(layout, strategy, PayloadExchange(group), key=key, clip_norm=clip_norm)
        self._master: _MasterWeights | None = None
        serves = self._exchange is not None and self._exchange.owners is not None
        if self._exchange is not None and strategy.shares == "updates" and (serves or strategy.combine == "serial"):
            self._master = _MasterWeights(weights, layout, strategy, derive(key, SiteStream.WEIGHTS), self._exchange)

    @property
    def releases_weights(self) -> bool:
        """Whether ranks get their weights from the local server; otherwise every rank has a replica of its own."""
        return self._master is not None

    def keeps(self, name: str) -> bool:
        """Whether this rank has the weights and the optimizer's state of a tensor that rounds and checkpoints use."""
        return self._master is None or name in self._master.names

    @property
    def exchanges(self) -> bool:
        """Whether `before` reads and writes gradients."""
        return self._exchange is not None

    @property
    def one_buffer(self) -> bool:
        """Whether the parameters lie in one buffer, as master weights and those for passes do."""
        return self._master is not None

    def release(self) -> None:
        """Training is over: give the parameters memory of their own, as they had before."""
        for parameter in (one.parameter for one in self._weights.parameters if self._master is not None):
            parameter.data = parameter.data.clone()

    def before(self, number: int) -> None:
        """Exchange the gradients that backward left, before the optimizer steps with them.

        Args:
            number: The number of the step, from which keys are derived.
        """
        if self._master is not None:
            for left, substep in self._master.substeps(number, self.gradients):
                if left:
                    self._step_now(substep)
                else:
                    self._options = substep.change(self._optimizer)  # the user's own step is the last one
        elif self._exchange is not None:
            # A plain mean stays on the device (NCCL); codecs and the order of the sum on the CPU need the host.
            device = self._weights.device if self._exchange.plain_mean else torch.device("cpu")
            room = torch.empty(max(bucket.stop - bucket.start for bucket in self._exchange.buckets), device=device)
            for place, bucket in enumerate(self._exchange.buckets):
                own = read_gradient(self.gradients, bucket.intervals, room)
                write_gradient(self.gradients, *self._exchange.mean(place, own, number))

    def after(self) -> None:
        """The optimizer has stepped. The parameters are the weights that rounds work on, until `for_passes`."""
        if self._options is not None:
            Substep.restore(self._optimizer, self._options)
            self._options = None
        if self._master is not None:
            self._master.moved()

    def _step_now(self, substep: Substep) -> None:
        assert self._master is not None
        self.busy = True
        try:
            with substep.within(self._optimizer):
                self._optimizer.step()
        finally:
            self.busy = False
        self._master.moved()

    # -- weights ---------------------------------------------------------------------------------

    def for_rounds(self) -> None:
        """Put the weights that rounds work on into the parameters."""
        if self._master is not None:
            self._master.show_master()

    def for_passes(self, *, release: bool = True) -> None:
        """Put the weights that the module computes on into the parameters.

        Args:
            release: Whether the weights have changed and are encoded anew.
        """
        if self._master is not None:
            self._master.release() if release else self._master.show()

    def resume_passes(self) -> None:
        """After a restart: put the weights that the module computed on before back into the parameters."""
        if self._master is not None:
            self._master.send_again()

    def quantized(self, key: int) -> tuple[Payload, ...] | None:
        """The weights that rounds work on, as workers would receive them; None unless the strategy is judged by those.

        Args:
            key: Parent of the keys of the tensors.
        """
        if self._master is None or self._strategy.evaluate != "quantized":
            return None
        return self._master.quantized(key)

    def state(self) -> dict[str, Tensor]:
        """Copies of what this rank remembers beside the parameters and their optimizer."""
        found = with_prefix("gradients.", self._exchange.state()) if self._exchange is not None else {}
        return found | (with_prefix("master.", self._master.state()) if self._master is not None else {})

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        if self._exchange is not None:
            self._exchange.load(without_prefix("gradients.", saved))
        if self._master is not None:
            self._master.load(without_prefix("master.", saved))


class _MasterWeights:
    """The master weights of the tensors that a rank serves, beside those that the module computes on.

    Memory, in models: the working weights; and of the tensors that are served, the master weights, a gradient, and
    what `LocalServer` keeps.
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
        self._working = torch.empty(layout.numel)
        self._working.copy_(weights.read(Intervals.whole(layout.numel), torch.empty(layout.numel)))
        own = layout.of_slots(self._served)
        self._flat = torch.empty(own.numel)
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
        room = torch.empty(max((bucket.stop - bucket.start for bucket in exchange.buckets), default=0))
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


def averages_gradients(module: nn.Module) -> bool:
    """Whether something else than this package averages the gradients of a module over the ranks of a site."""
    if any(is_sharded(parameter) for parameter in module.parameters()):
        return True
    return any(type(one).__name__ == "DistributedDataParallel" for one in module.modules())


def read_gradient(gradients: ModuleWeights, intervals: Intervals, out: Tensor) -> Tensor:
    """Copy gradients into memory of the caller; -0 becomes +0, as if gradients had been added to zeros."""
    found = gradients.read(intervals, out)
    return torch.add(found, 0.0, out=out[: intervals.numel])


@torch.no_grad()
def write_gradient(gradients: ModuleWeights, intervals: Intervals, values: Tensor) -> None:
    """Replace gradients; a parameter without one gets one."""
    for one in gradients.parameters:
        if one.parameter.grad is None:
            one.parameter.grad = torch.zeros_like(one.parameter)
    gradients.write(intervals, values)


def _not_applied(strategy: Strategy, clip_norm: float | None) -> list[str]:
    inside = {
        "quantized gradients": strategy.gradients != "fp32",
        "quantized weights": strategy.weights != "fp32",
        "serial workers": strategy.combine == "serial",
        "momentum correction": strategy.correction > 0,
        "clip_norm": clip_norm is not None,
    }
    return [what for what, wanted in inside.items() if wanted]
