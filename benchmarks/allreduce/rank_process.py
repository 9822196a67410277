"""One rank of an allreduce on its own host: reads requests from stdin, one per line, and replies on stdout.

    python -m allreduce.rank_process        with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them

The request {"method": "qsgd(bits=4)", "numel": 4096} makes a new allreduce, {"step": 0} draws the vector of this rank,
and {"at": 12.5} reduces it, beginning at this time of the monotonic clock, which all ranks on the machine share.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from allreduce.cost import ALL_TO_ALL, DOUBLING, RING, make_rank, vector_of
from result_table import Row
from torch import Tensor

from weightgrad import kernels
from weightgrad.runtime.payload_exchange import from_frames, to_frames
from weightgrad.runtime.process_group import SiteGroup

_TIMEOUT_S = 120.0


class Allreduce:
    """One method with its state: computes the mean of all ranks' vectors, and times the codec within it."""

    def __init__(self, method: str, numel: int, group: SiteGroup) -> None:
        self._group = group
        self._spans: list[tuple[float, float]] = []  # clock and processor time of this thread
        plain: dict[str, Callable[[Tensor, int], Tensor]] = {
            RING: self._by_gloo,
            DOUBLING: self._by_doubling,
            ALL_TO_ALL: lambda vector, _: group.mean(vector),
        }
        self._how = plain.get(method, self._by_codec)
        if method not in plain:
            self._rank = make_rank(method, numel, group.size, group.rank)

    def run(self, vector: Tensor, step: int) -> tuple[Tensor, float, float]:
        """Returns the mean, and the wall and processor seconds of the codec and its frames."""
        self._spans.clear()
        mean = self._how(vector, step)
        clock, processor = (sum(b[i] - a[i] for a, b in self._pairs()) for i in (0, 1))
        return mean, clock, processor

    def _pairs(self) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        return list(zip(self._spans[::2], self._spans[1::2], strict=True))

    def _mark(self) -> None:
        self._spans.append((time.monotonic(), time.thread_time()))

    def _by_codec(self, vector: Tensor, step: int) -> Tensor:
        """What `LocalStep` does with a gradient, with time stamps around everything that is not network."""
        self._mark()
        mine = [to_frames([payload]) for payload in self._rank.encode_chunks(vector, step)]
        self._mark()
        dealt = self._group.deal(mine)
        self._mark()
        reduced = to_frames([self._rank.reduce([from_frames(one)[0] for one in dealt], step)])
        self._mark()
        everyones = self._group.exchange(reduced)
        self._mark()
        mean = self._rank.gather([from_frames(one)[0] for one in everyones])
        self._mark()
        return mean

    def _by_gloo(self, vector: Tensor, _: int) -> Tensor:
        """The all_reduce of Gloo, as DDP uses it."""
        total = vector.clone()
        dist.all_reduce(total)
        return total.div_(self._group.size)

    def _by_doubling(self, vector: Tensor, _: int) -> Tensor:
        """Recursive doubling: exchange the whole vector with a partner whose distance doubles in every round.

        The receive is posted first, because Gloo announces it to the partner after data that it already sends.
        """
        total, received, distance = vector.clone(), torch.empty_like(vector), 1
        while distance < self._group.size:
            partner = self._group.rank ^ distance
            for work in (dist.irecv(received, partner), dist.isend(total, partner)):
                assert work is not None
                work.wait()
            total += received
            distance *= 2
        return total.div_(self._group.size)


def serve(group: SiteGroup) -> None:
    """Serve requests until stdin ends."""
    reply({"ready": group.rank})
    reduce, vector, step, numel = Allreduce(RING, 0, group), torch.empty(0), 0, 0
    for line in sys.stdin:
        request = json.loads(line)
        if "method" in request:
            numel = request["numel"]
            reduce = Allreduce(request["method"], numel, group)
            reply({})
        elif "step" in request:
            step = request["step"]
            vector = vector_of(numel, step, group.rank)
            reply({})
        else:
            reply(timed(reduce, vector, step, request["at"]))


def timed(reduce: Allreduce, vector: Tensor, step: int, at: float) -> Row:
    """Run one allreduce that begins at this time."""
    time.sleep(max(at - time.monotonic(), 0.0))
    processor = time.process_time()
    mean, codec_clock, codec = reduce.run(vector, step)
    end, processor = time.monotonic(), time.process_time() - processor
    digest = hashlib.blake2b(mean.numpy().data, digest_size=8).hexdigest()
    return {"end": end, "processor": processor, "codec": codec, "codec_clock": codec_clock, "digest": digest}


def reply(value: Row) -> None:
    """Print one reply."""
    print(json.dumps(value), flush=True)


def main() -> None:
    """Join the process group, then serve."""
    torch.set_num_threads(1)
    kernels.set_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name != "lo")
    serve(SiteGroup(timeout=_TIMEOUT_S))


if __name__ == "__main__":
    main()
