"""The Triton kernels on the pretend accelerator: interpreted on the CPU, in the memory that stands behind its tensors.

The process needs TRITON_INTERPRET=1 from its beginning. What is not shown: compilation, and that a kernel writes only
what its stream may write, since Triton does not say which arguments it writes.
"""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

from torch import Tensor

from tests.accelerator.pretend import PretendTensor
from tests.accelerator.streams import current_stream
from weightgrad.kernels import gpu, native


def installed() -> Counter[str]:
    """Let Triton's kernels work on tensors of the device; returns how often each was launched, which keeps counting."""
    from triton.runtime.interpreter import GridExecutor

    launches: Counter[str] = Counter()
    elsewhere, run = gpu.kernels_for, GridExecutor.__call__

    def kernels_for(tensor: Tensor, name: str) -> Any:
        if isinstance(tensor, PretendTensor) and native.forced() is None:
            return importlib.import_module(f"weightgrad.kernels.gpu.{name}")
        return elsewhere(tensor, name)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches[self.fn.__name__] += 1
        return run(self, *map(_bare, args), **{name: _bare(value) for name, value in kwargs.items()})

    gpu.kernels_for, GridExecutor.__call__ = kernels_for, launch
    return launches


def _bare(argument: Any) -> Any:
    """What a kernel sees of an argument; it has to be complete for the stream that launches the kernel."""
    if not isinstance(argument, Tensor):
        return argument
    if not isinstance(argument, PretendTensor):
        raise AssertionError("a kernel was given memory of the host")
    current_stream().touch([argument.memory], [])
    return argument.on_host
