"""Dense rivals: casts, quantizers and signs, as expressions and in chunks."""

from __future__ import annotations

import math

import numpy as np
import torch
from codec_rivals.coder import BUCKET, Coder, Pieces
from torch import Tensor

_RANDOM = np.random.Generator(np.random.SFC64(0))


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
