"""Frames round-trip, have the bytes the document says, and copy no more than they must."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from weightgrad import codecs, wire
from weightgrad.codecs.payload import Payload

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire-format.md"
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
CODECS = [entry.name for entry in codecs.formats()]


def make(
    body: bytes = b"",
    *,
    codec: str = "fp32",
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = (2,),
    params: bytes = b"",
) -> Payload:
    tensor = torch.tensor(list(body), dtype=torch.uint8)
    return Payload(codec=codec, dtype=dtype, shape=shape, params=params, body=tensor)


def fields(payload: Payload) -> tuple[object, ...]:
    """What must survive the wire; a payload itself compares by identity."""
    return payload.codec, payload.dtype, payload.shape, payload.params, bytes(payload.body.tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_survives(dtype: torch.dtype) -> None:
    payload = make(b"12345678", dtype=dtype)
    assert fields(wire.parse(wire.to_bytes(payload))) == fields(payload)


@pytest.mark.parametrize("codec", CODECS)
def test_codec_name_survives(codec: str) -> None:
    assert wire.parse(wire.to_bytes(make(codec=codec))).codec == codec


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (7,), (2, 3, 4), (1,) * 16])
def test_each_kind_of_shape_survives(shape: tuple[int, ...]) -> None:
    payload = make(b"abc", shape=shape)
    assert fields(wire.parse(wire.to_bytes(payload))) == fields(payload)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1024])
def test_params_survive_and_the_body_starts_at_a_multiple_of_8(size: int) -> None:
    payload = make(b"\xff" * 8, params=bytes(i % 251 for i in range(size)))
    data = wire.to_bytes(payload)
    assert fields(wire.parse(data)) == fields(payload)
    assert data.index(b"\xff" * 8) % 8 == 0


@given(
    dtype=st.sampled_from(DTYPES),
    codec=st.sampled_from(CODECS),
    shape=st.lists(st.integers(0, 4), max_size=16).map(tuple),
    params=st.binary(max_size=1024),
    body=st.binary(max_size=200),
    writable=st.booleans(),
)
def test_any_payload_survives(
    dtype: torch.dtype, codec: str, shape: tuple[int, ...], params: bytes, body: bytes, writable: bool
) -> None:
    payload = make(body, codec=codec, dtype=dtype, shape=shape, params=params)
    data = wire.to_bytes(payload)
    parsed = wire.parse(bytearray(data) if writable else data)
    assert fields(parsed) == fields(payload)
    assert wire.to_bytes(parsed) == data
    assert len(data) == wire.frame_bytes(payload) == wire.frame_size(data[:24])


def test_buffers_joined_are_the_bytes() -> None:
    payload = make(b"body!", params=b"xyz")
    assert b"".join(wire.to_buffers(payload)) == wire.to_bytes(payload)


def test_buffers_view_the_body_without_copying_it() -> None:
    payload = make(b"\x01\x02")
    _, body, _ = wire.to_buffers(payload)
    payload.body[0] = 9
    assert bytes(body) == b"\x09\x02"
    assert memoryview(body).readonly


def test_strided_body_is_sent_as_it_reads() -> None:
    payload = make(b"a-b-c-")
    strided = Payload("fp32", torch.float32, (2,), b"", payload.body[::2])
    assert bytes(wire.parse(wire.to_bytes(strided)).body.tolist()) == b"abc"


def test_writable_buffer_is_not_copied() -> None:
    data = bytearray(wire.to_bytes(make(b"12345678")))
    start = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
    body = wire.parse(data).body
    assert body.data_ptr() == start + 32
    data[32] = ord("!")
    assert body[0] == ord("!")


def test_read_only_buffer_is_copied() -> None:
    data = wire.to_bytes(make(b"12345678"))
    body = wire.parse(data).body
    body.zero_()
    assert data[32:40] == b"12345678"


@pytest.mark.parametrize("shift", range(8))
def test_body_is_aligned_wherever_the_frame_lies(shift: int) -> None:
    values = struct.pack("<2f", 1.0, -2.0)
    data = bytearray(shift) + wire.to_bytes(make(values))
    body = wire.parse(memoryview(data)[shift:]).body
    assert body.data_ptr() % 8 == 0
    assert body.storage_offset() % 8 == 0
    assert body.view(torch.float32).tolist() == [1.0, -2.0]


def test_view_with_wide_items_is_read_as_bytes() -> None:
    payload = make(b"12345678")
    words = memoryview(wire.to_bytes(payload)).cast("Q")
    assert fields(wire.parse(words)) == fields(payload)


def test_prefix_tells_how_much_it_took() -> None:
    payload = make(b"odd")
    data = wire.to_bytes(payload)
    parsed, taken = wire.parse_prefix(data + b"the rest")
    assert fields(parsed) == fields(payload)
    assert taken == len(data)


def test_frames_one_after_another() -> None:
    payloads = [make(b"x" * n, shape=(n,), params=b"p" * n) for n in range(5)]
    data = b"".join(wire.to_bytes(p) for p in payloads)
    for buffer in (data, bytearray(data), memoryview(data)):
        assert [fields(p) for p in wire.frames(buffer)] == [fields(p) for p in payloads]


def test_no_frames_in_no_bytes() -> None:
    assert list(wire.frames(b"")) == []


def test_a_stream_reader_needs_24_bytes_to_know_the_size() -> None:
    payload = make(b"x" * 77, shape=(1, 2, 3), params=b"p" * 13)
    data = wire.to_bytes(payload)
    assert wire.frame_size(data[:24]) == wire.frame_size(data) == len(data)


def test_frame_size_measures_a_codec_it_does_not_know() -> None:
    data = bytearray(wire.to_bytes(make(b"x")))
    data[5] = data[6] = 255
    assert wire.frame_size(data) == len(data)


def test_longest_overhead_is_what_frame_size_promises() -> None:
    payload = make(b"x", shape=(1,) * 16, params=bytes(1024))
    assert wire.frame_bytes(payload) - 1 == 1184


def worked_frame() -> bytes:
    """The hex column of the document's worked frame."""
    (block,) = re.findall(r"```hex\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    return bytes.fromhex("".join(line.split("#")[0] for line in block.splitlines()))


def test_worked_frame_of_the_document() -> None:
    payload = make(struct.pack("<2f", 1.0, -2.0))
    assert wire.to_bytes(payload) == worked_frame()
    assert fields(wire.parse(worked_frame())) == fields(payload)


def test_every_field_lies_where_the_document_says() -> None:
    data = wire.to_bytes(make(b"body", codec="bf16", dtype=torch.float16, shape=(3, 5), params=b"par"))
    assert data[:4] == b"WGRD"
    assert (data[4], data[5], data[6], data[7]) == (1, 3, 2, 2)
    assert struct.unpack_from("<HHIQ", data, 8) == (3, 0, 0, 4)
    assert struct.unpack_from("<QQ", data, 24) == (3, 5)
    assert data[40:48] == b"par\0\0\0\0\0"
    assert data[48:52] == b"body"
    assert data[52:] == xxhash.xxh3_64_intdigest(data[:52], seed=0).to_bytes(8, "little")
