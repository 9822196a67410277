"""Makes a user's model and its batch for a plan: on the meta device, or, where that does not work, as they are.

On the meta device tensors have shapes and types and no values, so a model of any size takes no memory, and devices that
this machine does not have are no matter. A function that reads values (from a file, with `.item()`) fails there; it is
then run as it is, in the memory that this machine has, and its tensors become fake ones afterwards.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import resource
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from weightgrad.errors import PlanError

Built = nn.Module | tuple[nn.Module, Any]
_MOVES = tuple(getattr(Tensor, name) for name in ("cuda", "cpu", "xpu") if hasattr(Tensor, name))
_OWN = ("_parameters", "_buffers", "_modules")  # of every module


class OneDevice(TorchFunctionMode):
    """Whatever device is asked for, tensors are made on this one and stay there.

    Args:
        device: the device.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with its device changed."""
        del types
        given = dict(kwargs or {})
        if func in _MOVES:
            return args[0]
        if given.get("device") is not None:
            given["device"] = self._device
        if func is Tensor.to:
            args = (args[0], *(self._device if _is_device(one) else one for one in args[1:]))
        return func(*args, **given)


def _is_device(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) or (isinstance(value, int) and not isinstance(value, bool))


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Tensors that are made in this context have no values; weights that are loaded into them are not read."""
    with warnings.catch_warnings(), torch.device("meta"), OneDevice("meta"):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def as_it_is() -> Iterator[None]:
    """Tensors have values, on the CPU; what does not fit into the memory of this machine is refused by an exception."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space_limit()
    if limit is not None and (before[0] == resource.RLIM_INFINITY or limit < before[0]):
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        with OneDevice("cpu"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _address_space_limit() -> int | None:
    """What this process has reserved, and what memory is free: more would end in the hands of the kernel's killer."""
    try:
        reserved = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        lines = Path("/proc/meminfo").read_text().splitlines()
        return reserved + next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


@contextlib.contextmanager
def fake() -> Iterator[None]:
    """Operations compute shapes and types only; tensors with values, which the model may still find, become fake."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, fused = log.level, torch._C._get_mkldnn_enabled()
    log.setLevel(logging.CRITICAL)  # what fails is told by the exception
    torch._C._set_mkldnn_enabled(False)  # its LSTM is one operation, of which nobody counts what it computes
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), OneDevice("cpu"):
            yield
    finally:
        torch._C._set_mkldnn_enabled(fused)
        log.setLevel(before)


def make(build: Callable[[], Built], inputs: Callable[[], Any] | None) -> tuple[nn.Module, Any]:
    """The user's model and its batch, as they come.

    Args:
        build: makes the model, or a pair of model and batch.
        inputs: makes a batch, where `build` does not.

    Raises:
        PlanError: that is not what the function makes.
    """
    built = build()
    if isinstance(built, tuple) and len(built) != 2:
        raise PlanError(
            f"build returned {len(built)} values; wanted a model, or a pair of model and batch. Several arguments are "
            "a tuple: (model, (x, y))"
        )
    module, given = built if isinstance(built, tuple) else (built, None)
    if not isinstance(module, nn.Module):
        raise PlanError(f"build returned {type(module).__name__}; wanted a torch.nn.Module, or one and a batch")
    if given is None and inputs is not None:
        given = inputs()
    if given is None:
        if not _takes_nothing(module):
            raise PlanError("build returned no batch; return (model, batch), or give --input, e.g. 3x224x224")
        given = ()
    given = dict(given) if isinstance(given, Mapping) else given
    if any(nn.parameter.is_lazy(one) for one in module.parameters()):  # it learns its shapes from its first batch
        with torch.no_grad():
            call(module, given)
    return module, given


def _takes_nothing(module: nn.Module) -> bool:
    """Whether the model can be called without a batch, because it has its own data."""
    try:
        inspect.signature(module.forward).bind()
    except (TypeError, ValueError):
        return False
    return type(module).forward is not nn.Module.forward


def call(module: nn.Module, arguments: Any) -> Any:
    """Call a model with its batch: a tensor, a tuple of arguments, or a dictionary of named ones."""
    if isinstance(arguments, Mapping):
        return module(**arguments)
    return module(*arguments) if isinstance(arguments, (tuple, list)) else module(arguments)


def samples_of(arguments: Any) -> int | None:
    """Samples of a batch: the first side of its first tensor; None where it has none."""
    found = next((leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.dim()), None)
    return None if found is None else found.shape[0]


def tokens_of(arguments: Any) -> int | None:
    """Tokens of a sample of a batch that is a text: whole numbers with two sides. None where it is none."""
    found = next((leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)), None)
    text = found is not None and found.dim() == 2 and not found.is_floating_point() and found.dtype != torch.bool
    return found.shape[1] if text and found is not None else None


def place(module: nn.Module, arguments: Any, dtype: torch.dtype | None, *, real: bool) -> Any:
    """Give all tensors of a model the type that was asked for; in `fake`, make them fake ones.

    `Module.to` cannot change tensors of the meta device. Tensors that several modules share stay shared.

    Args:
        module: the model.
        arguments: its batch.
        dtype: the type of whatever is a floating-point number; None: each keeps its own.
        real: whether tensors keep their values.

    Returns:
        The arguments, changed in the same way.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # the old one is kept, so that no other gets its id

    def placed(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = (tensor, _placed(tensor, dtype, real))
        return made[id(tensor)][1]

    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None and (found := placed(tensor)) is not tensor:
                    setattr(part, name, found)  # a layer that keeps its weights in a list, too, is told
        for name, value in list(vars(part).items()):
            if name not in _OWN and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                vars(part)[name] = tree_map(placed, value)
    return tree_map(placed, arguments)


def _placed(tensor: Tensor, dtype: torch.dtype | None, real: bool) -> Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if not real and not isinstance(tensor, FakeTensor):
        found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device="cpu")
    elif tensor.device.type == "meta":  # it has no values to keep
        found = torch.zeros(tensor.shape, dtype=wanted, device="cpu")
    elif wanted != tensor.dtype:
        found = tensor.detach().to(wanted)
    else:
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(found, tensor.requires_grad)
    return found.requires_grad_(tensor.requires_grad)
