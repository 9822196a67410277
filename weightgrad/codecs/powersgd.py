"""PowerSGD: a matrix as the product of two thin ones.

Vogels et al., 2019. M = x + error, seen as out x rest; one step of subspace iteration from the
last Q: P = orthonormal(M Q), Q = M^T P; sent are P and Q; error = M - P Q^T. What would not
become smaller (vectors, narrow matrices) is sent as it is. A matrix is decoded as a sum of
`rank` outer products in a fixed order, without BLAS, so that every site gets the same bits.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs.codec import (
    Benchmark,
    Codec,
    State,
    advance,
    between,
    choose,
    flat32,
    require_finite,
    state_tensor,
)
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.registry import decode_into, floats, register, sections, unpack_params
from weightgrad.codecs.spec import codec
from weightgrad.errors import EncodeError, ParamsError, RangeError
from weightgrad.kernels import dense, fixed, noise

PARAMS = "<Q"  # rank; 0: sent as it is


def _matrix(shape: tuple[int, ...], n: int) -> tuple[int, int]:
    rows = shape[0] if len(shape) >= 2 and shape[0] else n
    return rows, n // rows if rows else 0


@codec("powersgd")
@dataclass(frozen=True)
class PowerSgd(Codec):
    """Two thin matrices of this rank, with warm start and error feedback."""

    encode_gb_s, decode_gb_s = 2.4, 17.4
    benchmarks = (Benchmark("powersgd(rank=2)"),)

    rank: int = 2
    feedback: bool = True

    def __post_init__(self) -> None:
        between("powersgd", "rank", self.rank, 1, 4096, whole=True)
        choose("powersgd", "feedback", self.feedback, (True, False))

    @property
    def carries_error(self) -> bool:
        """True unless `feedback=False` leaves the error to the caller."""
        return self.feedback

    def _rank(self, shape: tuple[int, ...], n: int) -> int:
        rows, cols = _matrix(shape, n)
        rank = min(self.rank, rows, cols)
        return rank if rank * (rows + cols) < n else 0

    def init(self, like: Tensor) -> State:
        """Make the first Q, which is fixed noise, and a residual of zeros."""
        shape, n = tuple(like.shape), like.numel()
        rank, cols = self._rank(shape, n), _matrix(shape, n)[1]
        start = noise.noise16(noise.mix(n), 0, cols * rank, torch.device("cpu")).to(torch.float32)
        state = {"q": ((start - 32767.5) / 32768.0).view(cols if rank else 0, rank).to(like.device)}
        if self.feedback:
            state["residual"] = torch.zeros(n, dtype=torch.float32, device=like.device)
        return state

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """Encode with two products with the matrix, so that BLAS decides the speed; see Codec.encode."""
        if not self.feedback:
            return self._factor(x, flat32(x), state)
        residual = state_tensor(state, "residual", (x.numel(),), self, x)
        payload, new = self.encode_feedback(x, residual, state, key)
        return payload, {**new, "residual": residual}

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: int, *, out: Tensor | None = None
    ) -> tuple[Payload, State]:
        """Encode with a residual of the caller's."""
        flat = flat32(x)
        advance(residual, flat)
        try:
            payload, new = self._factor(x, residual, state)
        except EncodeError:
            residual -= flat
            raise
        decode_into(payload, residual, fixed.SUBTRACT)
        return payload, new

    def _factor(self, x: Tensor, flat: Tensor, state: State) -> tuple[Payload, State]:
        shape, n = tuple(x.shape), flat.numel()
        rank, (rows, cols) = self._rank(shape, n), _matrix(shape, n)
        q = state_tensor(state, "q", (cols if rank else 0, rank), self)
        if rank == 0:
            require_finite(flat)
            return Payload("lowrank", x.dtype, shape, struct.pack(PARAMS, 0), flat.clone().view(torch.uint8)), {"q": q}
        matrix = flat.view(rows, cols)
        p = torch.linalg.qr(_product(matrix, q, flat)).Q
        q = _product(matrix.t(), p, flat)
        body = torch.cat((p.reshape(-1), q.reshape(-1))).view(torch.uint8)
        return Payload("lowrank", x.dtype, shape, struct.pack(PARAMS, rank), body), {"q": q.contiguous()}


def _product(matrix: Tensor, thin: Tensor, flat: Tensor) -> Tensor:
    """matrix @ thin as (thin^T @ matrix^T)^T, which BLAS does up to forty times faster for few columns.

    A NaN or Inf in the matrix reaches the product, so no pass of its own is needed to find it.
    """
    product = (thin.t().contiguous() @ matrix.t()).t()
    if not bool(torch.isfinite(product).all()):
        require_finite(flat)
        raise RangeError("powersgd: the products of these values overflow float32; scale the tensor down")
    return product


@register("lowrank", 10, PARAMS, ("rank",))
def decode_lowrank(payload: Payload, out: Tensor, mode: int) -> None:
    """Decode P (rows x rank) and Q (columns x rank), row by row; or the elements themselves when rank is 0."""
    (rank,) = unpack_params(payload, PARAMS)
    n = payload.numel
    rows, cols = _matrix(payload.shape, n)
    if rank > min(rows, cols):
        raise ParamsError(f"lowrank: rank {rank} of a {rows} x {cols} matrix")
    if rank == 0:
        (body,) = sections(payload, 4 * n)
        fixed.put(out, floats(body), mode)
        return
    p_bytes, q_bytes = sections(payload, 4 * rows * rank, 4 * cols * rank)
    p, q = floats(p_bytes).view(rows, rank), floats(q_bytes).view(cols, rank).t().contiguous()
    dense.lowrank(p, q, out, mode)
