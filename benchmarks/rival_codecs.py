"""The codecs that WeightGrad's are measured against, each doing one of the same jobs.

Three kinds. Expressions: what gradient compression research code writes in plain torch, on the
whole tensor, every step a new temporary. Chunks: the same arithmetic as fast as we could make it
without a kernel of its own, a piece at a time so that temporaries stay in the cache, results
preallocated, sixteen random bits an element from numpy's fastest generator instead of torch.rand,
torch's vectorized quantizer instead of a cast, the piece size tuned on the spot. Libraries:
bitsandbytes and hivemind, when they are installed, whole and in parts.

A rival counts the bytes it would have to send: codes, scales, indices. None of them checks for
NaN, frames its bytes or describes them; WeightGrad's rows pay for that.
"""

from __future__ import annotations

import importlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

BUCKET = 512  # elements that share a scale, as in WeightGrad's qsgd
CHUNKS = (1 << 16, 1 << 18)  # elements: 256 KB and 1 MB of float32
_RANDOM = np.random.Generator(np.random.SFC64(0))


@dataclass(frozen=True)
class Label:
    """What a row of the table is about. Rows of one job are compared by task; a comma adds a demand."""

    job: str
    task: str
    name: str
    library: str


class Coder(ABC):
    """Something that encodes a matrix, holds the result, and decodes it."""

    @abstractmethod
    def encode(self, x: Tensor) -> None:
        """Encode a float32 matrix and keep what would be sent."""

    @abstractmethod
    def decode(self, out: Tensor) -> Tensor:
        """What was kept as a tensor: `out`, or a new one where the library cannot fill one."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that would be sent."""


Maker = Callable[[Tensor, int], Coder]
"""maker(like, chunk): a fresh coder for tensors like this one; chunk is its piece size in elements."""


@dataclass(frozen=True)
class Rival:
    """A row's label, how to make its coder, and the piece sizes to try; none: the whole tensor."""

    label: Label
    make: Maker
    chunks: tuple[int, ...] = ()


class Pieces(Coder):
    """Arithmetic on flat pieces of the tensor, each stored for itself."""

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


class Residual(Coder):
    """Error feedback around pieces: h = x + residual, send C(h), residual = h - decoded."""

    def __init__(self, inner: Pieces, like: Tensor) -> None:
        self.inner = inner
        self.residual = torch.zeros(like.numel())
        self.room = torch.zeros(inner.chunk)

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
            sent = self.room[: held.numel()]
            inner.unpack(piece, sent)
            held.sub_(sent)

    def decode(self, out: Tensor) -> Tensor:
        return self.inner.decode(out)

    def nbytes(self) -> int:
        return self.inner.nbytes()


class Foreign(Coder):
    """Functions of a library: pack(part) -> anything, unpack(anything) -> tensor."""

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
        if len(self.kept) == 1:  # its result is a new tensor; a copy of it would only cost the rival time
            return self.unpack(self.kept[0]).view(out.shape)
        for part, kept in zip(torch.split(out.view(-1), self.chunk), self.kept, strict=True):
            part.copy_(self.unpack(kept).view(-1))
        return out

    def nbytes(self) -> int:
        return sum(self.size(kept) for kept in self.kept)


# --- Half precision ------------------------------------------------------------------------


