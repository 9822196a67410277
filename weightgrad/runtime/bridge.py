"""Between a user's module and one flat vector: weights and gradients, both ways, wherever they live.

Parameters that are plain float32 tensors on the CPU become views of the flat vector: nothing is copied.
Others (GPU, bfloat16) are copied. Parameters that are partitioned inside the site (DTensors of FSDP2 or tensor
parallelism) are gathered and cut again, which all ranks must do together. Frozen parameters take no part.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from weightgrad.errors import StrategyError
from weightgrad.runtime.lan import Lan
from weightgrad.site.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


_VECTORS = 4  # weights and gradients, and room for one more of each


class Bridge:
    """The trainable parameters of a module, tied ones once."""

    def __init__(self, module: nn.Module) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise StrategyError("the model has no parameter that is trained; prepare() it before freezing everything")
        for name, parameter in named:
            if not parameter.is_floating_point() or parameter.is_sparse:
                raise StrategyError(f"{name} is {parameter.dtype}; only dense floating-point parameters can be shared")
        self.parameters = [parameter for _, parameter in named]
        self.layout = Layout.of_shapes((name, tuple(p.shape)) for name, p in named)
        self.partitioned = any(_in_parts(p) for p in self.parameters)
        self.plain = all(_plain(p) for p in self.parameters)  # float32 on the CPU: they can be views of a vector
        self._seen: dict[int, tuple[Tensor, list[Tensor]]] = {}  # the last few vectors, and their views

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        """Made once for a vector: it is the same one at every step."""
        found = self._seen.get(id(flat))
        if found is None:
            if len(self._seen) == _VECTORS:
                self._seen.clear()
            found = self._seen[id(flat)] = flat, self.layout.views(flat)
        return found[1]

    @torch.no_grad()
    def read_weights(self, out: Tensor) -> None:
        """Module to flat vector."""
        for view, parameter in zip(self._views_of(out), self.parameters, strict=True):
            if view.data_ptr() != parameter.data_ptr():
                view.copy_(_whole(parameter))

    @torch.no_grad()
    def write_weights(self, flat: Tensor) -> None:
        """Flat vector to module. Where they can be, parameters are views of this very vector from now on."""
        for view, parameter in zip(self._views_of(flat), self.parameters, strict=True):
            if self.plain:
                if parameter.data_ptr() != view.data_ptr():
                    parameter.data = view
            else:
                _put(parameter, view)

    @torch.no_grad()
    def read_gradient(self, out: Tensor) -> None:
        """The gradients that backward left; none is zero. No -0: as if they had been added to zeros."""
        for view, parameter in zip(self._views_of(out), self.parameters, strict=True):
            read_one(parameter.grad, view)

    @torch.no_grad()
    def write_gradient(self, flat: Tensor) -> None:
        """Give every parameter its part as its gradient."""
        for view, parameter in zip(self._views_of(flat), self.parameters, strict=True):
            if self.plain:
                parameter.grad = view
            else:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                _put(parameter.grad, view)

    def drop_gradients(self) -> None:
        """As after zero_grad()."""
        for parameter in self.parameters:
            parameter.grad = None


class StagedBridge(Bridge):
    """A model cut by layers: every rank has parameters of its own; the vector is one rank after the other."""

    def __init__(self, module: nn.Module, lan: Lan) -> None:
        super().__init__(module)
        self._lan, self._own = lan, self.layout
        mine = json.dumps([[slot.name, list(slot.shape)] for slot in self.layout.slots]).encode()
        told = lan.exchange(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        each = [json.loads(bytes(blob.numpy())) for blob in told]
        self.layout = Layout.of_shapes(
            (f"stage {rank}.{name}", tuple(shape)) for rank, stage in enumerate(each) for name, shape in stage
        )
        sizes = [sum(math.prod(shape) for _, shape in stage) for stage in each]
        self._at = sum(sizes[: lan.rank])
        self.partitioned = True
        self.plain = False

    def _part(self, flat: Tensor) -> Tensor:
        return flat[self._at : self._at + self._own.numel]

    def _all(self, own: Tensor, out: Tensor) -> None:
        torch.cat([blob.view(torch.float32) for blob in self._lan.exchange(own.view(torch.uint8))], out=out)

    @torch.no_grad()
    def read_weights(self, out: Tensor) -> None:
        """Every rank's own, put together."""
        self._all(torch.cat([_whole(p).flatten().float().cpu() for p in self.parameters]), out)

    @torch.no_grad()
    def write_weights(self, flat: Tensor) -> None:
        """This rank's part into its module."""
        for view, parameter in zip(self._own.views(self._part(flat)), self.parameters, strict=True):
            _put(parameter, view)

    @torch.no_grad()
    def read_gradient(self, out: Tensor) -> None:
        """Every rank's own, put together."""
        zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self._all(torch.cat([_whole(gradient).flatten().float().cpu() for gradient in zeros]), out)


