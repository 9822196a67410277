"""Sparse and low-rank rivals."""

from __future__ import annotations

from abc import abstractmethod

import torch
from codec_rivals.coder import Coder
from torch import Tensor


class Entries(Coder):
    """Values and indices of the entries that were sent."""

    def __init__(self, index_dtype: torch.dtype) -> None:
        self.indices, self.values = torch.empty(0, dtype=index_dtype), torch.empty(0)

    def decode(self, out: Tensor) -> Tensor:
        out.zero_().view(-1).index_copy_(0, self.indices.to(torch.int64), self.values)
        return out

    def nbytes(self) -> int:
        return self.values.numel() * (4 + self.indices.element_size())


class Chosen(Entries):
    """The entries that a subclass chooses, with or without a residual."""

    def __init__(self, like: Tensor, index_dtype: torch.dtype, *, residual: bool) -> None:
        super().__init__(index_dtype)
        self.index_dtype = index_dtype
        self.residual = torch.zeros(like.numel()) if residual else None

    @abstractmethod
    def choose(self, held: Tensor) -> Tensor:
        """Indices (int64) of the entries of a flat tensor to send."""

    def encode(self, x: Tensor) -> None:
        held = x.view(-1) if self.residual is None else self.residual.add_(x.view(-1))
        chosen = self.choose(held)
        self.values = held[chosen]
        self.indices = chosen.to(self.index_dtype)
        if self.residual is not None:
            self.residual.index_fill_(0, chosen, 0.0)


class TopK(Chosen):
    """torch.topk of the magnitudes: exactly the k largest."""

    def __init__(self, like: Tensor, fraction: float, index_dtype: torch.dtype, *, residual: bool = False) -> None:
        super().__init__(like, index_dtype, residual=residual)
        self.k = max(1, round(fraction * like.numel()))
        self.magnitudes = torch.zeros(like.numel())

    def choose(self, held: Tensor) -> Tensor:
        return torch.topk(torch.abs(held, out=self.magnitudes), self.k, sorted=False).indices


class LocalTopK(Chosen):
    """torch.topk of every piece for itself: about the k largest, never a whole-tensor selection."""

    def __init__(self, like: Tensor, chunk: int, fraction: float, *, residual: bool = False) -> None:
        super().__init__(like, torch.int32, residual=residual)
        self.chunk, self.fraction = chunk, fraction
        self.magnitudes = torch.zeros(min(chunk, like.numel()))

    def choose(self, held: Tensor) -> Tensor:
        chosen = []
        for place, part in enumerate(torch.split(held, self.chunk)):
            size = torch.abs(part, out=self.magnitudes[: part.numel()])
            k = max(1, round(self.fraction * part.numel()))
            chosen.append(torch.topk(size, k, sorted=False).indices.add_(place * self.chunk))
        return torch.cat(chosen)


def sampled_threshold(magnitudes: Tensor, fraction: float) -> float:
    """The magnitude that this fraction of a sample reaches."""
    k = max(1, round(fraction * magnitudes.numel()))
    return float(torch.topk(magnitudes, k, sorted=False).values.min())


class SampledTopK(Chosen):
    """A threshold from every 97th magnitude, then what passes it, a piece at a time."""

    def __init__(self, like: Tensor, chunk: int, fraction: float, *, residual: bool = False) -> None:
        super().__init__(like, torch.int32, residual=residual)
        self.chunk, self.fraction = chunk, fraction
        self.magnitudes = torch.zeros(min(chunk, like.numel()))
        self.passes = torch.zeros(min(chunk, like.numel()), dtype=torch.bool)

    def choose(self, held: Tensor) -> Tensor:
        threshold = sampled_threshold(held[::97].abs(), self.fraction)
        chosen = []
        for place, part in enumerate(torch.split(held, self.chunk)):
            size = torch.abs(part, out=self.magnitudes[: part.numel()])
            passes = torch.ge(size, threshold, out=self.passes[: part.numel()])
            chosen.append(passes.nonzero().view(-1).add_(place * self.chunk))
        return torch.cat(chosen)