class Cast(Coder):
    """The cast of PyTorch DDP's fp16_compress and bf16_compress hooks."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.half = torch.zeros(like.shape, dtype=dtype)

    def encode(self, x: Tensor) -> None:
        self.half.copy_(x)

    def decode(self, out: Tensor) -> Tensor:
        return out.copy_(self.half)

    def nbytes(self) -> int:
        return self.half.numel() * self.half.element_size()


# --- Levels: QSGD, TernGrad, rounding to nearest --------------------------------------------


class QsgdExpressions(Pieces):
    """QSGD on buckets with max norm: magnitude, lower level, torch.rand, sign, int8 or nibbles."""

    def __init__(self, like: Tensor, chunk: int, bits: int) -> None:
        super().__init__(like, chunk)
        self.bits, self.levels = bits, 2 ** (bits - 1) - 1
        self.codes, self.norms = torch.empty(0), torch.empty(0)

    def pack(self, piece: slice, x: Tensor) -> None:
        rows = x.view(-1, BUCKET)
        self.norms = rows.abs().amax(1, keepdim=True).clamp_(min=1e-30)
        level = rows.abs() / self.norms * self.levels
        lower = level.floor()
        level = lower + (torch.rand_like(level) < level - lower)
        codes = (level * rows.sign()).to(torch.int8)
        if self.bits == 4:
            pairs = (codes + self.levels).to(torch.uint8).view(-1, 2)
            codes = pairs[:, 0] | pairs[:, 1] << 4
        self.codes = codes

    def unpack(self, piece: slice, out: Tensor) -> None:
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), 1).to(torch.int8) - self.levels
        torch.mul(codes.view(-1, BUCKET), self.norms / self.levels, out=out.view(-1, BUCKET))

    def nbytes(self) -> int:
        return self.codes.numel() + 4 * self.norms.numel()


class TernGradExpressions(Pieces):
    """TernGrad: clip at 2.5 sigma, torch.bernoulli of |x|/s, times the sign, one int8 an element."""

    def __init__(self, like: Tensor, chunk: int) -> None:
        super().__init__(like, chunk)
        self.codes, self.scale = torch.empty(0), torch.empty(0)

    def pack(self, piece: slice, x: Tensor) -> None:
        limit = float(2.5 * x.std())
        clipped = x.clamp(-limit, limit)
        size = clipped.abs()
        self.scale = size.max()
        self.codes = (torch.bernoulli(size / self.scale) * clipped.sign()).to(torch.int8)

    def unpack(self, piece: slice, out: Tensor) -> None:
        torch.mul(self.codes, self.scale, out=out)

    def nbytes(self) -> int:
        return self.codes.numel() + 4


class Levels(Pieces):
    """x/scale + noise, cut to 2, 4 or 8 bits; codes of the parts of a piece share bytes.

    With `clip` one scale a tensor (TernGrad), otherwise one a bucket (QSGD). The first part of a
    piece is in the low bits of its bytes and the last in the high ones, so that packing is a
    vectorized add and unpacking a shift and a mask.
    """

    def __init__(self, like: Tensor, chunk: int, bits: int, *, stochastic: bool = True, clip: float = 0.0) -> None:
        super().__init__(like, chunk)
        n = like.numel()
        self.bits, self.levels, self.stochastic, self.clip = bits, 2 ** (bits - 1) - 1, stochastic, clip
        self.scans = clip > 0
        self.codes = torch.zeros(n * bits // 8, dtype=torch.uint8)
        self.scales = torch.zeros(1 if clip else n // BUCKET)
        self.scaled, self.noise = torch.zeros(self.chunk), torch.zeros(self.chunk)
        self.loose = torch.zeros(self.chunk, dtype=torch.uint8)

    def scan(self, flat: Tensor) -> None:
        if not self.clip:
            return
        total = squares = largest = 0.0
        for piece in self.pieces:
            x = flat[piece]
            low, high = torch.aminmax(x)
            total += float(x.sum())
            squares += float(torch.dot(x, x))
            largest = max(largest, -float(low), float(high))
        n = flat.numel()
        sigma = math.sqrt(max(0.0, squares / n - (total / n) ** 2))
        self.scales.fill_(min(self.clip * sigma, largest) / self.levels)

    def _scaled(self, piece: slice, x: Tensor) -> Tensor:
        scaled = self.scaled[: x.numel()]
        if self.clip:
            torch.mul(x, 1 / float(self.scales), out=scaled)
            return scaled.clamp_(-self.levels, self.levels)
        rows = scaled.view(-1, BUCKET)
        torch.abs(x, out=scaled)
        own = self.scales[piece.start // BUCKET : piece.stop // BUCKET]
        torch.amax(rows, 1, out=own)
        own.mul_(1 / self.levels).clamp_(min=1e-30)
        torch.mul(x.view(-1, BUCKET), own.reciprocal().view(-1, 1), out=rows)
        return scaled

    def pack(self, piece: slice, x: Tensor) -> None:
        scaled = self._scaled(piece, x)
        if self.stochastic:
            words = _RANDOM.integers(0, 2**64 - 1, x.numel() // 4, dtype=np.uint64, endpoint=True)
            noise = self.noise[: x.numel()].copy_(torch.from_numpy(words.view(np.int16)))
            scaled.add_(noise, alpha=2.0**-16)
        rounded = int8_bytes(torch.quantize_per_tensor(scaled, 1.0, self.levels, torch.quint8))
        codes = self.codes[piece.start * self.bits // 8 : piece.stop * self.bits // 8]
        if self.bits == 8:
            codes.copy_(rounded)
            return
        loose = rounded.view(8 // self.bits, -1)
        torch.add(loose[0], loose[1], alpha=1 << self.bits, out=codes)
        for place in range(2, 8 // self.bits):
            codes.add_(loose[place], alpha=1 << self.bits * place)

    def unpack(self, piece: slice, out: Tensor) -> None:
        codes = self.codes[piece.start * self.bits // 8 : piece.stop * self.bits // 8]
        last = 8 // self.bits - 1
        parts = out.view(last + 1, -1)
        loose = self.loose[: codes.numel()]
        for place in range(last + 1):
            part = codes
            if place:
                part = torch.bitwise_right_shift(part, self.bits * place, out=loose)
            if place < last:
                part = torch.bitwise_and(part, (1 << self.bits) - 1, out=loose)
            parts[place].copy_(torch.sub(part, self.levels, out=loose).view(torch.int8))
        if self.clip:
            out.mul_(float(self.scales))
        else:
            own = self.scales[piece.start // BUCKET : piece.stop // BUCKET]
            out.view(-1, BUCKET).mul_(own.view(-1, 1))

    def nbytes(self) -> int:
        return self.codes.numel() + 4 * self.scales.numel()


def int8_bytes(quantized: Tensor) -> Tensor:
    """The bytes of a quantized tensor, which int_repr() would copy."""
    return torch.empty(0, dtype=torch.uint8).set_(quantized.untyped_storage())[: quantized.numel()]


class PerTensor(Pieces):
    """Torch's own affine quantization to int8, symmetric, one scale a piece."""

    def __init__(self, like: Tensor, chunk: int) -> None:
        super().__init__(like, chunk)
        self.kept: dict[int, Tensor] = {}

    def pack(self, piece: slice, x: Tensor) -> None:
        low, high = torch.aminmax(x)
        scale = max(-float(low), float(high), 1e-30) / 127
        self.kept[piece.start] = torch.quantize_per_tensor(x, scale, 0, torch.qint8)

    def unpack(self, piece: slice, out: Tensor) -> None:
        kept = self.kept[piece.start]
        out.copy_(int8_bytes(kept).view(torch.int8)).mul_(kept.q_scale())

    def decode(self, out: Tensor) -> Tensor:
        if len(self.pieces) > 1:
            return super().decode(out)
        return self.kept[0].dequantize().view(out.shape)

    def nbytes(self) -> int:
        return sum(kept.numel() + 4 for kept in self.kept.values())


