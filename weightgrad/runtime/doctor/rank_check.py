"""Whether the ranks of a site can really talk: a small allreduce, in this process group or among two processes here.

Under torchrun the ranks that it has started are tried, over the network between them. Otherwise two processes of this
machine are. NCCL is tried where every rank has a GPU, Gloo otherwise.

    torchrun --nnodes 2 --nproc-per-node 4 ... -m weightgrad doctor
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta

import torch
from torch import distributed

from weightgrad.runtime.doctor.site_checks import Finding, Level
from weightgrad.units import show_seconds

_ELEMENTS = 1 << 20
_TIMEOUT_S = 60.0


def check_ranks(timeout_s: float = _TIMEOUT_S) -> Finding:
    """Whether ranks can be started and exchange a vector."""
    try:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return _ok(
                _exchange("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout_s), "started"
            )
        return _two_here(timeout_s)
    except (RuntimeError, ValueError, OSError) as error:
        return _failure(str(error).strip().splitlines()[0] if str(error).strip() else repr(error))


def _two_here(timeout_s: float) -> Finding:
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{directory}/store"
        command = [sys.executable, "-m", "weightgrad.runtime.doctor.rank_check", store]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        until = time.monotonic() + timeout_s
        try:
            for rank in ranks:
                out, err = rank.communicate(timeout=max(0.1, until - time.monotonic()))
                if rank.returncode:
                    return _failure((err.strip().splitlines() or ["a rank has ended"])[-1])
        except subprocess.TimeoutExpired:
            return _failure(f"two ranks on this machine have not found each other within {timeout_s:g} s")
        finally:
            for rank in ranks:
                rank.kill()
                with suppress(ValueError):  # it was read to its end
                    rank.communicate()
        return _ok(out.strip(), "here")


def _ok(told: str, where: str) -> Finding:
    return Finding(
        "ranks", Level.OK, f"{told} ({'the ranks that torchrun ' if where == 'started' else 'two ranks '}{where})"
    )


def _failure(why: str) -> Finding:
    return Finding(
        "ranks",
        Level.FAILURE,
        f"{why}; look for a firewall between the machines of this site, and name the right interface in "
        "GLOO_SOCKET_IFNAME (or NCCL_SOCKET_IFNAME)",
    )


def _exchange(store: str, rank: int, size: int, timeout_s: float) -> str:
    """Start a process group, add up a vector, end it; a sentence about it."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = int(os.environ.get("LOCAL_RANK", str(rank)))
    backend = "nccl" if distributed.is_nccl_available() and gpus > local else "gloo"
    began = time.perf_counter()
    distributed.init_process_group(
        backend, init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        ready = time.perf_counter() - began
        vector = torch.ones(
            _ELEMENTS, device=torch.device("cuda", local) if backend == "nccl" else "cpu", dtype=torch.float32
        )
        began = time.perf_counter()
        distributed.all_reduce(vector)
        if float(vector[-1]) != size:
            raise RuntimeError(f"{size} ranks added up ones and got {float(vector[-1])}")
        seconds = time.perf_counter() - began
    finally:
        distributed.destroy_process_group()
    told = f"{size} ranks with {backend} found each other in {show_seconds(ready)}"
    return f"{told} and added up 4 MB in {show_seconds(seconds)}"


if __name__ == "__main__":
    try:
        print(_exchange(sys.argv[1], int(sys.argv[2]), 2, _TIMEOUT_S))
    except RuntimeError as error:
        print(str(error).strip().splitlines()[0], file=sys.stderr)
        sys.exit(1)
