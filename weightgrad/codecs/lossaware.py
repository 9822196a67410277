"""Loss-aware weights: few values, chosen to disturb the loss least.

Hou & Kwok, 2017, 2018. With D the curvature (Adam's sqrt(v) + 1e-8), find the scale a and the
levels b that minimise sum D*(w - a*b)**2:

    binary    b = sign(w),                         a = sum D|w| / sum D
    ternary   b = sign(w) where |w| > a/2,         a = sum_kept D|w| / sum_kept D
    m bits    b = round(clip(w/a, -1, 1)*L)/L,     a = sum D*b*w / sum D*b*b     L = 2**(m-1) - 1

Ternary, exact: the kept entries are the j largest for the j that maximises
(sum D|w|)**2 / sum D, found by sorting. Otherwise: the exact solution of a sample is the start,
and whole passes alternate between b and a until the scale moves by less than half a percent
(the objective is flat there: it differs from the exact one in the fifth digit). The published
histogram variant did not win (docs/log.md). The scale is always the true weighted least squares
one for the levels sent. One scale a tensor, or one a row.

The curvature is an argument of `encode`; without it D = 1. With `fisher` it is squared: D = v, the
diagonal of the empirical Fisher information, instead of its root. Biased, and meant for weights.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs.codec import Benchmark, Codec, State, choose, flat32, require_finite
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.qsgd import UNIFORM
from weightgrad.codecs.sign import SIGN
from weightgrad.codecs.spec import codec
from weightgrad.codecs.terngrad import TERNARY
from weightgrad.errors import EncodeError, RangeError, SpecError
from weightgrad.kernels import bits as bitstream
from weightgrad.kernels import bucket, columns, fixed, select, ternary

_LEAST = 2.0**-126  # of a curvature that can be divided by
_SAMPLE = 1 << 14
_ROUNDS = 10
_TOLERANCE = 5e-3
_MANY_LEVELS = 31  # 6 bits and more


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def exact_ternary(w: Tensor, d: Tensor) -> Tensor:
    """Find the best scale for each row of (rows, n) weights and curvatures, by sorting."""
    size, order = torch.sort(w.abs().double(), dim=1, descending=True)
    weight = d.double().gather(1, order)
    mass = torch.cumsum(weight, 1)
    moment = torch.cumsum(weight * size, 1)
    best = (moment * moment / mass.clamp(min=1e-300)).argmax(1, keepdim=True)
    return (moment / mass.clamp(min=1e-300)).gather(1, best)[:, 0].float()


def alternate_levels(w: Tensor, d: Tensor, levels: int) -> Tensor:
    """Find the scale of one level for each row of (rows, n), from the best of several starts."""
    counts = torch.where(d > 0, w.abs(), torch.zeros_like(w))
    unit = torch.exp2(torch.frexp(counts.amax(1, keepdim=True)).exponent.float()).clamp(2.0**-126, 2.0**126)
    w = w / unit  # a power of two: no square overflows
    top = counts.amax(1, keepdim=True) / unit
    best = torch.zeros_like(top)
    least = torch.full_like(top, float("inf"), dtype=torch.float64)
    many = levels >= _MANY_LEVELS  # cutting off the tail gains nothing then, and few rounds settle it
    for share in (1.0, 0.8) if many else (1.0, 0.8, 0.6, 0.45, 0.3):
        alpha = top * share
        for _ in range(3 if many else _ROUNDS):
            b = _levels(w, alpha, levels)
            db = d * b
            step = (db * w).double().sum(1, keepdim=True) / (db * b).double().sum(1, keepdim=True).clamp(min=1e-300)
            alpha = step.float() * levels
        b = _levels(w, alpha, levels)
        error = (d * (w - b * (alpha / levels)) ** 2).double().sum(1, keepdim=True)
        better = error < least
        best, least = torch.where(better, alpha, best), torch.where(better, error, least)
    return (best * unit)[:, 0] / levels


def _levels(w: Tensor, alpha: Tensor, levels: int) -> Tensor:
    rule = fixed.ruler(alpha, levels)
    return (fixed.level_of(w, rule, levels, 0x8000, clamp=True) - levels).to(torch.float32)


@codec("lossaware")
@dataclass(frozen=True)
class LossAware(Codec):
    """Binary, ternary or m-bit weights that disturb the loss least."""

    encode_gb_s, decode_gb_s = 1.1, 17.5
    benchmarks = (
        Benchmark("lossaware(bits='ternary')", 0.25, 1.4),
        Benchmark("lossaware(bits=1)"),
        Benchmark("lossaware(bits=4)", 0.25),
    )

    bits: int | str = "ternary"
    exact: bool = False
    per: str = "tensor"
    fisher: bool = False

    def __post_init__(self) -> None:
        choose("lossaware", "bits", self.bits, ("ternary", 1, 2, 3, 4, 5, 6, 7, 8))
        choose("lossaware", "exact", self.exact, (True, False))
        choose("lossaware", "per", self.per, ("tensor", "row"))
        choose("lossaware", "fisher", self.fisher, (True, False))
        if self.exact and self.bits not in (1, "ternary"):
            raise SpecError("lossaware: exact=True is for ternary weights (binary ones are always exact)")

    def encode(
        self, x: Tensor, state: State, key: int, *, out: Tensor | None = None, curvature: Tensor | None = None
    ) -> tuple[Payload, State]:
        """Encode weights; see Codec.encode.

        Args:
            x: The weights.
            state: Empty.
            key: Not used.
            out: Not used.
            curvature: D, not negative, of the same shape; None is one everywhere.

        Returns:
            The payload, and the state.

        Raises:
            EncodeError: Weights or curvature are not finite, or the curvature is negative or of another shape.
        """
        w = flat32(x)
        d = None if curvature is None else flat32(curvature)
        if d is not None and (curvature is None or curvature.shape != x.shape):
            raise EncodeError(f"curvature must be shaped like the weights {list(x.shape)}, got {list(d.shape)}")
        if d is not None and self.fisher and d.numel():
            _require_good(w, d)  # a square would hide a sign
            d = (d / d.max().clamp(min=_LEAST)).square_()  # only ratios count, and none overflows
        rows = x.shape[0] if self.per == "row" and x.dim() >= 2 and x.numel() else 1
        group = max(1, w.numel() // rows)
        encode = self._rows if rows > 1 else self._tensor
        name, params, body = encode(w, d, group)
        return Payload(name, x.dtype, tuple(x.shape), params, body), state

    # One scale a tensor: passes of the kernels.

    def _tensor(self, w: Tensor, d: Tensor | None, group: int) -> tuple[str, bytes, Tensor]:
        if self.bits == 1:
            alpha = _checked(ternary.kept_sums(w, d, -1.0), w, d)
            return "sign", struct.pack(SIGN, group), _body([alpha] if w.numel() else [], _sign_bits(w))
        if self.bits == "ternary":
            return self._ternary_tensor(w, d, group)
        return self._level_tensor(w, d, group, int(self.bits))

    def _ternary_tensor(self, w: Tensor, d: Tensor | None, group: int) -> tuple[str, bytes, Tensor]:
        codes = torch.empty(ternary.packed_bytes(w.numel()), dtype=torch.uint8, device=w.device)
        params = struct.pack(TERNARY, group)
        if w.numel() == 0:
            return "ternary", params, codes
        if self.exact:
            some, weights, rounds = w, _ones(w, d), 1
        else:
            some, weights = _sample(w, d)
            rounds = _ROUNDS
        alpha = float(exact_ternary(some[None], weights[None])[0])
        for _ in range(rounds):
            threshold = _float32(alpha / 2)
            before, alpha = alpha, _checked(ternary.kept_sums(w, d, threshold), w, d)
            if abs(alpha - before) <= _TOLERANCE * before:
                break
        ternary.threshold_codes(w, threshold, codes)
        return "ternary", params, _body([alpha], codes)

    def _level_tensor(self, w: Tensor, d: Tensor | None, group: int, width: int) -> tuple[str, bytes, Tensor]:
        n, levels, stored = w.numel(), 2 ** (width - 1) - 1, width if width in (2, 3, 4) else 8
        params = struct.pack(UNIFORM, width, group)
        codes = torch.empty(-(-n * stored // 8), dtype=torch.uint8, device=w.device)
        if n == 0:
            return "uniform", params, codes
        some, weights = _sample(w, d)
        step = float(alternate_levels(some[None], weights[None], levels)[0])
        for _ in range(_ROUNDS):
            ruler_step = _float32(step)
            alpha = _float32(ruler_step * levels)
            before, step = step, _checked(ternary.level_sums(w, d, alpha, levels), w, d)
            if abs(step - before) <= _TOLERANCE * before:
                break
        scale = torch.tensor([ruler_step], dtype=torch.float32, device=w.device)
        spec = bucket.BucketSpec(-(-n // 32) * 32, stored, levels, "given", False)
        bucket.quantize(w, None, spec, 0, codes, scale)
        if stored != width:
            codes = bitstream.pack(codes, width)
        return "uniform", params, _body([step], codes)

    # One scale a row: all rows at once.

    def _rows(self, w: Tensor, d: Tensor | None, group: int) -> tuple[str, bytes, Tensor]:
        _require_good(w, d)
        table, weights = w.view(-1, group), _ones(w, d).view(-1, group)
        if self.bits == 1:
            alpha = (weights * table.abs()).double().sum(1) / weights.double().sum(1).clamp(min=1e-300)
            return "sign", struct.pack(SIGN, group), _body(alpha, _sign_bits(w))
        if self.bits == "ternary":
            alpha = exact_ternary(table, weights)
            kept = table.abs() > (alpha / 2)[:, None]
            trits = torch.where(kept, 1 + torch.sign(table), torch.ones_like(table)).to(torch.uint8)
            mass = torch.where(kept, weights, torch.zeros_like(weights)).double()
            scale = (mass * table.abs()).sum(1) / mass.sum(1).clamp(min=1e-300)
            return "ternary", struct.pack(TERNARY, group), _body(scale, ternary.pack_trits(trits.view(-1)))
        width = int(self.bits)
        levels = 2 ** (width - 1) - 1
        alpha = alternate_levels(table, weights, levels)[:, None] * levels
        b = _levels(table, alpha, levels)
        db = weights * b
        scale = (db * table).double().sum(1) / (db * b).double().sum(1).clamp(min=1e-300)
        codes = bitstream.pack((b.view(-1) + levels).to(torch.uint8), width)
        return "uniform", struct.pack(UNIFORM, width, group), _body(scale, codes)


def _checked(sums: ternary.WeightedSums, w: Tensor, d: Tensor | None) -> float:
    """Return the least squares scale; raise an error that names the element where something is not finite."""
    if not sums.finite:
        _require_good(w, d)
    if not math.isfinite(sums.first) or not math.isfinite(sums.ratio):
        raise _too_large()
    return sums.ratio


def _too_large() -> RangeError:
    return RangeError("lossaware: weights times curvature overflow float32; scale one of them down")


def _require_good(w: Tensor, d: Tensor | None) -> None:
    require_finite(w)
    if d is not None:
        require_finite(d)
        if d.numel() and float(d.min()) < 0:
            raise EncodeError(f"curvature must not be negative: element {int(d.argmin())} is {float(d.min())}")


def _sample(w: Tensor, d: Tensor | None) -> tuple[Tensor, Tensor]:
    """Take weights and curvatures at the same sampled places."""
    some = select.line_sample([w] if d is None else [w, d], _SAMPLE, w.numel())
    return some[0], _ones(some[0], None) if d is None else some[1]


def _ones(w: Tensor, d: Tensor | None) -> Tensor:
    return torch.ones_like(w) if d is None else d


def _sign_bits(w: Tensor) -> Tensor:
    packed = torch.empty(-(-w.numel() // 8), dtype=torch.uint8, device=w.device)
    columns.signs(w, packed)
    return packed


def _body(scales: Tensor | list[float], codes: Tensor) -> Tensor:
    head = torch.as_tensor(scales, dtype=torch.float64).to(codes.device, torch.float32)
    if not bool(torch.isfinite(head).all()):
        raise _too_large()
    return torch.cat((head.view(torch.uint8), codes))