# --- One bit -------------------------------------------------------------------------------


class SignExpressions(Pieces):
    """signSGD with a mean magnitude: x >= 0 as one uint8 an element."""

    def __init__(self, like: Tensor, chunk: int) -> None:
        super().__init__(like, chunk)
        self.signs, self.scale = torch.empty(0), torch.empty(0)

    def pack(self, piece: slice, x: Tensor) -> None:
        self.signs = (x >= 0).to(torch.uint8)
        self.scale = x.abs().mean()

    def unpack(self, piece: slice, out: Tensor) -> None:
        out.copy_((self.signs.to(torch.float32) * 2 - 1) * self.scale)

    def nbytes(self) -> int:
        return self.signs.numel() + 4


class OneBitExpressions(Pieces):
    """One-bit SGD with boolean masks: the mean of what is negative and of what is not."""

    def __init__(self, like: Tensor, chunk: int) -> None:
        super().__init__(like, chunk)
        self.negative = torch.empty(0, dtype=torch.bool)
        self.means = (torch.zeros(()), torch.zeros(()))

    def pack(self, piece: slice, x: Tensor) -> None:
        self.negative = x < 0
        self.means = x[self.negative].mean(), x[~self.negative].mean()

    def unpack(self, piece: slice, out: Tensor) -> None:
        torch.where(self.negative, self.means[0], self.means[1], out=out)

    def nbytes(self) -> int:
        return self.negative.numel() + 8


