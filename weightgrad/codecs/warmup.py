"""A warm start for any codec: the first calls send everything, then the codec takes over.

Seide et al., 2014, begin without quantization (and with a small learning rate), because error feedback needs gradients
that change slowly: at the start of training they do not, and a biased codec then sends yesterday's error in the wrong
direction. For the first `steps` calls the payload is fp32, and nothing is lost; from then on it is what the codec
inside makes of the tensor. Payloads say which they are, so decoding knows nothing of it. The learning rate is not the
codec's: a recipe's `training.warmup` lets it rise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs.codec import Benchmark, Codec, State, between, state_tensor
from weightgrad.codecs.error_feedback import ErrorFeedback
from weightgrad.codecs.floats import Fp32
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.spec import codec
from weightgrad.errors import SpecError

_INSIDE = "inner."


@codec("warmup")
@dataclass(frozen=True)
class WarmUp(Codec):
    """Fp32 for the first `steps` calls, then the codec inside."""

    benchmarks = (Benchmark("warmup(0, qsgd(bits=4))"),)

    steps: int
    inner: Codec

    def __post_init__(self) -> None:
        between("warmup", "steps", self.steps, 0, 2**31, whole=True)
        if not isinstance(self.inner, Codec):
            raise SpecError(f"warmup: expected a codec, got {self.inner!r}; write e.g. warmup(200, onebit())")
        if isinstance(self.inner, ErrorFeedback):
            plain = self.inner.inner
            raise SpecError(f"{self}: put the error feedback outside: ef(warmup({self.steps}, {plain}))")

    @property
    def unbiased(self) -> bool:
        """Whether the codec inside is."""
        return self.inner.unbiased

    @property
    def carries_error(self) -> bool:
        """Whether the codec inside keeps its own error; fp32 has none."""
        return self.inner.carries_error

    def init(self, like: Tensor) -> State:
        """Make the count of calls beside the state of the codec inside."""
        inside = {f"{_INSIDE}{name}": tensor for name, tensor in self.inner.init(like).items()}
        return {"step": torch.zeros((), dtype=torch.int64), **inside}

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        step = self._step(state)
        if step < self.steps:
            payload, _ = Fp32().encode(x, {}, key, out=out)
            return payload, {**state, "step": torch.tensor(step + 1)}
        payload, inside = self.inner.encode(x, self._inside(state), key, out=out)
        return payload, self._with(state, inside)

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: int, *, out: Tensor | None = None
    ) -> tuple[Payload, State]:
        """Encode with a residual of the caller's, which a warm-up empties."""
        if self._step(state) < self.steps:
            return super().encode_feedback(x, residual, state, key, out=out)
        payload, inside = self.inner.encode_feedback(x, residual, self._inside(state), key, out=out)
        return payload, self._with(state, inside)

    def _step(self, state: State) -> int:
        return int(state_tensor(state, "step", (), self))

    @staticmethod
    def _inside(state: State) -> State:
        return {name.removeprefix(_INSIDE): tensor for name, tensor in state.items() if name.startswith(_INSIDE)}

    @staticmethod
    def _with(state: State, inside: State) -> State:
        return {"step": state["step"], **{f"{_INSIDE}{name}": tensor for name, tensor in inside.items()}}

    def __str__(self) -> str:
        return f"warmup({self.steps}, {self.inner})"
