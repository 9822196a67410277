"""Pending: what was made here and has not left yet, and how part of it leaves.

Invariant, tested everywhere: what left + what is held = what was put in. A lossy codec's loss stays
held, unless the row says `keep_loss=False`, which only unbiased published systems ask for: then the
codec's noise is forgotten, as they do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weightgrad.codecs import Codec, ErrorFeedback, Fp32, State, pack_entries
from weightgrad.kernels import fixed
from weightgrad.kernels.noise import derive
from weightgrad.site.layout import Layout
from weightgrad.wan.messages import Part
from weightgrad.wan.selectors import Entries, Selector, Stretch, View


class Outbound:
    """One direction of one party: the held vector and the codec's states."""

    def __init__(self, layout: Layout, codec: Codec, key: int, *, per_tensor: bool, keep_loss: bool) -> None:
        self.layout = layout
        self.held = torch.zeros(layout.numel)
        self._codec = _plain(codec)
        self._key = key
        self._per_tensor = per_tensor
        self._keep = keep_loss
        self._states: dict[int, tuple[tuple[int, ...], State]] = {}  # by start: of a stretch of that shape

    def put(self, update: Tensor) -> None:
        """Add to what is held; nothing leaves."""
        self.held += update

    def take(
        self,
        fresh: Tensor,
        selector: Selector,
        base: Tensor,
        *,
        step: int,
        count: int,
        fragment: int = 0,
        step_update: Tensor | None = None,
        threshold: float = 0.0,
        codec: Codec | None = None,
    ) -> tuple[Part, ...]:
        """Put `fresh`, and let leave what the selector chooses. `count` makes the key unique.

        `codec` stands in for the usual one this time (the flush at the end).
        """
        if selector.needs_pending:
            self.held += fresh
            fresh = torch.zeros(()).expand_as(fresh)
        view = View(self.held, base, step_update, self.layout, step, fragment, self._per_tensor, threshold)
        chosen = selector.choose(view)
        key = derive(self._key, count)
        if isinstance(chosen, Entries):
            return self._entries(chosen.indices, key)
        return self._stretches(chosen, fresh, selector.needs_pending, key, codec)

    def _stretches(
        self, chosen: list[Stretch], fresh: Tensor, put: bool, key: int, instead: Codec | None
    ) -> tuple[Part, ...]:
        parts, at = [], 0
        for stretch in chosen:
            if not put:
                self.held[at : stretch.start] += fresh[at : stretch.start]
            parts.append(self._encode(stretch, fresh, put, key, instead))
            at = stretch.stop
        if not put:
            self.held[at:] += fresh[at:]
        return tuple(parts)

    def _encode(self, stretch: Stretch, fresh: Tensor, put: bool, key: int, instead: Codec | None) -> Part:
        codec = self._codec if instead is None else _plain(instead)
        held = self.held[stretch.start : stretch.stop]
        x = held.new_zeros(stretch.shape) if put else fresh[stretch.start : stretch.stop].view(stretch.shape)
        shape, state = (None, {}) if instead is not None else self._states.pop(stretch.start, (None, {}))
        if shape != stretch.shape:
            state = codec.init(x)
        payload, state = codec.encode_feedback(x, held, state, derive(key, stretch.start))
        if not self._keep:
            self._forget(held)
        if instead is None:
            self._states[stretch.start] = (stretch.shape, state)
        return Part(stretch.start, payload)

    def _entries(self, indices: Tensor, key: int) -> tuple[Part, ...]:
        if not indices.numel():
            return ()
        values = self.held[indices]
        codec = self._codec
        payload, _ = pack_entries(indices, values, self.held, codec, key)
        if isinstance(codec, Fp32) and payload.body.numel() >= 4 * self.held.numel():
            whole, _ = codec.encode(self.held, {}, key)  # all of it is smaller than naming the entries
            self.held.zero_()
            return (Part(0, whole),)
        Part(0, payload).into(self.held, fixed.SUBTRACT)
        if not self._keep:
            rest = self.held[indices]
            self.held[indices] = 0
            self._forget(rest)
        return (Part(0, payload),)

    def _forget(self, noise: Tensor) -> None:
        """What an unbiased codec rounded away, in systems that do not keep it."""
        noise.zero_()

    def clear(self) -> None:
        """Forget all of it."""
        self.held.zero_()
        self._states = {}

    def state(self) -> dict[str, Tensor]:
        """Everything it remembers, as named tensors."""
        found = {"held": self.held.clone()}
        for start, (shape, state) in self._states.items():
            place = f"codec.{start}.{'x'.join(map(str, shape))}"
            found |= {f"{place}.{name}": tensor.clone() for name, tensor in state.items()}
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """Remember what `state()` gave."""
        self.held.copy_(state["held"])
        self._states = {}
        for name, tensor in state.items():
            if name.startswith("codec."):
                _, start, sides, own = name.split(".", 3)
                shape = tuple(int(side) for side in sides.split("x") if side)
                self._states.setdefault(int(start), (shape, {}))[1][own] = tensor.clone()


def _plain(codec: Codec) -> Codec:
    """Without error feedback of its own: what is held here is that."""
    return codec.inner if isinstance(codec, ErrorFeedback) else codec
