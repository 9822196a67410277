"""The parameters of a user's module that take part in a run, by the names that they have there."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from weightgrad.core.layout import Layout
from weightgrad.errors import StrategyError
from weightgrad.runtime.model.sharded_tensor import is_sharded
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.wire.intervals import Span


@dataclass(frozen=True)
class NamedParameter:
    """A trainable parameter and its name in the run."""

    name: str
    parameter: nn.Parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all of it, however it is sharded."""
        return tuple(self.parameter.shape)

    def rows(self) -> Span | None:
        """The elements that this rank has, within the parameter, if they are a stretch of rows; else None."""
        if not is_sharded(self.parameter):
            return (0, math.prod(self.shape))
        chunks = self.parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
        if not chunks:
            return (0, 0)
        (chunk, *others), width = chunks, math.prod(self.shape[1:])
        sizes, offsets = tuple(chunk.sizes), tuple(chunk.offsets)
        if others or math.prod(sizes) != self.parameter.to_local().numel():
            return None
        if 0 in sizes:
            return (0, 0)
        if sizes[1:] != self.shape[1:] or any(offsets[1:]):
            return None
        return (offsets[0] * width, (offsets[0] + sizes[0]) * width)


def trainable(module: nn.Module, *, frozen: bool = False) -> list[NamedParameter]:
    """The parameters of a module that take part; tied ones once.

    Args:
        module: The user's model.
        frozen: Whether those that are frozen now take part, too.

    Raises:
        StrategyError: There is none, or one without values, or that is not dense and floating-point, or of 8 bits.
    """
    found = [NamedParameter(plain_name(name), p) for name, p in module.named_parameters() if frozen or p.requires_grad]
    if not found:
        raise StrategyError("the model has no parameter that is trained; prepare() it before freezing everything")
    for one in found:
        if is_lazy(one.parameter):
            raise StrategyError(
                f"{one.name} has no shape yet, as parameters of lazy modules before the first forward pass: pass a "
                "batch through the model before prepare()"
            )
        if one.parameter.is_meta:
            raise StrategyError(
                f"{one.name} is on the meta device and has no values: call to_empty() and load or make the weights "
                "before prepare(), and make the optimizer after it"
            )
        if one.parameter.is_complex():
            raise StrategyError(
                f"{one.name} is {one.parameter.dtype}; only floating-point parameters can be shared: keep its real "
                "view as the parameter (torch.view_as_real), and use torch.view_as_complex of it in forward()"
            )
        if not one.parameter.is_floating_point() or one.parameter.is_sparse:
            raise StrategyError(
                f"{one.name} is {one.parameter.dtype}; only dense floating-point parameters can be shared"
            )
        if one.parameter.dtype.itemsize == 1:
            raise StrategyError(
                f"{one.name} is {one.parameter.dtype}, in which updates would be lost and optimizers cannot step; keep "
                "parameters in bfloat16 or float32, and let the layers cast them"
            )
    return found


def plain_name(name: str) -> str:
    """The name without what wrappers add to it, so that a wrapped and a plain module are the same model."""
    for anywhere in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(anywhere, "")
    return name.removeprefix("module.")


def layout_of(parameters: Sequence[NamedParameter]) -> Layout:
    """The index space of parameters in their order."""
    return Layout.of_shapes((one.name, one.shape) for one in parameters)


def all_stages(own: Layout, group: SiteGroup) -> Layout:
    """The index space of a model that is cut by layers: the parameters of all ranks, rank after rank.

    Raises:
        StrategyError: Two ranks have parameters of one name.
    """
    mine = json.dumps([[slot.name, list(slot.shape)] for slot in own.slots]).encode()
    blobs = group.exchange(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    everything = [(name, tuple(shape)) for blob in blobs for name, shape in json.loads(bytes(blob.numpy()))]
    names = [name for name, _ in everything]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise StrategyError(
            f"two stages have a parameter {twice}; let every stage keep the names of the whole model, for instance by "
            "setting the layers of other stages to None, so that sites that are cut differently can train together"
        )
    return Layout.of_shapes(everything)
