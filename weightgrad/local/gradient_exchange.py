"""The gradients of a site's workers, exchanged bucket by bucket: encode, send, combine.

A bucket is a few tensors, or a part of the flat gradient, of at most `pieces.limit_of` elements; so an exchange needs
memory for a bucket and not for a second gradient. Two ways, as the strategy says:

- `allreduce`: all workers end with the mean. With a codec, every bucket is an allreduce in encoded chunks
  (`local/allreduce.py`); without one, workers take the mean of their vectors.
- `server`, `sharded`: every worker sends each tensor to the worker that serves it (`local/serving.py`), encoded
  (`local/gradient_encoder.py`) or as it is; that worker alone has what all workers sent.

How bytes travel between workers is an `Exchange`. In a deployment it is the process group of the site and each process
has one worker; in the simulator all workers of a site live in one process and the exchange only counts bytes. Both
compute the same bits and count the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weightgrad.codecs import Fp32, Payload, decode, decode_add
from weightgrad.core import pieces
from weightgrad.core.layout import Layout, Slot
from weightgrad.core.random_streams import SiteStream
from weightgrad.core.strategies import Strategy
from weightgrad.core.vector_checks import without_prefix
from weightgrad.kernels import derive
from weightgrad.local.allreduce import QuantizedAllreduce
from weightgrad.local.gradient_encoder import GradientEncoder
from weightgrad.local.serving import owners, serving
from weightgrad.wire.intervals import Intervals


class ServedPart(NamedTuple):
    """The elements start .. stop-1 of a vector, and the worker that serves them."""

    start: int
    stop: int
    owner: int


class Exchange(Protocol):
    """How the gradients of a site's workers reach one another.

    "Here" means in this process: one worker in the runtime, all of them in the simulator. What comes back is in the
    order of the workers.
    """

    @property
    def size(self) -> int:
        """Workers of the site."""

    @property
    def workers(self) -> Sequence[int]:
        """The workers that are here."""

    def all_gather(self, own: Sequence[Sequence[Payload]]) -> Sequence[Sequence[Payload]]:
        """Every worker's payloads, from those of the workers here."""

    def mean(self, own: Iterable[Tensor]) -> Iterable[Tensor]:
        """Vectors whose mean is the mean of all workers' vectors: all of them, or the mean alone."""

    def all_to_all(self, own: Sequence[Sequence[Payload]]) -> Sequence[Sequence[Payload]]:
        """For each worker here, what all workers sent to it; payload i of a worker goes to worker i."""

    def to_servers(self, own: Sequence[Sequence[Payload]], owners: Sequence[int]) -> Sequence[Sequence[Payload]]:
        """From every worker, the payloads that are served here; payload i is for the worker `owners[i]`."""

    def vectors_to_servers(self, own: Iterable[Tensor], parts: Sequence[ServedPart]) -> Iterable[Tensor]:
        """From every worker, the elements that are served here, one part after the other.

        Args:
            own: The vectors of the workers here; they may be overwritten when the next one is asked for.
            parts: Who serves which elements of a vector, in ascending order and without gaps.
        """


@dataclass(frozen=True)
class Bucket:
    """Neighbouring elements of the gradient that are exchanged together; the slots where tensors stay whole."""

    start: int
    stop: int
    slots: tuple[int, ...] = ()

    @property
    def intervals(self) -> Intervals:
        """The elements."""
        return Intervals(((self.start, self.stop),) if self.stop > self.start else ())

    def of(self, flat: Tensor) -> Tensor:
        """The bucket's elements of a whole flat gradient."""
        return flat[self.start : self.stop]


