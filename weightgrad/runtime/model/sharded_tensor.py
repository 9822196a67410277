"""Tensors of which a rank has a part: what it has, and all ranks together bringing them into rows and back."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weightgrad.errors import StrategyError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, in its own memory."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def flat_local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, as one dimension, in its own memory.

    Raises:
        StrategyError: Its memory is not contiguous, so that it has no such view.
    """
    local = local_part(tensor)
    if not local.is_contiguous():
        raise StrategyError(
            f"a parameter of shape {list(local.shape)} with strides {local.stride()} is not contiguous; make it so "
            "with p.data = p.data.contiguous() before prepare()"
        )
    return local.view(-1)


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether it is a DTensor. Without their module, which takes a second to import, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _row_placements(tensor: DTensor) -> tuple[Any, ...]:
    """Placements that shard by rows over every dimension of the mesh over which the tensor is sharded at all."""
    from torch.distributed.tensor import Replicate, Shard

    return tuple(Replicate() if isinstance(one, Replicate) else Shard(0) for one in tensor.placements)


def by_rows(tensor: Any) -> Any:
    """A tensor that is sharded otherwise, sharded by rows; all ranks of its mesh call this together."""
    return tensor.redistribute(placements=_row_placements(tensor))


@torch.no_grad()
def put_rows(tensor: Any, rows: Tensor) -> None:
    """Write rows back into a tensor that is sharded otherwise."""
    from torch.distributed.tensor import DTensor

    made = DTensor.from_local(
        rows,
        tensor.device_mesh,
        _row_placements(tensor),
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    tensor.to_local().copy_(made.redistribute(placements=tensor.placements).to_local())
