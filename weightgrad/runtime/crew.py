"""What the workers of a site do with their gradients: exchange them, and move one and the same model.

Every rank is a replica: it gets the same gradients in the same order and takes the same optimizer step, so
nothing but gradients crosses the LAN; quantized weights are computed on each rank from the same master. It
is the arithmetic of the simulator's site, step for step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from weightgrad import wire
from weightgrad.codecs import Fp32, Payload
from weightgrad.kernels.noise import derive
from weightgrad.runtime.bridge import Bridge, UserMover
from weightgrad.runtime.encoded_ahead import EncodedAhead
from weightgrad.runtime.lan import Lan
from weightgrad.site.allreduce import QuantizedAllreduce
from weightgrad.site.local_server import Combiner, LocalServer
from weightgrad.site.worker import GradientEncoder
from weightgrad.wan.strategies import Strategy

Gradients = list[tuple[Payload, ...] | Tensor]


class Crew:
    """One rank's part. `weights` is the master vector, the same on every rank."""

    def __init__(
        self,
        bridge: Bridge,
        optimizer: torch.optim.Optimizer,
        weights: Tensor,
        strategy: Strategy,
        lan: Lan,
        key: int,
        clip_norm: float | None = None,
    ) -> None:
        strategy = strategy.inside(lan.size)
        self._bridge, self._lan, self._strategy, self._weights = bridge, lan, strategy, weights
        self.mover = UserMover(bridge, optimizer, weights)
        self._gradient = torch.zeros_like(weights)
        self.local: LocalServer | None = None
        self._ring: QuantizedAllreduce | None = None
        self._encoder: GradientEncoder | None = None
        self.ahead: EncodedAhead | None = None
        layout, codec = bridge.layout, strategy.wan_codec("gradients")
        self._combiner = Combiner(layout)
        as_it_is = lan.size == 1 and clip_norm is None and not strategy.correction and strategy.combine == "mean"
        self._direct = bridge.partitioned or as_it_is  # nothing happens to a gradient between backward and its use
        if self._direct:
            return
        if strategy.shares == "updates":
            self.local = LocalServer(
                layout,
                weights,
                self.mover,
                combine=strategy.combine,
                weights_out=strategy.weights_out,
                serial_scale=strategy.serial_scale,
                key=derive(key, 1),
            )
        coded = not isinstance(codec, Fp32)
        if coded and strategy.exchange == "allreduce" and lan.size > 1:
            self._ring = QuantizedAllreduce(lan.size, layout.numel, codec, derive(key, 3, lan.rank))
        elif coded or clip_norm is not None or strategy.correction:
            own = derive(key, 2, lan.rank)
            self._encoder = GradientEncoder(layout, codec, own, clip_norm=clip_norm, momentum=strategy.correction)
        pieces = self._ring or self._encoder
        if pieces is not None and pieces.pure and bridge.plain and lan.idle_core:
            self.ahead = EncodedAhead(bridge.parameters, layout, pieces, self._gradient)

    @property
    def inside(self) -> str | None:
        """What of the row does not apply inside this site, and why."""
        row = self._strategy
        if self._bridge.partitioned and (row.gradients != "fp32" or row.weights != "fp32" or row.combine == "serial"):
            return (
                f"the model is partitioned inside the site, which exchanges its own gradients: gradients = "
                f"{row.gradients}, weights = {row.weights} and combine = {row.combine} apply to no one here"
            )
        return None

    def step(self, number: int) -> Tensor | None:
        """The gradients that backward left move the weights; or, if gradients are shared, here is their mean."""
        if self._direct:
            return self._directly()
        found = self._exchange(number)
        if self.local is not None:
            self.local.step(found, None)
            return None
        for gradient in found:
            if isinstance(gradient, Tensor):
                self._combiner.add_plain(gradient)
            else:
                self._combiner.add(gradient)
        return self._combiner.mean()

    def _directly(self) -> Tensor | None:
        if self._strategy.shares == "gradients":
            self._bridge.read_gradient(self._gradient)
            return self._gradient
        self.mover.move(None, None, 1.0)
        return None

    def _exchange(self, number: int) -> Gradients:
        if self._ring is not None:
            return [self._by_ring(self._ring, number)]
        if self._encoder is not None:
            blob = join(self._encoded(self._encoder.encode, number))
            return [part(one) for one in self._lan.exchange(blob)]
        self._bridge.read_gradient(self._gradient)
        if self._strategy.combine == "serial":
            blobs = self._lan.exchange(self._gradient.view(torch.uint8))
            return [blob.clone().view(torch.float32) for blob in blobs]
        return [self._lan.mean(self._gradient)]

    def _encoded(self, encode: Callable[[Tensor, int], Sequence[Payload]], number: int) -> Sequence[Payload]:
        found = self.ahead.take(number) if self.ahead is not None else None
        if found is not None:
            return found
        self._bridge.read_gradient(self._gradient)
        return encode(self._gradient, number)

    def _by_ring(self, ring: QuantizedAllreduce, number: int) -> Tensor:
        mine = [join([payload]) for payload in self._encoded(ring.encode_chunks, number)]
        chunks = [part(one)[0] for one in self._lan.deal(mine)]
        reduced = self._lan.exchange(join([ring.reduce(chunks, number)]))
        return ring.gather([part(one)[0] for one in reduced])

    def show(self, *, again: bool = False) -> None:
        """Let the module compute on the weights as they are now, quantized if the row says so.

        `again`: after a restart, on what was released before it.
        """
        if self.local is not None and self._strategy.weights_out is not None:
            if not again:
                self.local.released()
            self._bridge.write_weights(self.local.working_weights())
        else:
            self._bridge.write_weights(self._weights)

    def close(self) -> None:
        """There will be no more steps."""
        if self.ahead is not None:
            self.ahead.close()

    def state(self) -> dict[str, Tensor]:
        """What this rank remembers beside the weights."""
        found: dict[str, Tensor] = {}
        if self.local is not None:
            found |= {f"local.{name}": tensor for name, tensor in self.local.state().items()}
        elif self._strategy.shares == "updates":
            found |= {f"mover.{name}": tensor for name, tensor in self.mover.state().items()}
        for prefix, owner in (("ring", self._ring), ("encoder", self._encoder)):
            if owner is not None:
                found |= {f"{prefix}.{name}": tensor for name, tensor in owner.state().items()}
        return found

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""

        def own(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)}

        if self.local is not None:
            self.local.load(own("local."))
        elif self._strategy.shares == "updates":
            self.mover.load(own("mover."))
        if self._ring is not None:
            self._ring.load(own("ring."))
        if self._encoder is not None:
            self._encoder.load(own("encoder."))


def join(payloads: Iterable[Payload]) -> Tensor:
    """Their frames, one after the other."""
    data = bytearray().join(buffer for payload in payloads for buffer in wire.to_buffers(payload))
    return torch.frombuffer(data, dtype=torch.uint8)


def part(blob: Tensor) -> tuple[Payload, ...]:
    """The payloads that `join` put together."""
    return tuple(wire.frames(blob.numpy().data))
