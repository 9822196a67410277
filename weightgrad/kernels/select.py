"""Selection of the largest entries, with what error feedback and momentum need on the way.

    velocity given:  velocity = momentum*velocity + x;  h = residual + velocity
    x given:         h = residual + x
    neither:         h = residual

`residual` becomes h, and the entries with h >= above or h <= below are listed in order.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weightgrad.kernels import fixed, gpu, native, noise
from weightgrad.kernels.columns import Grid

BLOCK = 1024
_PATTERNS = 8
MAX_SCRATCH = 1 << 18  # entries that a thread keeps room for: 3 MB
_FEW = 1 << 12  # values of which NumPy selects one quickly, whatever they are
_DIGITS = ((21, 11), (10, 11), (0, 10))  # shift and width of the digits of an int32
_COUNTED = 1 << 18  # values that are counted at a time: bincount copies them
_LINE = 16  # a sample is a cache line of floats: one miss for sixteen of them


@dataclass(frozen=True)
class Thresholds:
    """Keep h >= above or h <= below."""

    above: float
    below: float

    def scaled(self, factor: float) -> Thresholds:
        """Multiply both by a factor, in float32, so that what is compared is what is remembered."""
        both = torch.tensor([self.above * factor, self.below * factor], dtype=torch.float32).tolist()
        return Thresholds(both[0], both[1])

    def passed(self, h: Tensor) -> Tensor:
        """Return the places of what is kept, in order."""
        kept = fixed.compared(h, ">=", self.above, "above").logical_or_(fixed.compared(h, "<=", self.below, "below"))
        if h.device.type == "cpu":  # NumPy takes a fifth of torch's time
            return torch.from_numpy(np.flatnonzero(kept.numpy()))
        return kept.nonzero().view(-1)

    @classmethod
    def magnitude(cls, value: float) -> Thresholds:
        """Keep |h| >= value."""
        return cls(value, -value)


class Selected(NamedTuple):
    """Entries in order, valid until the thread's next scan.

    `total` is how many there were; the list is cut at the room given.
    """

    indices: Tensor  # int64
    values: Tensor  # float32
    total: int
    done: int  # elements seen: fewer than all when a block holds a NaN or Inf

    @property
    def complete(self) -> bool:
        """Whether everything found is listed."""
        return self.total == self.indices.numel()


def scan(
    x: Tensor | None,
    residual: Tensor,
    velocity: Tensor | None,
    momentum: float,
    thresholds: Thresholds,
    room: int,
    *,
    clear: bool = False,
    keep: bool = False,
) -> Selected:
    """Advance `residual` (and `velocity`) by x and list what lies beyond the thresholds.

    A block of 1,024 elements with a NaN or Inf ends the scan and is left untouched.

    Args:
        x: What is added, or None.
        residual: Flat float32; h is written to it.
        velocity: Flat float32 with momentum, or None.
        momentum: Factor of the velocity.
        thresholds: Which entries are listed.
        room: How many entries the list may hold.
        clear: The entries that are listed become zero in `residual`.
        keep: The list survives the thread's next scan.

    Returns:
        The entries, how many there were in all, and how many elements were seen.
    """
    lib = native.library_for(residual)
    if (kernels := gpu.kernels_for(residual, "select")) is not None:
        selected: Selected = kernels.scan(x, residual, velocity, momentum, thresholds, room, clear)
        return selected
    if lib is None:
        return _scan_reference(x, residual, velocity, momentum, thresholds, room, clear)
    found = _Room(room, keep)
    selection = native.Selection(thresholds.above, thresholds.below, momentum, int(clear), room)
    count: int = lib.wg_scan(
        native.pointer(x),
        residual.data_ptr(),
        native.pointer(velocity),
        residual.numel(),
        ctypes.byref(selection),
        *found.pointers,
    )
    return found.selected(count)


class Sent(NamedTuple):
    """How the last selection of a matrix was sent: means (tiles, 2, cols), and the thresholds it passed."""

    thresholds: Thresholds
    means: Tensor

    def lost(self, residual: Tensor, grid: Grid) -> Tensor:
        """Return the residual without what was sent, in a new tensor."""
        return torch.cat(
            [residual[:0], *(self._lost_part(residual, grid, *piece).clone() for piece in self._pieces(grid))]
        )

    def _pieces(self, grid: Grid) -> list[tuple[int, int, int]]:
        """(tile, start, stop) of whole rows that fit the cache."""
        step = max(1, fixed.CHUNK // grid.cols) if grid.cols else 1
        ends = [(t, t * grid.tile, min(grid.rows, (t + 1) * grid.tile)) for t in range(grid.tiles)]
        return [
            (tile, row * grid.cols, min(stop, row + step) * grid.cols)
            for tile, start, stop in ends
            for row in range(start, stop, step)
        ]

    def _lost_part(self, residual: Tensor, grid: Grid, tile: int, start: int, stop: int) -> Tensor:
        """A part of the residual without what was sent, in scratch memory. Few entries were sent: each is visited."""
        h = fixed.scratch("lost", residual[start:stop]).copy_(residual[start:stop])
        places = self.thresholds.passed(h)
        values = h[places]
        column = places % grid.cols
        up = values >= self.thresholds.above
        h[places] = values - torch.where(up, self.means[tile, 0][column], self.means[tile, 1][column])
        return h

    def scan_reference(self, x: Tensor, residual: Tensor, grid: Grid, thresholds: Thresholds, room: int) -> Selected:
        """The reference implementation of wg_scan_columns."""
        lists: list[tuple[Tensor, Tensor]] = []
        count = done = 0
        for tile, start, stop in self._pieces(grid):
            before = self._lost_part(residual, grid, tile, start, stop)
            found = _scan_reference(x[start:stop], before, None, 0.0, thresholds, max(0, room - count), False)
            residual[start : start + found.done] = before[: found.done]
            lists.append((found.indices + start, found.values))
            count, done = count + found.total, start + found.done
            if done < stop:
                break
        indices = torch.cat([part[0] for part in lists]) if lists else torch.empty(0, dtype=torch.int64)
        return Selected(indices, torch.cat([residual[:0], *(part[1] for part in lists)]), count, done)


def scan_columns(x: Tensor, residual: Tensor, sent: Sent, grid: Grid, thresholds: Thresholds, room: int) -> Selected:
    """Scan a residual from which the last selection has not been taken out yet; see `scan`."""
    lib = native.library_for(residual)
    if lib is None:
        return sent.scan_reference(x, residual, grid, thresholds, room)
    found_room = _Room(room, False)
    selection = native.Selection(thresholds.above, thresholds.below, 0.0, 0, room)
    old = native.Sent(
        sent.thresholds.above, sent.thresholds.below, grid.rows, grid.cols, grid.tile, sent.means.data_ptr()
    )
    count: int = lib.wg_scan_columns(
        x.data_ptr(), residual.data_ptr(), ctypes.byref(old), ctypes.byref(selection), *found_room.pointers
    )
    return found_room.selected(count)


_scratch = threading.local()


class _Room:
    """Where the native scans list what they find: memory of this thread, used again by its next scan.

    Fresh memory would cost as much as the scan.
    """

    def __init__(self, room: int, keep: bool) -> None:
        if keep or room > MAX_SCRATCH:
            self.indices = torch.empty(room, dtype=torch.int64)
            self.values = torch.empty(room, dtype=torch.float32)
        else:
            if getattr(_scratch, "room", -1) < room:
                _scratch.room = room
                _scratch.indices = torch.empty(room, dtype=torch.int64)
                _scratch.values = torch.empty(room, dtype=torch.float32)
            self.indices, self.values = _scratch.indices[:room], _scratch.values[:room]
        self.done = ctypes.c_uint64()
        self.pointers = (self.indices.data_ptr(), self.values.data_ptr(), ctypes.byref(self.done))

    def selected(self, count: int) -> Selected:
        listed = min(self.indices.numel(), count)
        return Selected(self.indices[:listed], self.values[:listed], count, self.done.value)


def kth_largest(sizes: Tensor, k: int) -> int:
    """Return the k-th largest of int32 values, k from 1 on.

    Values are counted digit by digit, because a partition takes ten times as long where most values are equal, as after
    a codec of signs.
    """
    n = sizes.numel()
    lib = native.library_for(sizes)
    if lib is not None and sizes.is_contiguous():
        return int(lib.wg_kth_largest(sizes.data_ptr(), n, k))
    if sizes.device.type != "cpu":
        return int(torch.kthvalue(sizes, n - k + 1).values)
    values = sizes.numpy()
    return int(np.partition(values, n - k)[n - k]) if n <= _FEW else _kth_by_digits(values, k)


def _kth_by_digits(values: np.ndarray[Any, np.dtype[np.int32]], k: int) -> int:
    """The k-th largest, found from its upper digits to its lower ones among the values that share them."""
    rest, found = values, 0
    for shift, width in _DIGITS:
        counts = np.zeros(1 << width, dtype=np.int64)
        for start in range(0, rest.size, _COUNTED):
            counts += np.bincount(_digits(rest[start : start + _COUNTED], shift, width), minlength=1 << width)
        from_largest = np.cumsum(counts[::-1])
        place = int(np.searchsorted(from_largest, k))
        digit = (1 << width) - 1 - place
        k -= int(from_largest[place - 1]) if place else 0
        rest = rest[_digits(rest, shift, width) == digit]
        found = found << width | digit
    return found - (1 << 31)


def _digits(
    values: np.ndarray[Any, np.dtype[np.int32]], shift: int, width: int
) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """So many bits of each value, in the order of the values: negative ones come first."""
    ordered = values.view(np.uint32) ^ np.uint32(1 << 31)
    found: np.ndarray[Any, np.dtype[np.uint32]] = (ordered >> np.uint32(shift)) & np.uint32((1 << width) - 1)
    return found


def keep_largest(indices: Tensor, values: Tensor, k: int, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Keep the k entries of largest magnitude, in order; of equals, the first. Consumes its input.

    With `residual`, the entries that are not kept are written back there.
    """
    n = indices.numel()
    if k >= n:
        return indices, values
    sizes = torch.bitwise_and(values.view(torch.int32), 0x7FFFFFFF, out=fixed.scratch("sizes", values, torch.int32))
    lib = native.library_for(indices)
    if lib is not None:
        limit = fixed.INFINITY_BITS
        if k:
            limit = kth_largest(sizes, k)
        # One more than there are: the loop writes before it knows.
        others = torch.empty(n - k + 1, dtype=torch.int64), torch.empty(n - k + 1, dtype=torch.float32)
        lib.wg_keep_largest(
            indices.data_ptr(), values.data_ptr(), n, k, limit, others[0].data_ptr(), others[1].data_ptr()
        )
        if residual is not None:
            scatter(others[0][:-1], others[1][:-1], residual)
        return indices[:k], values[:k]
    limit = kth_largest(sizes, k) if k else fixed.INFINITY_BITS
    equal = sizes == limit
    kept = (sizes > limit) | (equal & (torch.cumsum(equal, 0) <= k - int((sizes > limit).sum())))
    if residual is not None:
        residual[indices[~kept]] = values[~kept]
    return indices[kept], values[kept]


