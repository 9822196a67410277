"""A pretend accelerator: tensors that behave as if they lived elsewhere.

A `PretendTensor` says that it is on the device "pretend" and keeps its values in a tensor of the host that nobody else
has. Operations among such tensors work. What would fail or be slow on a GPU raises:

- mixing them with tensors of the host that have dimensions: `MixedDevicesError`;
- `numpy()`, and an address that is handed to C: `data_ptr()` can be compared and nothing else;
- reading a value, which makes the host wait for the device, if this package does it: `HostReadError`;
- an asynchronous copy from or to memory that is not pinned.

Copies are counted, in number and bytes, each way. `tests/accelerator/streams.py` says what happens to copies that
nobody waits for. The device is of the whole process, so tests use it in processes of their own (`cases.py`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from tests.accelerator.streams import DeviceModule, Memory, current_stream

NAME = "pretend"
_PACKAGE = str(Path(__file__).parents[2] / "weightgrad")
_aten = torch.ops.aten
_READS = (_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero, _aten.nonzero, _aten.masked_select, _aten._unique2)


class MixedDevicesError(RuntimeError):
    """An operation got tensors of the host and of the device."""


class HostReadError(RuntimeError):
    """This package has read a value of the device, for which the host must wait."""


@dataclass
class Traffic:
    """Copies in one direction."""

    copies: int = 0
    nbytes: int = 0

    def add(self, tensor: Tensor) -> None:
        self.copies += 1
        self.nbytes += tensor.numel() * tensor.element_size()


@dataclass
class Counts:
    """What has crossed between the device and the host since the counts began."""

    to_host: Traffic = field(default_factory=Traffic)
    to_device: Traffic = field(default_factory=Traffic)
    blocking: int = 0
    """Copies for which the host has waited at once."""
    reads: list[str] = field(default_factory=list)
    """The functions that have read a value."""


class Accelerator:
    """The device: its counts, which memory of the host is pinned, and who may read values."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.readers: set[str] = set()
        """Functions of this package that may read a value, as "file.py:function"."""
        self._pinned: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """Count from zero in a block."""
        before, self.counts = self.counts, Counts()
        yield self.counts
        self.counts = before

    def pinned(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory of the host that asynchronous copies may use; stands for `pin_memory=True`."""
        assert device.type == NAME
        made = torch.empty(nbytes, dtype=torch.uint8)
        self._pinned.append((made.data_ptr(), made.data_ptr() + nbytes))
        return made

    def pinned_bytes(self) -> int:
        """How much has been pinned so far."""
        return sum(stop - start for start, stop in self._pinned)

    def is_pinned(self, tensor: Tensor) -> bool:
        first = tensor.data_ptr()
        last = first + tensor.numel() * tensor.element_size()
        return any(start <= first and last <= stop for start, stop in self._pinned)

    def copied(self, traffic: Traffic, tensor: Tensor, *, blocking: bool) -> None:
        with self._lock:
            traffic.add(tensor)
            self.counts.blocking += blocking

    def read(self) -> None:
        """Somebody reads a value. This package must not, unless the reader is known."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(_PACKAGE):
                reader = f"{Path(path).name}:{frame.f_code.co_name}"
                if reader not in self.readers:
                    raise HostReadError(f"{reader} reads a value of the device, and waits for all work before it")
                self.counts.reads.append(reader)
                return
            if "/torch/" not in path and not path.startswith(str(Path(__file__).parent)):
                break
            frame = frame.f_back
        self.counts.reads.append("user")


ACCELERATOR = Accelerator()


class Address:
    """An address on the device: it can be compared, and handed to nobody."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)


class PretendTensor(Tensor):
    """A tensor on the pretend accelerator."""

    on_host: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory) -> PretendTensor:
        made: PretendTensor = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.on_host, made.memory = inner, memory
        return made

    def data_ptr(self) -> Address:  # type: ignore[override]
        return Address(self.on_host.data_ptr())

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert a {NAME} tensor to numpy: copy it to the host first")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"PretendTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = dict(kwargs or {})
        if func is _aten.copy_.default:
            return _copy(args[0], args[1], bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking", False))
        if func is _aten._to_copy.default and _device_of(kwargs) == "cpu":
            return _to_host(args[0], kwargs)
        if func.overloadpacket in _READS:
            ACCELERATOR.read()
        return _run(func, args, kwargs)


def _device_of(kwargs: dict[str, Any]) -> str | None:
    device = kwargs.get("device")
    return None if device is None else torch.device(device).type


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do something on the device."""
    flat = pytree.tree_leaves((args, kwargs))
    ours = [one for one in flat if isinstance(one, PretendTensor)]
    for one in flat:
        if isinstance(one, Tensor) and not isinstance(one, PretendTensor) and one.dim() > 0:
            raise MixedDevicesError(f"{func} got tensors of the host and of the device")
    _touch(func, args, kwargs, ours)
    if _device_of(kwargs) == NAME:
        kwargs["device"] = torch.device("cpu")
    known = {id(one.on_host): one for one in ours}
    memories = {one.on_host.untyped_storage().data_ptr(): one.memory for one in ours if one.on_host.numel()}

    def bare(one: Any) -> Any:
        return one.on_host if isinstance(one, PretendTensor) else one

    found = func(*pytree.tree_map(bare, args), **pytree.tree_map(bare, kwargs))

    def wrapped(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        if id(one) in known:
            return known[id(one)]
        memory = memories.get(one.untyped_storage().data_ptr()) if one.numel() else None
        if memory is None:
            memory = Memory()
            current_stream().touch([], [memory])
        return PretendTensor(one, memory)

    return pytree.tree_map(wrapped, found)


def _touch(func: Any, args: Any, kwargs: dict[str, Any], ours: list[PretendTensor]) -> None:
    """Note what an operation reads and writes; a view does neither."""
    schema = func._schema
    written: set[int] = set()
    given = [
        *zip(schema.arguments, args, strict=False),
        *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs),
    ]
    viewing = False
    for argument, value in given:
        if argument.alias_info is None:
            continue
        viewing |= not argument.alias_info.is_write
        if argument.alias_info.is_write:
            written |= {id(one) for one in pytree.tree_leaves(value)}
    if viewing and not written:
        return
    writes = [one.memory for one in ours if id(one) in written]
    current_stream().touch([one.memory for one in ours if id(one) not in written], writes)


def _copy(target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    if isinstance(target, PretendTensor) and isinstance(source, PretendTensor):
        current_stream().touch([source.memory], [target.memory])
        target.on_host.copy_(source.on_host)
    elif isinstance(target, PretendTensor):
        _to_device(target, source, non_blocking)
    else:
        assert isinstance(source, PretendTensor)
        _from_device(target, source, non_blocking)
    return target


def _to_device(target: PretendTensor, source: Tensor, non_blocking: bool) -> None:
    stream = current_stream()
    stream.touch([], [target.memory])
    if source.dim() == 0:
        target.on_host.copy_(source)  # a number that travels with the call
        return
    ACCELERATOR.copied(ACCELERATOR.counts.to_device, source, blocking=not non_blocking)
    if not non_blocking:
        stream.synchronize()
        target.on_host.copy_(source)
        return
    _check_asynchronous(source, target)
    stream.copy_from_host(source, target.on_host)


def _from_device(target: Tensor, source: PretendTensor, non_blocking: bool) -> None:
    stream = current_stream()
    stream.touch([source.memory], [])
    ACCELERATOR.copied(ACCELERATOR.counts.to_host, source.on_host, blocking=not non_blocking)
    if not non_blocking:
        stream.synchronize()
        target.copy_(source.on_host)
        return
    _check_asynchronous(target, source)
    stream.copy_to_host(source.on_host, target)


def _check_asynchronous(host: Tensor, device: Tensor) -> None:
    if not ACCELERATOR.is_pinned(host):
        raise AssertionError("a copy that is not waited for needs pinned memory; this one would be made at once")
    if host.dtype != device.dtype or not host.is_contiguous() or not device.is_contiguous():
        raise AssertionError("a copy that also converts goes through memory of its own; convert before or after it")


def _to_host(source: PretendTensor, kwargs: dict[str, Any]) -> Tensor:
    current_stream().touch([source.memory], [])
    non_blocking = bool(kwargs.pop("non_blocking", False))
    assert not non_blocking, "nobody can know when such a copy is complete"
    ACCELERATOR.copied(ACCELERATOR.counts.to_host, source.on_host, blocking=True)
    found: Tensor = _aten._to_copy.default(source.on_host, **{**kwargs, "device": torch.device("cpu")})
    return found


def register() -> None:
    """Make the device known to torch; once in a process."""
    backend_registration._setup_privateuseone_for_python_backend(rename=NAME, backend_module=DeviceModule())
    library = torch.library.Library("aten", "IMPL")
    _KEPT.append(library)

    def made(inner: Tensor) -> Tensor:
        memory = Memory()
        current_stream().touch([], [memory])
        return PretendTensor(inner, memory)

    def empty(
        size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None, **_: Any
    ) -> Tensor:
        del layout, device, pin_memory
        return made(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return made(torch.empty_strided(size, stride, dtype=dtype))

    library.impl("empty.memory_format", empty, "PrivateUse1")

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        return _copy(target, source, non_blocking)

    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")


_KEPT: list[Any] = []


def moved(module: nn.Module) -> nn.Module:
    """Put the parameters and buffers of a module on the device. (`Module.to` would assign `.data`.)"""
    for one in module.modules():
        for name, parameter in list(one._parameters.items()):
            if parameter is not None:
                one._parameters[name] = nn.Parameter(parameter.detach().to(NAME), requires_grad=parameter.requires_grad)
        for name, buffer in list(one._buffers.items()):
            if buffer is not None:
                one._buffers[name] = buffer.to(NAME)
    return module


def values(tensor: Tensor) -> Tensor:
    """The values of a tensor, for a test to look at."""
    return tensor.on_host.clone() if isinstance(tensor, PretendTensor) else tensor.clone()
