"""How long the workers of a site take to exchange gradients and weights over their LAN.

There are three patterns. `server`: every worker sends to the local server; its network card is shared fairly, and the
results leave through it. `sharded`: the workers divide the work of the local server, each has 1/n of the vector; every
card carries (n-1)/n of what a worker sends and receives. `allreduce`: the ring; every card carries 2(n-1)/n of the
vector in each direction. A site of one worker has nothing to exchange.
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
        """When the local server has received everything, if workers begin to send at these times."""
        if len(sizes) < 2:
            return max(starts)
        return shared_finish(starts, sizes, self.bandwidth_bit_s / 8) + self.delay_seconds

    def spread(self, workers: int, nbytes: int) -> float:
        """Seconds for the local server to send so many bytes to each worker."""
        if workers < 2 or not nbytes:
            return 0.0
        return workers * nbytes * 8 / self.bandwidth_bit_s + self.delay_seconds

    def broadcast(self, workers: int, nbytes: int) -> float:
        """Seconds until all workers have so many bytes of one worker, passed on in pieces from worker to worker."""
        if workers < 2 or not nbytes:
            return 0.0
        return nbytes * 8 / self.bandwidth_bit_s + (workers - 1) * self.delay_seconds

    def all_to_all(self, workers: int, nbytes: int) -> float:
        """Seconds of an all-to-all exchange in which each worker sends so many bytes in total."""
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