class UserMover:
    """The user's own optimizer as what moves the master weights."""

    def __init__(self, bridge: Bridge, optimizer: torch.optim.Optimizer, weights: Tensor) -> None:
        self._bridge, self._optimizer, self._weights = bridge, optimizer, weights
        self.busy = False  # the optimizer steps because we asked it to

    def move(self, gradient: Tensor | None, lr: float | None, scale: float) -> None:
        """One step of the optimizer at `scale` times its present rate; no gradient: by those it has."""
        del lr
        if gradient is not None:
            self._bridge.write_weights(self._weights)
            self._bridge.write_gradient(gradient)
        rates = [group["lr"] for group in self._optimizer.param_groups]
        self.busy = True
        try:
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale if scale != 1.0 else rate
            self._optimizer.step()
        finally:
            self.busy = False
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        self._bridge.read_weights(self._weights)

    def state(self) -> dict[str, Tensor]:
        """Everything it remembers, by the place of the parameter; parts of a partitioned model as they are here."""
        found = {}
        for place, parameter in enumerate(self._bridge.parameters):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"{place}.{name}"] = _local(value).detach().clone()
                elif isinstance(value, (int, float)):
                    found[f"{place}.{name}#"] = torch.tensor(value, dtype=torch.float64)
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        self._optimizer.state.clear()
        for place, parameter in enumerate(self._bridge.parameters):
            own = {k.split(".", 1)[1]: v for k, v in tensors.items() if k.split(".", 1)[0] == str(place)}
            for name, tensor in own.items():
                value: Tensor | float = tensor.clone()
                if name.endswith("#"):
                    name, value = name[:-1], float(tensor)
                elif _in_parts(parameter) and tensor.shape == parameter.to_local().shape and tensor.dim():
                    value = parameter.from_local(tensor.clone(), parameter.device_mesh, parameter.placements)
                elif tensor.dim() and isinstance(value, Tensor):
                    value = value.to(parameter.device)
                self._optimizer.state[parameter][name] = value


def read_one(gradient: Tensor | None, view: Tensor) -> None:
    """One parameter's gradient into its part of the flat vector, as `Bridge.read_gradient` does."""
    if gradient is None:
        view.zero_()
    elif gradient.data_ptr() != view.data_ptr():
        found = _whole(gradient)
        if found.device == view.device and found.dtype == view.dtype:
            torch.add(found, 0.0, out=view)
        else:
            view.copy_(found).add_(0.0)


def first_difference(mine: Layout, theirs: Sequence[tuple[str, Sequence[int]]]) -> str | None:
    """What makes two models different, in words; None when they are alike."""
    own = [(slot.name, tuple(slot.shape)) for slot in mine.slots]
    other = [(name, tuple(shape)) for name, shape in theirs]
    for place, (a, b) in enumerate(zip(own, other, strict=False)):
        if a != b:
            return f"parameter {place} is {a[0]} {list(a[1])}, the others have {b[0]} {list(b[1])}"
    if len(own) != len(other):
        more, word = (own, "has") if len(own) > len(other) else (other, "lacks")
        name, shape = more[min(len(own), len(other))]
        return f"it {word} parameter {min(len(own), len(other))}, {name} {list(shape)}"
    return None


def _in_parts(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether it is a DTensor; there are none where their module, a second long, was never loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _plain(parameter: nn.Parameter) -> bool:
    return (
        not _in_parts(parameter)
        and parameter.device.type == "cpu"
        and parameter.dtype == torch.float32
        and parameter.is_contiguous()
    )


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if _in_parts(tensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if _in_parts(tensor) else tensor


def _put(target: Tensor, view: Tensor) -> None:
    if _in_parts(target):
        from torch.distributed.tensor import distribute_tensor

        full = view.to(target.device_mesh.device_type)
        cut = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(cut.to_local())
    else:
        target.copy_(view)
