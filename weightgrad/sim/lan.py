"""How long the workers of a site take to exchange gradients and weights over their LAN.

Three patterns. `server`: every worker sends to the local server through its one network card, which is
shared fairly, and the answers leave through it. `sharded`: the local server's work is dealt among the
workers, each has 1/n of the vector; every card carries (n-1)/n of what a worker sends, and of what
it is given. `allreduce`: the ring; every card carries 2(n-1)/n of the vector each way. A site of one
worker has nothing to exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lan:
    """A site's network."""

    bandwidth_bit_s: float
    delay_seconds: float

    def gather(self, starts: Sequence[float], sizes: Sequence[int]) -> float:
        """When the local server has everything that workers began to send at these times."""
        if len(sizes) < 2:
            return max(starts)
        return shared_finish(starts, sizes, self.bandwidth_bit_s / 8) + self.delay_seconds

    def spread(self, workers: int, nbytes: int) -> float:
        """Seconds for the local server to give each worker so many bytes."""
        if workers < 2 or not nbytes:
            return 0.0
        return workers * nbytes * 8 / self.bandwidth_bit_s + self.delay_seconds

    def broadcast(self, workers: int, nbytes: int) -> float:
        """Seconds until all workers have what one of them got, handed on from one to the next in pieces."""
        if workers < 2 or not nbytes:
            return 0.0
        return nbytes * 8 / self.bandwidth_bit_s + (workers - 1) * self.delay_seconds

    def all_to_all(self, workers: int, nbytes: int) -> float:
        """Seconds until each worker has its share of what every other sent, or all have every share."""
        if workers < 2 or not nbytes:
            return 0.0
        return (workers - 1) / workers * nbytes * 8 / self.bandwidth_bit_s + self.delay_seconds

    def allreduce(self, workers: int, nbytes: int) -> float:
        """Seconds of a ring allreduce of so many bytes."""
        if workers < 2:
            return 0.0
        hops = 2 * (workers - 1)
        return hops / workers * nbytes * 8 / self.bandwidth_bit_s + hops * self.delay_seconds


def allreduce_bytes(workers: int, nbytes: int) -> int:
    """Bytes all workers together send in a ring allreduce."""
    return 2 * (workers - 1) * nbytes


def shared_finish(starts: Sequence[float], sizes: Sequence[int], rate: float) -> float:
    """When the last of several transfers that share one link fairly is through.

    A fair link is never idle while anything waits, so the last end is that of one queue.
    """
    done = 0.0
    for start, size in sorted(zip(starts, sizes, strict=True)):
        done = max(done, start) + size / rate
    return done
