"""The interface of a rival codec: it encodes, decodes and counts its bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BUCKET = 512  # elements that share a scale, as in WeightGrad's qsgd
CHUNKS = (1 << 16, 1 << 18)  # elements: 256 KB and 1 MB of float32


@dataclass(frozen=True)
class Label:
    """What a row of the table measures. Rows of one job are compared by task; a comma adds a requirement."""

    job: str
    task: str
    name: str
    library: str


class Coder(ABC):
    """Encodes a matrix, keeps the result, and decodes it."""

    @abstractmethod
    def encode(self, x: Tensor) -> None:
        """Encode a float32 matrix and keep what would be sent."""

    @abstractmethod
    def decode(self, out: Tensor) -> Tensor:
        """Decode into `out`, or into a new tensor if the library cannot write into one."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that would be sent."""


Maker = Callable[[Tensor, int], Coder]
"""maker(like, chunk): a fresh coder for tensors like this one; chunk is its piece size in elements."""


@dataclass(frozen=True)
class Rival:
    """The label of a row, how to make its coder, and the piece sizes to try; without sizes, the whole tensor."""

    label: Label
    make: Maker
    chunks: tuple[int, ...] = ()


class Pieces(Coder):
    """A coder that works on flat pieces of the tensor and stores each separately."""

    scans = False  # whether `scan` must see the whole tensor before the first piece

    def __init__(self, like: Tensor, chunk: int) -> None:
        n = like.numel()
        self.chunk = min(chunk, n)
        self.pieces = [slice(start, min(n, start + chunk)) for start in range(0, n, chunk)]

    def scan(self, flat: Tensor) -> None:
        """Statistics of the whole tensor."""

    @abstractmethod
    def pack(self, piece: slice, x: Tensor) -> None:
        """Encode one piece."""

    @abstractmethod
    def unpack(self, piece: slice, out: Tensor) -> None:
        """Decode one piece."""

    def encode(self, x: Tensor) -> None:
        flat = x.view(-1)
        self.scan(flat)
        for piece in self.pieces:
            self.pack(piece, flat[piece])

    def decode(self, out: Tensor) -> Tensor:
        flat = out.view(-1)
        for piece in self.pieces:
            self.unpack(piece, flat[piece])
        return out


class ErrorFeedback(Coder):
    """Error feedback around pieces: h = x + residual, send C(h), residual = h - decoded."""

    def __init__(self, inner: Pieces, like: Tensor) -> None:
        self.inner = inner
        self.residual = torch.zeros(like.numel())
        self.buffer = torch.zeros(inner.chunk)

    def encode(self, x: Tensor) -> None:
        flat, inner = x.view(-1), self.inner
        if inner.scans:
            self.residual.add_(flat)
            inner.scan(self.residual)
        for piece in inner.pieces:
            held = self.residual[piece]
            if not inner.scans:
                held.add_(flat[piece])
            inner.pack(piece, held)
            sent = self.buffer[: held.numel()]
            inner.unpack(piece, sent)
            held.sub_(sent)

    def decode(self, out: Tensor) -> Tensor:
        return self.inner.decode(out)

    def nbytes(self) -> int:
        return self.inner.nbytes()


class LibraryCoder(Coder):
    """A coder made of the functions of a library: pack(tensor) -> any object, unpack(object) -> tensor."""

    def __init__(
        self,
        like: Tensor,
        chunk: int,
        pack: Callable[[Tensor], Any],
        unpack: Callable[[Any], Tensor],
        size: Callable[[Any], int],
    ) -> None:
        self.chunk = chunk
        self.pack, self.unpack, self.size = pack, unpack, size
        self.kept: list[Any] = [None] * -(-like.numel() // chunk)

    def encode(self, x: Tensor) -> None:
        for place, part in enumerate(torch.split(x.view(-1), self.chunk)):
            self.kept[place] = self.pack(part)

    def decode(self, out: Tensor) -> Tensor:
        if len(self.kept) == 1:  # the result is a new tensor; copying it would only cost the rival time
            return self.unpack(self.kept[0]).view(out.shape)
        for part, kept in zip(torch.split(out.view(-1), self.chunk), self.kept, strict=True):
            part.copy_(self.unpack(kept).view(-1))
        return out

    def nbytes(self) -> int:
        return sum(self.size(kept) for kept in self.kept)
