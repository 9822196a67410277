"""Sparse payloads: the entries chosen, their indices packed, their values by any codec.

`topk(fraction)` sends the fraction of largest magnitude, exactly: a sample gives a threshold
that a little more than k entries pass, one scan lists those, and the k largest of the list
are the k largest of all. Zeros are not sent, even if there are fewer than k other entries: a
codec of signs would make something of them. `exact=False` skips the last step and sends what passes a threshold
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
from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weightgrad.codecs import registry
from weightgrad.codecs.codec import Benchmark, Codec, Stage, State, between, flat32, joined, not_finite, state_tensor
from weightgrad.codecs.floats import Fp32
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.sparse_entries import PARAMS
from weightgrad.codecs.spec import codec
from weightgrad.errors import EncodeError, SpecError
from weightgrad.kernels import bits, fixed, noise, select

_SAMPLE = 1 << 15  # elements, at most; which they are changes how long the search takes, not what it finds
_LEAST_SAMPLE = 1 << 13
_TOLERANCE = 0.1
_LEAST = 0x00800000  # the bits of the smallest normal float: what is smaller, zeros above all, is not sent


def check_values_codec(owner: str, then: Codec) -> None:
    """Check a codec for the values of chosen entries: they are other entries every time, so it can carry nothing over.

    Args:
        owner: What the message names first.
        then: The codec of the values.

    Raises:
        SpecError: It is no codec, chooses entries itself, or keeps state.
    """
    if not isinstance(then, Codec):
        raise SpecError(f"{owner}: expected a codec behind '>', got {then!r}")
    last = then
    while isinstance(last, Stage) and not isinstance(last, Selector):
        last = last.then
    if isinstance(last, Selector):
        raise SpecError(f"{owner} > {then}: the values are chosen already; choose once, then quantize")
    if then.init(torch.zeros(1, dtype=torch.float32)):
        raise SpecError(
            f"{owner} > {then}: the values are other entries every time, so their codec cannot keep state; "
            "put error feedback around the whole chain: ef(... > ...)"
        )


def pack_entries(
    indices: Tensor, values: Tensor, like: Tensor, then: Codec, key: int, out: Tensor | None = None
) -> tuple[Payload, Payload]:
    """Make a sparse payload of chosen entries.

    Args:
        indices: Sorted int64 places in the flat tensor.
        values: Float32 values at these places.
        like: The tensor they come from, for its dtype and shape.
        then: Codec of the values; one without state.
        key: As for `Codec.encode`.
        out: As for `Codec.encode`.

    Returns:
        The payload, and the payload of the values inside it, which lives in scratch memory until the thread packs
        the next.
    """
    check_values_codec("pack_entries", then)
    room = fixed.scratch("values", values.new_empty(1).expand(4 * values.numel() + 4096), torch.uint8)
    inner, _ = then.encode(values, {}, noise.derive(key, 1), out=room)
    low, unary, code = bits.pack_gaps(indices, bits.best_gap_code(indices))
    gap = torch.zeros(-(low.numel() + unary.numel()) % 8, dtype=torch.uint8, device=values.device)
    head = struct.pack(PARAMS, indices.numel(), code.unary_bits, code.rice, code.width, registry.wire_id(inner.codec))
    body = joined([low, unary, gap, inner.body], out)
    return Payload("sparse", like.dtype, tuple(like.shape), head + inner.params, body), inner


class Chosen(NamedTuple):
    """Entries to send, in order. `cleared` says that they are zero already where they came from."""

    indices: Tensor
    values: Tensor
    cleared: bool

    @property
    def lowest(self) -> Tensor:
        """The smallest magnitude that was chosen, on the host."""
        return self.values.abs().min().cpu() if self.values.numel() else torch.zeros((), dtype=torch.float32)


@dataclass(frozen=True)
class Carried:
    """What a selection looks at: h = residual (+ x), or with momentum as in kernels.select."""

    x: Tensor | None
    residual: Tensor
    velocity: Tensor | None = None
    momentum: float = 0.0

    @property
    def clears(self) -> bool:
        """Whether the scan itself may clear what it lists: with error feedback and no momentum."""
        return self.x is not None and self.velocity is None

    def scan(self, thresholds: select.Thresholds, room: int) -> select.Selected:
        """Scan and advance the residual. Call it once, then go on with what `again` returns."""
        found = select.scan(self.x, self.residual, self.velocity, self.momentum, thresholds, room, clear=self.clears)
        if found.done < self.residual.numel():
            if self.clears:
                select.scatter(found.indices, found.values, self.residual)
            self.roll_back(found.done)
            raise not_finite(self.residual if self.x is None else self.x)
        return found

    def again(self, found: select.Selected) -> Carried:
        """Return what is left to look at after a scan that did not list the right number of entries."""
        if self.clears:
            select.scatter(found.indices, found.values, self.residual)
        return Carried(None, self.residual)

    def roll_back(self, done: int) -> None:
        """Undo the advance of the first `done` elements, up to rounding."""
        if self.x is None:
            return
        x, residual = self.x[:done], self.residual[:done]
        if self.velocity is None:
            residual -= x
            return
        speed = self.velocity[:done]
        residual -= speed
        speed.sub_(x)
        if self.momentum:
            speed.div_(self.momentum)


def largest(carried: Carried, k: int, key: int) -> Chosen:
    """Choose the k entries of largest magnitude."""
    n = carried.residual.numel()
    if n == 0:
        return Chosen(torch.empty(0, dtype=torch.int64, device=carried.residual.device), carried.residual, True)
    wanted = min(_SAMPLE, max(_LEAST_SAMPLE, n >> 6))
    sizes = fixed.magnitude_bits(
        select.sample(carried.x, carried.residual, carried.velocity, carried.momentum, wanted, noise.mix(key ^ 0xA5))
    )
    rank = k * sizes.numel() / n
    if sizes.numel() < n:  # a sample: stay on the safe side of k
        rank += 2.5 * math.sqrt(rank) + 4
    room = 0
    while True:
        place = math.ceil(rank)
        lowest = _LEAST if place > sizes.numel() else max(_LEAST, select.kth_largest(sizes, place))
        passing = fixed.count_at_least(sizes, lowest)  # more than `place` if many are equal, as after a codec of signs
        room = max(room, min(n, int(1.2 * passing * n / sizes.numel()) + 1024))
        found = carried.scan(select.Thresholds.magnitude(fixed.float_of_bits(lowest)), room)
        if found.complete and (found.total >= k or lowest == _LEAST):
            break
        carried = carried.again(found)
        if not found.complete:
            room = found.total
        else:
            rank *= 2
    back = carried.residual if carried.clears else None
    return Chosen(*select.keep_largest(found.indices, found.values, k, back), cleared=carried.clears)


class Selector(Stage):
    """Base of the codecs that choose entries: it packs them and leaves the error in the residual."""

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: int, *, out: Tensor | None = None
    ) -> tuple[Payload, State]:
        """Encode in one scan, which adds x to the residual; what is sent leaves it."""
        return self._encode_carried(Carried(flat32(x), residual), x, state, key, out)

    def encode_residual(
        self, residual: Tensor, state: State, key: int, *, out: Tensor | None = None
    ) -> tuple[Payload, State]:
        """See Codec.encode_residual; the scan reads the residual alone."""
        return self._encode_carried(Carried(None, residual.view(-1)), residual, state, key, out)

    def _encode_carried(
        self, carried: Carried, like: Tensor, state: State, key: int, out: Tensor | None
    ) -> tuple[Payload, State]:
        residual = carried.residual
        chosen, state = self._choose(carried, state, key)
        try:
            payload, inner = pack_entries(chosen.indices, chosen.values, like, self.then, key, out)
        except EncodeError:  # the codec of the values refuses one: nothing was sent
            select.scatter(chosen.indices, chosen.values, residual)
            carried.roll_back(residual.numel())
            raise
        leave_error(inner, chosen, residual)
        return payload, state

    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """See Codec.encode."""
        chosen, state = self._choose(Carried(None, flat32(x)), state, key)
        return pack_entries(chosen.indices, chosen.values, x, self.then, key, out)[0], state

    @abstractmethod
    def _choose(self, carried: Carried, state: State, key: int) -> tuple[Chosen, State]:
        """Choose the entries to send."""


def leave_error(inner: Payload, chosen: Chosen, residual: Tensor) -> None:
    """Set residual[indices] to the values less what their codec made of them."""
    if inner.codec == "fp32":
        if not chosen.cleared:
            select.scatter(chosen.indices, None, residual)
        return
    error = chosen.values.clone()
    registry.decode_into(inner, error, fixed.SUBTRACT)
    select.scatter(chosen.indices, error, residual)


def entries_for(fraction: float, n: int) -> int:
    """Say how many entries a fraction of n is: at least one, if there are any."""
    return min(n, max(1, round(fraction * n)))


@codec("topk")
@dataclass(frozen=True)
class TopK(Selector):
    """The fraction of largest magnitude, exactly or by a controlled threshold."""

    encode_gb_s, decode_gb_s = 5.7, 12.8
    benchmarks = (
        Benchmark("topk(0.01)"),
        Benchmark("ef(topk(0.01))", 0.75),
        Benchmark("ef(topk(0.001))", 0.75),
        Benchmark("ef(topk(0.01, exact=False))"),
        Benchmark("ef(topk(0.01) > qsgd(bits=4))"),
    )

    fraction: float
    exact: bool = True
    then: Codec = dataclasses.field(default_factory=Fp32)

    def __post_init__(self) -> None:
        between("topk", "fraction", self.fraction, 1e-9, 1)
        if not isinstance(self.exact, bool):
            raise SpecError(f"topk: exact={self.exact!r} is not allowed; choose True or False")
        check_values_codec("topk", self.then)

    def init(self, like: Tensor) -> State:
        """Make the threshold that is carried from call to call; zero means that there is none yet."""
        return {} if self.exact else {"threshold": torch.zeros((), dtype=torch.float32)}

    def _choose(self, carried: Carried, state: State, key: int) -> tuple[Chosen, State]:
        n = carried.residual.numel()
        k = entries_for(self.fraction, n)
        if self.exact:
            return largest(carried, k, key), state
        threshold = float(state_tensor(state, "threshold", (), self))
        slack = max(1, int(_TOLERANCE * k))
        if threshold > 0 and n:
            found = carried.scan(select.Thresholds.magnitude(threshold), min(n, 2 * k + 1024))
            if found.complete and abs(found.total - k) <= slack:
                # Near the tail the count falls about with the tenth power of the threshold.
                threshold *= (found.total / k) ** 0.1
                new = {"threshold": torch.tensor(threshold, dtype=torch.float32)}
                return Chosen(found.indices, found.values, carried.clears), new
            if found.complete and found.total > k:  # too low: the largest of the list will do
                back = carried.residual if carried.clears else None
                kept = select.keep_largest(found.indices, found.values, k, back)
                chosen = Chosen(*kept, cleared=carried.clears)
                return chosen, {"threshold": chosen.lowest}
            carried = carried.again(found)
        chosen = largest(carried, k, key)
        return chosen, {"threshold": chosen.lowest}


@codec("threshold")
@dataclass(frozen=True)
class Threshold(Selector):
    """Every entry of at least this magnitude."""

    encode_gb_s, decode_gb_s = 13.0, 19.0
    benchmarks = (Benchmark("threshold(3.0)"),)

    value: float
    then: Codec = dataclasses.field(default_factory=Fp32)

    def __post_init__(self) -> None:
        between("threshold", "value", self.value, 0, 3e38)
        check_values_codec("threshold", self.then)

    def _choose(self, carried: Carried, state: State, key: int) -> tuple[Chosen, State]:
        n = carried.residual.numel()
        thresholds = select.Thresholds.magnitude(self.value)
        found = carried.scan(thresholds, min(n, n // 50 + 1024))
        if not found.complete:
            carried = carried.again(found)
            found = carried.scan(thresholds, found.total)
        return Chosen(found.indices, found.values, carried.clears), state
