"""Deep gradient compression: top-k with the momentum of what waits.

Lin et al., 2018. Two accumulators: u = momentum*u + g (velocity) and v = v + u. The largest
entries of v are sent, and both are cleared there (momentum factor masking). `clip` bounds the
L2 norm of the gradient first (the paper: N**-0.5 of the global threshold). During the first
`warmup` calls the kept fraction falls in four equal stages from 0.25 towards `fraction`, as the
paper's 0.25, 0.063, 0.015, 0.004, 0.001. Its error feedback is inside.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs.codec import Benchmark, Codec, Stage, State, between, flat32, not_finite, state_tensor
from weightgrad.codecs.floats import Fp32
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.sparse import Carried, check_values_codec, entries_for, largest, leave_error, pack_entries
from weightgrad.codecs.spec import codec
from weightgrad.errors import EncodeError
from weightgrad.kernels import select
from weightgrad.kernels.moments import moments

_STAGES = 4
_FIRST = 0.25


@codec("dgc")
@dataclass(frozen=True)
class Dgc(Stage):
    """Top-k with momentum correction, factor masking and warm-up."""

    encode_gb_s, decode_gb_s = 5.0, 22.1
    benchmarks = (Benchmark("dgc(fraction=0.001)", 0.4),)

    fraction: float = 0.001
    momentum: float = 0.9
    clip: float = 0.0
    warmup: int = 0
    then: Codec = dataclasses.field(default_factory=Fp32)

    def __post_init__(self) -> None:
        between("dgc", "fraction", self.fraction, 1e-9, 1)
        between("dgc", "momentum", self.momentum, 0, 0.9999)
        between("dgc", "clip", self.clip, 0, 1e30)
        between("dgc", "warmup", self.warmup, 0, 2**31, whole=True)
        check_values_codec("dgc", self.then)

    @property
    def carries_error(self) -> bool:
        """Always True: the accumulators are the error."""
        return True

    def init(self, like: Tensor) -> State:
        """Make zeros for the velocity u, the accumulator v (`residual`) and the count of calls."""
        zeros = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
        return {"velocity": zeros, "residual": zeros.clone(), "step": torch.zeros((), dtype=torch.int64)}

    def fraction_at(self, step: int) -> float:
        """Return the fraction that is kept at this call."""
        if step >= self.warmup or self.fraction >= _FIRST:
            return self.fraction
        stage = step * _STAGES // self.warmup
        return float(_FIRST * (self.fraction / _FIRST) ** (stage / _STAGES))

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        residual = state_tensor(state, "residual", (x.numel(),), self, x)
        return self.encode_feedback(x, residual, state, key, out=out)

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: int, *, out: Tensor | None = None
    ) -> tuple[Payload, State]:
        """Encode with the caller's residual as accumulator v."""
        flat = flat32(x)
        n = flat.numel()
        velocity = state_tensor(state, "velocity", (n,), self, x)
        step = int(state_tensor(state, "step", (), self))
        if self.clip:
            found = moments(flat)
            if not found.finite:
                raise not_finite(flat)
            norm = math.sqrt(found.squares)
            if norm > self.clip:
                flat = flat * (self.clip / norm)
        carried = Carried(flat, residual, velocity, self.momentum)
        chosen = largest(carried, entries_for(self.fraction_at(step), n), key)
        try:
            payload, inner = pack_entries(chosen.indices, chosen.values, x, self.then, key, out)
        except EncodeError:  # the codec of the values refuses one: nothing was sent
            carried.roll_back(n)
            raise
        leave_error(inner, chosen, residual)
        select.scatter(chosen.indices, None, velocity)
        return payload, {**state, "velocity": velocity, "step": torch.tensor(step + 1, dtype=torch.int64)}
