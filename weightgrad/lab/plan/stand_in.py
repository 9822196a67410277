"""A small stand-in for a large model, with which a strategy is played through in the simulator.

The simulator runs the real state machines and codecs. What they need of a model is vectors to select from and to
encode, and their number of elements only scales bytes, codec times and LAN times. So the stand-in has at most
`ELEMENTS` elements, in tensors of the same proportions, with gradients drawn at random: a direction that all sites
share, noise of each worker's own, and sizes that differ from tensor to tensor and from element to element. Then

- a message counts the bytes that the large model's would have: what was encoded, times the ratio of the elements, and
  the headers of as many pieces as the large model is cut into;
- a codec that sees one tensor at a time (`per: tensor`) may have costs by row and column: there the ratio is that of
  encoding a piece of the large model once and one of the stand-in;
- codecs and LAN are slower by the ratio;
- of the many ranks that share a model (FSDP2), `RANKS` are played, with a LAN that is slower as theirs is: what the
  simulator does grows with the square of the pieces that ranks hold.

A model that is no larger than the stand-in stands for itself.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from weightgrad.codecs import Codec, ErrorFeedback
from weightgrad.codecs.warmup import WarmUp
from weightgrad.core import pieces
from weightgrad.core.layout import Layout, Slot
from weightgrad.core.strategies import Strategy
from weightgrad.kernels.noise import derive
from weightgrad.lab.sim.local_network import LocalNetwork
from weightgrad.lab.sim.plan import SimulationPlan, SiteSpec
from weightgrad.lab.sim.site import holdings
from weightgrad.lab.sim.task import Gradient, Score
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import Message, Push, RoundResult, Segment, segments_bytes

ELEMENTS = 1 << 16
TENSORS = 16
RANKS = 4  # of a sharded site that are played, at most
_DRAWN = 8  # workers of a site with noise of their own, at most; further ones have that of another
_SPREAD = 1.0  # of the logarithm of the size of gradients, element by element, the same at all sites
_KEPT = 0.9  # of the noise from step to step, as momentum keeps it


@dataclass(frozen=True)
class Gradients:
    """How the random gradients of sites are related.

    Attributes:
        shared: the length of the direction that all sites share, beside noise of length 1.
        size: how large they are, beside the usual.
        alike: whether the noise, too, is the same at all sites.
        zeros: the share of elements that have none, as weights behind inputs that are always zero.
        weights: how large the weights are, beside one over the root of a layer's inputs: where significance is relative
            to them, it is what counts, because the steps of Adam are as large whatever the gradients are.
    """

    shared: float = 0.5
    size: float = 1.0
    alike: bool = False
    zeros: float = 0.0
    weights: float = 1.0


TYPICAL = Gradients()
ENDS = (  # that send least and most, about
    Gradients(size=1e-3, alike=True, zeros=0.75),
    Gradients(shared=0.0, size=10.0, weights=0.1),
)


class StandInTask:
    """Random gradients of a layout."""

    def __init__(
        self,
        layout: Layout,
        samples: Sequence[int],
        workers: Sequence[int],
        seed: int,
        gradients: Gradients = TYPICAL,
    ) -> None:
        self.layout = layout
        self.epoch_steps = 2**31
        self._samples, self._workers, self._seed, self._kind = samples, workers, seed, gradients
        scales = [torch.full((slot.numel,), _scale(slot.shape)) for slot in layout.slots]
        self._scale = torch.cat(scales) if scales else torch.empty(0)
        self._size = self._scale * (_SPREAD * self._draw(3)).exp()
        if gradients.zeros:
            self._size *= torch.arange(layout.numel) % 1000 >= 1000 * gradients.zeros
        self._shared = self._draw(1) * gradients.shared
        self._noise: dict[tuple[int, int], Tensor] = {}

    def initial(self) -> Tensor:
        """Weights of the usual size; biases are zero."""
        found = self._draw(0) * self._scale * self._kind.weights
        for slot in self.layout.slots:
            if len(slot.shape) < 2:
                slot.of(found).zero_()
        return found

    def samples(self, site: int) -> int:
        """The samples of a site's step."""
        return self._samples[site]

    def gradients(self, site: int, weights: Tensor, step: int) -> Iterator[Gradient]:
        """One vector for each worker of the site."""
        del weights
        vectors: list[Tensor] = []
        for worker in range(self._workers[site]):
            if worker >= _DRAWN:
                yield Gradient(vectors[worker % _DRAWN], 1.0)
                continue
            fresh = self._draw(2, 0 if self._kind.alike else site, worker, step)
            old = self._noise.get((site, worker))
            noise = fresh if old is None else _KEPT * old + math.sqrt(1 - _KEPT**2) * fresh
            self._noise[site, worker] = noise
            vectors.append((self._shared + noise) * self._size * (0.01 * self._kind.size))
            yield Gradient(vectors[-1], 1.0)

    def evaluate(self, weights: Tensor) -> Score:
        """Nothing is learnt."""
        del weights
        return Score(0.0, 1.0)

    def _draw(self, *place: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive(self._seed, *place) >> 1)
        return torch.randn(self.layout.numel, generator=generator)


