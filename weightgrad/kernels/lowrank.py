"""A matrix from two thin ones, in a fixed order of operations: no BLAS, the same floats everywhere."""

from __future__ import annotations

from torch import Tensor

from weightgrad.kernels import fixed, native


def lowrank(p: Tensor, q: Tensor, out: Tensor, mode: int = fixed.STORE) -> None:
    """out (rows*cols,) (mode)= p (rows, rank) @ q (rank, cols); products added in the order of the rank."""
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
