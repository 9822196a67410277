"""Sparse payloads: the entries chosen, their indices packed, their values by any codec.

`topk(fraction)` sends the fraction of largest magnitude, exactly: a sample gives a threshold
that a little more than k entries pass, one scan lists those, and the k largest of the list
are the k largest of all. `exact=False` skips the last step and sends what passes a threshold
that a controller carries from step to step; when the sent fraction is off by more than 10 % it
falls back to the exact way. `threshold(value)` sends |x| >= value. Both are biased: wrap them in
`ef(...)`. `pack_entries` makes the payload from any choice of indices (Gaia's relative
threshold, DGC).

Indices are gaps, bit-packed or Golomb-Rice, whichever is smaller: at 1 % about 8 bits each.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs import registry
from weightgrad.codecs.codec import Codec, Stage, State, between, flat32, not_finite, state_tensor
from weightgrad.codecs.floats import Fp32
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.spec import codec
from weightgrad.errors import BodyContentError, ParamsError, SpecError
from weightgrad.kernels import bits, fixed, noise, select

PARAMS = "<QQBBBx"  # entries, bits of the unary stream, Rice?, width, format of the values
_SAMPLE = 1 << 16
_TOLERANCE = 0.1


def check_values_codec(owner: str, then: Codec) -> None:
    """Values are other entries every time, so their codec cannot carry anything over."""
    if not isinstance(then, Codec):
        raise SpecError(f"{owner}: expected a codec behind '>', got {then!r}")
    if then.init(torch.zeros(1)):
        raise SpecError(
            f"{owner} > {then}: the values are other entries every time, so their codec cannot keep state; "
            "put error feedback around the whole chain: ef(... > ...)"
        )


def pack_entries(
    indices: Tensor, values: Tensor, like: Tensor, then: Codec, key: int
) -> tuple[Payload, Payload]:
    """The sparse payload of sorted int64 indices, and the payload of the values inside it."""
    inner, _ = then.encode(values, {}, noise.derive(key, 1))
    code = bits.best_gap_code(indices)
    low, unary = bits.pack_gaps(indices, code)
    gap = torch.zeros(-(low.numel() + unary.numel()) % 8, dtype=torch.uint8, device=values.device)
    head = struct.pack(
        PARAMS, indices.numel(), code.unary_bits, code.rice, code.width, registry.wire_id(inner.codec)
    )
    body = torch.cat((low, unary, gap, inner.body))
    return Payload("sparse", like.dtype, tuple(like.shape), head + inner.params, body), inner


@registry.register("sparse", 9, PARAMS, ("entries", "unary_bits", "rice", "width", "values_format"))
def decode_sparse(payload: Payload, out: Tensor, mode: int) -> None:
    """Low bits of the gaps, their unary part, zeros to a multiple of 8, the body of the values."""
    size = struct.calcsize(PARAMS)
    if len(payload.params) < size:
        raise ParamsError(f"sparse: {len(payload.params)} bytes of parameters, expected at least {size}")
    count, unary_bits, rice, width, identifier = struct.unpack(PARAMS, payload.params[:size])
    name = registry.wire_name(identifier)
    n = payload.numel
    if name is None or count > n or width > bits.MAX_WIDTH or rice > 1 or (unary_bits > 0 and not rice):
        raise ParamsError(
            f"sparse: {count} entries of {n}, width {width}, rice {rice}, values format {identifier}: "
            "not something the encoder writes"
        )
    code = bits.GapCode(bool(rice), width, unary_bits)
    low_bytes = code.low_bytes(count)
    indexed = low_bytes + code.unary_bytes
    start = indexed + -indexed % 8
    rest = max(0, payload.body.numel() - start)
    low, unary, gap, body = registry.sections(payload, low_bytes, code.unary_bytes, start - indexed, rest)
    inner = Payload(name, payload.dtype, (count,), payload.params[size:], body)
    indices = bits.unpack_gaps(low, unary, count, code, n)
    if indices is None or bool(gap.any()):
        raise BodyContentError(f"sparse: the index stream does not hold {count} ascending indices below {n}")
    values = torch.empty(count, dtype=torch.float32, device=out.device)
    registry.decode_into(inner, values, fixed.STORE)
    if mode == fixed.STORE:
        out.zero_()
    select.scatter(indices, values, out, mode)


@dataclass(frozen=True)
class Carried:
    """What a selection looks at: h = held (+ x), or with momentum (see kernels.select)."""

    x: Tensor | None
    held: Tensor
    velocity: Tensor | None = None
    momentum: float = 0.0

    def scan(self, thresholds: select.Thresholds, room: int) -> select.Selected:
        """The pass that also advances `held`; call once, then `again`."""
        found = select.scan(self.x, self.held, self.velocity, self.momentum, thresholds, room)
        if found.done < self.held.numel():
            self._roll_back(found.done)
            raise not_finite(self.held if self.x is None else self.x)
        return found

    @property
    def again(self) -> Carried:
        """The same after it has been advanced."""
        return Carried(None, self.held)

    def _roll_back(self, done: int) -> None:
        if self.x is None:
            return
        x, held = self.x[:done], self.held[:done]
        if self.velocity is None:
            held -= x
            return
        speed = self.velocity[:done]
        held -= speed
        speed.sub_(x)
        if self.momentum:
            speed.div_(self.momentum)


def largest(carried: Carried, k: int, key: int) -> tuple[Tensor, Tensor]:
    """The k entries of largest magnitude, in order: (indices, values)."""
    n = carried.held.numel()
    if n == 0:
        return torch.empty(0, dtype=torch.int64), torch.empty(0)
    sample = select.sample(
        carried.x, carried.held, carried.velocity, carried.momentum, _SAMPLE, noise.mix(key ^ 0xA5)
    )
    sizes = fixed.magnitude_bits(sample)
    expected = k * sizes.numel() / n
    rank = expected if sizes.numel() == n else expected + 4 * math.sqrt(expected) + 8
    view, thresholds = carried, select.Thresholds.magnitude(0.0)
    room = min(n, int(1.2 * rank * n / sizes.numel()) + 1024)
    while True:
        place = sizes.numel() - min(sizes.numel(), max(1, math.ceil(rank))) + 1
        limit = float(torch.kthvalue(sizes, place).values.view(torch.float32))
        thresholds = select.Thresholds.magnitude(limit if math.ceil(rank) < sizes.numel() or sizes.numel() == n else 0.0)
        found = view.scan(thresholds, room)
        view = carried.again
        if found.count < k:
            rank *= 2
            room = n if thresholds.above == 0.0 else min(n, 2 * room)
            continue
        if not found.complete:
            found = view.scan(thresholds, found.count)
        return select.keep_largest(found.indices, found.values, k)


class Selector(Stage):
    """Shared by the codecs that choose entries: where the error goes."""

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: int, *, out: Tensor | None = None
    ) -> tuple[Payload, State]:
        """Fused: the scan adds x to the residual; what is sent leaves it."""
        indices, values, state = self._choose(Carried(flat32(x), residual), state, key)
        payload, inner = pack_entries(indices, values, x, self.then, key)
        leave_error(inner, indices, values, residual)
        return payload, state

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode. The body's size is not known beforehand, so `out` is not used."""
        indices, values, state = self._choose(Carried(None, flat32(x)), state, key)
        return pack_entries(indices, values, x, self.then, key)[0], state

    def _choose(self, carried: Carried, state: State, key: int) -> tuple[Tensor, Tensor, State]:
        raise NotImplementedError


