"""The residual: updates that were made here and have not been sent yet, and how some of them leave.

Invariant, tested for every strategy: what was sent + the residual = what was put in. What a lossy codec loses stays in
the residual, unless the strategy says `keep_loss=False`: systems with unbiased codecs discard the codec's noise.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weightgrad.codecs import Codec, ErrorFeedback, Fp32, State, pack_entries
from weightgrad.core.layout import Layout
from weightgrad.core.selectors import Entries, Interval, Selector, View
from weightgrad.kernels import fixed
from weightgrad.kernels.noise import derive
from weightgrad.wire.messages import Segment


class Residual:
    """What one sender has not sent yet, and the states of its codec.

    Memory, in vectors of the model's size: `vector`, and what the codec keeps between rounds.

    Args:
        layout: where the tensors lie in the flat vector.
        codec: the usual codec; its own error feedback is removed, because the residual is that.
        key: the key of the codec's random stream.
        per_tensor: whether tensors are encoded one by one.
        keep_loss: whether what the codec loses stays in the residual.
    """

    def __init__(self, layout: Layout, codec: Codec, key: int, *, per_tensor: bool, keep_loss: bool) -> None:
        self.layout = layout
        self.vector = torch.zeros(layout.numel)
        self._codec = _without_error_feedback(codec)
        self._key = key
        self._per_tensor = per_tensor
        self._keep_loss = keep_loss
        self._states: dict[
            int, tuple[tuple[int, ...], State]
        ] = {}  # by start of an interval: its shape and the codec's state

    def put(self, update: Tensor) -> None:
        """Add an update to the residual; nothing leaves."""
        self.vector += update

    def take(
        self,
        fresh: Tensor,
        selector: Selector,
        global_model: Tensor,
        *,
        step: int,
        count: int,
        fragment: int = 0,
        step_update: Tensor | None = None,
        threshold: float = 0.0,
        codec: Codec | None = None,
    ) -> tuple[Segment, ...]:
        """Put a fresh update into the residual, and encode what the selector takes out.

        Args:
            fresh: the update made since the last call.
            selector: chooses what leaves.
            global_model: the flat global model, for selectors that compare with it.
            step: local steps done.
            count: a number that makes the key of the random stream unique, such as the round's.
            fragment: which fragment of the model the round is about.
            step_update: the update of the last step, for selectors that compare with it.
            threshold: the significance threshold.
            codec: replaces the usual codec this once, without memory from round to round.

        Returns:
            The encoded segments, in order.
        """
        if selector.needs_residual:
            self.vector += fresh
            fresh = torch.zeros(()).expand_as(fresh)
        view = View(self.vector, global_model, step_update, self.layout, step, fragment, self._per_tensor, threshold)
        chosen = selector.choose(view)
        key = derive(self._key, count)
        if isinstance(chosen, Entries):
            return self._encode_entries(chosen.indices, key)
        return self._encode_intervals(chosen, fresh, selector.needs_residual, key, codec)

    def _encode_intervals(
        self, chosen: list[Interval], fresh: Tensor, added: bool, key: int, replacement: Codec | None
    ) -> tuple[Segment, ...]:
        """Encode intervals; `added` says whether the fresh update is in the residual already."""
        segments, end = [], 0
        for interval in chosen:
            if not added:
                self.vector[end : interval.start] += fresh[end : interval.start]
            segments.append(self._encode(interval, fresh, added, key, replacement))
            end = interval.stop
        if not added:
            self.vector[end:] += fresh[end:]
        return tuple(segments)

    def _encode(self, interval: Interval, fresh: Tensor, added: bool, key: int, replacement: Codec | None) -> Segment:
        codec = self._codec if replacement is None else _without_error_feedback(replacement)
        residual = self.vector[interval.start : interval.stop]
        x = residual.new_zeros(interval.shape) if added else fresh[interval.start : interval.stop].view(interval.shape)
        shape, state = (None, {}) if replacement is not None else self._states.pop(interval.start, (None, {}))
        if shape != interval.shape:
            state = codec.init(x)
        payload, state = codec.encode_feedback(x, residual, state, derive(key, interval.start))
        if not self._keep_loss:
            self._discard(residual)
        if replacement is None:
            self._states[interval.start] = (interval.shape, state)
        return Segment(interval.start, payload)

    def _encode_entries(self, indices: Tensor, key: int) -> tuple[Segment, ...]:
        if not indices.numel():
            return ()
        values = self.vector[indices]
        codec = self._codec
        payload, _ = pack_entries(indices, values, self.vector, codec, key)
        if isinstance(codec, Fp32) and payload.body.numel() >= 4 * self.vector.numel():
            whole, _ = codec.encode(self.vector, {}, key)  # the whole vector is smaller than entries with their indices
            self.vector.zero_()
            return (Segment(0, whole),)
        Segment(0, payload).into(self.vector, fixed.SUBTRACT)
        if not self._keep_loss:
            rest = self.vector[indices]
            self.vector[indices] = 0
            self._discard(rest)
        return (Segment(0, payload),)

    def _discard(self, noise: Tensor) -> None:
        """Discard what an unbiased codec rounded away, in systems that do not keep it."""
        noise.zero_()

    def clear(self) -> None:
        """Discard the whole residual and the codec's states."""
        self.vector.zero_()
        self._states = {}

    def state(self) -> dict[str, Tensor]:
        """Copies of the residual and the codec's states, as named tensors for a checkpoint."""
        found = {"vector": self.vector.clone()}
        for start, (shape, state) in self._states.items():
            name_of_interval = f"codec.{start}.{'x'.join(map(str, shape))}"
            found |= {f"{name_of_interval}.{name}": tensor.clone() for name, tensor in state.items()}
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.vector.copy_(state["vector"])
        self._states = {}
        for name, tensor in state.items():
            if name.startswith("codec."):
                _, start, sides, own = name.split(".", 3)
                shape = tuple(int(side) for side in sides.split("x") if side)
                self._states.setdefault(int(start), (shape, {}))[1][own] = tensor.clone()


def _without_error_feedback(codec: Codec) -> Codec:
    """The codec without error feedback of its own: the residual is the error feedback."""
    return codec.inner if isinstance(codec, ErrorFeedback) else codec
