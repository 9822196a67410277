"""How long the workers of a site take to exchange gradients and weights over their LAN.

There are three patterns. `server`: worker 0 is the local server; the others send it their gradients, whose transfers
share its network card fairly, and the weights leave through it. `sharded`: every worker is the local server of some
tensors; workers send and receive at the same time, and the busiest card decides. `allreduce`: the ring; every card
carries 2(n-1)/n of the vector in each direction. What one worker has and all need, such as its part of the result of a
round, is passed on from worker to worker in pieces. A site of one worker has nothing to exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LocalNetwork:
    """The network inside a site: bandwidth of every card, and one-way delay."""

    bandwidth_bit_s: float
    delay_seconds: float

    def gather(self, starts: Sequence[float], sizes: Sequence[int]) -> float:
        """When worker 0, the local server, has all gradients, if workers begin to send theirs at these times."""
        if len(sizes) < 2:
            return max(starts)
        received = shared_finish(starts[1:], sizes[1:], self.bandwidth_bit_s / 8) + self.delay_seconds
        return max(starts[0], received)

    def exchange(self, busiest_bytes: int) -> float:
        """Seconds in which workers send to one another, with so many bytes one way through the busiest card."""
        if not busiest_bytes:
            return 0.0
        return busiest_bytes * 8 / self.bandwidth_bit_s + self.delay_seconds

    def pass_on(self, sizes: Sequence[int]) -> float:
        """Seconds until every worker has the bytes of all others, passed on in pieces from worker to worker.

        Args:
            sizes: the bytes of each worker.
        """
        if len(sizes) < 2 or not sum(sizes):
            return 0.0
        busiest = sum(sizes) - min(sizes)
        return busiest * 8 / self.bandwidth_bit_s + (len(sizes) - 1) * self.delay_seconds

    def allreduce(self, workers: int, nbytes: int) -> float:
        """Seconds of a ring allreduce of so many bytes."""
        if workers < 2:
            return 0.0
        hops = 2 * (workers - 1)
        return hops / workers * nbytes * 8 / self.bandwidth_bit_s + hops * self.delay_seconds


def allreduce_bytes(workers: int, nbytes: int) -> int:
    """Bytes that all workers together send in a ring allreduce."""
    return 2 * (workers - 1) * nbytes


def shared_finish(starts: Sequence[float], sizes: Sequence[int], rate: float) -> float:
    """When the last of several transfers ends that share one link fairly.

    A fair link is never idle while a transfer waits, so the last end is that of one queue.
    """
    done = 0.0
    for start, size in sorted(zip(starts, sizes, strict=True)):
        done = max(done, start) + size / rate
    return done