def leave_error(inner: Payload, indices: Tensor, values: Tensor, residual: Tensor) -> None:
    """residual[indices] = values - what their codec made of them."""
    if inner.codec == "fp32":
        select.scatter(indices, None, residual)
        return
    error = values.clone()
    registry.decode_into(inner, error, fixed.SUBTRACT)
    select.scatter(indices, error, residual)


def entries_for(fraction: float, n: int) -> int:
    """How many entries a fraction of n is: at least one, if there are any."""
    return min(n, max(1, round(fraction * n)))


@codec("topk")
@dataclass(frozen=True)
class TopK(Selector):
    """The fraction of largest magnitude, exactly or by a controlled threshold."""

    fraction: float
    exact: bool = True
    then: Codec = dataclasses.field(default_factory=Fp32)

    def __post_init__(self) -> None:
        between("topk", "fraction", self.fraction, 1e-9, 1)
        if not isinstance(self.exact, bool):
            raise SpecError(f"topk: exact={self.exact!r} is not allowed; choose True or False")
        check_values_codec("topk", self.then)

    def init(self, like: Tensor) -> State:
        """The threshold that the controller carries; zero means none yet."""
        return {} if self.exact else {"threshold": torch.zeros((), dtype=torch.float32)}

    def _choose(self, carried: Carried, state: State, key: int) -> tuple[Tensor, Tensor, State]:
        n = carried.held.numel()
        k = entries_for(self.fraction, n)
        if self.exact:
            return *largest(carried, k, key), state
        threshold = float(state_tensor(state, "threshold", (), self))
        slack = max(1, int(_TOLERANCE * k))
        if threshold > 0 and n:
            found = carried.scan(select.Thresholds.magnitude(threshold), k + slack)
            carried = carried.again
            if found.complete and abs(found.count - k) <= slack:
                # Near the tail the count falls about with the tenth power of the threshold.
                threshold *= (found.count / k) ** 0.1
                return found.indices, found.values, {"threshold": torch.tensor(threshold, dtype=torch.float32)}
        indices, values = largest(carried, k, key)
        lowest = values.abs().min() if n else torch.zeros(())
        return indices, values, {"threshold": lowest.to(torch.float32).cpu()}


@codec("threshold")
@dataclass(frozen=True)
class Threshold(Selector):
    """Every entry of at least this magnitude."""

    value: float
    then: Codec = dataclasses.field(default_factory=Fp32)

    def __post_init__(self) -> None:
        between("threshold", "value", self.value, 0, 3e38)
        check_values_codec("threshold", self.then)

    def _choose(self, carried: Carried, state: State, key: int) -> tuple[Tensor, Tensor, State]:
        n = carried.held.numel()
        thresholds = select.Thresholds.magnitude(self.value)
        found = carried.scan(thresholds, min(n, n // 50 + 1024))
        if not found.complete:
            found = carried.again.scan(thresholds, found.count)
        return found.indices, found.values, state
