"""The local server of a site: gradients in, one optimizer step, weights out.

The master weights are one flat vector that belongs to the caller and is moved in place. After
a step, and after the caller has moved them by the result of a round, `released()` encodes them
for the workers; `working_weights()` is what the workers then compute on. Where the work of the
local server is divided, each has some of the tensors (`served`), and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weightgrad.codecs import Payload, decode, decode_add
from weightgrad.core.layout import Layout
from weightgrad.core.optimizers.substep import MATCHED, Substep
from weightgrad.core.optimizers.weight_updater import FlatWeightUpdater, WeightUpdater
from weightgrad.core.vector_checks import require_flat, require_payloads, restored
from weightgrad.errors import ProtocolError, StateError, StrategyError
from weightgrad.kernels import derive
from weightgrad.local.parameter_average import ParameterAverage
from weightgrad.local.weight_encoder import WeightEncoder, decode_flat

_EPS = 1e-8  # Adam's


class Combiner:
    """The mean of any number of gradients in the memory of one: that of `room`, or its own."""

    def __init__(self, layout: Layout, device: torch.device | str = "cpu", *, room: Tensor | None = None) -> None:
        self._layout = layout
        self._device = device
        self._room = room
        self._count = 0
        self._spoiled = False

    @property
    def _sum(self) -> Tensor:
        if self._room is None:
            self._room = torch.zeros(self._layout.numel, dtype=torch.float32, device=self._device)
        return self._room

    @property
    def count(self) -> int:
        """Gradients added since the last mean."""
        return self._count

    def add(self, payloads: Sequence[Payload]) -> None:
        """Add an encoded gradient. After a DecodeError the sum is unusable until `reset`."""
        require_payloads(self._layout, payloads)
        self._spoiled = True
        for payload, view in zip(payloads, self._layout.views(self._sum), strict=True):
            if self._count:
                decode_add(payload, view)
            else:  # not 0 + x, which would make +0 of -0
                decode(payload, out=view)
        self._spoiled = False
        self._count += 1

    def add_plain(self, gradient: Tensor) -> None:
        """Add a gradient that is not encoded."""
        require_flat(self._layout, gradient, "flat gradient")
        if self._count:
            self._sum.add_(gradient)
        else:
            self._sum.copy_(gradient)
        self._count += 1

    def add_all(self, gradients: Iterable[Sequence[Payload] | Tensor]) -> None:
        """Add gradients, encoded or as they are, one at a time and in their order."""
        for gradient in gradients:
            if isinstance(gradient, Tensor):
                self.add_plain(gradient)
            else:
                self.add(gradient)

    def mean(self, out: Tensor | None = None) -> Tensor:
        """The sum, in the order of the calls, divided by their number. Then the next mean begins.

        Raises:
            ProtocolError: No gradient was added, or one could not be decoded.
        """
        if self._spoiled:
            raise ProtocolError("a gradient could not be decoded and is half added; reset() and add the others again")
        if not self._count:
            raise ProtocolError("there is no mean of no gradients; add one first")
        count, self._count = self._count, 0
        if out is None:
            out = torch.empty_like(self._sum)
        if count > 1:
            return torch.div(self._sum, count, out=out)
        return out if out is self._sum else out.copy_(self._sum)

    def reset(self) -> None:
        """Forget all gradients that were added."""
        self._count, self._spoiled = 0, False


class LocalServer:
    """Master weights, optimizer, curvature, and the weights that are released to the workers.

    Args:
        layout: The slots of the model.
        weights: The master weights of what is served, one slot after the other; moved in place.
        optimizer: A name with options, or anything else that can move the weights by a gradient.
        combine: "mean" takes one optimizer step with the mean gradient, "serial" one step for each gradient, in order.
        weight_encoder: How weights are encoded for the workers; None: they go as they are.
        ema: Decay of the moving average of the master weights; None for no average.
        serial_scale: Factor of the learning rate of a serial step; None is 1/n for n gradients, so that plain SGD
            moves as far as with the mean; "matched" changes momentum, betas and learning rate so that the n steps are
            one mean step (`core/optimizers/substep.py`).
        key: Parent of the keys of weight codecs that round at random.
        served: Places of the slots that this server has; None: all. All vectors are of these slots alone.

    Raises:
        StrategyError: An argument is out of range.
    """

    def __init__(
        self,
        layout: Layout,
        weights: Tensor,
        optimizer: tuple[str, Mapping[str, Any]] | WeightUpdater,
        *,
        combine: str = "mean",
        weight_encoder: WeightEncoder | None = None,
        ema: float | None = None,
        serial_scale: float | str | None = None,
        key: int = 0,
        served: Sequence[int] | None = None,
    ) -> None:
        if combine not in ("mean", "serial"):
            raise StrategyError(f"combine={combine!r}; choose 'mean' or 'serial'")
        good = serial_scale in (None, MATCHED) or (isinstance(serial_scale, (int, float)) and serial_scale > 0)
        if not good or (serial_scale is not None and combine != "serial"):
            raise StrategyError(
                f"serial_scale={serial_scale!r} must be above 0 or {MATCHED!r}, and is for combine='serial' only"
            )
        self._whole = layout
        self._served = tuple(range(len(layout.slots)) if served is None else served)
        self._layout = layout = layout.of_slots(self._served)
        self._weights = weights
        self._combine = combine
        self._serial_scale = serial_scale
        self._key = key
        self._gradient = torch.zeros_like(weights)
        if isinstance(optimizer, tuple):
            optimizer = FlatWeightUpdater(layout, weights, self._gradient, *optimizer)
        self._updater = optimizer
        self._combiner = Combiner(layout, weights.device, room=self._gradient if combine == "mean" else None)
        self._average = None if ema is None else ParameterAverage(weights, ema)
        self._out = weight_encoder
        self._states = (
            [] if weight_encoder is None else weight_encoder.init(self._whole, weights.device, served=self._served)
        )
        loss_aware = weight_encoder is not None and weight_encoder.loss_aware
        self._moment = torch.zeros_like(weights) if loss_aware else None
        self._moments = 0  # how many gradients the second moment has seen
        self._releases = 0
        self._working = weights if weight_encoder is None else torch.zeros_like(weights)
        self._undecoded: tuple[Payload, ...] | None = None
        self._fresh = False  # whether there was a release since the last step

    def step(self, gradients: Iterable[Sequence[Payload] | Tensor], lr: float | None) -> Tensor:
        """Move the master weights by the workers' gradients.

        Args:
            gradients: Encoded or not. They are taken one at a time and in order (unless "serial" must know their
                number), so memory does not grow with the workers.
            lr: The learning rate; None leaves it to the optimizer.

        Returns:
            The mean gradient, flat. It is the server's own tensor and is overwritten by the next step.

        Raises:
            DecodeError: A payload cannot be decoded. A mean step has not happened; a serial one has happened for the
                gradients before it.
        """
        for substep in self.substeps(gradients):
            self._updater.move(self._gradient, lr, substep)
            self.moved()
        return self.mean_gradient()

    def substeps(self, gradients: Iterable[Sequence[Payload] | Tensor]) -> Iterator[Substep]:
        """The optimizer steps that the workers' gradients make: one, or one for each with "serial".

        For each of them `gradient` has been filled, and the caller steps with it and calls `moved`.

        Yields:
            How the options of the optimizer change for it.
        """
        self._combiner.reset()
        if self._combine != "serial":
            self._combiner.add_all(gradients)
            self._combiner.mean(out=self._gradient)
            yield Substep()
            return
        count = 1
        if self._serial_scale is None or self._serial_scale == MATCHED:
            gradients = list(gradients)
            count = len(gradients)
        substep = Substep.of(self._serial_scale, count)
        for gradient in gradients:
            if isinstance(gradient, Tensor):
                require_flat(self._layout, gradient, "flat gradient")
                self._gradient.copy_(gradient)
            else:
                decode_flat(self._layout, gradient, self._gradient)
            self._combiner.add_plain(self._gradient)
            yield substep

    @property
    def gradient(self) -> Tensor:
        """The flat gradient of the present substep."""
        return self._gradient

    def moved(self) -> None:
        """The optimizer has stepped with `gradient`."""
        self._fresh = False
        if self._moment is not None and self._out is not None:
            beta2 = self._out.beta2
            self._moment.mul_(beta2).addcmul_(self._gradient, self._gradient, value=1 - beta2)
            self._moments += 1

    def mean_gradient(self) -> Tensor:
        """After the last substep: the mean gradient, in the memory of `gradient`."""
        if self._combine == "serial":
            self._combiner.mean(out=self._gradient)
        if self._average is not None:
            self._average.update(self._weights)
        return self._gradient

    def master(self) -> Tensor:
        """The full-precision weights: the caller's own vector."""
        return self._weights

    @property
    def layout(self) -> Layout:
        """The slots that are served, one after the other."""
        return self._layout

    @property
    def weight_encoder(self) -> WeightEncoder | None:
        """How weights are encoded for the workers; None: they go as they are."""
        return self._out

    def average(self) -> Tensor | None:
        """The moving average of the master weights, if there is one."""
        return None if self._average is None else self._average.value()

    def curvature(self) -> Tensor | None:
        """The curvature D = sqrt(v) + 1e-8; None means that every D is 1.

        v is the running second moment of the decoded gradients that the optimizer stepped with, corrected for its
        start at zero. There is none before the first step, nor for codecs that do not use it.
        """
        if self._moment is None or self._out is None or not self._moments:
            return None
        correction = 1 - self._out.beta2**self._moments
        return torch.div(self._moment, correction).sqrt_().add_(_EPS)

    def released(self) -> tuple[Payload, ...] | None:
        """Encode the master weights as they are now for the workers; None if they go as they are.

        Every call is a new release: it draws new noise and advances the codec's error feedback.
        """
        if self._out is None:
            return None
        key = derive(self._key, self._releases)
        curvature = self.curvature()
        payloads = self._out.encode(self._whole, self._weights, curvature, self._states, key, served=self._served)
        self._releases += 1
        self._undecoded, self._fresh = payloads, True
        return payloads

    def working_weights(self) -> Tensor:
        """The flat weights that the workers compute on: the last release, decoded, or the master weights.

        If there was no release since the last step, this makes one. The tensor must not be written to; the next
        release overwrites it.
        """
        if self._out is None:
            return self._weights
        if not self._fresh:
            self.released()
        if self._undecoded is not None:
            decode_flat(self._layout, self._undecoded, self._working)
            self._undecoded = None
        return self._working

    def state(self) -> dict[str, Tensor]:
        """Copies of all that it remembers, except for the master weights, which are the caller's."""
        found = {f"optimizer/{name}": tensor for name, tensor in self._updater.state().items()}
        if self._fresh:
            found["working"] = self.working_weights().clone()
        return found | {name: tensor.clone() for name, tensor in self._present().items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave; the caller puts back the master weights."""
        own = {name: tensor for name, tensor in saved.items() if not name.startswith("optimizer/")}
        working = own.pop("working", None)
        if working is not None and self._out is None:
            raise StateError("LocalServer: a saved state of a server with quantized weights; this one sends them whole")
        present = self._present() | ({} if working is None else {"working": self._working})
        good = restored("LocalServer", present, own | ({} if working is None else {"working": working}))
        optimizer = {k.removeprefix("optimizer/"): v for k, v in saved.items() if k.startswith("optimizer/")}
        self._updater.load(optimizer)
        self._moments, self._releases = (int(one) for one in good["counts"])
        if self._moment is not None:
            self._moment = good["moment"]
        if self._average is not None:
            self._average.load({name: good[f"average/{name}"] for name in ("value", "updates")})
        for slot, state in zip(self._layout.slots, self._states, strict=False):
            state |= {name: good[f"{slot.name}/{name}"] for name in state}
        if working is not None:
            self._working = good["working"]
        self._undecoded, self._fresh = None, working is not None

    def _present(self) -> dict[str, Tensor]:
        found = {"counts": torch.tensor([self._moments, self._releases], dtype=torch.int64)}
        if self._moment is not None:
            found["moment"] = self._moment
        if self._average is not None:
            found |= {f"average/{name}": tensor for name, tensor in self._average.state().items()}
        for slot, state in zip(self._layout.slots, self._states, strict=False):
            found |= {f"{slot.name}/{name}": tensor for name, tensor in state.items()}
        return found
