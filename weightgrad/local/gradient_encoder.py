"""A worker encodes its flat gradient: one payload per slot.

In this order: each tensor is clipped to an L2 norm of at most `clip_norm`; momentum correction
u = momentum*u + g replaces the gradient (Deep Gradient Compression: the momentum must be
inside what is compressed, so the local server's optimizer then has none); the codec encodes
each slot, with the state that it keeps for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weightgrad.codecs import Codec, Dgc, Payload
from weightgrad.codecs.codec import require_finite
from weightgrad.core.layout import Layout
from weightgrad.core.vector_checks import require_flat, restored
from weightgrad.errors import EncodeError, NonFiniteError, StrategyError
from weightgrad.kernels import derive
from weightgrad.local.weight_encoder import named


class GradientEncoder:
    """Encodes the gradients of one worker.

    Args:
        layout: Where the slots lie in the flat gradient.
        codec: Encodes a slot.
        key: Parent of this worker's random keys; it must differ from worker to worker, or their noise is the same.
        clip_norm: Largest norm of each slot; None does not clip.
        momentum: Decay of the momentum correction; 0 for none.
        device: Where gradients live.

    Raises:
        StrategyError: An argument is out of range, or codec and worker would both correct the momentum.
    """

    def __init__(
        self,
        layout: Layout,
        codec: Codec,
        key: int,
        *,
        clip_norm: float | None = None,
        momentum: float = 0.0,
        device: torch.device | str = "cpu",
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise StrategyError(f"clip_norm={clip_norm!r} must be above 0, or None for no clipping")
        if not 0 <= momentum < 1:
            raise StrategyError(f"momentum={momentum!r} must be at least 0 and below 1")
        if momentum and isinstance(codec, Dgc) and codec.momentum:
            raise StrategyError(f"{codec} has its own momentum correction; leave the worker's momentum at 0")
        self._layout = layout
        self._codec = codec
        self._key = key
        self._clip_norm = clip_norm
        self._momentum = momentum
        self._states = [
            codec.init(torch.empty(slot.shape, device=device, dtype=torch.float32)) for slot in layout.slots
        ]
        self._velocity = torch.zeros(layout.numel, dtype=torch.float32, device=device) if momentum else None

    def encode(self, gradient: Tensor, step: int) -> tuple[Payload, ...]:
        """Encode a gradient, one payload per slot. The gradient is not changed.

        Args:
            gradient: The flat gradient.
            step: The number of the step, from which the keys are derived.

        Raises:
            NonFiniteError: There is a NaN or an Inf. Nothing has changed, and the step may be skipped.
            EncodeError: A slot cannot be encoded. The error feedback of the slots before it counts them as sent: go
                back to the last checkpoint.
        """
        require_flat(self._layout, gradient, "flat gradient")
        for place, slot in enumerate(self._layout.slots):
            self._require_finite(place, slot.of(gradient))
        return tuple(self._encode(place, slot.of(gradient), step) for place, slot in enumerate(self._layout.slots))

    def encode_slot(self, place: int, own: Tensor, step: int) -> Payload:
        """Encode one slot.

        Args:
            place: Which of the slots.
            own: Its gradient, in its shape.
            step: The number of the step, from which the key is derived.

        Raises:
            NonFiniteError: There is a NaN or an Inf. This slot has not changed; those encoded before count as sent: go
                back to the last checkpoint.
            EncodeError: It cannot be encoded.
        """
        self._require_finite(place, own)
        return self._encode(place, own, step)

    def _encode(self, place: int, own: Tensor, step: int) -> Payload:
        corrected = self._correct(place, own)
        key = derive(self._key, step, place)
        try:
            payload, self._states[place] = self._codec.encode(corrected, self._states[place], key)
        except EncodeError as error:
            raise named(self._layout.slots[place], error) from error
        return payload

    def _correct(self, place: int, own: Tensor) -> Tensor:
        slot = self._layout.slots[place]
        factor = 1.0
        if self._clip_norm is not None:
            norm = float(torch.linalg.vector_norm(own))
            factor = self._clip_norm / norm if norm > self._clip_norm else 1.0
        if self._velocity is not None:
            return slot.of(self._velocity).mul_(self._momentum).add_(own, alpha=factor)
        return own if factor == 1.0 else own * factor

    def _require_finite(self, place: int, own: Tensor) -> None:
        try:
            require_finite(own.reshape(-1))
        except NonFiniteError as error:
            raise named(self._layout.slots[place], error) from None

    def state(self) -> dict[str, Tensor]:
        """Copies of all that it remembers: `velocity`, and `<slot>/<name>` of the codec's states."""
        return {name: tensor.clone() for name, tensor in self._present().items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        good = restored(f"GradientEncoder({self._codec})", self._present(), saved)
        if self._velocity is not None:
            self._velocity = good["velocity"]
        for place, slot in enumerate(self._layout.slots):
            self._states[place] = {name: good[f"{slot.name}/{name}"] for name in self._states[place]}

    def _present(self) -> dict[str, Tensor]:
        found = {} if self._velocity is None else {"velocity": self._velocity}
        for slot, state in zip(self._layout.slots, self._states, strict=True):
            found |= {f"{slot.name}/{name}": tensor for name, tensor in state.items()}
        return found