class PackedSigns(Pieces):
    """Sign bits by numpy.packbits and two means of the whole tensor, or one mean magnitude.

    Both means come from three sums: of x, of |x|, and of the bits.
    """

    scans = True

    def __init__(self, like: Tensor, chunk: int, *, two_means: bool) -> None:
        super().__init__(like, chunk)
        self.two_means = two_means
        self.bits = np.zeros(like.numel() // 8, dtype=np.uint8)
        self.negative = torch.zeros(self.chunk, dtype=torch.bool)
        self.room = torch.zeros(self.chunk)
        self.low = self.high = 0.0

    def scan(self, flat: Tensor) -> None:
        total = size = 0.0
        below = 0
        for piece in self.pieces:
            x = flat[piece]
            room, negative = self.room[: x.numel()], self.negative[: x.numel()]
            size += float(torch.abs(x, out=room).sum())
            torch.lt(x, 0, out=negative)
            self.bits[piece.start // 8 : piece.stop // 8] = np.packbits(negative.numpy())
            if self.two_means:
                total += float(x.sum())
                below += int(torch.count_nonzero(negative))
        n = flat.numel()
        self.high = (size + total) / 2 / max(1, n - below) if self.two_means else size / n
        self.low = (total - size) / 2 / max(1, below) if self.two_means else -size / n

    def pack(self, piece: slice, x: Tensor) -> None:
        """The scan, which had the piece in the cache, wrote the bits already."""

    def unpack(self, piece: slice, out: Tensor) -> None:
        loose = np.unpackbits(self.bits[piece.start // 8 : piece.stop // 8])
        out.copy_(torch.from_numpy(loose)).mul_(self.low - self.high).add_(self.high)

    def nbytes(self) -> int:
        return self.bits.size + (8 if self.two_means else 4)


# --- Sparse --------------------------------------------------------------------------------


class Entries(Coder):
    """Values and indices of the entries a subclass chooses, with or without a residual."""

    def __init__(self, like: Tensor, index_dtype: torch.dtype, *, residual: bool) -> None:
        self.index_dtype = index_dtype
        self.residual = torch.zeros(like.numel()) if residual else None
        self.indices, self.values = torch.empty(0, dtype=index_dtype), torch.empty(0)

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

    def decode(self, out: Tensor) -> Tensor:
        out.zero_().view(-1).index_copy_(0, self.indices.to(torch.int64), self.values)
        return out

    def nbytes(self) -> int:
        return self.values.numel() * (4 + self.indices.element_size())


class TopK(Entries):
    """torch.topk of the magnitudes: exactly the k largest."""

    def __init__(self, like: Tensor, fraction: float, index_dtype: torch.dtype, *, residual: bool = False) -> None:
        super().__init__(like, index_dtype, residual=residual)
        self.k = max(1, round(fraction * like.numel()))
        self.magnitudes = torch.zeros(like.numel())

    def choose(self, held: Tensor) -> Tensor:
        return torch.topk(torch.abs(held, out=self.magnitudes), self.k, sorted=False).indices


class LocalTopK(Entries):
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


class SampledTopK(Entries):
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


class DgcExpressions(Entries):
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
        super().__init__(like, torch.int32, residual=False)
        self.chunk, self.fraction = chunk, fraction
        self.velocity, self.waiting = torch.zeros(like.numel()), torch.zeros(like.numel())
        self.magnitudes = torch.zeros(min(chunk, like.numel()))
        self.passes = torch.zeros(min(chunk, like.numel()), dtype=torch.bool)

    def choose(self, held: Tensor) -> Tensor:
        raise NotImplementedError("chooses while it accumulates, in encode")

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


def _bitsandbytes(found: Any) -> list[Rival]:
    functional = found.functional
    name = f"bitsandbytes {found.__version__}"

    def eight(block: int) -> Maker:
        return lambda like, chunk: Foreign(
            like,
            chunk,
            lambda part: functional.quantize_blockwise(part, blocksize=block),
            lambda kept: functional.dequantize_blockwise(*kept),
            lambda kept: kept[0].numel() + 4 * kept[1].absmax.numel(),
        )

    def four(kind: str, block: int) -> Maker:
        return lambda like, chunk: Foreign(
            like,
            chunk,
            lambda part: functional.quantize_4bit(part, quant_type=kind, blocksize=block),
            lambda kept: functional.dequantize_4bit(*kept),
            lambda kept: kept[0].numel() + 4 * kept[1].absmax.numel(),
        )

    table = [
        ("8 bit", "nearest", "quantize_blockwise(512)", eight(512)),
        ("8 bit", "nearest", "quantize_blockwise(4096)", eight(4096)),
        ("4 bit", "nearest, table", "quantize_4bit(fp4, 64)", four("fp4", 64)),
        ("4 bit", "nearest, table", "quantize_4bit(nf4, 64)", four("nf4", 64)),
        ("4 bit", "nearest, table", "quantize_4bit(nf4, 512)", four("nf4", 512)),
    ]
    return _whole_and_parts(table, name, CHUNKS)


def _hivemind(found: Any) -> list[Rival]:
    compression = found.compression
    name = f"hivemind {found.__version__}"

    def coder(kind: str) -> Maker:
        codec = getattr(compression, kind)()

        def make(like: Tensor, chunk: int) -> Coder:
            info = compression.CompressionInfo.from_tensor(like)
            return Foreign(
                like,
                chunk,
                lambda part: codec.compress(part, info),
                lambda kept: codec.extract(kept),
                lambda kept: len(kept.buffer),
            )

        return make

    kinds = {
        "Float16Compression": ("half precision", "fp16"),
        "Uniform8BitQuantization": ("8 bit", "nearest"),
        "Quantile8BitQuantization": ("8 bit", "nearest"),
        "BlockwiseQuantization": ("8 bit", "nearest"),
    }
    table = [(job, task, kind, coder(kind)) for kind, (job, task) in kinds.items()]
    return _whole_and_parts(table, name, (1 << 17, 1 << 18))  # its averager cuts parts of 2**19 bytes


def _whole_and_parts(
    table: Sequence[tuple[str, str, str, Maker]], library: str, chunks: tuple[int, ...]
) -> list[Rival]:
    rivals = []
    for job, task, name, make in table:
        rivals.append(Rival(Label(job, task, name, library), make))
        rivals.append(Rival(Label(job, task, f"{name}, parts", library), make, chunks))
    return rivals


def libraries(threads: int) -> tuple[list[Rival], list[str]]:
    """Rivals of the libraries that are installed, and a line about each that is not."""
    os.environ["QUANTIZATION_THREADS"] = str(threads)  # hivemind reads it once, when imported
    rivals, notes = [], []
    makers = {"bitsandbytes": _bitsandbytes, "hivemind": _hivemind}
    for name, maker in makers.items():
        try:
            rivals += maker(importlib.import_module(name))
        except ImportError as error:
            notes.append(f"{name} is not installed ({error}); its rows are left out")
        except Exception as error:  # an optional library must not stop the benchmark
            notes.append(f"{name} is installed and fails to import ({error}); its rows are left out")
    return rivals, notes


# --- The list ------------------------------------------------------------------------------


def torch_rivals() -> list[Rival]:
    """Casts, expressions and chunks: what needs only torch."""
    rivals: list[Rival] = []

    def add(job: str, task: str, name: str, make: Maker, chunks: tuple[int, ...] = ()) -> None:
        rivals.append(Rival(Label(job, task, name, "torch"), make, chunks))

    def residual(inner: Callable[[Tensor, int], Pieces]) -> Maker:
        return lambda like, chunk: Residual(inner(like, chunk), like)

    add("half precision", "fp16", "cast", lambda like, _: Cast(like, torch.float16))
    add("half precision", "bf16", "cast", lambda like, _: Cast(like, torch.bfloat16))
    add("8 bit", "stochastic", "qsgd expressions, int8", lambda like, c: QsgdExpressions(like, c, 8))
    add("8 bit", "stochastic", "qsgd chunks", lambda like, c: Levels(like, c, 8), CHUNKS)
    add("8 bit", "nearest", "quantize_per_tensor", PerTensor)
    add("8 bit", "nearest", "quantize_per_tensor, chunks", PerTensor, CHUNKS)
    add("8 bit", "nearest", "rounding chunks", lambda like, c: Levels(like, c, 8, stochastic=False), CHUNKS)

    def qsgd_whole(like: Tensor, chunk: int) -> Pieces:
        return QsgdExpressions(like, chunk, 4)

    def qsgd_chunks(like: Tensor, chunk: int) -> Pieces:
        return Levels(like, chunk, 4)

    add("4 bit", "stochastic", "qsgd expressions, packed", qsgd_whole)
    add("4 bit", "stochastic", "qsgd chunks", qsgd_chunks, CHUNKS)
    add("4 bit", "nearest", "rounding chunks", lambda like, c: Levels(like, c, 4, stochastic=False), CHUNKS)
    add("4 bit", "feedback", "qsgd expressions, residual", residual(qsgd_whole))
    add("4 bit", "feedback", "qsgd chunks, residual", residual(qsgd_chunks), CHUNKS)

    def ternary_chunks(like: Tensor, chunk: int) -> Pieces:
        return Levels(like, chunk, 2, clip=2.5)

    add("ternary", "stochastic", "terngrad expressions, int8", TernGradExpressions)
    add("ternary", "stochastic", "terngrad chunks, 2 bit", ternary_chunks, CHUNKS)
    add("ternary", "feedback", "terngrad expressions, residual", residual(TernGradExpressions))
    add("ternary", "feedback", "terngrad chunks, residual", residual(ternary_chunks), CHUNKS)

    def means_chunks(like: Tensor, chunk: int) -> Pieces:
        return PackedSigns(like, chunk, two_means=True)

    add("one bit", "sign", "signsgd expressions, uint8", SignExpressions)
    add("one bit", "sign", "signsgd chunks, packbits", lambda like, c: PackedSigns(like, c, two_means=False), CHUNKS)
    add("one bit", "means", "onebit masks", OneBitExpressions)
    add("one bit", "means", "onebit chunks, packbits", means_chunks, CHUNKS)
    add("one bit", "feedback", "onebit masks, residual", residual(OneBitExpressions))
    add("one bit", "feedback", "onebit chunks, residual", residual(means_chunks), CHUNKS)

    add("sparse", "top 1%", "topk, int64", lambda like, _: TopK(like, 0.01, torch.int64))
    add("sparse", "top 1%", "topk, int32", lambda like, _: TopK(like, 0.01, torch.int32))
    add("sparse", "about 1%", "topk of each chunk", lambda like, c: LocalTopK(like, c, 0.01), CHUNKS)
    add("sparse", "about 1%", "sampled threshold chunks", lambda like, c: SampledTopK(like, c, 0.01), CHUNKS)
    add("sparse", "top 1%, feedback", "topk, residual", lambda like, _: TopK(like, 0.01, torch.int32, residual=True))
    for name, kind in (("topk of each chunk, residual", LocalTopK), ("sampled threshold, residual", SampledTopK)):

        def about(like: Tensor, chunk: int, kind: Callable[..., Coder] = kind) -> Coder:
            return kind(like, chunk, 0.01, residual=True)

        add("sparse", "about 1%, feedback", name, about, CHUNKS)
    add("sparse", "dgc 0.1%", "dgc expressions, int64", lambda like, _: DgcExpressions(like, 0.001))
    add("sparse", "dgc 0.1%", "dgc chunks, int32", lambda like, c: DgcChunks(like, c, 0.001), CHUNKS)
    for task, feedback in (("plain", False), ("feedback", True)):
        for name, by_column in (("powersgd hook arithmetic", False), ("powersgd, by column", True)):

            def power(like: Tensor, _: int, feedback: bool = feedback, by_column: bool = by_column) -> Coder:
                return PowerSgd(like, 2, residual=feedback, by_column=by_column)

            add("low rank", task, f"{name}, error" if feedback else name, power)
    return rivals
