"""Allreduce of a flat vector in encoded chunks, as pure steps of one rank.

Reduce-scatter: rank r receives the encoded chunk r of every rank, adds the chunks in the order of
the ranks and divides. All-gather: it encodes that mean again, with error feedback of its own
(Dryden et al., 2016), and all ranks decode the same payloads, so all hold the same bits. Each rank
sends and receives about two encoded vectors, whatever the number of ranks.

    payloads = mine.encode_chunks(vector, step)     # payload i goes to rank i
    reduced = mine.reduce(received, step)           # received in the order of the ranks; goes to all
    mean = mine.gather(everyones)                   # in the order of the ranks; `out` takes memory of the caller

Only a codec with error feedback, such as ef(qsgd(bits=4)), keeps what its encoding lost; then the
sum of all results and of what is kept equals the sum of the means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from weightgrad.codecs import Codec, Dgc, ErrorFeedback, Fp32, Payload, State, decode, decode_add
from weightgrad.codecs.codec import flat32, require_finite
from weightgrad.core.vector_checks import restored
from weightgrad.errors import ProtocolError, StrategyError
from weightgrad.kernels import derive


class QuantizedAllreduce:
    """One rank of the allreduce.

    Args:
        size: Number of ranks.
        numel: Elements of the vector.
        codec: Encodes the chunks. They are vectors: a codec that works by rows or columns sees none here. The mean is
            encoded by ef(codec) if the codec keeps no error itself.
        key: Parent of this rank's random keys; it must differ from rank to rank.
        device: Where vectors live.

    Raises:
        StrategyError: There is no rank, or the codec has momentum, which an allreduce would count twice.
    """

    def __init__(self, size: int, numel: int, codec: Codec, key: int, *, device: torch.device | str = "cpu") -> None:
        if size < 1 or numel < 0:
            raise StrategyError(f"an allreduce of {numel} elements over {size} ranks; there must be a rank")
        if isinstance(codec, Dgc) and codec.momentum:
            raise StrategyError(f"{codec}: momentum would count twice in an allreduce; use momentum=0.0 or ef(topk())")
        self._numel = numel
        self._key = key
        self.spans = tuple(pairwise(rank * numel // size for rank in range(size + 1)))
        self._codec = codec
        self._mean_codec = codec if codec.carries_error or isinstance(codec, Fp32) else ErrorFeedback(codec)
        self._device = torch.device(device)
        self._states = [codec.init(torch.empty(n, device=device)) for n in self._sizes()]
        self._mean_state: State = {}
        self._mean_numel = -1  # of this rank's own chunk, once it has seen one
        self._room = torch.empty(0, device=device)  # where `reduce` adds up

    @property
    def pure(self) -> bool:
        """Whether a payload depends on nothing but its chunk, its place and the step: the codec remembers nothing."""
        return not any(self._states)

    def _sizes(self) -> list[int]:
        return [stop - start for start, stop in self.spans]

    def encode_chunks(self, vector: Tensor, step: int) -> list[Payload]:
        """Encode this rank's vector: payload i is its chunk i, for rank i."""
        if tuple(vector.shape) != (self._numel,):
            raise StrategyError(f"a vector of shape {list(vector.shape)}, expected {self._numel} elements; flatten it")
        require_finite(flat32(vector))
        return [self.encode_piece(vector, place, step) for place in range(len(self._states))]

    def encode_piece(self, vector: Tensor, place: int, step: int) -> Payload:
        """Encode chunk `place` alone; the rest of the vector is not read."""
        start, stop = self.spans[place]
        key = derive(self._key, step, place)
        payload, self._states[place] = self._codec.encode(vector[start:stop], self._states[place], key)
        return payload

    def reduce(self, own_chunks: Sequence[Payload], step: int) -> Payload:
        """The encoded mean of the chunks that all ranks sent to this one.

        Args:
            own_chunks: The chunks, in the order of the ranks.
            step: The number of the step.

        Raises:
            ProtocolError: A chunk is missing or has another size.
        """
        self._check_count(own_chunks)
        numel = own_chunks[0].numel
        known = [self._mean_numel] if self._mean_numel >= 0 else self._sizes()
        wrong = [list(payload.shape) for payload in own_chunks if payload.shape != (numel,)]
        if wrong or numel not in known:
            shapes = wrong or [[numel]]
            raise ProtocolError(f"a chunk of shape {shapes[0]}, expected {max(known)} elements; ranks must agree on it")
        if self._room.numel() != numel:
            self._room = torch.empty(numel, dtype=torch.float32, device=self._device)
        total = decode(own_chunks[0], out=self._room)
        for payload in own_chunks[1:]:
            decode_add(payload, total)
        if len(own_chunks) > 1:
            total /= len(own_chunks)
        if self._mean_numel < 0:
            self._mean_numel, self._mean_state = numel, self._mean_codec.init(total)
        key = derive(self._key, step, len(own_chunks))
        payload, self._mean_state = self._mean_codec.encode(total, self._mean_state, key)
        return payload

    def gather(self, reduced: Sequence[Payload], *, out: Tensor | None = None) -> Tensor:
        """The flat mean, the same on all ranks.

        Args:
            reduced: The reduced chunks, in the order of the ranks.
            out: Contiguous float32 memory for the result; None makes a new tensor. After an error its content is
                undefined.

        Raises:
            ProtocolError: A chunk is missing or has another size.
        """
        self._check_count(reduced)
        if out is None:
            out = torch.empty(self._numel, dtype=torch.float32, device=self._device)
        elif tuple(out.shape) != (self._numel,) or out.dtype != torch.float32 or not out.is_contiguous():
            found = f"{out.dtype} of shape {list(out.shape)}"
            raise StrategyError(f"out is {found}, expected contiguous float32 of {self._numel} elements; make it so")
        for payload, (start, stop) in zip(reduced, self.spans, strict=True):
            if payload.shape != (stop - start,):
                raise ProtocolError(
                    f"a reduced chunk of shape {list(payload.shape)}, expected {stop - start} elements; "
                    "give them in the order of the ranks"
                )
            decode(payload, out=out[start:stop])
        return out

    def _check_count(self, payloads: Sequence[Payload]) -> None:
        if len(payloads) != len(self._states):
            raise ProtocolError(f"{len(payloads)} payloads for {len(self._states)} ranks; give one of each rank")

    def state(self) -> dict[str, Tensor]:
        """Copies of all that it remembers."""
        return {name: tensor.clone() for name, tensor in self._present().items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        numel = int(saved.get("mean_numel", torch.tensor(-1)))
        fresh = self._mean_codec.init(torch.empty(numel, device=self._device)) if numel in self._sizes() else {}
        good = restored("QuantizedAllreduce", self._present(fresh), saved)
        for place, state in enumerate(self._states):
            self._states[place] = {name: good[f"chunk {place}/{name}"] for name in state}
        self._mean_state = {name: good[f"mean/{name}"] for name in fresh}
        self._mean_numel = numel

    def _present(self, mean_state: State | None = None) -> dict[str, Tensor]:
        found = {"mean_numel": torch.tensor(self._mean_numel, dtype=torch.int64)}
        for place, state in enumerate(self._states):
            found |= {f"chunk {place}/{name}": tensor for name, tensor in state.items()}
        mean_state = self._mean_state if mean_state is None else mean_state
        return found | {f"mean/{name}": tensor for name, tensor in mean_state.items()}
