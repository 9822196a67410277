"""Selection of the largest entries, with what error feedback and momentum need on the way.

    velocity given:  velocity = momentum*velocity + x;  h = held + velocity
    x given:         h = held + x
    neither:         h = held

`held` becomes h, and the entries with h >= above or h <= below are listed in order.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weightgrad.kernels import fixed, native, noise

BLOCK = 1024
_LINE = 16  # a sample is a cache line of floats: one miss for sixteen of them


@dataclass(frozen=True)
class Thresholds:
    """Keep h >= above or h <= below."""

    above: float
    below: float

    @classmethod
    def magnitude(cls, value: float) -> Thresholds:
        """Keep |h| >= value."""
        return cls(value, -value)


class Selected(NamedTuple):
    """Entries in order. `count` is how many there were; the list is cut at the room given."""

    indices: Tensor  # int64
    values: Tensor  # float32
    count: int
    done: int  # elements seen: fewer than all when a block holds a NaN or Inf

    @property
    def complete(self) -> bool:
        """Whether everything found is listed."""
        return self.count == self.indices.numel()


def scan(
    x: Tensor | None,
    held: Tensor,
    velocity: Tensor | None,
    momentum: float,
    thresholds: Thresholds,
    room: int,
) -> Selected:
    """Advance `held` (and `velocity`) by x and list what lies beyond the thresholds.

    A block of 1,024 elements with a NaN or Inf ends the scan and is left untouched.
    """
    lib = native.library_for(held)
    if lib is None:
        return _scan_twin(x, held, velocity, momentum, thresholds, room)
    indices = torch.empty(room, dtype=torch.int64)
    values = torch.empty(room, dtype=torch.float32)
    selection = native.Selection(thresholds.above, thresholds.below, momentum, 0, room)
    done = ctypes.c_uint64()
    count: int = lib.wg_scan(
        native.pointer(x),
        held.data_ptr(),
        native.pointer(velocity),
        held.numel(),
        ctypes.byref(selection),
        indices.data_ptr(),
        values.data_ptr(),
        ctypes.byref(done),
    )
    listed = min(room, count)
    return Selected(indices[:listed], values[:listed], count, done.value)


def keep_largest(indices: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k entries of largest magnitude, in order; of equals, the first. Consumes its input."""
    n = indices.numel()
    if k >= n:
        return indices, values
    if k == 0:
        return indices[:0], values[:0]
    lib = native.library_for(indices)
    if lib is not None:
        lib.wg_keep_largest(indices.data_ptr(), values.data_ptr(), n, k)
        return indices[:k], values[:k]
    sizes = fixed.magnitude_bits(values)
    limit = torch.kthvalue(sizes, n - k + 1).values
    larger = sizes > limit
    equal = sizes == limit
    quota = k - int(larger.sum())
    kept = larger | (equal & (torch.cumsum(equal, 0) <= quota))
    return indices[kept], values[kept]


def scatter(indices: Tensor, values: Tensor | None, out: Tensor, mode: int = fixed.STORE) -> None:
    """out[indices] (mode)= values; without values, zeros. Indices are distinct."""
    lib = native.library_for(out)
    if lib is not None:
        lib.wg_scatter(indices.data_ptr(), native.pointer(values), indices.numel(), mode, out.data_ptr())
    elif values is None:
        out[indices] = 0.0
    elif mode == fixed.STORE:
        out[indices] = values
    elif mode == fixed.ADD:
        out[indices] = out[indices] + values
    else:
        out[indices] = out[indices] - values


def line_sample(tensors: list[Tensor], size: int, key: int) -> list[Tensor]:
    """About `size` elements of each of these flat tensors, the same places in all.

    One line from each of as many equal strata, at a hashed place: two encoders with the same key
    take the same sample on any device. The tensors themselves when they are not larger than that.
    """
    lines, wanted = tensors[0].numel() // _LINE, size // _LINE
    if lines <= wanted:
        return list(tensors)
    place = noise.noise16(key, 0, wanted, torch.device("cpu")).to(torch.int64)
    first = torch.arange(wanted, dtype=torch.int64) * lines // wanted
    chosen = (first + place * (lines // wanted) // 65536).to(tensors[0].device)
    return [t[: lines * _LINE].view(lines, _LINE).index_select(0, chosen).view(-1) for t in tensors]


def sample(
    x: Tensor | None, held: Tensor, velocity: Tensor | None, momentum: float, size: int, key: int
) -> Tensor:
    """About `size` of the values h that `scan` would see."""
    given = [t for t in (held, x, velocity) if t is not None]
    h, *steps = line_sample(given, size, key)
    if not steps:
        return h
    return h + (steps[0] if velocity is None else momentum * steps[1] + steps[0])


def _scan_twin(
    x: Tensor | None,
    held: Tensor,
    velocity: Tensor | None,
    momentum: float,
    thresholds: Thresholds,
    room: int,
) -> Selected:
    n, count, done = held.numel(), 0, held.numel()
    mu = torch.tensor(momentum, dtype=torch.float32, device=held.device)
    found: list[tuple[Tensor, Tensor]] = []
    for start in range(0, n, fixed.CHUNK):
        stop = min(n, start + fixed.CHUNK)
        h, speed = held[start:stop], None
        if x is not None:
            speed = x[start:stop]
            if velocity is not None:
                speed = mu * velocity[start:stop] + speed
            h = h + speed
        bad = fixed.magnitude_bits(h) >= fixed.INFINITY_BITS
        if bool(bad.any()):
            done = start + int(bad.int().argmax()) // BLOCK * BLOCK
            h = h[: done - start]
        if x is not None:
            held[start : start + h.numel()] = h
            if velocity is not None and speed is not None:
                velocity[start : start + h.numel()] = speed[: h.numel()]
        places = ((h >= thresholds.above) | (h <= thresholds.below)).nonzero().view(-1)
        if count < room:
            listed = places[: room - count]
            found.append((listed + start, h[listed]))
        count += places.numel()
        if done < stop:
            break
    if not found:
        return Selected(torch.empty(0, dtype=torch.int64), torch.empty(0), count, done)
    return Selected(torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found]), count, done)
