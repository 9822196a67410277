"""The hot loops for GPUs, in Triton, under the names of the C sources in `csrc/`.

They give the same bytes and the same floats as the C kernels and the reference implementations, for the same reasons
(`csrc/wg.h`): noise is a hash of (key, index), sums follow a fixed tree, and nothing contracts a*b+c: every launch
says `enable_fp_fusion=False`, and a test looks for fused operations in what the compiler makes of it. Divisions are
`div_rn`, because Triton's `/` may be off by two units in the last place.

**Memory traffic is the speed.** Each file says how many bytes an element reads and writes. A piece of a push has at
most 2**21 elements, so x and residual are 16 MB, which stays in the second-level cache of a recent data center GPU
(A100: 40 MB, H100: 50 MB). That is why the kernels look twice instead of undoing: a first pass finds what is not finite
and changes nothing, and the second pass reads from the cache what the first one has brought there.

**Block sizes.** A program works on 1,024 elements: 4 KB in and 4 KB out, 8 elements for each of the 128 threads of the
four warps that Triton starts by default. So a thread loads two vectors of 16 bytes of x, and a piece makes 2,048
programs, enough for every multiprocessor many times over. Compiled for an A100 (Triton 3.9) no kernel spills, and
most have 30 to 100 registers a thread; `ternary` with error feedback has the most, 139, so that 12 of 64 warps run on a
multiprocessor at a time. The test `test_every_launch_compiles_and_rounds_each_product` prints them (`pytest -s`).

Triton is an optional dependency (`weightgrad[triton]`, and part of CUDA builds of torch). It is imported when the first
tensor on a GPU comes; without it the reference implementations in torch work there. `status()` says which.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from weightgrad.kernels import native


@cache
def _available() -> str | None:
    """Why the kernels cannot be used; None if they can."""
    try:
        importlib.import_module("triton")
    except ModuleNotFoundError as failure:
        if failure.name == "triton":
            return "triton is not installed (pip install 'weightgrad[triton]')"
        return f"triton cannot be imported: {failure}"
    except (ImportError, OSError, RuntimeError) as failure:
        return f"triton cannot be imported: {failure}"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return None


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, in Python: TRITON_INTERPRET=1, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def status() -> str:
    """Which kernels work on tensors that are on a GPU, and why."""
    why = _available()
    if why is not None:
        return f"reference (torch): {why}"
    return "triton, interpreted on the CPU" if interpreted() else "triton"


def kernels_for(tensor: Tensor, name: str) -> Any:
    """The module of Triton kernels for a tensor, or None where another backend works on it.

    Args:
        tensor: What a kernel would work on.
        name: The family, such as "bucket".
    """
    if tensor.device.type == "cpu":
        if native.forced() != "triton":
            return None
    elif tensor.device.type != "cuda" or native.forced() == "reference":
        return None
    return importlib.import_module(f"weightgrad.kernels.gpu.{name}") if _available() is None else None
