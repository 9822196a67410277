"""The workers of a site and how they talk: torch.distributed, NCCL for what is on GPUs, Gloo for the rest.

Sums are made in the order of the ranks, whatever the transport, so a site gives the same bits every
time, and the same as the simulator.
"""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from weightgrad.errors import StrategyError
from weightgrad.runtime import gloo_threads


class Lan:
    """This process among the workers of its site; alone when it was not started by torchrun."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 1800.0) -> None:
        ours = group is None and int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
        if ours:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            _gather(backend, timedelta(seconds=timeout))
        self._here = dist.is_available() and dist.is_initialized()
        if self._here:
            atexit.register(_part, ours)
        self._group = group
        self.rank: int = dist.get_rank(group) if self._here else 0
        self.size: int = dist.get_world_size(group) if self._here else 1
        self.sent_bytes = 0
        if self._here and self.size > 1 and not _speaks_cpu(group):
            raise StrategyError(
                "the process group cannot carry CPU tensors, which encoded gradients are; "
                'initialise it with backend "cpu:gloo,cuda:nccl", or let weightgrad.join do it'
            )

    @property
    def first(self) -> bool:
        """Whether this rank is the site's local server: the one that speaks with the global server."""
        return self.rank == 0

    @property
    def idle_core(self) -> bool:
        """Whether every rank of this machine has a core more than it computes on."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cores >= ranks * (torch.get_num_threads() + 1)

    def mean(self, flat: Tensor) -> Tensor:
        """The mean of the ranks' vectors, summed in their order; a new tensor."""
        if self.size == 1:
            return flat.clone()
        if flat.is_cuda:
            total = flat.clone()
            dist.all_reduce(total, group=self._group)
            self.sent_bytes += 2 * (self.size - 1) * flat.numel() * 4 // self.size
            return total.div_(self.size)
        cuts = [rank * flat.numel() // self.size for rank in range(self.size + 1)]
        sizes = [stop - start for start, stop in pairwise(cuts)]
        own = sizes[self.rank]
        received = torch.empty(own * self.size)
        self._all_to_all(received, flat, [own] * self.size, sizes)
        total = received[:own]
        for rank in range(1, self.size):
            total += received[rank * own : (rank + 1) * own]
        total /= self.size
        out = torch.empty_like(flat)
        self._all_to_all(out, total.repeat(self.size), sizes, [own] * self.size)
        return out

    def exchange(self, blob: Tensor) -> list[Tensor]:
        """Everybody's bytes, in the order of the ranks."""
        if self.size == 1:
            return [blob]
        return self.deal([blob] * self.size)

    def deal(self, blobs: list[Tensor]) -> list[Tensor]:
        """Blob i goes to rank i; returns what came, in the order of the ranks."""
        if self.size == 1:
            return blobs
        mine = torch.tensor([blob.numel() for blob in blobs])
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self._group)
        counts = theirs.tolist()
        out = torch.empty(sum(counts), dtype=torch.uint8)
        self._all_to_all(out, torch.cat(blobs), counts, mine.tolist())
        return list(out.split(counts))

    def from_first(self, tensor: Tensor) -> None:
        """Rank 0's values, on every rank, in place."""
        if self.size > 1:
            dist.broadcast(tensor, group=self._group, group_src=0)
            self.sent_bytes += tensor.numel() * tensor.element_size() if self.first else 0

    def number_from_first(self, number: int) -> int:
        """Rank 0's whole number, on every rank."""
        if self.size == 1:
            return number
        box = torch.tensor([number])
        dist.broadcast(box, group=self._group, group_src=0)
        return int(box)

    def words_from_first(self, words: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""
        if self.size == 1:
            return words
        box = torch.empty(self.number_from_first(len(words)), dtype=torch.uint8)
        if self.first and words:
            box.copy_(torch.frombuffer(bytearray(words), dtype=torch.uint8))
        self.from_first(box)
        return bytes(box.numpy())

    def barrier(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            self.exchange(torch.zeros(0, dtype=torch.uint8))

    def _all_to_all(self, out: Tensor, given: Tensor, incoming: list[int], outgoing: list[int]) -> None:
        """Asks for everything before it sends anything, which Gloo's own all-to-all does not.

        What Gloo asks of a peer waits behind what it is sending to him, so asking late makes the two directions of
        a connection take turns.
        """
        coming, going = out.split(incoming), given.contiguous().split(outgoing)
        coming[self.rank].copy_(going[self.rank])
        others = [(self.rank + i) % self.size for i in range(1, self.size)]
        work = [dist.irecv(coming[one], group=self._group, group_src=one) for one in others if incoming[one]]
        work += [dist.isend(going[one], group=self._group, group_dst=one) for one in others if outgoing[one]]
        for one in work:
            one.wait()  # type: ignore[union-attr]
        self.sent_bytes += (given.numel() - outgoing[self.rank]) * given.element_size()


def _gather(backend: str, timeout: timedelta) -> None:
    """Meet the other ranks. Under torchrun, where no rank of an earlier life can be met."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    life = f"weightgrad/{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    met = dist.TCPStore(host, port, size, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    store = dist.PrefixStore(life, met)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _part(ours: bool) -> None:
    """At the very end: a process that exits while Gloo's threads run may abort, and torchrun would start it again."""
    if ours and dist.is_initialized():
        dist.destroy_process_group()
    gloo_threads.until_quiet()


def _speaks_cpu(group: dist.ProcessGroup | None) -> bool:
    config = str(dist.get_backend_config(group))
    return "cpu" in config or "gloo" in config
