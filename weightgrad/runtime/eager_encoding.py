"""Eager encoding: pieces of a gradient are encoded while backward still computes earlier layers.

A gradient is final only when `optimizer.step()` is called: until then users clip it, unscale it or add further passes
to it. So a piece that is encoded right after backward is speculation, and is sent only if the step finds the same
gradient again. A payload is used if and only if

    the step has the number that was expected                                  (its key is derived from it)
    XXH3(what was copied to be encoded) = XXH3(the gradient as it is now)      (of every parameter in the piece)

Then it has the bits that encoding in the step would have given. The hash is taken of the copy and not of the gradient,
so a change during the copying is noticed too. `Tensor._version` would be cheaper, but it misses
`p.grad.data.clamp_(-1, 1)` and writes by NumPy.

A gradient is expected to be complete after as many backward passes as in the step before. So gradient accumulation
works, and a parameter that no pass reaches is not waited for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from weightgrad.codecs import Payload
from weightgrad.core.layout import Layout
from weightgrad.errors import EncodeError
from weightgrad.runtime.flat_parameters import read_one

log = logging.getLogger("weightgrad")

_BLOCK = 1 << 15  # elements
_ZERO = np.float32(0)
_MAX_MISSES = 2  # consecutive steps with changed gradients, after which eager encoding stops


class Pieces(Protocol):
    """Encodes a flat vector in pieces: the chunks of an allreduce, or the slots of a worker's gradient."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """Start and stop of each piece in the vector."""

    @property
    def pure(self) -> bool:
        """Whether a payload depends on nothing but its piece, its place and the step."""

    def encode_piece(self, vector: Tensor, place: int, step: int, /) -> Payload:
        """Encode the piece at `place`."""


