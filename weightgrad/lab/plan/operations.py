"""The operations of a training step and the bytes they move, by layer and phase.

Operations are those of `torch.utils.flop_counter`: multiplications and additions of matrix products, convolutions and
attention. Bytes are those of the operands and results of every operation that computes something, as if none were
fused; an operation that only makes a view moves nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from weightgrad.lab.plan.layer_tracker import LayerTracker

PHASES = ("forward", "backward", "optimizer")


@dataclass
class Work:
    """Operations, and bytes that are read and written."""

    flops: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.nbytes + other.nbytes)


class OperationCounter(TorchDispatchMode):
    """Counts while it is entered.

    Args:
        module: the model whose layers are told apart.

    Attributes:
        phase: what is going on; forward at first.
        by_layer: the work by the path of a module and the phase; the path is empty outside the model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        self.by_layer: dict[tuple[str, str], Work] = defaultdict(Work)
        self._tracker = LayerTracker(module)

    def __enter__(self) -> OperationCounter:
        self._tracker.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._tracker.__exit__(*error)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if getattr(func, "is_view", False) or packet is None:
            return found
        work = self.by_layer[self._tracker.layer, self.phase]
        work.nbytes += sum(_nbytes(leaf) for leaf in tree_leaves((args, kwargs, found)) if isinstance(leaf, Tensor))
        if packet in flop_registry:
            work.flops += flop_registry[packet](*args, **kwargs, out_val=found)
        elif packet in _CPU_ATTENTION:
            work.flops += _CPU_ATTENTION[packet](*args)
        return found


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> float:
    del rest
    return float(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> float:
    del rest
    return float(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


_CPU_ATTENTION: dict[Any, Callable[..., float]] = {  # the fused attention of the CPU, which torch does not count
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
