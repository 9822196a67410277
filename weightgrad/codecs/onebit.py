"""One-bit SGD: the sign of each element and two means a column.

Seide et al., 2014. val = x + error; in each column the mean of the non-negative values and the
mean of the negative ones; one bit says which; error = val - that mean. It does not train without
error feedback, so the codec has its own by default; `feedback=False` leaves it to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs.codec import Benchmark, Codec, State, body_room, choose, flat32, not_finite, state_tensor
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.registry import floats, register, sections, unpack_params
from weightgrad.codecs.spec import codec
from weightgrad.kernels import columns as kernel
from weightgrad.kernels import fixed
from weightgrad.kernels.columns import matrix_grid


def onebit_sizes(grid: kernel.Grid) -> tuple[int, int]:
    """Bytes of (means, bits)."""
    return 8 * grid.tiles * grid.cols, -(-grid.rows * grid.cols // 8)


@codec("onebit")
@dataclass(frozen=True)
class OneBit(Codec):
    """A sign an element and two means a column, with error feedback."""

    encode_gb_s, decode_gb_s = 8.3, 19.0
    benchmarks = (Benchmark("onebit()", 0.55, 1.4),)

    feedback: bool = True

    def __post_init__(self) -> None:
        choose("onebit", "feedback", self.feedback, (True, False))

    @property
    def carries_error(self) -> bool:
        """True unless `feedback=False` leaves the error to the caller."""
        return self.feedback

    def init(self, like: Tensor) -> State:
        """Make zeros for `residual`, what was to be sent, and the means; the next call works out the error."""
        if not self.feedback:
            return {}
        grid = matrix_grid(tuple(like.shape))
        return {
            "residual": torch.zeros(like.numel(), dtype=torch.float32, device=like.device),
            "means": torch.zeros(grid.tiles, 2, grid.cols, dtype=torch.float32, device=like.device),
        }

    def error(self, like: Tensor, state: State) -> Tensor:
        """Work out the error that a state carries for tensors like this one."""
        return kernel.lost(state["residual"], state["means"], matrix_grid(tuple(like.shape))).view(like.shape)

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        if not self.feedback:
            return self._encode(x, None, None, out)[0], state
        grid = matrix_grid(tuple(x.shape))
        residual = state_tensor(state, "residual", (x.numel(),), self, x)
        old = state_tensor(state, "means", (grid.tiles, 2, grid.cols), self, x)
        payload, means = self._encode(x, residual, old, out)
        old.copy_(means)
        return payload, {"residual": residual, "means": old}

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: int, *, out: Tensor | None = None
    ) -> tuple[Payload, State]:
        """Encode with a residual of the caller's, which loses at once what is sent."""
        grid = matrix_grid(tuple(x.shape))
        nothing = torch.zeros(grid.tiles, 2, grid.cols, dtype=torch.float32, device=residual.device)
        payload, means = self._encode(x, residual, nothing, out)
        bits = payload.body[onebit_sizes(grid)[0] :]
        kernel.onebit_decode(bits, means, grid, residual, fixed.SUBTRACT)
        return payload, state

    def _encode(
        self, x: Tensor, residual: Tensor | None, old: Tensor | None, out: Tensor | None
    ) -> tuple[Payload, Tensor]:
        flat = flat32(x)
        grid = matrix_grid(tuple(x.shape))
        sizes = onebit_sizes(grid)
        body = body_room(out, sum(sizes), flat.device)
        means = floats(body[: sizes[0]]).view(grid.tiles, 2, grid.cols)
        if not kernel.onebit(flat, residual, old, grid, body[sizes[0] :], means):
            raise not_finite(flat)
        return Payload("onebit", x.dtype, tuple(x.shape), b"", body), means


@register("onebit", 7, "<", ())
def decode_onebit(payload: Payload, out: Tensor, mode: int) -> None:
    """Decode means (tiles, 2, columns) and sign bits, row by row."""
    unpack_params(payload, "<")
    grid = matrix_grid(payload.shape)
    mean_bytes, bits = sections(payload, *onebit_sizes(grid))
    if payload.numel:
        kernel.onebit_decode(bits, floats(mean_bytes).view(grid.tiles, 2, grid.cols), grid, out, mode)
