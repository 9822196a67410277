"""A vector of which every rank stores some intervals, as torch.distributed.checkpoint sees it.

All ranks together save one vector of `numel` elements; a site that comes back with another number of ranks loads from
it whatever its ranks hold now.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from weightgrad.wire.intervals import Intervals


class IntervalTensor(torch.Tensor):
    """What one rank stores of a vector; implements the protocol of tensors that are checkpointed in shards.

    It has no values of its own and can do nothing but be saved and loaded.

    Args:
        numel: the elements of the whole vector.
        held: which of them are stored here.
        stored: the values; read by `save` and overwritten by `load`.
    """

    stored: Tensor
    held: Intervals

    @staticmethod
    def __new__(cls, numel: int, held: Intervals, stored: Tensor) -> IntervalTensor:
        """Make a tensor of the size of the whole vector, without memory for it."""
        made: IntervalTensor = torch.Tensor._make_wrapper_subclass(
            cls, (numel,), dtype=stored.dtype, device=stored.device
        )
        made.held, made.stored = held, stored
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Only `detach`, which torch.distributed.checkpoint calls on everything."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"an IntervalTensor is only for checkpoints, not for {func}")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"IntervalTensor({self.shape[0]} elements, {self.held.numel} here)"

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size([start]), sizes=torch.Size([stop - start]))
            for start, stop in self.held.spans
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What this rank saves."""
        del object
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.stored.dtype), size=self.size()
                ),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank loads."""
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The memory of one interval."""
        assert index.offset is not None
        start = index.offset[0]
        (span,) = [span for span in self.held.spans if span[0] == start]
        place = self.held.slice_of(Intervals((span,)))
        assert place is not None
        return self.stored[place]
