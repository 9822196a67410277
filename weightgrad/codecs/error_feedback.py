"""Error feedback for any codec: what was lost this time is added next time.

Seide et al., 2014; Karimireddy et al., 2019. h = x + error; send C(h); error = h - decoded.
With it biased codecs converge. A codec that can do it in the pass that encodes overrides
`Codec.encode_feedback`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs.codec import Codec, State, state_tensor
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.spec import codec
from weightgrad.errors import SpecError


@codec("ef")
@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Error feedback around any codec: what was lost is added next time."""

    inner: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Codec):
            raise SpecError(f"ef: expected a codec, got {self.inner!r}; write e.g. ef(topk(0.01))")
        if self.inner.carries_error:
            raise SpecError(f"ef({self.inner}): it keeps its own error already; leave ef() away")

    @property
    def carries_error(self) -> bool:
        """Always True: the residual is the error."""
        return True

    def init(self, like: Tensor) -> State:
        """Make a residual of zeros beside the inner codec's state."""
        residual = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
        return {"residual": residual, **{f"inner.{k}": v for k, v in self.inner.init(like).items()}}

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        residual = state_tensor(state, "residual", (x.numel(),), self, x)
        inside = {k.removeprefix("inner."): v for k, v in state.items() if k.startswith("inner.")}
        payload, inside = self.inner.encode_feedback(x, residual, inside, key, out=out)
        return payload, {"residual": residual, **{f"inner.{k}": v for k, v in inside.items()}}

    def __str__(self) -> str:
        return f"ef({self.inner})"
