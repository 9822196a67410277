"""A user's model as it is trained: made, converted, with a loss, and timed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn import functional
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from weightgrad.core import optimizers
from weightgrad.errors import PlanError

Built = nn.Module | tuple[nn.Module, Any]
_T = TypeVar("_T")
_VALUES = (DataDependentOutputException, DynamicOutputShapeException)  # that fake tensors do not have


def step_seconds(
    build: Callable[[], Built],
    optimizer: tuple[str, Mapping[str, Any]],
    *,
    inputs: Callable[[], Any] | None = None,
    dtype: torch.dtype | None = None,
    checkpointing: bool = False,
    steps: int = 3,
) -> float:
    """Seconds of a real training step on this machine, the best of a few; it takes the memory of the model.

    Args:
        build: as `cost_of` takes it, and so are `optimizer`, `inputs`, `dtype` and `checkpointing`.
        optimizer: name and options.
        inputs: makes a batch.
        dtype: the type to convert the model to.
        checkpointing: whether activations are computed again.
        steps: how many are timed, after one that is not.

    Raises:
        PlanError: the model cannot be made or run.
    """
    return told(lambda: _timed(*made(build, inputs, dtype, checkpointing), optimizer, steps), real=True)


def told(work: Callable[[], _T], *, real: bool) -> _T:
    """Do something with the user's model.

    Args:
        work: what to do.
        real: whether its tensors have values.

    Raises:
        PlanError: it fails; says why.
    """
    try:
        return work()
    except PlanError:
        raise
    except _VALUES as error:
        raise PlanError(
            f"the model asks for the values of tensors, which a plan does not compute ({error}); give --measure, which "
            "takes real steps"
        ) from error
    except Exception as error:
        raise PlanError(
            f"a step of the model with {'real' if real else 'fake'} tensors failed: {type(error).__name__}: {error}"
        ) from error


def made(
    build: Callable[[], Built], inputs: Callable[[], Any] | None, dtype: torch.dtype | None, checkpointing: bool
) -> tuple[nn.Module, Any]:
    """The user's model and its batch."""
    try:
        built = build()
    except (*_VALUES, PlanError):
        raise
    except (Exception, SystemExit) as error:
        raise PlanError(f"the function that makes the model failed: {type(error).__name__}: {error}") from error
    module, given = built if isinstance(built, tuple) else (built, None)
    if not isinstance(module, nn.Module):
        raise PlanError(f"build returned {type(module).__name__}; wanted a torch.nn.Module, or one and a batch")
    if given is None and inputs is None:
        raise PlanError("build returned no batch; return (model, batch), or give --input, e.g. 3x224x224")
    _materialize(module, dtype)
    arguments = given if given is not None else inputs() if inputs is not None else None
    if checkpointing:
        checkpoint_blocks(module)
    module.train()
    return module, tree_map(lambda x: _converted(x, dtype), arguments)


def _timed(module: nn.Module, arguments: Any, optimizer: tuple[str, Mapping[str, Any]], steps: int) -> float:
    stepper = optimizers.build(optimizer[0], [p for p in module.parameters() if p.requires_grad], optimizer[1])
    best = math.inf
    for step in range(steps + 1):
        began = time.perf_counter()
        loss_of(module, arguments).backward()
        stepper.step()
        stepper.zero_grad()
        if step:
            best = min(best, time.perf_counter() - began)
    return best


def loss_of(module: nn.Module, arguments: Any) -> Tensor:
    """A scalar to differentiate: the model's own loss if it returns one, otherwise something of the same cost."""
    if isinstance(arguments, Mapping):
        found = module(**arguments)
    else:
        found = module(*arguments) if isinstance(arguments, (tuple, list)) else module(arguments)
    for name in ("loss", "logits"):
        if (value := _get(found, name)) is not None:
            found = value
            break
    if isinstance(found, (tuple, list)):
        found = found[0]
    if not isinstance(found, Tensor):
        raise PlanError(f"the model returned {type(found).__name__}; wanted a tensor, or an object with a loss")
    if found.dim() == 0:
        return found
    if found.dim() == 1:
        return found.float().mean()
    labels = torch.zeros((found.shape[0], *found.shape[2:]), dtype=torch.int64, device=found.device)
    return functional.cross_entropy(found.float() if found.dtype != torch.float32 else found, labels)


def _get(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)


def _converted(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _like(value, dtype) if _differs(value, dtype) else value


def _materialize(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Give the model's tensors the type that was asked for, and those of the meta device a place.

    `Module.to` cannot change fake tensors of the meta device in place. Tensors that several modules share stay shared.
    """
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None or nn.parameter.is_lazy(tensor):
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _placed(tensor, dtype)
                held[name] = made[id(tensor)]  # type: ignore[assignment]


def _placed(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if not _differs(tensor, dtype):
        return tensor
    found = _like(tensor, dtype)
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def _differs(tensor: Tensor, dtype: torch.dtype | None) -> bool:
    wanted = dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype
    return wanted or tensor.device.type == "meta"


def _like(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if tensor.device.type == "meta":  # it has no values to keep
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device="cpu")
    return tensor.detach().to(wanted)


def blocks_of(module: nn.Module) -> Sequence[nn.Module]:
    """The parts of a model that follow one another: the children of its largest list of modules."""
    lists = [part for part in module.modules() if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) > 1]
    if not lists:
        return list(module.children()) or [module]
    return list(max(lists, key=lambda part: sum(p.numel() for p in part.parameters())).children())


def checkpoint_blocks(module: nn.Module) -> None:
    """Let the activations inside the blocks of a model be computed again for backward."""
    for block in blocks_of(module):
        forward = block.forward

        def again(*args: Any, _forward: Callable[..., Any] = forward, **kwargs: Any) -> Any:
            return checkpoint(_forward, *args, use_reentrant=False, **kwargs)

        block.forward = again
