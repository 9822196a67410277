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

A chunk is a stretch of the vector, for which onebit() and adaptive() have one pair of means for each 32,768 elements.
With `matrix=(rows, columns)` the vector is that matrix, row by row, and a chunk is whole columns of it, as Dryden et
al. deal theirs: the codec sees a matrix and has a pair of means for each column. That costs eight bytes a column for
onebit(), which is 64/rows bits an element more, and up to ten a column for adaptive(); and two copies of the vector a
rank and step, because the columns of a chunk do not lie together in memory.
"""

from __future__ import annotations

import math
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
        codec: Encodes the chunks. They are vectors, of which a codec that works by columns sees one, or whole columns
            of `matrix`. The mean is encoded by ef(codec) if the codec keeps no error itself.
        key: Parent of this rank's random keys; it must differ from rank to rank.
        matrix: Rows and columns of the matrix that the vector is, row by row; None: chunks are vectors.
        device: Where vectors live.

    Raises:
        StrategyError: There is no rank, the matrix has another number of elements, or the codec has momentum, which
            an allreduce would count twice.
    """

    def __init__(
        self,
        size: int,
        numel: int,
        codec: Codec,
        key: int,
        *,
        matrix: tuple[int, int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if size < 1 or numel < 0:
            raise StrategyError(f"an allreduce of {numel} elements over {size} ranks; there must be a rank")
        if matrix is not None and (min(matrix) < 1 or matrix[0] * matrix[1] != numel):
            raise StrategyError(f"matrix={matrix} for {numel} elements; wanted rows and columns that make as many")
        if isinstance(codec, Dgc) and codec.momentum:
            raise StrategyError(f"{codec}: momentum would count twice in an allreduce; use momentum=0.0 or ef(topk())")
        self._numel = numel
        self._key = key
        self._matrix = matrix
        dealt = numel if matrix is None else matrix[1]
        self.spans = tuple(pairwise(rank * dealt // size for rank in range(size + 1)))
        """The elements of each rank's chunk or, of a matrix, its columns."""
        self._codec = codec
        self._mean_codec = codec if codec.carries_error or isinstance(codec, Fp32) else ErrorFeedback(codec)
        self._device = torch.device(device)
        self._states = [codec.init(torch.empty(shape, device=device, dtype=torch.float32)) for shape in self._shapes()]
        self._mean_state: State = {}
        self._mean_numel = -1  # of this rank's own chunk, once it has seen one
        self._room = torch.empty(0, device=device, dtype=torch.float32)  # where `reduce` adds up
        self._columns = torch.empty(0, device=device, dtype=torch.float32)  # a chunk of a matrix, in one piece

    def _shapes(self) -> list[tuple[int, ...]]:
        rows = () if self._matrix is None else (self._matrix[0],)
        return [(*rows, stop - start) for start, stop in self.spans]

    def _shape_of(self, numel: int) -> tuple[int, ...]:
        """The shape of a chunk of so many elements."""
        return (numel,) if self._matrix is None else (self._matrix[0], numel // self._matrix[0])

    def _chunk_of(self, vector: Tensor, place: int) -> Tensor:
        """A view of one chunk: of a matrix, columns that do not lie together."""
        start, stop = self.spans[place]
        return vector[start:stop] if self._matrix is None else vector.view(self._matrix)[:, start:stop]

    def _columns_room(self, shape: tuple[int, ...]) -> Tensor:
        if tuple(self._columns.shape) != shape:
            self._columns = torch.empty(shape, dtype=torch.float32, device=self._device)
        return self._columns

    def encode_chunks(self, vector: Tensor, step: int) -> list[Payload]:
        """Encode this rank's vector: payload i is its chunk i, for rank i."""
        if tuple(vector.shape) != (self._numel,):
            raise StrategyError(f"a vector of shape {list(vector.shape)}, expected {self._numel} elements; flatten it")
        require_finite(flat32(vector))
        return [self._encode_chunk(vector, place, step) for place in range(len(self._states))]

    def _encode_chunk(self, vector: Tensor, place: int, step: int) -> Payload:
        chunk = self._chunk_of(vector.contiguous(), place)
        if self._matrix is not None:
            chunk = self._columns_room(tuple(chunk.shape)).copy_(chunk)
        key = derive(self._key, step, place)
        payload, self._states[place] = self._codec.encode(chunk, self._states[place], key)
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
        known = [self._mean_numel] if self._mean_numel >= 0 else [math.prod(shape) for shape in self._shapes()]
        shape = self._shape_of(numel)
        wrong = [list(payload.shape) for payload in own_chunks if payload.shape != shape]
        if wrong or numel not in known:
            shapes = wrong or [list(shape)]
            raise ProtocolError(f"a chunk of shape {shapes[0]}, expected {max(known)} elements; ranks must agree on it")
        if tuple(self._room.shape) != shape:
            self._room = torch.empty(shape, dtype=torch.float32, device=self._device)
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
        for place, (payload, shape) in enumerate(zip(reduced, self._shapes(), strict=True)):
            if payload.shape != shape:
                raise ProtocolError(
                    f"a reduced chunk of shape {list(payload.shape)}, expected {list(shape)}; "
                    "give them in the order of the ranks"
                )
            chunk = self._chunk_of(out, place)
            if self._matrix is None:
                decode(payload, out=chunk)
            else:
                chunk.copy_(decode(payload, out=self._columns_room(shape)))
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
        known = numel in [math.prod(shape) for shape in self._shapes()]
        fresh = (
            self._mean_codec.init(torch.empty(self._shape_of(numel), device=self._device, dtype=torch.float32))
            if known
            else {}
        )
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