def _scale(shape: tuple[int, ...]) -> float:
    """The size of the weights of a tensor: one over the root of its inputs."""
    return 1 / math.sqrt(max(1, math.prod(shape[1:])))


def shrunk(layout: Layout, *, per_tensor: bool, elements: int = ELEMENTS) -> Layout:
    """A layout of at most about `elements` elements with tensors of the same proportions.

    Rows are left out, so that a codec that sees a tensor sees rows of the same length. What is encoded flat is put
    together with its neighbours, since the simulator's own time grows with the number of tensors; but matrices stay
    apart from vectors, and the first and the last matrix from the others, because what is quantized inside a site
    exempts them.
    """
    if layout.numel <= elements:
        return layout
    ratio = elements / layout.numel
    if not per_tensor:
        return Layout.of_shapes((group[0].name, _together(group, ratio)) for group in _groups(layout))
    return Layout.of_shapes((slot.name, _fewer(slot.shape, ratio)) for slot in layout.slots)


def _groups(layout: Layout) -> list[list[Slot]]:
    """Neighbouring tensors together, about as many elements in each group; matrices and vectors apart."""
    if len(layout.slots) <= TENSORS:
        return [[slot] for slot in layout.slots]
    matrices = [slot for slot in layout.slots if len(slot.shape) >= 2]
    ends = {slot.start for slot in (*matrices[:1], *matrices[-1:])}
    found: dict[tuple[object, ...], list[Slot]] = {}
    for slot in layout.slots:
        place = (slot.start * TENSORS) // layout.numel
        key = (slot.start,) if slot.start in ends and slot.numel else (place, len(slot.shape) >= 2)
        found.setdefault(key, []).append(slot)
    return list(found.values())


def _together(group: Sequence[Slot], ratio: float) -> tuple[int, ...]:
    """The shape of some tensors as one: fewer rows of about the same length, or fewer elements of a vector."""
    total = sum(slot.numel for slot in group)
    wanted = max(1, round(total * ratio))
    if len(group[0].shape) < 2:
        return (wanted,)
    rows = max(1, round(sum(slot.shape[0] for slot in group) * ratio))
    return rows, max(1, round(wanted / rows))


def _fewer(shape: tuple[int, ...], ratio: float) -> tuple[int, ...]:
    """A smaller shape with about the same proportions."""
    if not shape:
        return shape
    each = ratio ** (1 / len(shape))
    return tuple(max(1, round(side * each)) if side > 1 else side for side in shape)


@dataclass(frozen=True)
class StandIn:
    """The small model, and how to count for the large one.

    Attributes:
        real: the layout of the large model.
        small: the layout of the stand-in.
        strategy: what is played through.
    """

    real: Layout
    small: Layout
    strategy: Strategy

    @property
    def ratio(self) -> float:
        """How many times as many elements the large model has."""
        return self.real.numel / max(1, self.small.numel)

    def plan(self, plan: SimulationPlan) -> SimulationPlan:
        """The plan with codecs and LANs that are as slow for the stand-in as they are for the large model."""
        sites = tuple(self._site(site) for site in plan.sites)
        return replace(plan, sites=sites, codec_speed=plan.codec_speed / self.ratio)

    def played(self, site: SiteSpec) -> int:
        """The workers of a site that are played: all, or some ranks of a sharded one that are all as fast."""
        alike = not site.compute.jitter and not site.compute.stragglers
        if not site.sharded or not alike or self.real is self.small:
            return site.workers
        return min(site.workers, RANKS)

    def _site(self, site: SiteSpec) -> SiteSpec:
        workers, rate, delay = self.played(site), site.lan.bandwidth_bit_s / self.ratio, site.lan.delay_seconds
        if workers < site.workers:  # a ring of n has 2 (n - 1) hops and sends (n - 1) / n of the vector in each half
            hops = (site.workers - 1) / (workers - 1)
            rate, delay = rate / hops * site.workers / workers, delay * hops
        return replace(site, workers=workers, lan=LocalNetwork(rate, delay))

    def counter(self, plan: SimulationPlan) -> MessageSizes:
        """What counts the messages of a simulation of this plan."""
        return MessageSizes(self, plan)


