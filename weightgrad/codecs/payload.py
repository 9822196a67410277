"""What a codec makes of a tensor: a few parameters and a body of packed bytes.

A payload says by itself how to decode it: `codec` names the decoder, `params` is that
codec's own little-endian struct, `dtype` and `shape` are those of the tensor it came
from. `docs/wire-format.md` specifies the body of every codec.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Payload:
    """One encoded tensor. `body` is a contiguous 1-D uint8 tensor on the tensor's device."""

    codec: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    params: bytes
    body: Tensor

    @property
    def numel(self) -> int:
        """Elements of the decoded tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Packed bytes: parameters and body, without the frame around them."""
        return len(self.params) + self.body.numel()

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Payload({self.codec}, {dtype}{list(self.shape)}, {self.nbytes} bytes)"
