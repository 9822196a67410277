"""What one training step of a model computes, moves and holds, found without its memory.

The model is made on the meta device where that works, and its tensors become fake ones (`FakeTensorMode`): they have
shapes and types, but no values, so a model of 70 billion parameters takes as much as one of a thousand. Real training
steps run on them, forward, backward and optimizer: one while `LiveBytes` counts what is alive, and one while
`OperationCounter` counts what is computed. Not both at once: the hooks by which the latter knows a layer keep
activations that are computed again alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightgrad.core import optimizers
from weightgrad.core.layout import Layout
from weightgrad.errors import PlanError
from weightgrad.lab.plan import made_model, trained_module
from weightgrad.lab.plan.devices import Device
from weightgrad.lab.plan.live_bytes import LiveBytes, optimizer_tensors, tensor_bytes
from weightgrad.lab.plan.made_model import Built
from weightgrad.lab.plan.operations import PHASES, OperationCounter, Work

_LISTS = (nn.ModuleList, nn.Sequential)
_MOVED = 0.8  # the share of the bandwidth of memory that operations reach


@dataclass(frozen=True)
class Layer:
    """One part of the model: its parameters, and its work by phase."""

    name: str
    parameters: int
    work: Mapping[str, Work]

    def seconds(self, device: Device, phase: str, *, fp32: bool) -> float:
        """How long a phase takes: as long as computing or as moving bytes takes, whichever is longer."""
        return seconds_of(self.work.get(phase, Work()), device, fp32=fp32)


@dataclass(frozen=True)
class ModelCost:
    """A training step of one worker.

    Attributes:
        layout: where the trainable parameters lie.
        batch: samples of the step.
        layers: the parts of the model in order; their work adds up to the step's.
        parameter_bytes: all parameters and buffers.
        gradient_bytes: the gradients of the trainable ones.
        optimizer_bytes: the optimizer's state.
        activation_bytes: what forward leaves for backward.
        peak_bytes: the most that is alive at any time of a step, all of the above that is alive then included.
        largest_layer_bytes: the parameters of the largest part, which FSDP2 gathers at a time.
        fp32: whether it computes in float32.
        tokens: of a sample, if samples are texts.
    """

    layout: Layout
    batch: int
    layers: tuple[Layer, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    peak_bytes: int
    largest_layer_bytes: int
    fp32: bool = True
    tokens: int | None = None

    def work(self, phase: str) -> Work:
        """The work of a phase."""
        return sum((layer.work.get(phase, Work()) for layer in self.layers), Work())

    def alike(self) -> list[tuple[str, Layer]]:
        """The layers in order; neighbours with the same parameters and work are one, with the names of both ends."""
        found: list[tuple[str, str, Layer]] = []
        for layer in self.layers:
            if found and (found[-1][2].parameters, found[-1][2].work) == (layer.parameters, layer.work):
                found[-1] = (found[-1][0], layer.name, layer)
            else:
                found.append((layer.name, layer.name, layer))
        return [(first if first == last else f"each of {first} to {last}", layer) for first, last, layer in found]

    def seconds(self, device: Device) -> dict[str, float]:
        """How long each phase takes on a device."""
        return {phase: sum(self.layer_seconds(device, one)[phase] for one in self.layers) for phase in PHASES}

    def layer_seconds(self, device: Device, layer: Layer) -> dict[str, float]:
        """The same of one layer."""
        return {phase: layer.seconds(device, phase, fp32=self.fp32) for phase in PHASES}


def seconds_of(work: Work, device: Device, *, fp32: bool) -> float:
    """How long some work takes on a device: computing or moving bytes, whichever is longer."""
    peak = 1e12 * (device.tflops_fp32 if fp32 else device.tflops) * device.efficiency
    return max(work.flops / peak, work.nbytes / (device.memory_gb_s * 1e9 * _MOVED))


def cost_of(
    build: Callable[[], Built],
    optimizer: tuple[str, Mapping[str, Any]],
    *,
    inputs: Callable[[], Any] | None = None,
    batch: int | None = None,
    dtype: torch.dtype | None = None,
    checkpointing: bool = False,
    real: bool = False,
) -> ModelCost:
    """Run training steps and count.

    Args:
        build: makes the model, or a pair of model and batch.
        optimizer: name and options.
        inputs: makes a batch, where `build` does not: a tensor, or a tuple or dict of arguments.
        batch: samples in it; None: as many as its first tensor has rows.
        dtype: the type to convert the model to; None leaves it as it is.
        checkpointing: whether the activations inside the blocks of the model are computed again for backward.
        real: with real tensors, which takes the memory of the model.

    Returns:
        The cost.

    Raises:
        PlanError: the model cannot be made or run.
    """
    if real:
        module, arguments = trained_module.made_real(build, inputs, dtype, checkpointing)
        return trained_module.told(lambda: _counted(module, arguments, optimizer, batch), trained_module.REAL_STEP)

    def counted(making: Callable[[], AbstractContextManager[None]]) -> ModelCost:
        def make() -> tuple[nn.Module, Any]:
            with making():
                return made_model.make(build, inputs)

        def count() -> ModelCost:
            with made_model.fake():
                placed = trained_module.ready(module, arguments, dtype, checkpointing, real=False)
                return _counted(module, placed, optimizer, batch)

        module, arguments = trained_module.told(make, trained_module.MAKING)
        return trained_module.told(count, trained_module.FAKE_STEP)

    try:
        return counted(made_model.on_meta)
    except PlanError as error:
        if error.__cause__ is None:  # what it makes is wrong, and would be so with values
            raise
        return counted(made_model.as_it_is)


def _counted(
    module: nn.Module, arguments: Any, optimizer: tuple[str, Mapping[str, Any]], batch: int | None
) -> ModelCost:
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not trained:
        raise PlanError("the model has no parameter that is trained; wanted one or more with requires_grad")
    layout = Layout.of_shapes((name, tuple(parameter.shape)) for name, parameter in trained)
    made = optimizers.build(optimizer[0], [parameter for _, parameter in trained], optimizer[1])
    fixed = [*module.parameters(), *module.buffers()]
    for _, parameter in trained:  # the optimizer makes its state in its first step, before the one that is counted
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    made.zero_grad()
    with LiveBytes() as live:
        live.add([*fixed, *optimizer_tensors(made)])
        before = live.now
        loss = trained_module.loss_of(module, arguments)
        activations = live.now - before
        loss.backward()
        del loss
        gradients = tensor_bytes(p.grad for _, p in trained if p.grad is not None)
        made.step()
    made.zero_grad()
    with OperationCounter(module) as counter:
        loss = trained_module.loss_of(module, arguments)
        counter.phase = "backward"
        loss.backward()
        counter.phase = "optimizer"
        made.step()
    return ModelCost(
        layout=layout,
        batch=batch if batch is not None else made_model.samples_of(arguments) or 1,
        layers=_layers(module, counter),
        parameter_bytes=tensor_bytes(fixed),
        gradient_bytes=gradients,
        optimizer_bytes=tensor_bytes(optimizer_tensors(made)),
        activation_bytes=activations,
        peak_bytes=live.peak,
        largest_layer_bytes=max(
            (tensor_bytes(block.parameters()) for block in trained_module.blocks_of(module)),
            default=tensor_bytes(fixed),
        ),
        fp32=trained[0][1].dtype == torch.float32,
        tokens=made_model.tokens_of(arguments),
    )


def _layers(module: nn.Module, counter: OperationCounter) -> tuple[Layer, ...]:
    """The parts that a reader tells apart, with their work; a parameter that several share is the first one's."""
    names, seen = list(_parts(module)), set[int]()
    own: dict[str, dict[str, Work]] = {name: {} for name in [*names, ""]}
    for (path, phase), work in counter.by_layer.items():
        place = next((name for name in names if path == name or path.startswith(f"{name}.")), "")
        own[place][phase] = own[place].get(phase, Work()) + work
    found = []
    for name in [*names, ""]:
        parameters = {id(p): p.numel() for p in module.get_submodule(name).parameters() if id(p) not in seen}
        seen |= parameters.keys()
        found.append(Layer(name or "the rest", sum(parameters.values()), own[name]))
    return tuple(found)


def _parts(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """The paths of the children of a model and, where one is a list of modules or has such a list, of its children."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, _LISTS):
            yield from [f"{path}.{own}" for own, _ in child.named_children()] or [path]
        elif any(isinstance(part, _LISTS) and len(part) > 1 for part in child.modules()):
            yield from _parts(child, f"{path}.")
        else:
            yield path
