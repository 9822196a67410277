"""One rank of an allreduce on a host of its own: does what stdin says, line by line, and answers on stdout.

python allreduce_child.py            with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them

{"method": "qsgd(bits=4)", "numel": 4096} makes a fresh allreduce, {"step": 0} draws this rank's vector, {"at": 12.5}
reduces it, beginning when the machine's monotonic clock, which all ranks share, says so.
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
from allreduce_formula import DEALT, DOUBLING, RING
from allreduce_ranks import make_rank, vector_of
from field_sheet import Row
from torch import Tensor

from weightgrad import kernels
from weightgrad.runtime.crew import join, part
from weightgrad.runtime.lan import Lan

_PATIENCE_S = 120.0


class Allreduce:
    """One method with its state: the mean of all ranks' vectors, and what the codec took of it."""

    def __init__(self, method: str, numel: int, lan: Lan) -> None:
        self._lan = lan
        self._spans: list[tuple[float, float]] = []  # clock and processor time of this thread
        plain: dict[str, Callable[[Tensor, int], Tensor]] = {
            RING: self._by_gloo,
            DOUBLING: self._by_doubling,
            DEALT: lambda vector, _: lan.mean(vector),
        }
        self._how = plain.get(method, self._by_codec)
        if method not in plain:
            self._rank = make_rank(method, numel, lan.size, lan.rank)

    def run(self, vector: Tensor, step: int) -> tuple[Tensor, float, float]:
        """The mean; clock and processor seconds of the codec and its frames."""
        self._spans.clear()
        mean = self._how(vector, step)
        clock, processor = (sum(b[i] - a[i] for a, b in self._pairs()) for i in (0, 1))
        return mean, clock, processor

    def _pairs(self) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        return list(zip(self._spans[::2], self._spans[1::2], strict=True))

    def _mark(self) -> None:
        self._spans.append((time.monotonic(), time.thread_time()))

    def _by_codec(self, vector: Tensor, step: int) -> Tensor:
        """What `Crew` does with a gradient, with marks before and after what is not network."""
        self._mark()
        mine = [join([payload]) for payload in self._rank.encode_chunks(vector, step)]
        self._mark()
        dealt = self._lan.deal(mine)
        self._mark()
        reduced = join([self._rank.reduce([part(one)[0] for one in dealt], step)])
        self._mark()
        everyones = self._lan.exchange(reduced)
        self._mark()
        mean = self._rank.gather([part(one)[0] for one in everyones])
        self._mark()
        return mean

    def _by_gloo(self, vector: Tensor, _: int) -> Tensor:
        """What DDP does."""
        total = vector.clone()
        dist.all_reduce(total)
        return total.div_(self._lan.size)

    def _by_doubling(self, vector: Tensor, _: int) -> Tensor:
        """Everything to a partner twice as far away each round; sums of two are the same in either order.

        Receiving is asked for first: Gloo says so to the partner behind whatever it is sending to him.
        """
        total, came, distance = vector.clone(), torch.empty_like(vector), 1
        while distance < self._lan.size:
            partner = self._lan.rank ^ distance
            for work in (dist.irecv(came, partner), dist.isend(total, partner)):
                assert work is not None
                work.wait()
            total += came
            distance *= 2
        return total.div_(self._lan.size)


def serve(lan: Lan) -> None:
    """Until stdin ends."""
    answer({"ready": lan.rank})
    reduce, vector, step, numel = Allreduce(RING, 0, lan), torch.empty(0), 0, 0
    for line in sys.stdin:
        told = json.loads(line)
        if "method" in told:
            numel = told["numel"]
            reduce = Allreduce(told["method"], numel, lan)
            answer({})
        elif "step" in told:
            step = told["step"]
            vector = vector_of(numel, step, lan.rank)
            answer({})
        else:
            answer(timed(reduce, vector, step, told["at"]))


def timed(reduce: Allreduce, vector: Tensor, step: int, at: float) -> Row:
    """One allreduce that begins at that time."""
    time.sleep(max(at - time.monotonic(), 0.0))
    processor = time.process_time()
    mean, codec_clock, codec = reduce.run(vector, step)
    end, processor = time.monotonic(), time.process_time() - processor
    digest = hashlib.blake2b(mean.numpy().data, digest_size=8).hexdigest()
    return {"end": end, "processor": processor, "codec": codec, "codec_clock": codec_clock, "digest": digest}


def answer(value: Row) -> None:
    """One line."""
    print(json.dumps(value), flush=True)


def main() -> None:
    """Meet the others, then serve."""
    torch.set_num_threads(1)
    kernels.set_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name != "lo")
    serve(Lan(timeout=_PATIENCE_S))


if __name__ == "__main__":
    main()
