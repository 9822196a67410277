"""Dense tensors: casts to float16 and bfloat16 (rounded to nearest even) and back, zeros, weights plus a share of a
residual, Nesterov momentum, low-rank products."""

from __future__ import annotations

import torch
from torch import Tensor

from weightgrad.kernels import fixed, native, threads
from weightgrad.kernels.moments import largest_bits

_KINDS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 17}


def narrow(x: Tensor, out: Tensor) -> int:
    """Cast x to the dtype of `out`, into `out`; return the bits of the largest |x|."""
    lib = native.library_for(x)
    if lib is None or not lib.wg_isa():  # torch's own casts; a chunk at a time, while it is in the cache
        top = 0
        for start in range(0, x.numel(), fixed.CHUNK):
            piece = x[start : start + fixed.CHUNK]
            out[start : start + fixed.CHUNK] = piece
            top = max(top, largest_bits(piece))
        return top

    def work(start: int, stop: int) -> int:
        at = out.data_ptr() + start * out.dtype.itemsize
        return int(lib.wg_narrow(x.data_ptr() + 4 * start, stop - start, _KINDS[out.dtype], at))

    return max(threads.run_split(x.numel(), 16, work))


def widen(x: Tensor, out: Tensor, mode: int = fixed.STORE) -> None:
    """Cast x to float32 and write it to `out`, as `mode` says."""
    lib = native.library_for(out)
    if lib is None or not lib.wg_isa():
        for start in range(0, out.numel(), fixed.CHUNK):
            piece = slice(start, start + fixed.CHUNK)
            fixed.put(out[piece], x[piece].to(torch.float32), mode)
        return

    def work(start: int, stop: int) -> None:
        at = x.data_ptr() + start * x.dtype.itemsize
        lib.wg_widen(at, stop - start, _KINDS[x.dtype], mode, out.data_ptr() + 4 * start)

    threads.run_split(out.numel(), 16, work)


def clear(out: Tensor) -> None:
    """Fill `out` with zeros."""
    lib = native.library_for(out)
    if lib is None:
        out.zero_()
        return
    threads.run_split(out.numel(), 16, lambda start, stop: lib.wg_clear(out.data_ptr() + 4 * start, stop - start))


def reference(weights: Tensor, residual: Tensor | None, share: float, out: Tensor) -> Tensor:
    """Write weights + share * residual to `out`, in one pass; product and sum are rounded one after the other."""
    lib = native.library_for(out)
    if lib is not None:
        lib.wg_reference(weights.data_ptr(), native.pointer(residual), share, out.numel(), out.data_ptr())
    elif residual is None:
        out.copy_(weights)
    else:
        torch.mul(residual, share, out=out)
        out += weights
    return out


def distance(local: Tensor, weights: Tensor, residual: Tensor | None, share: float, out: Tensor) -> Tensor:
    """Write local - (weights + share * residual) to `out`, in one pass; `out` has memory of its own."""
    lib = native.library_for(out)
    if lib is not None:
        where = (local.data_ptr(), weights.data_ptr(), native.pointer(residual))
        lib.wg_distance(*where, share, out.numel(), out.data_ptr())
        return out
    return torch.sub(local, reference(weights, residual, share, out), out=out)


def nesterov(total: Tensor, weight: float, velocity: Tensor, momentum: float, lr: float) -> Tensor:
    """One step of an outer optimizer with Nesterov momentum, in one pass.

        mean = total / weight;  velocity = momentum * velocity + mean;  total = lr * (mean + momentum * velocity)

    Args:
        total: The sum of the updates, flat float32; becomes the step.
        weight: What the sum is divided by.
        velocity: Changed in place.
        momentum: Of the velocity.
        lr: The learning rate.

    Returns:
        `total`.
    """
    lib = native.library_for(total)
    if lib is not None and total.is_contiguous() and velocity.is_contiguous():
        lib.wg_nesterov(total.data_ptr(), weight, velocity.data_ptr(), momentum, lr, total.numel())
        return total
    total.div_(weight)
    velocity.mul_(momentum).add_(total)
    total += velocity * momentum
    return total.mul_(lr)


def lowrank(p: Tensor, q: Tensor, out: Tensor, mode: int = fixed.STORE) -> None:
    """Write p (rows, rank) @ q (rank, cols) to `out` (rows*cols,), as `mode` says.

    Products are added in the order of the rank, without BLAS, so that every machine gets the same floats.
    """
    (rows, rank), cols = p.shape, q.shape[1]
    lib = native.library_for(out)
    if lib is not None:
        lib.wg_lowrank(p.data_ptr(), q.data_ptr(), rows, cols, rank, mode, out.data_ptr())
        return
    step = max(1, fixed.CHUNK // cols)
    for start in range(0, rows, step):
        some = p[start : start + step]
        total = some[:, :1] * q[:1]
        for k in range(1, rank):
            total += some[:, k : k + 1] * q[k : k + 1]
        fixed.put(out[start * cols : (start + some.shape[0]) * cols], total.view(-1), mode)
