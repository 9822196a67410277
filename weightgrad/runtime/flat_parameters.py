"""The parameters of a user's module as one flat vector, and the user's optimizer on it.

Parameters that are plain float32 tensors on the CPU become views of the flat vector: nothing is copied. Others (GPU,
bfloat16) are copied. Parameters that are partitioned inside the site (DTensors of FSDP2 or tensor parallelism) are
gathered and cut again, which all ranks must do together. Frozen parameters take no part.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor, nn

from weightgrad.core.layout import Layout
from weightgrad.errors import StrategyError
from weightgrad.runtime.process_group import SiteGroup

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


_VECTORS = 4  # whose views are remembered: weights and gradients, and one more of each


class FlatParameters:
    """The trainable parameters of a module as one flat vector; tied parameters are in it once.

    Raises:
        StrategyError: There is no trainable parameter, or one that is not dense and floating-point.
    """

    def __init__(self, module: nn.Module) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise StrategyError("the model has no parameter that is trained; prepare() it before freezing everything")
        for name, parameter in named:
            if not parameter.is_floating_point() or parameter.is_sparse:
                raise StrategyError(f"{name} is {parameter.dtype}; only dense floating-point parameters can be shared")
        self.parameters = [parameter for _, parameter in named]
        self.layout = Layout.of_shapes((name, tuple(p.shape)) for name, p in named)
        self.partitioned = any(_is_partitioned(p) for p in self.parameters)
        self.plain = all(_plain(p) for p in self.parameters)  # float32 on the CPU: can be views of a vector
        self._seen: dict[int, tuple[Tensor, list[Tensor]]] = {}  # the last few vectors and their views

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        """The slots of a vector. They are made once, because every step uses the same vectors."""
        found = self._seen.get(id(flat))
        if found is None:
            if len(self._seen) == _VECTORS:
                self._seen.clear()
            found = self._seen[id(flat)] = flat, self.layout.views(flat)
        return found[1]

    @torch.no_grad()
    def read_weights(self, out: Tensor) -> None:
        """Copy the weights of the module into a flat vector."""
        for view, parameter in zip(self._views_of(out), self.parameters, strict=True):
            if view.data_ptr() != parameter.data_ptr():
                view.copy_(_whole(parameter))

    @torch.no_grad()
    def write_weights(self, flat: Tensor) -> None:
        """Give the module the weights of a flat vector; plain parameters become views of it."""
        for view, parameter in zip(self._views_of(flat), self.parameters, strict=True):
            if self.plain:
                if parameter.data_ptr() != view.data_ptr():
                    parameter.data = view
            else:
                _put(parameter, view)

    @torch.no_grad()
    def read_gradient(self, out: Tensor) -> None:
        """Copy the gradients that backward left into a flat vector.

        A parameter without a gradient counts as zero, and -0 becomes +0, as if gradients had been added to zeros.
        """
        for view, parameter in zip(self._views_of(out), self.parameters, strict=True):
            read_one(parameter.grad, view)

    @torch.no_grad()
    def write_gradient(self, flat: Tensor) -> None:
        """Give every parameter its slot of a flat vector as gradient."""
        for view, parameter in zip(self._views_of(flat), self.parameters, strict=True):
            if self.plain:
                parameter.grad = view
            else:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                _put(parameter.grad, view)

    def drop_gradients(self) -> None:
        """Set every gradient to None, as zero_grad() does."""
        for parameter in self.parameters:
            parameter.grad = None


class StagedFlatParameters(FlatParameters):
    """A model cut by layers, where every rank has parameters of its own. The flat vector has them rank after rank."""

    def __init__(self, module: nn.Module, group: SiteGroup) -> None:
        super().__init__(module)
        self._group, self._own = group, self.layout
        mine = json.dumps([[slot.name, list(slot.shape)] for slot in self.layout.slots]).encode()
        announced = group.exchange(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        each = [json.loads(bytes(blob.numpy())) for blob in announced]
        self.layout = Layout.of_shapes(
            (f"stage {rank}.{name}", tuple(shape)) for rank, stage in enumerate(each) for name, shape in stage
        )
        sizes = [sum(math.prod(shape) for _, shape in stage) for stage in each]
        self._at = sum(sizes[: group.rank])
        self.partitioned = True
        self.plain = False

    def _part(self, flat: Tensor) -> Tensor:
        return flat[self._at : self._at + self._own.numel]

    def _all(self, own: Tensor, out: Tensor) -> None:
        torch.cat([blob.view(torch.float32) for blob in self._group.exchange(own.view(torch.uint8))], out=out)

    @torch.no_grad()
    def read_weights(self, out: Tensor) -> None:
        """Copy the weights of all ranks into a flat vector."""
        self._all(torch.cat([_whole(p).flatten().float().cpu() for p in self.parameters]), out)

    @torch.no_grad()
    def write_weights(self, flat: Tensor) -> None:
        """Give the module of this rank its own part of a flat vector."""
        for view, parameter in zip(self._own.views(self._part(flat)), self.parameters, strict=True):
            _put(parameter, view)

    @torch.no_grad()
    def read_gradient(self, out: Tensor) -> None:
        """Copy the gradients of all ranks into a flat vector."""
        zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self._all(torch.cat([_whole(gradient).flatten().float().cpu() for gradient in zeros]), out)


class UserOptimizerUpdater:
    """The user's optimizer as a `WeightUpdater`: it moves the master weights."""

    def __init__(self, flat_parameters: FlatParameters, optimizer: torch.optim.Optimizer, weights: Tensor) -> None:
        self._flat_parameters, self._optimizer, self._weights = flat_parameters, optimizer, weights
        self.busy = False  # the optimizer steps because `move` asked it to

    def move(self, gradient: Tensor | None, lr: float | None, scale: float) -> None:
        """Take one step of the optimizer.

        Args:
            gradient: The flat gradient; None steps with the gradients that the parameters have.
            lr: Not used: the optimizer has its own learning rate.
            scale: Factor of the learning rate for this step.
        """
        del lr
        if gradient is not None:
            self._flat_parameters.write_weights(self._weights)
            self._flat_parameters.write_gradient(gradient)
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
        self._flat_parameters.read_weights(self._weights)

    def state(self) -> dict[str, Tensor]:
        """Copies of the optimizer's state, by the place of the parameter; of a partitioned model, this rank's part."""
        found = {}
        for place, parameter in enumerate(self._flat_parameters.parameters):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"{place}.{name}"] = _local(value).detach().clone()
                elif isinstance(value, (int, float)):
                    found[f"{place}.{name}#"] = torch.tensor(value, dtype=torch.float64)
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        self._optimizer.state.clear()
        for place, parameter in enumerate(self._flat_parameters.parameters):
            own = {k.split(".", 1)[1]: v for k, v in tensors.items() if k.split(".", 1)[0] == str(place)}
            for name, tensor in own.items():
                value: Tensor | float = tensor.clone()
                if name.endswith("#"):
                    name, value = name[:-1], float(tensor)
                elif _is_partitioned(parameter) and tensor.shape == parameter.to_local().shape and tensor.dim():
                    value = parameter.from_local(tensor.clone(), parameter.device_mesh, parameter.placements)
                elif tensor.dim() and isinstance(value, Tensor):
                    value = value.to(parameter.device)
                self._optimizer.state[parameter][name] = value


