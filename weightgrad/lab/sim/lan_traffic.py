"""The bytes between the workers of a simulated site: who sends how many, counted as a deployment counts them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from weightgrad import wire
from weightgrad.codecs import Payload
from weightgrad.local.gradient_exchange import ServedPart


class LanTraffic:
    """Bytes that cross the network card of each worker."""

    def __init__(self, workers: int) -> None:
        self.sent, self.received = [0] * workers, [0] * workers

    def send(self, sender: int, receiver: int, nbytes: int) -> None:
        """Count bytes from one worker to another; a worker sends nothing to itself."""
        if sender != receiver:
            self.sent[sender] += nbytes
            self.received[receiver] += nbytes

    def send_all(self, sender: int, nbytes: int) -> None:
        """Count bytes from one worker to each of the others."""
        for receiver in range(len(self.sent)):
            self.send(sender, receiver, nbytes)

    @property
    def total(self) -> int:
        """Bytes of all workers."""
        return sum(self.sent)

    @property
    def busiest(self) -> int:
        """Bytes in one direction through the card that carries most."""
        return max(*self.sent, *self.received)


class CountingExchange:
    """The `Exchange` of workers that live in one process: nothing travels, and the bytes are counted."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.workers = range(size)
        self.begin_step()

    def begin_step(self) -> None:
        """Count from zero."""
        self.traffic = LanTraffic(self.size)
        self.sizes = [0] * self.size
        """Bytes of each worker's gradient as it is sent, what it keeps for itself included."""

    def all_gather(self, own: Sequence[Sequence[Payload]]) -> Sequence[Sequence[Payload]]:
        """All payloads."""
        for worker, payloads in enumerate(own):
            self.traffic.send_all(worker, frames_bytes(payloads))
        return own

    def mean(self, own: Iterable[Tensor]) -> Iterator[Tensor]:
        """All vectors, one at a time; whoever takes them adds them up in the order of the workers."""
        for worker, vector in enumerate(own):
            self.sizes[worker] += 4 * vector.numel()
            cuts = [rank * vector.numel() // self.size for rank in range(self.size + 1)]
            for other in self.workers:  # a share of the vector to each worker, and the mean of its own share back
                share = 4 * (cuts[other + 1] - cuts[other])
                self.traffic.send(worker, other, share)
                self.traffic.send(other, worker, share)
            yield vector

    def all_to_all(self, own: Sequence[Sequence[Payload]]) -> list[list[Payload]]:
        """Payload i of every worker, for each worker i."""
        for worker, payloads in enumerate(own):
            for receiver, payload in enumerate(payloads):
                self._count(worker, receiver, wire.frame_bytes(payload))
        return [[payloads[worker] for payloads in own] for worker in self.workers]

    def to_servers(self, own: Sequence[Sequence[Payload]], owners: Sequence[int]) -> Sequence[Sequence[Payload]]:
        """All payloads: all of them are served here."""
        for worker, payloads in enumerate(own):
            for payload, owner in zip(payloads, owners, strict=True):
                self._count(worker, owner, wire.frame_bytes(payload))
        return own

    def vectors_to_servers(self, own: Iterable[Tensor], parts: Sequence[ServedPart]) -> Iterator[Tensor]:
        """All vectors, one at a time: all elements are served here."""
        for worker, vector in enumerate(own):
            for part in parts:
                self._count(worker, part.owner, 4 * (part.stop - part.start))
            yield vector

    def _count(self, sender: int, receiver: int, nbytes: int) -> None:
        self.sizes[sender] += nbytes
        self.traffic.send(sender, receiver, nbytes)


def frames_bytes(payloads: Iterable[Payload]) -> int:
    """The bytes of payloads as frames."""
    return sum(wire.frame_bytes(payload) for payload in payloads)
