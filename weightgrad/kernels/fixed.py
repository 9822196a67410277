"""The fixed-point arithmetic that every quantizer shares: the reference implementation of csrc/scalar.h."""

from __future__ import annotations

import struct
import threading
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

STORE, ADD, SUBTRACT = 0, 1, -1
INFINITY_BITS = 0x7F800000
MAX_SCRATCH = 1 << 26  # bytes a thread keeps under one name
CHUNK = 1 << 18  # elements a reference implementation works on at a time: its temporaries stay in the cache


_scratch = threading.local()


def scratch(name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory of this thread, shaped like a tensor and used again by the next call with this name.

    A fresh megabyte costs several times the work on it, because the allocator gives it back to the system. Use it only
    for what does not outlive one chunk of one reference implementation.
    """
    dtype = dtype or like.dtype
    if like.numel() * dtype.itemsize > MAX_SCRATCH:
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    buffers: dict[object, Tensor] = _scratch.__dict__.setdefault("buffers", {})
    key = (name, dtype, like.device)
    if key not in buffers or buffers[key].numel() < like.numel():
        buffers[key] = torch.empty(like.numel(), dtype=dtype, device=like.device)
    return buffers[key][: like.numel()].view(like.shape)


def noise_room(h: Tensor) -> Tensor:
    """Return room for the noise of a chunk; see noise.noise16."""
    return scratch("noise", h.new_empty(1).expand(2 * (h.numel() + 16)), torch.int32)


def magnitude_bits(x: Tensor) -> Tensor:
    """Return the bits of |x| as int32: they order like the magnitudes, NaN and Inf on top."""
    return x.view(torch.int32) & 0x7FFFFFFF


def largest_bits(x: Tensor) -> int:
    """Return the largest of magnitude_bits of a chunk that is not empty."""
    return int(torch.bitwise_and(x.view(torch.int32), 0x7FFFFFFF, out=scratch("sizes", x, torch.int32)).max())


_COMPARISONS = {
    "<": (np.less, torch.lt),
    "<=": (np.less_equal, torch.le),
    ">": (np.greater, torch.gt),
    ">=": (np.greater_equal, torch.ge),
}


def compared(x: Tensor, how: str, limit: float, name: str) -> Tensor:
    """Say where x < limit (or <=, >, >=), in scratch memory. NumPy takes a fifth of torch's time for it."""
    out = scratch(name, x, torch.bool)
    on_cpu, anywhere = _COMPARISONS[how]
    if x.device.type == "cpu":
        values = x.numpy()
        on_cpu(values, values.dtype.type(limit), out=out.numpy())
        return out
    return anywhere(x, limit, out=out)


def count_at_least(x: Tensor, limit: int) -> int:
    """Count the values of an integer tensor that are at least `limit`. NumPy takes a tenth of torch's time for it."""
    if x.device.type == "cpu":
        return int(np.count_nonzero(x.numpy() >= limit))
    return int((x >= limit).sum())


def float_of_bits(bits: int) -> float:
    """Return the float32 with these bits."""
    found: tuple[float] = struct.unpack("<f", struct.pack("<i", bits))
    return found[0]


def put(out: Tensor, value: Tensor, mode: int) -> None:
    """Store the value in `out`, add it or subtract it, as `mode` says."""
    if mode == STORE:
        out.copy_(value)
    elif mode == ADD:
        out += value
    else:
        out -= value


class Ruler(NamedTuple):
    """From floats to 16.16 fixed point levels: y = x * before * inverse; value = level * scale."""

    before: Tensor
    inverse: Tensor
    scale: Tensor


def ruler(norm: Tensor, levels: int) -> Ruler:
    """Make one ruler for each norm; wg_make_ruler says why the inverse is one step lower."""
    tiny = (norm < 2.0**-100) & (norm > 0)
    before = torch.where(tiny, torch.full_like(norm, 2.0**64), torch.ones_like(norm))
    inverse = torch.full_like(norm, float(levels * 65536)) / (norm * before)
    after_step = (inverse.view(torch.int32) - 1).view(torch.float32)
    zero = torch.zeros_like(norm)
    return Ruler(before, torch.where(norm > 0, after_step, zero), norm / torch.full_like(norm, float(levels)))


def level_of(h: Tensor, rule: Ruler, levels: int, noise: Tensor | int, *, clamp: bool) -> Tensor:
    """Return the level index 0 .. 2*levels of each element, int32, in scratch memory."""
    y = scratch("level", h)
    if bool((rule.before != 1.0).any()):
        torch.mul(h, rule.before, out=y)
        y *= rule.inverse
    else:  # one pass less, and the same floats
        torch.mul(h, rule.inverse, out=y)
    if clamp:
        y.clamp_(-float(levels * 65536), float(levels * 65536))
    code = scratch("code", h, torch.int32)
    code.copy_(y.round_())
    code += levels * 65536
    code += noise
    code >>= 16
    return code


def fold_lanes(lanes: Tensor) -> Tensor:
    """Halve the last dimension until it is one wide: lane i takes lane i + half."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def add_rows(rows: Tensor) -> Tensor:
    """Sum over the second to last dimension, in order, from zero."""
    total = torch.zeros_like(rows[..., 0, :])
    for row in rows.unbind(-2):
        total += row
    return total


def add_groups(rows: Tensor, group: int) -> Tensor:
    """Sum as add_rows does, but `group` rows at a time first and then those sums, in order."""
    missing = -rows.shape[-2] % group
    if missing:
        rows = torch.cat((rows, rows.new_zeros(*rows.shape[:-2], missing, rows.shape[-1])), dim=-2)
    return add_rows(add_rows(rows.unflatten(-2, (-1, group))))


def block_sums(values: Tensor, block: int) -> Tensor:
    """Sum (n,) doubles for each block, by the tree in csrc/units.h; n is whole blocks."""
    lanes = add_rows(values.view(-1, block // 256, 256))
    return fold_lanes(add_rows(lanes.view(-1, 16, 16)))


def padded(x: Tensor, multiple: int) -> Tensor:
    """Put zeros behind x up to a multiple."""
    missing = -x.numel() % multiple
    return x if missing == 0 else torch.cat((x, x.new_zeros(missing)))
