"""One-bit SGD: the sign of each element and two means a column.

Seide et al., 2014. val = x + error; in each column the mean of the non-negative values and the
mean of the negative ones; one bit says which; error = val - that mean. The error feedback is
what makes it train, so it is inside by default; `feedback=False` leaves it to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs.codec import Codec, State, body_room, choose, flat32, not_finite, state_tensor
from weightgrad.codecs.matrix import matrix_grid
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.registry import floats, register, sections, unpack_params
from weightgrad.codecs.spec import codec
from weightgrad.kernels import columns as kernel
from weightgrad.kernels import fixed


def onebit_sizes(grid: kernel.Grid) -> tuple[int, int]:
    """Bytes of (means, bits)."""
    return 8 * grid.tiles * grid.cols, -(-grid.rows * grid.cols // 8)


@codec("onebit")
@dataclass(frozen=True)
class OneBit(Codec):
    """A sign an element and two means a column, with error feedback."""

    feedback: bool = True

    def __post_init__(self) -> None:
        choose("onebit", "feedback", self.feedback, (True, False))

    @property
    def carries_error(self) -> bool:
        """Unless told otherwise."""
        return self.feedback

    def init(self, like: Tensor) -> State:
        """`held` is what was to be sent; the error is held - mean of its sign (worked out lazily)."""
        if not self.feedback:
            return {}
        grid = matrix_grid(tuple(like.shape))
        return {
            "held": torch.zeros(like.numel(), dtype=torch.float32, device=like.device),
            "means": torch.zeros(grid.tiles, 2, grid.cols, dtype=torch.float32, device=like.device),
        }

    def error(self, like: Tensor, state: State) -> Tensor:
        """The error that a state carries for tensors like this one."""
        return kernel.lost(state["held"], state["means"], matrix_grid(tuple(like.shape))).view(like.shape)

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        if not self.feedback:
            return self._encode(x, None, None, out)[0], state
        grid = matrix_grid(tuple(x.shape))
        held = state_tensor(state, "held", (x.numel(),), self, x)
        old = state_tensor(state, "means", (grid.tiles, 2, grid.cols), self, x)
        payload, means = self._encode(x, held, old, out)
        old.copy_(means)
        return payload, {"held": held, "means": old}

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: int, *, out: Tensor | None = None
    ) -> tuple[Payload, State]:
        """With a residual of the caller's: h stays in it, and then loses what was sent."""
        grid = matrix_grid(tuple(x.shape))
        nothing = torch.zeros(grid.tiles, 2, grid.cols, dtype=torch.float32, device=residual.device)
        payload, means = self._encode(x, residual, nothing, out)
        bits = payload.body[onebit_sizes(grid)[0] :]
        kernel.onebit_decode(bits, means, grid, residual, fixed.SUBTRACT)
        return payload, state

    def _encode(self, x: Tensor, held: Tensor | None, old: Tensor | None, out: Tensor | None) -> tuple[Payload, Tensor]:
        flat = flat32(x)
        grid = matrix_grid(tuple(x.shape))
        sizes = onebit_sizes(grid)
        body = body_room(out, sum(sizes), flat.device)
        means = floats(body[: sizes[0]]).view(grid.tiles, 2, grid.cols)
        if not kernel.onebit(flat, held, old, grid, body[sizes[0] :], means):
            raise not_finite(flat)
        return Payload("onebit", x.dtype, tuple(x.shape), b"", body), means


@register("onebit", 7, "<", ())
def decode_onebit(payload: Payload, out: Tensor, mode: int) -> None:
    """Means (tiles, 2, columns), then the sign bits row by row."""
    unpack_params(payload, "<")
    grid = matrix_grid(payload.shape)
    mean_bytes, bits = sections(payload, *onebit_sizes(grid))
    if payload.numel:
        kernel.onebit_decode(bits, floats(mean_bytes).view(grid.tiles, 2, grid.cols), grid, out, mode)
