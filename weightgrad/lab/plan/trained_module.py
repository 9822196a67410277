"""A user's model as it is trained: its loss, its blocks, a step of it timed, and what goes wrong in words."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from weightgrad.core import optimizers
from weightgrad.errors import PlanError
from weightgrad.lab.plan import made_model
from weightgrad.lab.plan.made_model import Built
from weightgrad.lab.plan.operations import PHASES

_T = TypeVar("_T")
_VALUES = (DataDependentOutputException, DynamicOutputShapeException)  # that fake tensors do not have
_NO_MEMORY = "can't allocate memory"  # of torch's allocator for the CPU


def phase_seconds(
    build: Callable[[], Built],
    optimizer: tuple[str, Mapping[str, Any]],
    *,
    inputs: Callable[[], Any] | None = None,
    dtype: torch.dtype | None = None,
    checkpointing: bool = False,
    steps: int = 3,
) -> dict[str, float]:
    """Seconds of each phase of a real step on this machine, the best of a few; it takes the memory of the model.

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
    module, arguments = made_real(build, inputs, dtype, checkpointing)
    return told(lambda: _timed(module, arguments, optimizer, steps), REAL_STEP)


def told(work: Callable[[], _T], what: str) -> _T:
    """Do something with the user's model.

    Args:
        work: what to do.
        what: what that is, for the error.

    Raises:
        PlanError: it fails; says why, and what to do.
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
    except (Exception, SystemExit) as error:
        told = f"{what} failed: {type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error, MemoryError) or _NO_MEMORY in str(error):
            told += '; make the model on the meta device, which takes no memory: with torch.device("meta"): ...'
        raise PlanError(told) from error


MAKING = "the function that makes the model"
REAL_STEP = "a step of the model"
FAKE_STEP = (
    "a step of the model with tensors that have no values (if it works with real ones, give --measure, which takes "
    "real steps)"
)


def made_real(
    build: Callable[[], Built], inputs: Callable[[], Any] | None, dtype: torch.dtype | None, checkpointing: bool
) -> tuple[nn.Module, Any]:
    """The user's model and its batch, with values, ready to be trained.

    Raises:
        PlanError: they cannot be made.
    """
    module, arguments = told(lambda: made_model.make(build, inputs), MAKING)
    return module, ready(module, arguments, dtype, checkpointing, real=True)


def ready(module: nn.Module, arguments: Any, dtype: torch.dtype | None, checkpointing: bool, *, real: bool) -> Any:
    """Prepare a model to be trained, and return its batch in the same type."""
    found = made_model.place(module, arguments, dtype, real=real)
    if checkpointing:
        checkpoint_blocks(module)
    module.train()
    return found


def _timed(module: nn.Module, arguments: Any, optimizer: tuple[str, Mapping[str, Any]], steps: int) -> dict[str, float]:
    stepper = optimizers.build(optimizer[0], [p for p in module.parameters() if p.requires_grad], optimizer[1])
    times = []
    for _ in range(steps + 1):
        times.append([time.perf_counter()])
        loss = loss_of(module, arguments)
        times[-1].append(time.perf_counter())
        loss.backward()
        times[-1].append(time.perf_counter())
        stepper.step()
        stepper.zero_grad()
        times[-1].append(time.perf_counter())
    best = min(times[1:], key=lambda own: own[-1] - own[0])
    return {phase: end - begin for phase, begin, end in zip(PHASES, best, best[1:], strict=False)}


def loss_of(module: nn.Module, arguments: Any) -> Tensor:
    """A scalar to differentiate: the model's own loss if it returns one, otherwise something of the same cost.

    Raises:
        PlanError: nothing that the model returns can be differentiated.
    """
    found = _differentiable(made_model.call(module, arguments))
    if found.is_complex():
        found = found.abs()
    if found.dim() == 0:
        return found
    if found.dim() == 1:
        return found.float().mean()
    labels = torch.zeros((found.shape[0], *found.shape[2:]), dtype=torch.int64, device=found.device)
    return functional.cross_entropy(found.float() if found.dtype != torch.float32 else found, labels)


def _differentiable(found: Any) -> Tensor:
    """Of what a model returns, its loss, its logits, or the first tensor with a gradient."""
    for name in ("loss", "logits"):
        if isinstance(value := _get(found, name), Tensor) and value.requires_grad:
            return value
    within = vars(found) if hasattr(found, "__dict__") and not isinstance(found, (Tensor, Mapping)) else found
    leaves = [leaf for leaf in tree_leaves(within) if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if leaf.requires_grad:
            return leaf
    kinds = ", ".join(sorted({str(leaf.dtype).removeprefix("torch.") for leaf in leaves}))
    kind = "a tensor" if isinstance(found, Tensor) else type(found).__name__
    what = f"{kind} of {kinds}" if leaves else kind
    raise PlanError(
        f"the model returned {what}, with nothing that has a gradient; wanted its loss, or scores from which to make "
        "one. A small module around it, whose forward returns the loss, will do"
    )


def _get(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)


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