def read_one(gradient: Tensor | None, view: Tensor) -> None:
    """Copy the gradient of one parameter into its slot, as `FlatParameters.read_gradient` does."""
    if gradient is None:
        view.zero_()
    elif gradient.data_ptr() != view.data_ptr():
        found = _whole(gradient)
        if found.device == view.device and found.dtype == view.dtype:
            torch.add(found, 0.0, out=view)
        else:
            view.copy_(found).add_(0.0)


def digest(weights: Tensor) -> str:
    """A fingerprint of flat weights: sites that start from the same model have the same."""
    return xxhash.xxh3_64_hexdigest(weights.numpy().tobytes())


def first_difference(mine: Layout, theirs: Sequence[tuple[str, Sequence[int]]]) -> str | None:
    """The first parameter in which two models differ, in words; None if they are alike."""
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


def _is_partitioned(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether it is a DTensor. Without their module, which takes a second to import, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _plain(parameter: nn.Parameter) -> bool:
    return (
        not _is_partitioned(parameter)
        and parameter.device.type == "cpu"
        and parameter.dtype == torch.float32
        and parameter.is_contiguous()
    )


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if _is_partitioned(tensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if _is_partitioned(tensor) else tensor


def _put(target: Tensor, view: Tensor) -> None:
    if _is_partitioned(target):
        from torch.distributed.tensor import distribute_tensor

        full = view.to(target.device_mesh.device_type)
        cut = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(cut.to_local())
    else:
        target.copy_(view)