class EagerEncoder:
    """Encodes gradients in a thread of its own, as backward leaves them.

    Only for parameters that are plain float32 on the CPU: on a GPU a copy would wait for a stream, or race with it.

    Args:
        parameters: The parameters, in the order of the layout.
        layout: Where they lie in the flat vector.
        pieces: What encodes a piece.
        flat: The vector that gradients are copied into. From `take` until the next backward it belongs to the step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, pieces: Pieces, flat: Tensor) -> None:
        self._parameters, self._pieces, self._flat = parameters, pieces, flat
        self._spans = pieces.spans
        self._views = layout.views(flat)
        self._within = [
            [place for place, slot in enumerate(layout.slots) if slot.start < stop and start < slot.stop]
            for start, stop in self._spans
        ]
        self._touches: list[list[int]] = [[] for _ in parameters]
        for piece, places in enumerate(self._within):
            for place in places:
                self._touches[place].append(piece)
        self.asked = 0
        """Pieces that steps needed."""
        self.used = 0
        """Pieces that were encoded eagerly and used."""
        self._misses = 0
        self._closed = False
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eager-encoding")
        self._expect([0] * len(parameters), -1)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, place))
            for place, parameter in enumerate(parameters)
        ]

    @property
    def share(self) -> float:
        """The share of the needed pieces that was encoded eagerly."""
        return self.used / max(1, self.asked)

    def _expect(self, passes: list[int], step: int) -> None:
        """Prepare for a step, with this number of passes over each parameter."""
        self._step, self._passes = step, passes
        self._seen = [0] * len(passes)
        self._missing = [sum(passes[place] > 0 for place in places) for places in self._within]
        self._copies: dict[int, Future[int]] = {}
        self._work: dict[int, Future[Payload]] = {}

    # -- while backward runs ----------------------------------------------------------------

    def _arrived(self, place: int, parameter: Tensor) -> None:
        """Called when backward has left a gradient: the final one, if this step has as many passes as the last."""
        with self._lock:
            self._seen[place] += 1
            if self._closed or self._seen[place] < self._passes[place]:
                return
            if self._seen[place] > self._passes[place]:  # one pass more than expected: what was encoded is outdated
                for piece in self._touches[place]:
                    if piece in self._work:
                        self._work[piece].cancel()
                return
            if parameter.grad is None:  # another hook has taken it
                return
            self._copies[place] = self._thread.submit(self._copy, place, parameter.grad)
            for piece in self._touches[place]:
                self._missing[piece] -= 1
                if not self._missing[piece]:
                    idle = [at for at in self._within[piece] if not self._passes[at]]
                    self._work[piece] = self._thread.submit(self._encode, piece, idle, self._step)

    def _copy(self, place: int, gradient: Tensor) -> int:
        """Copy as `read_one` does and hash what was copied, in blocks that fit the cache, so memory is read once."""
        source, target = _elements(gradient), _elements(self._views[place])
        found = xxhash.xxh3_64()
        for start in range(0, len(target), _BLOCK):
            part = target[start : start + _BLOCK]
            np.copyto(part, source[start : start + _BLOCK])
            found.update(part.data)
            np.add(part, _ZERO, out=part)
        return found.intdigest()

    def _encode(self, piece: int, idle: Sequence[int], step: int) -> Payload:
        for place in idle:
            self._views[place].zero_()
        return self._pieces.encode_piece(self._flat, piece, step)

    # -- in the step ------------------------------------------------------------------------

    def take(self, step: int) -> list[Payload] | None:
        """The payloads of this step; pieces that are missing or outdated are encoded now.

        Nothing but the step writes into the flat vector after this, until backward runs again.

        Args:
            step: The number of the step.

        Returns:
            One payload for each piece. None if nothing was encoded eagerly or the gradient cannot be encoded: then the
            step encodes everything itself, and raises what is wrong.
        """
        self.asked += len(self._spans)
        if self._closed:
            return None
        with self._lock:
            work, good = self._work, self._step == step
            unchanged: dict[int, bool] = {}
            found = {piece: self._result(piece, unchanged) for piece in work}
            payloads = {piece: one for piece, one in found.items() if one is not None and good}
            wait(self._copies.values())
            self._expect(self._seen, step + 1)
        if good:
            changed = False in unchanged.values() or any(job.cancelled() for job in work.values())
            self._note_outcome(changed, bool(payloads))
        if not payloads or (done := self._completed(payloads, step)) is None:
            return None
        self.used += len(payloads)
        return done

    def _result(self, piece: int, unchanged: dict[int, bool]) -> Payload | None:
        """The payload of a piece, if it was made from the gradient as it is now."""
        try:
            payload = self._work[piece].result()
            for place in self._within[piece]:
                if place not in unchanged:
                    unchanged[place] = self._is_unchanged(place)
                if not unchanged[place]:
                    return None
        except CancelledError:
            return None
        except Exception:  # whatever it is, the step will raise it again
            log.debug("piece %d was not encoded eagerly", piece, exc_info=True)
            return None
        return payload

    def _is_unchanged(self, place: int) -> bool:
        gradient = self._parameters[place].grad
        if place not in self._copies:
            return gradient is None
        if gradient is None:
            return False
        return self._copies[place].result() == xxhash.xxh3_64_intdigest(_elements(gradient).data)

    def _note_outcome(self, changed: bool, right: bool) -> None:
        """Stop where gradients always change, so that nobody pays for payloads that are thrown away."""
        if changed:
            self._misses += 1
        elif right:
            self._misses = 0
        if self._misses == _MAX_MISSES:
            log.info(
                "gradients change between backward and optimizer.step(), as by clipping or unscaling: "
                "from now on they are encoded in the step, and no longer during backward"
            )
            self.close()

    @torch.no_grad()
    def _completed(self, payloads: dict[int, Payload], step: int) -> list[Payload] | None:
        done = []
        for piece, places in enumerate(self._within):
            payload = payloads.get(piece)
            if payload is None:
                for place in places:
                    read_one(self._parameters[place].grad, self._views[place])
                try:
                    payload = self._encode(piece, (), step)
                except EncodeError:
                    return None
            done.append(payload)
        return done

    def close(self) -> None:
        """Remove the hooks and end the thread."""
        with self._lock:
            self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._thread.shutdown(cancel_futures=True)


def _elements(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    found: np.ndarray[tuple[int], np.dtype[np.float32]] = tensor.detach().contiguous().view(-1).numpy()
    return found
