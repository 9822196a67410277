"""Adaptive quantization: the largest entries, each as the mean of its column.

Dryden et al., 2016. val = x + error; of the positive and of the negative values of the whole
matrix the fraction 1/pi of largest magnitude is kept (thresholds from a sample); each column's
kept values are sent as their mean, one for each sign; an entry is fifteen bits of row and one
of sign. error = val - what was sent. Columns taller than 32,768 are tiled. A column of which
nothing is kept costs two bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs.codec import Codec, State, between, choose, flat32, not_finite, state_tensor
from weightgrad.codecs.matrix import matrix_grid
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.registry import floats, register, sections, unpack_params
from weightgrad.codecs.spec import codec
from weightgrad.errors import BodyContentError
from weightgrad.kernels import csc as kernel
from weightgrad.kernels import fixed, noise, select

PARAMS = "<QQ"  # entries, columns that have any
_SAMPLE = 1 << 16


@codec("adaptive")
@dataclass(frozen=True)
class Adaptive(Codec):
    """The largest 1/pi of the entries as column means, with error feedback (Dryden)."""

    pi: float = 64
    feedback: bool = True

    def __post_init__(self) -> None:
        between("adaptive", "pi", self.pi, 1, 1e9)
        choose("adaptive", "feedback", self.feedback, (True, False))

    @property
    def carries_error(self) -> bool:
        """Unless told otherwise."""
        return self.feedback

    def init(self, like: Tensor) -> State:
        """The error: what was not sent."""
        if not self.feedback:
            return {}
        return {"residual": torch.zeros(like.numel(), dtype=torch.float32, device=like.device)}

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode. The body's size is not known beforehand, so `out` is not used."""
        if not self.feedback:
            flat = flat32(x)
            return self._encode(x, None, flat, key, keep_error=False), state
        residual = state_tensor(state, "residual", (x.numel(),), self)
        return self._encode(x, flat32(x), residual, key, keep_error=True), state

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: int, *, out: Tensor | None = None
    ) -> tuple[Payload, State]:
        """With a residual of the caller's."""
        return self._encode(x, flat32(x), residual, key, keep_error=True), state

    def _thresholds(self, step: Tensor | None, held: Tensor, key: int) -> select.Thresholds:
        """tau+ and tau- from a sample: the magnitude above which 1/pi of each sign lies."""
        size = min(held.numel(), max(_SAMPLE, int(1024 * self.pi)))
        sample = select.sample(step, held, None, 0.0, size, noise.mix(key ^ 0x5A))
        limits = []
        for part in (sample[sample > 0], -sample[sample < 0]):
            kept = round(part.numel() / self.pi)
            if part.numel() == 0:
                limits.append(float("inf"))
            else:
                rank = part.numel() - max(1, kept) + 1
                limits.append(float(torch.kthvalue(part, rank).values))
        return select.Thresholds(limits[0], -limits[1])

    def _encode(self, x: Tensor, step: Tensor | None, held: Tensor, key: int, *, keep_error: bool) -> Payload:
        grid = matrix_grid(tuple(x.shape))
        n = held.numel()
        if n:
            thresholds = self._thresholds(step, held, key)
            room = min(n, int(2 * n / self.pi) + 1024)
            found = select.scan(step, held, None, 0.0, thresholds, room)
            if found.done < n:
                if step is not None:
                    held[: found.done] -= step[: found.done]
                raise not_finite(flat32(x))
            if not found.complete:
                found = select.scan(None, held, None, 0.0, thresholds, found.count)
            indices, values = found.indices, found.values
        else:
            indices, values = torch.empty(0, dtype=torch.int64), torch.empty(0)
        columns = kernel.columns_of(indices, values, grid, held if keep_error else None)
        used = columns.counts > 0
        means = columns.means[used]
        parts = [means.view(-1), columns.counts.to(torch.int16), columns.entries]
        body = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
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
    placed = kernel.entries_of(kernel.Columns(counts, means, codes.view(torch.int16)), grid)
    if placed is None:
        raise BodyContentError("adaptive: an entry lies outside its column, or rows do not ascend")
    if mode == fixed.STORE:
        out.zero_()
    select.scatter(placed[0], placed[1], out, mode)
