"""PyTorch's own: DistributedDataParallel over Gloo, its compression hooks, and post-local SGD.

`ddp` is what everybody starts from; `ddp-fp16` halves its bytes; `ddp-powersgd` is the hook of Vogels et al., 2019,
rank 4 with error feedback and warm start; `post-local` is Lin et al., 2018: DDP for some steps, then averaging of the
models every `period`. Options are as published, but for the starts, which are early as the runs are short.
"""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from rivals.rival import PORT, Rival, Worker, interface
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_TIMEOUT = datetime.timedelta(seconds=120)


class _Ddp(Rival):
    def __init__(self, worker: Worker, optimizer: Optimizer | PostLocalSGDOptimizer, *, averages: bool) -> None:
        self._worker, self._optimizer, self._averages = worker, optimizer, averages

    def step(self) -> None:
        """The gradients are averaged already, by the hook."""
        self._optimizer.step()

    def finish(self) -> None:
        """One last averaging where the models are apart."""
        if self._averages:
            whole = self._worker.task.layout.gather(self._worker.module)
            dist.all_reduce(whole)
            self._worker.task.layout.scatter(whole / dist.get_world_size(), self._worker.module)

    def close(self) -> None:
        """Leave the group together."""
        dist.barrier()
        dist.destroy_process_group()


def make(worker: Worker, name: str) -> Rival:
    """The rival of that name."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface()
    rendezvous = f"tcp://{worker.addresses[0]}:{PORT}"
    size = len(worker.addresses)
    dist.init_process_group("gloo", init_method=rendezvous, rank=worker.rank, world_size=size, timeout=_TIMEOUT)
    wrapped = DistributedDataParallel(worker.module, bucket_cap_mb=worker.number("bucket_mb", 25))
    worker.task.module = wrapped
    optimizer: Optimizer | PostLocalSGDOptimizer = worker.optimizer
    start = int(worker.number("start", 10))
    if name == "ddp-fp16":
        wrapped.register_comm_hook(None, fp16_compress_hook)
    elif name == "ddp-powersgd":
        rank = int(worker.number("rank", 4))
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
        wrapped.register_comm_hook(state, powerSGD_hook)
    elif name == "post-local":
        # One worker a site: no gradients to average inside it.
        local = PostLocalSGDState(None, None, start, post_local_gradient_allreduce=False)
        wrapped.register_comm_hook(local, post_localSGD_hook)
        averager = PeriodicModelAverager(period=int(worker.number("period", 16)), warmup_steps=start)
        optimizer = PostLocalSGDOptimizer(worker.optimizer, averager)
    torch.manual_seed(0)
    return _Ddp(worker, optimizer, averages=name == "post-local")