def scatter(indices: Tensor, values: Tensor | None, out: Tensor, mode: int = fixed.STORE, *, first: int = 0) -> None:
    """Write values to out[indices - first], as `mode` says; without values, zeros. Indices are distinct."""
    if first and (out.device.type != "cpu" or native.library_for(out) is None):
        indices, first = indices - first, 0
    lib = native.library_for(out)
    if (kernels := gpu.kernels_for(out, "select")) is not None:
        kernels.scatter(indices, values, out, mode)
    elif lib is not None:
        start = out.data_ptr() - 4 * first
        lib.wg_scatter(indices.data_ptr(), native.pointer(values), indices.numel(), mode, start)
    elif values is None:
        out[indices] = 0.0
    elif mode == fixed.STORE:
        out[indices] = values
    elif mode == fixed.ADD:
        out[indices] = out[indices] + values
    else:
        out[indices] = out[indices] - values


@functools.lru_cache(maxsize=64)
def _lines(lines: int, wanted: int, pattern: int) -> Tensor:
    place = noise.noise16(noise.mix(pattern), 0, wanted, torch.device("cpu")).to(torch.int64)
    first = torch.arange(wanted, dtype=torch.int64) * lines // wanted
    return first + place * (lines // wanted) // 65536


def line_sample(tensors: list[Tensor], size: int, key: int) -> list[Tensor]:
    """Take about `size` elements of each of these flat tensors, from the same places in all.

    The sample is one line from each of as many equal strata, at a hashed place, in one of eight patterns that the key
    chooses: two encoders with the same key take the same sample on any device. Tensors that are not larger than the
    sample are returned whole.
    """
    lines, wanted = tensors[0].numel() // _LINE, size // _LINE
    if lines <= wanted:
        return list(tensors)
    chosen = _lines(lines, wanted, key % _PATTERNS).to(tensors[0].device)
    return [t[: lines * _LINE].view(lines, _LINE).index_select(0, chosen).view(-1) for t in tensors]


def sample(x: Tensor | None, residual: Tensor, velocity: Tensor | None, momentum: float, size: int, key: int) -> Tensor:
    """Take about `size` of the values h that `scan` would see."""
    given = [t for t in (residual, x, velocity) if t is not None]
    h, *steps = line_sample(given, size, key)
    if not steps:
        return h
    return h + (steps[0] if velocity is None else momentum * steps[1] + steps[0])


def _scan_reference(
    x: Tensor | None,
    residual: Tensor,
    velocity: Tensor | None,
    momentum: float,
    thresholds: Thresholds,
    room: int,
    clear: bool,
) -> Selected:
    n, count, done = residual.numel(), 0, residual.numel()
    mu = torch.full((), momentum, dtype=torch.float32, device=residual.device)  # no copy from the host
    found: list[tuple[Tensor, Tensor]] = []
    for start in range(0, n, fixed.CHUNK):
        stop = min(n, start + fixed.CHUNK)
        h, speed = residual[start:stop], None
        if x is not None:
            speed = x[start:stop]
            if velocity is not None:
                speed = mu * velocity[start:stop] + speed
            h = torch.add(h, speed, out=fixed.scratch("sum", h))
        if fixed.largest_bits(h) >= fixed.INFINITY_BITS:
            bad = fixed.magnitude_bits(h) >= fixed.INFINITY_BITS
            done = start + int(bad.int().argmax()) // BLOCK * BLOCK
            h = h[: done - start]
        if x is not None:
            residual[start : start + h.numel()] = h
            if velocity is not None and speed is not None:
                velocity[start : start + h.numel()] = speed[: h.numel()]
        places = thresholds.passed(h)
        if count < room:
            listed = places[: room - count]
            found.append((listed + start, h[listed].clone()))
            if clear:
                residual[listed + start] = 0.0
        count += places.numel()
        if done < stop:
            break
    if not found:
        nothing = torch.empty(0, dtype=torch.int64, device=residual.device)
        return Selected(nothing, residual[:0], count, done)
    return Selected(torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found]), count, done)