class DgcExpressions(Chosen):
    """Deep gradient compression on the whole tensor: momentum, accumulator, sampled threshold, masks."""

    momentum = 0.9

    def __init__(self, like: Tensor, fraction: float) -> None:
        super().__init__(like, torch.int64, residual=False)
        self.fraction = fraction
        self.velocity, self.waiting = torch.zeros(like.numel()), torch.zeros(like.numel())

    def choose(self, held: Tensor) -> Tensor:
        size = held.abs()
        sample = size[torch.randint(0, held.numel(), (max(1, held.numel() // 100),))]
        return (size >= sampled_threshold(sample, self.fraction)).nonzero().view(-1)

    def encode(self, x: Tensor) -> None:
        self.velocity = self.momentum * self.velocity + x.view(-1)
        self.waiting = self.waiting + self.velocity
        self.indices = self.choose(self.waiting)
        self.values = self.waiting[self.indices]
        self.velocity[self.indices] = 0
        self.waiting[self.indices] = 0


class DgcChunks(Entries):
    """The same in one pass over pieces, in place, the threshold from every 97th element beforehand."""

    momentum = 0.9

    def __init__(self, like: Tensor, chunk: int, fraction: float) -> None:
        super().__init__(torch.int32)
        self.chunk, self.fraction = chunk, fraction
        self.velocity, self.waiting = torch.zeros(like.numel()), torch.zeros(like.numel())
        self.magnitudes = torch.zeros(min(chunk, like.numel()))
        self.passes = torch.zeros(min(chunk, like.numel()), dtype=torch.bool)

    def encode(self, x: Tensor) -> None:
        flat = x.view(-1)
        ahead = self.velocity[::97] * self.momentum + flat[::97] + self.waiting[::97]
        threshold = sampled_threshold(ahead.abs_(), self.fraction)
        indices, values = [], []
        for start in range(0, flat.numel(), self.chunk):
            piece = slice(start, start + self.chunk)
            velocity, waiting = self.velocity[piece], self.waiting[piece]
            velocity.mul_(self.momentum).add_(flat[piece])
            size = torch.abs(waiting.add_(velocity), out=self.magnitudes[: waiting.numel()])
            chosen = torch.ge(size, threshold, out=self.passes[: waiting.numel()]).nonzero().view(-1)
            values.append(waiting[chosen])
            velocity.index_fill_(0, chosen, 0.0)
            waiting.index_fill_(0, chosen, 0.0)
            indices.append(chosen.add_(start))
        self.indices, self.values = torch.cat(indices).to(torch.int32), torch.cat(values)


# --- Low rank ------------------------------------------------------------------------------


class PowerSgd(Coder):
    """The arithmetic of PyTorch's powerSGD hook: P = M Q, orthogonalize, Q = M^T P, decode P Q^T.

    The hook keeps P and Q row by row, and BLAS is slow to write M^T P that way; `by_column`
    keeps them column by column, which the hook does not do and its users would like.
    """

    def __init__(self, like: Tensor, rank: int, *, residual: bool, by_column: bool) -> None:
        rows, cols = like.shape
        self.p, self.q = torch.zeros(rows, rank), torch.randn(cols, rank)
        if by_column:
            self.p, self.q = torch.zeros(rank, rows).t(), torch.randn(rank, cols).t()
        self.error = torch.zeros_like(like) if residual else None

    def encode(self, x: Tensor) -> None:
        matrix = x if self.error is None else self.error.add_(x)
        torch.mm(matrix, self.q, out=self.p)
        self.p.copy_(torch.linalg.qr(self.p).Q)
        torch.mm(matrix.t(), self.p, out=self.q)
        if self.error is not None:
            self.error.addmm_(self.p, self.q.t(), alpha=-1)

    def decode(self, out: Tensor) -> Tensor:
        return torch.mm(self.p, self.q.t(), out=out)

    def nbytes(self) -> int:
        return 4 * (self.p.numel() + self.q.numel())


# --- Libraries -----------------------------------------------------------------------------