class GradientExchange:
    """What a strategy does with gradients inside a site, for the workers of one process.

    Memory: the states of the codecs, and momentum where the strategy corrects it. A bucket at a time otherwise.

    Args:
        layout: Where the parameters lie in the flat gradient.
        strategy: The strategy, adapted to the number of workers (`Strategy.inside`).
        exchange: How gradients reach the other workers.
        key: Parent of the keys of this site (`RunStream.LOCAL_STEP`).
        clip_norm: Largest norm of each tensor of a worker's gradient; None does not clip.
    """

    def __init__(
        self, layout: Layout, strategy: Strategy, exchange: Exchange, *, key: int, clip_norm: float | None = None
    ) -> None:
        self.layout, self.exchange = layout, exchange
        self.owners = owners(layout, serving(layout, strategy, exchange.size))
        """The worker that serves each tensor; None where all workers get the mean of everything."""
        self.codec = codec = strategy.wan_codec("gradients")
        self._quantizes = quantizes = not isinstance(codec, Fp32)
        self.rings: list[list[QuantizedAllreduce]] = []
        """For each worker here, one for each bucket: where encoded gradients meet in an allreduce."""
        self.encoders: list[GradientEncoder] = []
        """One for each worker here, if something happens to a gradient before it leaves its worker."""
        if quantizes and self.owners is None and exchange.size > 1:
            self.buckets = _stretches(layout)
            self.rings = [
                [
                    QuantizedAllreduce(exchange.size, bucket.stop - bucket.start, codec, _ring_key(key, worker, place))
                    for place, bucket in enumerate(self.buckets)
                ]
                for worker in exchange.workers
            ]
        elif quantizes or clip_norm is not None or strategy.correction:
            self.buckets = _whole_tensors(layout)
            keys = [derive(key, SiteStream.GRADIENTS, worker) for worker in exchange.workers]
            self.encoders = [
                GradientEncoder(layout, codec, own, clip_norm=clip_norm, momentum=strategy.correction) for own in keys
            ]
        else:
            served = self.owners is not None or strategy.combine == "serial"
            self.buckets = _whole_tensors(layout) if served else _stretches(layout)

    @property
    def encodes(self) -> bool:
        """Whether gradients become payloads before they leave a worker."""
        return bool(self.rings or (self.encoders and self._quantizes))

    @property
    def plain_mean(self) -> bool:
        """Whether all that happens to gradients is that every worker gets their mean."""
        return not self.encoders and not self.rings and self.owners is None

    @property
    def corrects(self) -> bool:
        """Whether gradients are clipped or corrected before they leave a worker as they are."""
        return bool(self.encoders) and not self._quantizes

    def encode(self, place: int, bucket: int, values: Tensor, number: int) -> Sequence[Payload]:
        """Encode a bucket of the gradient of a worker.

        Args:
            place: Which of the workers here.
            bucket: Which of the buckets.
            values: Its elements.
            number: The step's number, which its keys are derived from.
        """
        if self.rings:
            return self.rings[place][bucket].encode_chunks(values, number)
        found = self.buckets[bucket]
        return [
            self.encoders[place].encode_slot(slot, self._slot(slot).of_part(values, found.start), number)
            for slot in found.slots
        ]

    def correct(self, place: int, bucket: int, values: Tensor, number: int) -> Tensor:
        """Clip and correct a bucket of the gradient of a worker, where nothing else happens to it; in place."""
        if self.corrects:
            found = self.buckets[bucket]
            for payload, slot in zip(self.encode(place, bucket, values, number), found.slots, strict=True):
                decode(payload, out=self._slot(slot).of_part(values, found.start))
        return values

    def _slot(self, index: int) -> Slot:
        return self.layout.slots[index]

    def gather(
        self, bucket: int, own: Sequence[Sequence[Payload]], number: int
    ) -> Tensor | Sequence[Sequence[Payload]]:
        """Exchange an encoded bucket.

        Args:
            bucket: Which of the buckets.
            own: What `encode` returned for each worker here.
            number: The step's number.

        Returns:
            The mean, or from every worker the payloads that are served here, in the order of the workers.
        """
        if not self.rings:
            return self.exchange.to_servers(own, self._owners_of(bucket))
        rings = [worker[bucket] for worker in self.rings]
        dealt = self.exchange.all_to_all(own)
        reduced = [[ring.reduce(chunks, number)] for ring, chunks in zip(rings, dealt, strict=True)]
        everyones = [payload for (payload,) in self.exchange.all_gather(reduced)]
        return rings[0].gather(everyones)

    def gather_vectors(self, bucket: int, own: Iterable[Tensor]) -> Iterable[Tensor]:
        """Exchange a bucket that is not encoded: from every worker, the elements that are served here."""
        found = self.buckets[bucket]
        return self.exchange.vectors_to_servers(own, self._parts(found.slots, found.start))

    def whole_vectors(self, own: Iterable[Tensor]) -> Iterable[Tensor]:
        """Exchange whole gradients that are not encoded, in a process that has all workers."""
        return self.exchange.vectors_to_servers(own, self._parts(range(len(self.layout.slots)), 0))

    def _parts(self, slots: Sequence[int], start: int) -> list[ServedPart]:
        chosen = [(self._slot(slot), owner) for slot, owner in zip(slots, self._owners_of_slots(slots), strict=True)]
        return [ServedPart(slot.start - start, slot.stop - start, owner) for slot, owner in chosen]

    def _owners_of(self, bucket: int) -> Sequence[int]:
        return self._owners_of_slots(self.buckets[bucket].slots)

    def _owners_of_slots(self, slots: Sequence[int]) -> Sequence[int]:
        (here, *_) = self.exchange.workers  # alone, a worker serves everything itself
        return [here if self.owners is None else self.owners[slot] for slot in slots]

    def served_slots(self, bucket: int | None = None) -> list[int]:
        """The tensors that are served here, in a process that has one worker; of one bucket, or all."""
        (here,) = self.exchange.workers
        slots = range(len(self.layout.slots)) if bucket is None else self.buckets[bucket].slots
        return [slot for slot, owner in zip(slots, self._owners_of_slots(slots), strict=True) if owner == here]

    def mean(self, bucket: int, own: Tensor, number: int) -> tuple[Intervals, Tensor]:
        """The mean of all workers' gradients in a bucket, in a process that has one of them.

        Args:
            bucket: Which of the buckets.
            own: This worker's elements; may be overwritten.
            number: The step's number.

        Returns:
            The elements of which this worker gets the mean, and the mean.
        """
        found = self.buckets[bucket]
        if not self.encodes:
            corrected = self.correct(0, bucket, own, number)
            if self.owners is None:
                (mean,) = self.exchange.mean([corrected])
                return found.intervals, mean
            return self._intervals(self.served_slots(bucket)), _mean(self.gather_vectors(bucket, [corrected]))
        gathered = self.gather(bucket, [self.encode(0, bucket, own, number)], number)
        if isinstance(gathered, Tensor):
            return found.intervals, gathered
        slots = self.served_slots(bucket)
        return self._intervals(slots), self._decoded_mean(slots, gathered)

    def _intervals(self, slots: Sequence[int]) -> Intervals:
        return Intervals.of((self._slot(slot).start, self._slot(slot).stop) for slot in slots)

    def _decoded_mean(self, slots: Sequence[int], payloads: Sequence[Sequence[Payload]]) -> Tensor:
        """The mean of payloads, added in the order of the workers."""
        layout = self.layout.of_slots(slots)
        out = torch.empty(layout.numel, dtype=torch.float32)
        for count, worker in enumerate(payloads):
            for payload, view in zip(worker, layout.views(out), strict=True):
                # Not 0 + x for the first one, which would make +0 of -0.
                decode_add(payload, view) if count else decode(payload, out=view)
        return out.div_(len(payloads)) if len(payloads) > 1 else out

    def state(self) -> dict[str, Tensor]:
        """Copies of all that it remembers."""
        return {f"{name}.{key}": tensor for name, one in self._owners() for key, tensor in one.state().items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        for name, owner in self._owners():
            owner.load(without_prefix(f"{name}.", saved))

    def _owners(self) -> Iterator[tuple[str, QuantizedAllreduce | GradientEncoder]]:
        for worker, rings in zip(self.exchange.workers, self.rings, strict=False):
            for place, ring in enumerate(rings):
                yield f"allreduce {worker} {place}", ring
        for worker, encoder in zip(self.exchange.workers, self.encoders, strict=False):
            yield f"encoder {worker}", encoder


def _ring_key(key: int, worker: int, bucket: int) -> int:
    own = derive(key, SiteStream.ALLREDUCE, worker)
    return own if bucket == 0 else derive(own, bucket)


def _stretches(layout: Layout) -> tuple[Bucket, ...]:
    """The flat gradient in stretches of equal size."""
    cut = pieces.cut(Intervals.whole(layout.numel), layout, per_tensor=False)
    return tuple(Bucket(piece.intervals.first, piece.intervals.end) for piece in cut)


def _whole_tensors(layout: Layout) -> tuple[Bucket, ...]:
    """Neighbouring tensors together, as many as fit a piece, or one alone if it is larger."""
    found: list[Bucket] = []
    for index, slot in enumerate(layout.slots):
        last = found[-1] if found else None
        if last is not None and slot.stop - last.start <= pieces.limit_of(layout):
            found[-1] = Bucket(last.start, slot.stop, (*last.slots, index))
        else:
            found.append(Bucket(slot.start, slot.stop, (index,)))
    return tuple(found)


def _mean(vectors: Iterable[Tensor]) -> Tensor:
    """The mean of vectors, added in their order."""
    total, count = torch.empty(0, dtype=torch.float32), 0
    for vector in vectors:
        total, count = (total.add_(vector) if count else vector.clone()), count + 1
    return total.div_(count) if count > 1 else total
