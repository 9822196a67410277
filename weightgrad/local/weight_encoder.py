"""Encodes the weights for the workers: few bits for most tensors, exact values for the sensitive ones.

The local server keeps full-precision master weights; the workers compute on what is encoded
here. Loss-aware codecs (Hou & Kwok) get the curvature D = sqrt(v) + 1e-8, with v the running
second moment of the decoded gradients. By default these tensors stay exact: vectors and scalars
(biases and norms, which are small and sensitive) and the first and the last matrix of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from weightgrad.codecs import Codec, Fp32, LossAware, Payload, State, decode
from weightgrad.core.layout import Layout, Slot
from weightgrad.core.strategies import Strategy
from weightgrad.core.vector_checks import require_flat, require_payloads
from weightgrad.errors import EncodeError, StrategyError
from weightgrad.kernels import derive


@dataclass(frozen=True)
class WeightEncoder:
    """How weights are encoded for the workers.

    Args:
        codec: Encodes the slots that are not exempt.
        exempt: Slots that are encoded by `exempt_codec` instead: "default" (see above), or patterns of names with * and
            ? as in file names.
        beta2: Decay of the second moment.
        exempt_codec: Encodes exempt slots.

    Raises:
        StrategyError: An argument is not what it should be.
    """

    codec: Codec
    exempt: Sequence[str] | str = "default"
    beta2: float = 0.999
    exempt_codec: Codec = field(default_factory=Fp32)

    def __post_init__(self) -> None:
        for name in ("codec", "exempt_codec"):
            value = getattr(self, name)
            if not isinstance(value, Codec):
                raise StrategyError(f"weight encoder: {name}={value!r} is no codec; make one with codecs.parse")
        if isinstance(self.exempt, str) and self.exempt != "default":
            raise StrategyError(f"weight encoder: exempt={self.exempt!r} must be 'default' or a list of names of slots")
        if not isinstance(self.exempt, str):
            object.__setattr__(self, "exempt", tuple(self.exempt))
        if not 0 <= self.beta2 < 1:
            raise StrategyError(f"weight encoder: beta2={self.beta2!r} must be at least 0 and below 1")

    @classmethod
    def of(cls, strategy: Strategy) -> WeightEncoder | None:
        """The encoder of a strategy; None where weights go to the workers as they are."""
        codec = strategy.codec("weights")
        if strategy.weights == "fp32" or codec is None:
            return None
        patterns = [pattern.strip() for pattern in strategy.exempt.split(",")]
        return cls(codec=codec, exempt="default" if strategy.exempt == "default" else patterns)

    @property
    def loss_aware(self) -> bool:
        """Whether the codec uses the curvature."""
        return isinstance(self.codec, LossAware)

    def exempt_slots(self, layout: Layout) -> frozenset[int]:
        """Places of the exempt slots.

        Raises:
            StrategyError: A pattern matches no slot.
        """
        if isinstance(self.exempt, str):
            large = [place for place, slot in enumerate(layout.slots) if len(slot.shape) >= 2]
            small = [place for place, slot in enumerate(layout.slots) if len(slot.shape) < 2]
            return frozenset(small + large[:1] + large[-1:])
        chosen = set()
        for pattern in self.exempt:
            found = {place for place, slot in enumerate(layout.slots) if fnmatchcase(slot.name, pattern)}
            if not found:
                names = ", ".join(slot.name for slot in layout.slots)
                raise StrategyError(f"weight encoder: exempt {pattern!r} is none of the slots {names}")
            chosen |= found
        return frozenset(chosen)

    def codecs(self, layout: Layout) -> list[Codec]:
        """The codec of each slot."""
        exempt = self.exempt_slots(layout)
        return [self.exempt_codec if place in exempt else self.codec for place in range(len(layout.slots))]

    def init(
        self, layout: Layout, device: torch.device | str = "cpu", *, served: Sequence[int] | None = None
    ) -> list[State]:
        """New codec states, one per slot, or one for each slot that is `served`."""
        codecs, places = self.codecs(layout), range(len(layout.slots)) if served is None else served
        return [
            codecs[place].init(torch.empty(layout.slots[place].shape, device=device, dtype=torch.float32))
            for place in places
        ]

    def encode(
        self,
        layout: Layout,
        weights: Tensor,
        curvature: Tensor | None,
        states: list[State],
        key: int,
        *,
        served: Sequence[int] | None = None,
    ) -> tuple[Payload, ...]:
        """Encode the weights, one payload per slot.

        Args:
            layout: Where the slots lie.
            weights: The flat weights; of the served slots alone, one after the other, if not all are served.
            curvature: D, flat; None is D = 1.
            states: The codec states, one for each payload; replaced in place.
            key: Parent of the keys of the slots.
            served: Places of the slots to encode; None takes all. A slot's bits do not depend on the others.

        Raises:
            EncodeError: A slot cannot be encoded; the message names it.
        """
        places = range(len(layout.slots)) if served is None else served
        own_layout, codecs = layout.of_slots(places), self.codecs(layout)
        require_flat(own_layout, weights, "flat weights")
        if curvature is not None:
            require_flat(own_layout, curvature, "flat curvature")
        payloads = []
        for index, (place, slot) in enumerate(zip(places, own_layout.slots, strict=True)):
            own, codec = derive(key, place), codecs[place]
            try:
                if isinstance(codec, LossAware) and curvature is not None:
                    payload, state = codec.encode(slot.of(weights), states[index], own, curvature=slot.of(curvature))
                else:
                    payload, state = codec.encode(slot.of(weights), states[index], own)
            except EncodeError as error:
                raise named(slot, error) from error
            states[index] = state
            payloads.append(payload)
        return tuple(payloads)


def decode_flat(layout: Layout, payloads: Sequence[Payload], out: Tensor | None = None) -> Tensor:
    """Decode one payload per slot into a flat vector: `out`, or a new one."""
    require_payloads(layout, payloads)
    if out is None:
        device = payloads[0].body.device if payloads else torch.device("cpu")
        out = torch.empty(layout.numel, dtype=torch.float32, device=device)
    require_flat(layout, out, "out")
    for payload, view in zip(payloads, layout.views(out), strict=True):
        decode(payload, out=view)
    return out


def named(slot: Slot, error: EncodeError) -> EncodeError:
    """The same error, with the name of the slot in its message."""
    return type(error)(f"{slot.name}: {error}")
