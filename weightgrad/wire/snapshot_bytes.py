"""Named tensors as bytes: a safetensors file in memory, as it stands at the end of a JoinReply.

    ┌───────────┬────────────────────────────┬──────┐
    │ u64: size │ JSON, padded with spaces   │ data │
    └───────────┴────────────────────────────┴──────┘

The format is https://github.com/huggingface/safetensors, narrowed to the one way in which its library writes tensors
without metadata: by dtype, the widest first, then by name, without gaps. So a reader writes the table again from what
it understood and compares the two; whatever differs is refused. The length is known without touching the data.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from weightgrad.errors import (
    ProtocolError,
    RangeError,
    ShapeError,
    SizeLimitError,
    TrailingBytesError,
    TruncatedError,
    UnknownDtypeError,
)

Snapshot: TypeAlias = Mapping[str, Tensor]
Contents: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

MAX_NAME_BYTES = 512
MAX_NDIM = 16
METADATA = "__metadata__"  # safetensors keeps this name for itself
_NAMES = {torch.int64: "I64", torch.float64: "F64", torch.float32: "F32"}  # in the order of their data
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_SIZE = struct.Struct("<Q")
# One tensor in the table. Each turn of the first loop is one byte of the name.
_ENTRY = re.compile(
    rb'[{,]"((?:[^"\\\x00-\x1f]|\\["\\bfnrt]|\\u00[01][0-9a-f]){0,512})":'
    rb'\{"dtype":"([A-Z0-9_]{1,16})","shape":\[((?:[0-9]{1,19}(?:,[0-9]{1,19}){0,63})?)\],'
    rb'"data_offsets":\[[0-9]{1,19},[0-9]{1,19}\]\}'
)


def nbytes(snapshot: Snapshot) -> int:
    """The size of the snapshot as bytes, without making them."""
    return len(_table(_contents(snapshot))) + sum(t.numel() * t.element_size() for t in snapshot.values())


def to_buffers(snapshot: Snapshot) -> list[bytes | memoryview]:
    """The snapshot as its table and views of the tensors' memory (of copies, if not contiguous on the CPU)."""
    found: list[bytes | memoryview] = [_table(_contents(snapshot))]
    for name in _in_order(_contents(snapshot)):
        flat = snapshot[name].detach().cpu().contiguous().view(-1)
        if flat.numel():
            found.append(flat.view(torch.uint8).numpy().data.toreadonly())
    return found


def parse(view: memoryview, *, max_bytes: int, max_tensors: int) -> dict[str, Tensor]:
    """Parse exactly one snapshot; all tensors are copies.

    Args:
        view: the bytes.
        max_bytes: the size of a tensor that the reader accepts.
        max_tensors: how many tensors the reader accepts.

    Returns:
        The tensors by name.

    Raises:
        FrameError: the bytes are damaged or exceed a limit.
        ProtocolError: no correct writer writes them.
    """
    if len(view) < _SIZE.size:
        raise TruncatedError(f"a snapshot of {len(view)} bytes; it starts with {_SIZE.size} of length; send it again")
    (size,) = _SIZE.unpack(view[: _SIZE.size])
    if size > len(view) - _SIZE.size:
        raise TruncatedError(f"a snapshot's table of {size} bytes; {len(view) - _SIZE.size} came; send it again")
    table, data = bytes(view[: _SIZE.size + size]), view[_SIZE.size + size :]
    contents = _read_table(table, max_bytes, max_tensors)
    if _table(contents) != table:
        raise ProtocolError(
            "a snapshot's table is not what a writer makes of the tensors in it: their order, offsets, names or "
            "padding differ; write it as docs/wire-format.md says"
        )
    wanted = sum(_data_bytes(dtype, shape) for dtype, shape in contents.values())
    if wanted > len(data):
        raise TruncatedError(f"a snapshot's tensors have {wanted} bytes; {len(data)} came; send it again")
    if wanted < len(data):
        raise TrailingBytesError(f"{len(data) - wanted} bytes follow a snapshot; wanted none; its writer is wrong")
    found = {}
    # The table is the one that a writer makes, so the data lie in its order without gaps.
    for name, (dtype, shape) in contents.items():
        own, data = data[: _data_bytes(dtype, shape)], data[_data_bytes(dtype, shape) :]
        flat = torch.frombuffer(bytearray(own), dtype=dtype) if len(own) else torch.empty(0, dtype=dtype)
        found[name] = flat.view(shape)
    return found


def _contents(snapshot: Snapshot) -> Contents:
    for name, tensor in snapshot.items():
        check_name(name)
        if tensor.dtype not in _NAMES:
            raise UnknownDtypeError(
                f"{name!r} is {tensor.dtype}; a snapshot holds float32, float64 and int64; convert it"
            )
        _check_ndim(name, tensor.dim())
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in snapshot.items()}


def _in_order(contents: Contents) -> list[str]:
    order = list(_NAMES)
    return sorted(contents, key=lambda name: (order.index(contents[name][0]), name))


def _table(contents: Contents) -> bytes:
    """Everything before the data."""
    entries, end = {}, 0
    for name in _in_order(contents):
        dtype, shape = contents[name]
        start, end = end, end + _data_bytes(dtype, shape)
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _SIZE.pack(len(text)) + text


def _read_table(table: bytes, max_bytes: int, max_tensors: int) -> Contents:
    """The tensors that can be read, up to the first that cannot."""
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    at = _SIZE.size
    while entry := _ENTRY.match(table, at):
        at = entry.end()
        try:
            name = str(json.loads(f'"{entry[1].decode()}"'))
        except UnicodeDecodeError as error:
            raise ProtocolError(f"tensor name {entry[1].hex(' ')} is not UTF-8; its writer is wrong") from error
        if name in found or name == METADATA:
            raise ProtocolError(f"a snapshot with a second tensor {name!r}, or metadata; its writer is wrong")
        dtype = _DTYPES.get(entry[2].decode())
        if dtype is None:
            raise UnknownDtypeError(f"{name!r} has dtype {entry[2].decode()}; a snapshot holds F32, F64 and I64")
        shape = tuple(int(size) for size in entry[3].split(b",") if size)
        _check_ndim(name, len(shape))
        # A 0 counts as a 1: for (0, 2**62, 2**62) the strides that torch computes overflow.
        if math.prod(max(1, size) for size in shape) * dtype.itemsize > max_bytes:
            raise SizeLimitError(f"{name!r} has shape {shape}; the reader's limit is {max_bytes} bytes")
        if len(found) == max_tensors:
            raise SizeLimitError(f"a snapshot of more than {max_tensors} tensors, the reader's limit")
        found[name] = dtype, shape
    return found


def _data_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize


def _check_ndim(name: str, ndim: int) -> None:
    if ndim > MAX_NDIM:
        raise ShapeError(f"{name!r} has {ndim} dimensions; a snapshot's tensor has at most {MAX_NDIM}; flatten it")


def check_name(name: str) -> None:
    """Raise RangeError for a tensor's name that cannot be written."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise RangeError(f"the tensor name {name!r} cannot be written in UTF-8; rename it") from error
    if size > MAX_NAME_BYTES or name == METADATA:
        raise RangeError(
            f"the tensor name {name[:40]!r} of {size} bytes; a snapshot takes at most {MAX_NAME_BYTES}, "
            f"and not {METADATA!r}; rename it"
        )
