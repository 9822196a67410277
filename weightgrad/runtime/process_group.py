"""The ranks of a site and how they talk: torch.distributed, with NCCL for tensors on GPUs and Gloo for the rest.

What holds for `SiteGroup.mean`: on the CPU, vectors are summed in the order of the ranks, so a site gives the same bits
every time, and the same as the simulator. On a GPU it is NCCL's all-reduce, which sums in an order of its own: the
ranks of a site agree on the bits, but another run may differ in the last of them. Gradients that are averaged as they
are stay on the GPU; gradients that are encoded, clipped or corrected go through the host.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

_THREAD_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")  # only Linux has it; elsewhere no thread is found and nothing is waited for
_LOOK_S = 0.02  # between two looks; a thread that waits for the interpreter wakes every 5 ms to ask for it again
_AT_MOST_S = 5.0
_PASSED_BYTES = 1 << 20  # of a piece that is passed on


class SiteGroup:
    """This process among the ranks of its site; alone if it was not started by torchrun.

    Where the group carries tensors of devices only, as after `init_process_group("nccl")`, those use it, and a group of
    Gloo with the same ranks is made beside it: encoded gradients and orders are tensors of the CPU.

    Args:
        group: The ranks of the site; None takes the default group, and makes one under torchrun if there is none.
        timeout: Seconds after which a collective of a group made here fails.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 1800.0) -> None:
        ours = group is None and int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
        if ours:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            init_process_group(backend, timedelta(seconds=timeout))
        self._here = dist.is_available() and dist.is_initialized()
        if self._here:
            atexit.register(_end_process_group, ours)
        self._group = self._device_group = group
        self.rank: int = dist.get_rank(group) if self._here else 0
        self.size: int = dist.get_world_size(group) if self._here else 1
        if self._here and self.size > 1 and not _carries_cpu(group):
            self._group = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=timedelta(seconds=timeout),
                backend="gloo",
                use_local_synchronization=True,
            )
        self.sent_bytes = 0
        """Bytes of gradients, weights, results and buffers that this rank has sent to other ranks.

        What ranks tell one another about their work (orders, sizes, sums) is not in it; see `told_bytes`.
        """
        self.told_bytes = 0
        """Bytes of everything else: they do not grow with the model."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of torch.distributed that carries tensors of the CPU; None is the default one."""
        return self._group

    @property
    def first(self) -> bool:
        """Whether this rank is the local server, the one that speaks with the global server."""
        return self.rank == 0

    def mean(self, flat: Tensor) -> Tensor:
        """The mean of all ranks' float32 vectors, as a new tensor.

        Args:
            flat: This rank's vector; all ranks have vectors of the same length.

        Returns:
            The same bits on every rank. On the CPU they are those of a sum in the order of the ranks; on a GPU the
            order is NCCL's.
        """
        if self.size == 1:
            return flat.clone()
        if flat.device.type != "cpu":
            total = flat.clone()
            dist.all_reduce(total, group=self._device_group)
            self.sent_bytes += 2 * (self.size - 1) * flat.numel() * 4 // self.size
            return total.div_(self.size)
        cuts = [rank * flat.numel() // self.size for rank in range(self.size + 1)]
        sizes = [stop - start for start, stop in pairwise(cuts)]
        own = sizes[self.rank]
        received = torch.empty(own * self.size, dtype=torch.float32)
        self._all_to_all(received, flat, [own] * self.size, sizes)
        total = received[:own]
        for rank in range(1, self.size):
            total += received[rank * own : (rank + 1) * own]
        total /= self.size
        out = torch.empty_like(flat)
        self._all_to_all(out, total.repeat(self.size), sizes, [own] * self.size)
        self.sent_bytes += 4 * (flat.numel() - own + (self.size - 1) * own)
        return out

    def exchange(self, blob: Tensor) -> list[Tensor]:
        """Every rank's bytes, in the order of the ranks. Their lengths may differ. For a few bytes, not for vectors."""
        if self.size == 1:
            return [blob]
        incoming, out = self._deal([blob] * self.size)
        self.told_bytes += (self.size - 1) * blob.numel()
        return list(out.split(incoming))

    def deal(self, blobs: list[Tensor]) -> list[Tensor]:
        """Send blob i to rank i; returns what the ranks sent to this one, in their order."""
        if self.size == 1:
            return blobs
        incoming, out = self._deal(blobs)
        self.sent_bytes += sum(blob.numel() for rank, blob in enumerate(blobs) if rank != self.rank)
        return list(out.split(incoming))

    def _deal(self, blobs: list[Tensor]) -> tuple[list[int], Tensor]:
        mine = torch.tensor([blob.numel() for blob in blobs])
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self._group)
        counts = theirs.tolist()
        out = torch.empty(sum(counts), dtype=torch.uint8)
        self._all_to_all(out, torch.cat(blobs), counts, mine.tolist())
        return counts, out

    def pass_on(self, blob: Tensor) -> list[Tensor]:
        """Every rank's bytes, in the order of the ranks, passed on from rank to rank in pieces.

        Of n ranks each sends every blob once at most, also where one rank has all of the bytes: a card that sent them
        to everybody would need n-1 times as long.
        """
        if self.size == 1:
            return [blob]
        told = self.exchange(torch.tensor([blob.numel()]).view(torch.uint8))
        sizes = [int(one.clone().view(torch.int64)) for one in told]
        found = [blob if rank == self.rank else torch.empty(size, dtype=torch.uint8) for rank, size in enumerate(sizes)]
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        pieces = [one.split(_PASSED_BYTES) if one.numel() else () for one in found]
        turns = [
            (place, rank)
            for place in range(max(len(own) for own in pieces))
            for rank in ((self.rank - distance) % self.size for distance in range(self.size))
            if place < len(pieces[rank])
        ]
        coming = {
            turn: dist.irecv(pieces[turn[1]][turn[0]], group=self._group, group_src=before, tag=self._tag(turn))
            for turn in turns
            if turn[1] != self.rank
        }
        going = []
        for turn in turns:
            place, rank = turn
            if rank != self.rank:
                coming[turn].wait()  # type: ignore[union-attr]
            if rank != after:
                piece = pieces[rank][place]
                going.append(dist.isend(piece, group=self._group, group_dst=after, tag=self._tag(turn)))
                self.sent_bytes += piece.numel()
        for one in going:
            one.wait()  # type: ignore[union-attr]
        return found

    def _tag(self, turn: tuple[int, int]) -> int:
        """Tells a piece from the others on their way between the same two ranks."""
        place, rank = turn
        return 1 + place * self.size + rank

    def from_first(self, tensor: Tensor) -> None:
        """Broadcast rank 0's values into the tensor of every rank. For a few bytes."""
        if self.size > 1:
            dist.broadcast(tensor, group=self._group, group_src=0)
            self.told_bytes += (self.size - 1) * tensor.numel() * tensor.element_size() if self.first else 0

    def number_from_first(self, number: int) -> int:
        """Broadcast an integer of rank 0."""
        if self.size == 1:
            return number
        box = torch.tensor([number])
        dist.broadcast(box, group=self._group, group_src=0)
        return int(box)

    def maximum(self, number: int) -> int:
        """The largest of all ranks' integers."""
        if self.size == 1:
            return number
        box = torch.tensor([number])
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._group)
        return int(box)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """The sums over all ranks, in the order of the ranks: the same bits on every rank."""
        if self.size == 1:
            return list(numbers)
        blobs = self.exchange(torch.tensor(list(numbers), dtype=torch.float64).view(torch.uint8))
        each = [blob.clone().view(torch.float64).tolist() for blob in blobs]
        return [math.fsum(column) for column in zip(*each, strict=True)]

    def whole_sum(self, number: int) -> int:
        """The sum of all ranks' integers of up to 64 bits, modulo 2**64."""
        if self.size == 1:
            return number
        box = torch.tensor([number - 2**64 if number >= 2**63 else number])
        blobs = self.exchange(box.view(torch.uint8))
        return sum(int(blob.clone().view(torch.int64)) for blob in blobs) % 2**64

    def bytes_from_first(self, data: bytes) -> bytes:
        """Broadcast bytes of rank 0."""
        if self.size == 1:
            return data
        box = torch.empty(self.number_from_first(len(data)), dtype=torch.uint8)
        if self.first and data:
            box.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.from_first(box)
        return bytes(box.numpy())

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            self.exchange(torch.zeros(0, dtype=torch.uint8))

    def _all_to_all(self, out: Tensor, given: Tensor, incoming: list[int], outgoing: list[int]) -> None:
        """Post all receives before any send, which Gloo's own all-to-all does not do.

        Gloo's request to a peer waits behind what it is sending to that peer, so a late request makes the two
        directions of a connection take turns.
        """
        coming, going = out.split(incoming), given.contiguous().split(outgoing)
        coming[self.rank].copy_(going[self.rank])
        others = [(self.rank + i) % self.size for i in range(1, self.size)]
        work = [dist.irecv(coming[one], group=self._group, group_src=one) for one in others if incoming[one]]
        work += [dist.isend(going[one], group=self._group, group_dst=one) for one in others if outgoing[one]]
        for one in work:
            one.wait()  # type: ignore[union-attr]


