"""Adaptive quantization: the largest entries, each as the mean of its column.

Dryden et al., 2016. val = x + error; of the positive and of the negative values of the whole
matrix the fraction 1/pi of largest magnitude is kept (thresholds from a sample, then carried from
call to call while they keep between two thirds and one and a half times that); each column's
kept values are sent as their mean, one for each sign; an entry is fifteen bits of row and one
of sign. error = val - what was sent. Columns taller than 32,768 are tiled. A column of which
nothing is kept costs two bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs.codec import Benchmark, Codec, State, between, choose, flat32, joined, not_finite, state_tensor
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.registry import floats, register, sections, unpack_params
from weightgrad.codecs.spec import codec
from weightgrad.errors import BodyContentError
from weightgrad.kernels import csc, dense, fixed, noise, select
from weightgrad.kernels.columns import matrix_grid

PARAMS = "<QQ"  # entries, columns that have any
_SAMPLE = 1 << 14
_FEWEST, _MOST = 2 / 3, 3 / 2


@codec("adaptive")
@dataclass(frozen=True)
class Adaptive(Codec):
    """The largest 1/pi of the entries as column means, with error feedback."""

    encode_gb_s, decode_gb_s = 6.3, 11.9
    benchmarks = (Benchmark("adaptive(pi=64)", 0.5),)

    pi: float = 64
    feedback: bool = True

    def __post_init__(self) -> None:
        between("adaptive", "pi", self.pi, 1, 1e9)
        choose("adaptive", "feedback", self.feedback, (True, False))

    @property
    def carries_error(self) -> bool:
        """True unless `feedback=False` leaves the error to the caller."""
        return self.feedback

    def init(self, like: Tensor) -> State:
        """Make zeros for `residual`, what was to be sent, and for the means and thresholds of what was sent of it."""
        if not self.feedback:
            return {}
        grid = matrix_grid(tuple(like.shape))
        return {
            "residual": torch.zeros(like.numel(), dtype=torch.float32, device=like.device),
            "means": torch.zeros(grid.tiles, 2, grid.cols, dtype=torch.float32, device=like.device),
            "thresholds": torch.tensor([math.inf, -math.inf], dtype=torch.float32),
            "drift": torch.zeros((), dtype=torch.float32),
        }

    def error(self, like: Tensor, state: State) -> Tensor:
        """Work out the error that a state carries for tensors like this one."""
        return self._sent(state).lost(state["residual"], matrix_grid(tuple(like.shape))).view(like.shape)

    def _sent(self, state: State) -> select.Sent:
        above, below = state["thresholds"].tolist()
        return select.Sent(select.Thresholds(above, below), state["means"])

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        flat, grid = flat32(x), matrix_grid(tuple(x.shape))
        n = flat.numel()
        if not self.feedback:
            limits = self._thresholds(select.line_sample([flat], self._sample(n), noise.mix(key))[0])
            # `keep`: flat may be values that another scan has just listed (topk(...) > adaptive(...)).
            found = self._complete(lambda room: select.scan(None, flat, None, 0.0, limits, room, keep=True), n)
            if found.done < n:
                raise not_finite(flat)
            return self._pack(x, csc.columns_of(found.indices, found.values, grid, None), out), state
        residual = state_tensor(state, "residual", (n,), self, x)
        means = state_tensor(state, "means", (grid.tiles, 2, grid.cols), self, x)
        state_tensor(state, "thresholds", (2,), self)
        sent = self._sent(state)
        drift = float(state_tensor(state, "drift", (), self))
        sampled = None if drift else self._lazy_sample(flat, residual, sent, key)
        limits = sent.thresholds.scaled(drift) if sampled is None else self._thresholds(sampled)
        found = select.scan_columns(flat, residual, sent, grid, limits, self._room(n))
        if found.done < n:
            rest = sent.lost(residual, grid)
            residual[: found.done] -= flat[: found.done]
            residual[found.done :] = rest[found.done :]
            means.zero_()
            raise not_finite(flat)
        if drift and not _FEWEST <= found.total * self.pi / n <= _MOST:  # the gradient has changed its size
            limits = self._thresholds(select.line_sample([residual], self._sample(n), noise.mix(key))[0])
            found = select.scan(None, residual, None, 0.0, limits, self._room(n))
        found = self._complete(lambda room: select.scan(None, residual, None, 0.0, limits, room), n, found)
        columns = csc.columns_of(found.indices, found.values, grid, None)
        means.copy_(columns.means.view(grid.tiles, grid.cols, 2).transpose(1, 2))
        passed = torch.tensor([limits.above, limits.below], dtype=torch.float32)
        # Near the tail the count falls about with the tenth power of the threshold.
        kept = found.total * self.pi / max(1, n)
        drift = kept**0.1 if _FEWEST <= kept <= _MOST and bool(torch.isfinite(passed).all()) else 0.0
        new = {"residual": residual, "means": means, "thresholds": passed}
        return self._pack(x, columns, out), {**new, "drift": torch.tensor(drift, dtype=torch.float32)}

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: int, *, out: Tensor | None = None
    ) -> tuple[Payload, State]:
        """Encode with a residual of the caller's, which loses at once what is sent."""
        flat, n = flat32(x), x.numel()
        limits = self._thresholds(select.sample(flat, residual, None, 0.0, self._sample(n), noise.mix(key)))
        found = select.scan(flat, residual, None, 0.0, limits, self._room(n))
        if found.done < n:
            residual[: found.done] -= flat[: found.done]
            raise not_finite(flat)
        found = self._complete(lambda room: select.scan(None, residual, None, 0.0, limits, room), n, found)
        columns = csc.columns_of(found.indices, found.values, matrix_grid(tuple(x.shape)), residual)
        return self._pack(x, columns, out), state

    def _sample(self, n: int) -> int:
        return min(n, max(_SAMPLE, int(256 * self.pi)))

    def _room(self, n: int) -> int:
        return min(n, int(1.5 * n / self.pi) + 1024)

    def _complete(
        self, scan: Callable[[int], select.Selected], n: int, found: select.Selected | None = None
    ) -> select.Selected:
        """The scan's list, made again with more room if it did not fit."""
        found = scan(self._room(n)) if found is None else found
        return found if found.complete else scan(found.total)

    def _lazy_sample(self, flat: Tensor, residual: Tensor, sent: select.Sent, key: int) -> Tensor:
        """A sample of x + error, where the error of what was sent is taken as zero: it is small."""
        error, step = select.line_sample([residual, flat], self._sample(flat.numel()), noise.mix(key))
        gone = (error >= sent.thresholds.above) | (error <= sent.thresholds.below)
        return torch.where(gone, torch.zeros_like(error), error) + step

    def _thresholds(self, sample: Tensor) -> select.Thresholds:
        """tau+ and tau-: the magnitude above which 1/pi of each sign lies."""
        limits = []
        for part in (sample, -sample):
            positive = int((part > 0).sum())
            kept = max(1, round(positive / self.pi))
            # Positive floats order like their bits, above all negative ones.
            bits = select.kth_largest(part.view(torch.int32), kept) if positive else fixed.INFINITY_BITS
            limits.append(fixed.float_of_bits(bits))
        return select.Thresholds(limits[0], -limits[1])

    def _pack(self, x: Tensor, columns: csc.Columns, out: Tensor | None) -> Payload:
        means = columns.means[columns.counts > 0]
        parts = [means.view(-1), columns.counts.to(torch.int16), columns.entries]
        body = joined([part.contiguous().view(-1).view(torch.uint8) for part in parts], out)
        params = struct.pack(PARAMS, columns.entries.numel(), means.shape[0])
        return Payload("adaptive", x.dtype, tuple(x.shape), params, body)