class MessageSizes:
    """The bytes that messages of the stand-in would have if they were of the large model."""

    def __init__(self, stand_in: StandIn, plan: SimulationPlan) -> None:
        self._stand_in, self._plan = stand_in, plan
        self._starts = [slot.start for slot in stand_in.small.slots]
        self._encoded: dict[tuple[Codec, tuple[int, ...]], tuple[str, int]] = {}

    def __call__(self, message: Message) -> int:
        """The bytes of a message."""
        if self._stand_in.real is self._stand_in.small:
            return nbytes(message)
        if isinstance(message, Push):
            return nbytes(message) + self._more(message.segments, "up")
        if isinstance(message, RoundResult):
            found = nbytes(message) + self._more(message.segments, "down")
            return found + sum(self._more(push.segments or (), "up") for push in message.relayed)
        return nbytes(message)

    def _more(self, segments: Sequence[Segment], way: str) -> int:
        """The bytes that the segments of the large model have more."""
        if not segments:
            return 0
        own = sum(segment.payload.body.numel() for segment in segments)
        headers = segments_bytes(segments) - own
        if self._stand_in.strategy.per == "tensor":
            grown = sum(self._tensor_bytes(segment, way) for segment in segments)
            return round(grown) - own
        covered = sum(segment.payload.numel for segment in segments) / max(1, self._stand_in.small.numel)
        count = max(1.0, covered * self._pieces)
        return round(own * (self._stand_in.ratio - 1) + headers * (count / len(segments) - 1))

    @cached_property
    def _pieces(self) -> int:
        """Pieces of the large model, as the site with most ranks cuts it."""
        real, most = self._stand_in.real, max(self._plan.sites, key=lambda site: site.workers)
        held = holdings(most, self._plan, real) or [Intervals.whole(real.numel)]
        limit = pieces.limit_of(real)
        return sum(-(-own.numel // limit) for own in held if own.numel)

    def _tensor_bytes(self, segment: Segment, way: str) -> float:
        """The body of a tensor's segments in the large model, further headers included."""
        place = bisect_right(self._starts, segment.start) - 1
        small, real = self._stand_in.small.slots[place], self._stand_in.real.slots[place]
        body, codec = segment.payload.body.numel(), _inner(self._plan.strategy.wan_codec(way))
        cut = Counter(piece.shape for piece in _pieces_of(real, self._stand_in.real))
        header = segments_bytes((segment,)) - body
        share = segment.payload.numel / max(1, small.numel)  # a rank may hold a part of the tensor
        small_format, small_bytes = self._encode(codec, small.shape)
        if small_format != segment.payload.codec or not small_bytes:  # not the usual codec: by elements
            return body * real.numel / max(1, small.numel) + header * (sum(cut.values()) - 1)
        grown = sum(count * self._encode(codec, shape)[1] for shape, count in cut.items())
        return body * grown / small_bytes + share * header * (sum(cut.values()) - 1)

    def _encode(self, codec: Codec, shape: tuple[int, ...]) -> tuple[str, int]:
        """Format and body of random values of a shape."""
        if (codec, shape) not in self._encoded:
            values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            payload, _ = codec.encode(values, codec.init(values), 0)
            self._encoded[codec, shape] = (payload.codec, payload.body.numel())
        return self._encoded[codec, shape]


def _pieces_of(slot: Slot, layout: Layout) -> tuple[pieces.Piece, ...]:
    held = Intervals(((slot.start, slot.stop),) if slot.numel else ())
    return pieces.cut(held, Layout((slot,)), per_tensor=True, limit=pieces.limit_of(layout))


def _inner(codec: Codec) -> Codec:
    while isinstance(codec, (ErrorFeedback, WarmUp)):
        codec = codec.inner
    return codec
