"""The residual: updates that were made here and have not been sent yet, and how some of them leave.

Invariant, tested for every strategy: what was sent + the residual = what was put in. What a lossy codec loses stays in
the residual, unless the strategy says `keep_loss=False`: systems with unbiased codecs discard the codec's noise.

A residual belongs to one holder of elements and is taken piece by piece (`core/pieces.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from weightgrad.codecs import Codec, ErrorFeedback, Fp32, Payload, State, pack_entries
from weightgrad.codecs.registry import decode_into
from weightgrad.codecs.sparse import Selector as EntrySelector
from weightgrad.core.local_model import Scratch, scatter
from weightgrad.core.parts.selectors import Entries, Selector, View
from weightgrad.core.pieces import Piece
from weightgrad.kernels import fixed
from weightgrad.kernels.noise import derive
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import Segment

Look = Callable[[Piece, Tensor], View]
"""What a selector may look at, from a piece and its residual."""


class Residual:
    """What one holder has not sent yet, and the states of its codec.

    Memory, in vectors of what is held: `vector`, made when something first stays behind; and what the codec keeps
    between rounds. A codec without loss leaves nothing behind.

    Args:
        held: the elements.
        codec: the usual codec; its own error feedback is removed, because the residual is that.
        key: the key of the codec's random stream.
        keep_loss: whether what the codec loses stays in the residual.
        scratch: memory for one piece at a time; the residual is on the same device.
    """

    def __init__(self, held: Intervals, codec: Codec, key: int, *, keep_loss: bool, scratch: Scratch) -> None:
        self.held = held
        self.vector: Tensor | None = None
        self._codec = _without_error_feedback(codec)
        self._key = key
        self._keep_loss = keep_loss
        self._scratch = scratch
        self._states: dict[int, tuple[Piece, State]] = {}  # the codec's state of each piece, by its first element

    def whole(self) -> Tensor:
        """The vector, made now if nothing has stayed behind yet."""
        if self.vector is None:
            self.vector = torch.zeros(self.held.numel, device=self._scratch.device, dtype=torch.float32)
        return self.vector

    def of(self, intervals: Intervals) -> Tensor | None:
        """The residual of some held elements, as `gather` gives it; None if nothing has stayed behind yet."""
        return None if self.vector is None else self._gather(intervals)

    def _gather(self, intervals: Intervals) -> Tensor:
        return self._scratch.gather("residual", self.whole(), self.held, intervals)

    def put(self, piece: Piece, update: Tensor) -> None:
        """Add an update to the residual; nothing leaves."""
        own = self._gather(piece.intervals)
        own += update
        scatter(self.whole(), self.held, piece.intervals, own)

    def leaves_by_entries(self, selector: Selector, codec: Codec | None) -> bool:
        """Whether what leaves a piece changes the residual only at the entries that are sent.

        Args:
            selector: chooses what leaves.
            codec: as for `take`.
        """
        codec = self._codec if codec is None else _without_error_feedback(codec)
        return self._keep_loss and not selector.needs_residual and isinstance(codec, EntrySelector)

    def hold_back(self, piece: Piece, share: float) -> Tensor | None:
        """Take a share of a piece out of the residual, for the caller to put back; None if there is nothing."""
        if not share or self.vector is None:
            return None
        own = self._gather(piece.intervals)
        held = own * share
        own -= held
        scatter(self.vector, self.held, piece.intervals, own)
        return held

    def take(
        self,
        piece: Piece,
        fresh: Tensor | None,
        selector: Selector,
        look: Look,
        *,
        count: int,
        codec: Codec | None = None,
    ) -> Segment | None:
        """Put the fresh update of a piece into the residual, and encode what the selector takes out.

        Args:
            piece: the elements.
            fresh: the update made since the last call, flat, and overwritten; None: the residual has it already.
            selector: chooses what leaves.
            look: gives the selector what it may look at.
            count: a number that makes the key of the random stream unique, such as the round's.
            codec: replaces the usual codec this once, without memory from round to round.

        Returns:
            The encoded segment, or None if nothing leaves.

        Raises:
            NonFiniteError: the update has a NaN or an Inf. Pieces before this one have been taken: go back to the last
                checkpoint.
        """
        key = derive(derive(self._key, count), piece.start)
        if not selector.needs_residual:
            return Segment.at(piece.intervals, self._encode(piece, fresh, key, codec))
        own = self._gather(piece.intervals)
        if fresh is not None:
            own += fresh
        chosen = selector.choose(look(piece, own))
        found: Segment | None = None
        if isinstance(chosen, Entries):
            found = self._encode_entries(piece, own, chosen.indices, key)
        elif chosen:
            scatter(self.whole(), self.held, piece.intervals, own)
            return Segment.at(piece.intervals, self._encode(piece, None, key, codec))
        scatter(self.whole(), self.held, piece.intervals, own)
        return found

    def _encode(self, piece: Piece, fresh: Tensor | None, key: int, replacement: Codec | None) -> Payload:
        """Encode residual + fresh update; None says that the residual has it already."""
        codec = self._codec if replacement is None else _without_error_feedback(replacement)
        known, state = (None, {}) if replacement is not None else self._states.pop(piece.start, (None, {}))
        x = (self._gather(piece.intervals) if fresh is None else fresh).view(piece.shape)
        if known != piece:
            state = codec.init(x)
        if fresh is not None and self.vector is None and (isinstance(codec, Fp32) or not self._keep_loss):
            payload, state = codec.encode(x, state, key)  # nothing stays behind
        else:
            own = self._gather(piece.intervals)
            if fresh is None:
                payload, state = codec.encode_residual(own.view(piece.shape), state, key)
            else:
                payload, state = codec.encode_feedback(x, own, state, key)
            if not self._keep_loss:
                self._discard(own)
            scatter(self.whole(), self.held, piece.intervals, own)
        if replacement is None:
            self._states[piece.start] = (piece, state)
        return payload

    def _encode_entries(self, piece: Piece, residual: Tensor, indices: Tensor, key: int) -> Segment | None:
        if not indices.numel():
            return None
        codec = self._codec
        payload, _ = pack_entries(indices, residual[indices], residual, codec, key)
        if isinstance(codec, Fp32) and payload.body.numel() >= 4 * residual.numel():
            payload, _ = codec.encode(residual, {}, key)  # the whole piece is smaller than entries with their indices
            residual.zero_()
            return Segment.at(piece.intervals, payload)
        decode_into(payload, residual, fixed.SUBTRACT)
        if not self._keep_loss:
            rest = residual[indices]
            residual[indices] = 0
            self._discard(rest)
        return Segment.at(piece.intervals, payload)

    def _discard(self, noise: Tensor) -> None:
        """Discard what an unbiased codec rounded away, in systems that do not keep it."""
        noise.zero_()

    def clear(self) -> None:
        """Discard the whole residual and the codec's states."""
        self.vector = None
        self._states = {}

    def any(self) -> bool:
        """Whether anything has stayed behind."""
        return self.vector is not None and bool(self.vector.any())

    def state(self) -> dict[str, Tensor]:
        """The residual and the codec's states, as named tensors for a checkpoint; they are not copied."""
        found = {} if self.vector is None else {"vector": self.vector}
        for piece, state in self._states.values():
            name_of_piece = f"codec.{piece.start}.{'x'.join(map(str, piece.shape))}"
            found |= {f"{name_of_piece}.{name}": tensor for name, tensor in state.items()}
            if state and len(piece.intervals.spans) > 1:
                found[f"spans.{piece.start}"] = torch.tensor(piece.intervals.spans)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; the codec's states of pieces that are not held here begin anew."""
        self.vector = None
        if "vector" in state:
            self.whole().copy_(state["vector"])
        self._states = {}
        for name, tensor in state.items():
            if name.startswith("codec."):
                _, start, sides, own = name.split(".", 3)
                piece = _piece(int(start), sides, state.get(f"spans.{start}"))
                if self.held.contains(piece.intervals):
                    self._states.setdefault(piece.start, (piece, {}))[1][own] = tensor.clone()


def _piece(start: int, sides: str, spans: Tensor | None) -> Piece:
    """A piece from its names in a checkpoint."""
    shape = tuple(int(side) for side in sides.split("x") if side)
    if spans is None:
        return Piece(Intervals(((start, start + math.prod(shape)),)), shape)
    return Piece(Intervals(tuple((int(first), int(last)) for first, last in spans)), shape)


def _without_error_feedback(codec: Codec) -> Codec:
    """The codec without error feedback of its own: the residual is the error feedback."""
    return codec.inner if isinstance(codec, ErrorFeedback) else codec
