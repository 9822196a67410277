"""Scalars in a JoinReply are a safetensors file, written in one way, and what is not one is refused by name."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Mapping

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from torch import Tensor

from weightgrad import errors
from weightgrad.wire import snapshot_bytes
from weightgrad.wire.message_bytes import MessageLimits, pack, unpack
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import HEADER_BYTES, JoinReply

from .message_samples import LIMITS, plain, reply, scalars

HEAD = pack(reply(downloads=True))[:HEADER_BYTES]


def blob_of(tensors: Mapping[str, Tensor]) -> bytes:
    return pack(reply(downloads=True, scalars=tensors))[HEADER_BYTES:]


def scalars_of(data: bytes, limits: MessageLimits = LIMITS) -> Mapping[str, Tensor]:
    found = unpack(HEAD + data, limits)
    assert isinstance(found, JoinReply)
    return found.scalars


def table(text: str, data: bytes = b"") -> bytes:
    written = text.encode() + b" " * (-len(text.encode()) % 8)
    return struct.pack("<Q", len(written)) + written + data


def entry(name: str, dtype: str, shape: str, start: int, stop: int) -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{start},{stop}]}}'


def test_they_are_what_the_safetensors_library_writes_and_reads() -> None:
    tensors = {
        "moments": torch.randn(7),
        "optimizer.0.step": torch.tensor(3.0),
        "clock": torch.arange(4),
        "wide": torch.randn(2, 3, dtype=torch.float64),
        'none "of" it\n\x01é': torch.zeros(0, 5),
    }
    blob = blob_of(tensors)
    assert blob == safetensors.torch.save(tensors)
    assert plain(safetensors.torch.load(blob)) == plain(tensors)


@settings(max_examples=60)
@given(scalars)
def test_the_size_is_known_without_making_the_bytes(tensors: Mapping[str, Tensor]) -> None:
    blob = blob_of(tensors)
    assert snapshot_bytes.nbytes(tensors) == len(blob)
    assert plain(scalars_of(blob, MessageLimits())) == plain(tensors)


def test_there_may_be_none_and_they_may_be_not_contiguous() -> None:
    for tensors in ({}, {"turned": torch.arange(6.0).view(2, 3).t(), "every": torch.arange(9)[::2]}):
        assert plain(scalars_of(blob_of(tensors))) == plain(tensors)
    assert blob_of({}) == table("{}")
    assert nbytes(reply()) == 32


def test_a_good_table_is_read() -> None:
    assert torch.equal(scalars_of(table("{" + entry("a", "F32", "2", 0, 8) + "}", bytes(8)))["a"], torch.zeros(2))


BAD: dict[str, tuple[bytes, type[Exception]]] = {
    "no length": (b"\x08", errors.TruncatedError),
    "a table cut off": (struct.pack("<Q", 2**63) + b"{}      ", errors.TruncatedError),
    "data cut off": (table("{" + entry("a", "F32", "2", 0, 8) + "}", bytes(7)), errors.TruncatedError),
    "data after the last": (table("{}", b"\0"), errors.TrailingBytesError),
    "another dtype": (table("{" + entry("a", "F16", "2", 0, 4) + "}", bytes(4)), errors.UnknownDtypeError),
    "too large": (table("{" + entry("a", "F32", "2048", 0, 8192) + "}"), errors.SizeLimitError),
    "strides too large": (table("{" + entry("a", "F32", "0," + str(2**62), 0, 0) + "}"), errors.SizeLimitError),
    "too many dimensions": (table("{" + entry("a", "F32", "0" + ",1" * 16, 0, 0) + "}"), errors.ShapeError),
    "too many tensors": (
        table("{" + ",".join(entry(f"{i}", "F32", "0", 0, 0) for i in range(9)) + "}"),
        errors.SizeLimitError,
    ),
    "a name twice": (
        table("{" + entry("a", "F32", "1", 0, 4) + "," + entry("a", "F32", "1", 4, 8) + "}", bytes(8)),
        errors.ProtocolError,
    ),
    "metadata": (table('{"__metadata__":{"format":"pt"}}'), errors.ProtocolError),
    "a tensor called metadata": (table("{" + entry("__metadata__", "F32", "0", 0, 0) + "}"), errors.ProtocolError),
    "a gap": (table("{" + entry("a", "F32", "1", 4, 8) + "}", bytes(8)), errors.ProtocolError),
    "another order": (
        table("{" + entry("b", "F32", "1", 0, 4) + "," + entry("a", "F32", "1", 4, 8) + "}", bytes(8)),
        errors.ProtocolError,
    ),
    "padding of another kind": (struct.pack("<Q", 8) + b"{}\t     ", errors.ProtocolError),
    "no padding": (struct.pack("<Q", 2) + b"{}", errors.ProtocolError),
    "an escape that is not needed": (table("{" + entry("\\u0061", "F32", "0", 0, 0) + "}"), errors.ProtocolError),
    "half a surrogate": (table("{" + entry("\\ud800", "F32", "0", 0, 0) + "}"), errors.ProtocolError),
    "a leading zero": (table("{" + entry("a", "F32", "01", 0, 4) + "}", bytes(4)), errors.ProtocolError),
    "deep nesting": (table("[" * 3000), errors.ProtocolError),
    "not UTF-8": (
        table("{" + entry("?", "F32", "0", 0, 0) + "}").replace(b"?", b"\xff"),
        errors.ProtocolError,
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_scalars(case: str) -> None:
    data, error = BAD[case]
    with pytest.raises(error):
        scalars_of(data)


def test_a_claim_costs_nothing() -> None:
    tracemalloc.start()
    with pytest.raises(errors.TruncatedError):
        scalars_of(table("{" + entry("a", "F32", str(2**29), 0, 2**31) + "}"), MessageLimits())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**18


@pytest.mark.parametrize("name", ["__metadata__", "n" * 513, "\ud800"])
def test_a_name_that_cannot_be_written(name: str) -> None:
    with pytest.raises(errors.RangeError):
        blob_of({name: torch.zeros(1)})


def test_a_tensor_that_cannot_be_written() -> None:
    with pytest.raises(errors.UnknownDtypeError):
        blob_of({"a": torch.zeros(1, dtype=torch.float16)})
    with pytest.raises(errors.ShapeError):
        blob_of({"a": torch.zeros((1,) * 17)})