def init_process_group(backend: str, timeout: timedelta) -> None:
    """Make the default group. Under torchrun its store has a name for each restart, so that no two restarts meet."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    restart = f"weightgrad/{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    shared = dist.TCPStore(host, port, size, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    store = dist.PrefixStore(restart, shared)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _end_process_group(ours: bool) -> None:
    """At exit: a process that ends while Gloo's threads run may abort, and torchrun would start it again."""
    if ours and dist.is_initialized():
        dist.destroy_process_group()
    wait_for_gloo_threads()


def _carries_cpu(group: dist.ProcessGroup | None) -> bool:
    config = str(dist.get_backend_config(group))
    return "cpu" in config or "gloo" in config


def wait_for_gloo_threads() -> bool:
    """Wait until Gloo's threads are at rest, so that it is safe to end the interpreter.

    A thread that has run a collective still has to release its tensors, for which it needs the interpreter. If it asks
    while the interpreter is ending, the process aborts (SIGABRT, "terminate called without an active exception";
    pytorch issue 190489). Destroying the groups joins the threads only if nobody else holds a group: FSDP and device
    meshes do, and so does a script with a model in a global variable. So this waits until every thread sleeps and has
    slept since the last look.

    Returns:
        False if a thread did not come to rest within a few seconds.
    """
    before, end = dict(_gloo_threads()), time.monotonic() + _AT_MOST_S
    while before:
        time.sleep(_LOOK_S)  # a thread that waits for the interpreter gets it here
        now = dict(_gloo_threads())
        if now == before and all(asleep for asleep, _ in now.values()):
            return True
        if time.monotonic() > end:
            return False
        before = now
    return True


def _gloo_threads() -> Iterator[tuple[str, tuple[bool, tuple[str, ...]]]]:
    """For each thread its id, whether it sleeps, and how often it was put to sleep or woken."""
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        try:
            facts = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        except OSError:  # it has just ended
            continue
        if facts["Name"] == _THREAD_NAME:
            switches = (facts["voluntary_ctxt_switches"], facts["nonvoluntary_ctxt_switches"])
            yield task.name, (facts["State"].startswith("S"), switches)