@register("adaptive", 8, PARAMS, ("entries", "columns_used"))
def decode_adaptive(payload: Payload, out: Tensor, mode: int) -> None:
    """Means of the columns that have entries, count of every column (u16), entries (u16)."""
    entries, used = unpack_params(payload, PARAMS)
    grid = matrix_grid(payload.shape)
    slots = grid.tiles * grid.cols
    mean_bytes, count_bytes, entry_bytes = sections(payload, 8 * used, 2 * slots, 2 * entries)
    pairs = count_bytes.view(-1, 2).to(torch.int32)
    counts = pairs[:, 0] | pairs[:, 1] << 8
    some = counts > 0
    if int(counts.sum()) != entries or int(some.sum()) != used:
        raise BodyContentError("adaptive: the column counts do not add up to the entries and columns announced")
    means = torch.zeros(slots, 2, dtype=torch.float32, device=out.device)
    means[some] = floats(mean_bytes).view(-1, 2)
    codes = entry_bytes if entry_bytes.storage_offset() % 2 == 0 else entry_bytes.clone()
    placed = csc.entries_of(csc.Columns(counts, means, codes.view(torch.int16)), grid)
    if placed is None:
        raise BodyContentError("adaptive: an entry lies outside its column, or rows do not ascend")
    if mode == fixed.STORE:
        dense.clear(out)
    select.scatter(placed[0], placed[1], out, mode)
