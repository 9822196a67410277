"""Each way a frame can be wrong has one error class; each class has its tests here."""

from __future__ import annotations

import re
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
import xxhash

from weightgrad import errors, wire
from weightgrad.codecs.payload import Payload

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire-format.md"


def payload(**changes: object) -> Payload:
    fields: dict[str, object] = {
        "codec": "fp32",
        "dtype": torch.float32,
        "shape": (2,),
        "params": b"abc",
        "body": torch.arange(8, dtype=torch.uint8),
    }
    return Payload(**(fields | changes))  # type: ignore[arg-type]


FRAME = wire.to_bytes(payload())


def sealed(data: bytes) -> bytes:
    """`data` with its last 8 bytes replaced by a checksum that holds."""
    return data[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:-8]))


def patched(offset: int, patch: bytes) -> bytes:
    """A frame with `patch` at `offset`, and a checksum that holds."""
    return sealed(FRAME[:offset] + patch + FRAME[offset + len(patch) :])


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def test_magic() -> None:
    with pytest.raises(errors.MagicError, match=r"b'XGRD'.*b'WGRD'"):
        wire.parse(patched(0, b"X"))


@pytest.mark.parametrize("data", [b"H", b"HTTP/1.1 400"])
def test_magic_is_judged_from_the_first_byte(data: bytes) -> None:
    with pytest.raises(errors.MagicError):
        wire.frame_size(data)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_version(version: int) -> None:
    with pytest.raises(errors.VersionError, match=f"version {version}"):
        wire.parse(patched(4, bytes([version])))


@pytest.mark.parametrize("size", range(len(FRAME)))
def test_truncated_anywhere(size: int) -> None:
    with pytest.raises(errors.TruncatedError, match=f"{size} bytes came"):
        wire.parse(FRAME[:size])


def test_frame_size_of_less_than_a_header() -> None:
    with pytest.raises(errors.TruncatedError, match="a header has 24"):
        wire.frame_size(FRAME[:23])


def test_trailing_bytes() -> None:
    with pytest.raises(errors.TrailingBytesError, match="2 bytes follow"):
        wire.parse(FRAME + b"\0\0")


@pytest.mark.parametrize("offset", range(len(FRAME)))
def test_every_flipped_byte_is_found(offset: int) -> None:
    damaged = bytearray(FRAME)
    damaged[offset] ^= 0x40
    with pytest.raises(errors.FrameError):
        wire.parse(damaged)


@pytest.mark.parametrize("offset", [32, 40, len(FRAME) - 1], ids=["params", "body", "checksum"])
def test_checksum(offset: int) -> None:
    damaged = bytearray(FRAME)
    damaged[offset] ^= 1
    with pytest.raises(errors.ChecksumError, match="ask for it again"):
        wire.parse(damaged)


@pytest.mark.parametrize("offset", range(10, 16))
def test_reserved_fields(offset: int) -> None:
    with pytest.raises(errors.ReservedError, match="reserved fields"):
        wire.parse(patched(offset, b"\1"))


@pytest.mark.parametrize("offset", range(35, 40))
def test_padding(offset: int) -> None:
    with pytest.raises(errors.ReservedError, match="padding"):
        wire.parse(patched(offset, b"\1"))


@pytest.mark.parametrize("codec_id", [0, 255])
def test_unknown_codec(codec_id: int) -> None:
    with pytest.raises(errors.UnknownCodecError, match=f"codec id {codec_id} "):
        wire.parse(patched(5, bytes([codec_id])))


@pytest.mark.parametrize("dtype_id", [0, 5, 255])
def test_unknown_dtype(dtype_id: int) -> None:
    with pytest.raises(errors.UnknownDtypeError, match=f"dtype id {dtype_id} "):
        wire.parse(patched(6, bytes([dtype_id])))


@pytest.mark.parametrize("ndim", [17, 255])
def test_too_many_dimensions(ndim: int) -> None:
    with pytest.raises(errors.ShapeError, match=f"{ndim} dimensions"):
        wire.parse(patched(7, bytes([ndim])))


def test_too_many_params() -> None:
    with pytest.raises(errors.SizeLimitError, match="1025 bytes of params"):
        wire.parse(patched(8, struct.pack("<H", 1025)))


@pytest.mark.parametrize("read", [wire.parse, wire.parse_prefix, wire.frame_size])
def test_body_over_the_limit(read: object) -> None:
    assert callable(read)
    read(FRAME, limits=wire.Limits(max_body_bytes=8))
    with pytest.raises(errors.SizeLimitError, match="max_body_bytes is 7"):
        read(FRAME, limits=wire.Limits(max_body_bytes=7))


def test_elements_over_the_limit() -> None:
    wire.parse(FRAME, limits=wire.Limits(max_elements=2))
    with pytest.raises(errors.SizeLimitError, match="max_elements is 1"):
        wire.parse(FRAME, limits=wire.Limits(max_elements=1))


@pytest.mark.parametrize("shape", [(2**33, 2**33), (2**63,), (2**64 - 1,) * 16, (0, 2**62, 2**62), (2**62, 2**62, 0)])
def test_product_of_the_shape_does_not_wrap(shape: tuple[int, ...]) -> None:
    header = bytearray(wire.to_bytes(payload(shape=(1,) * len(shape))))
    header[24 : 24 + 8 * len(shape)] = b"".join(map(u64, shape))
    with pytest.raises(errors.SizeLimitError, match="max_elements"):
        wire.parse(sealed(bytes(header)), limits=wire.Limits(max_elements=2**63 - 1))


@pytest.mark.parametrize("limits", [wire.Limits(), wire.Limits(max_body_bytes=2**63 - 1)])
@pytest.mark.parametrize("claim", [2**20, 2**32, 2**62, 2**63, 2**64 - 1])
def test_a_claim_costs_no_memory(claim: int, limits: wire.Limits) -> None:
    data = patched(16, u64(claim))
    tracemalloc.start()
    try:
        with pytest.raises((errors.TruncatedError, errors.SizeLimitError)):
            wire.parse(data, limits=limits)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 * 1024


# One way to fail each check, in the order of the document: where, and what is put there.
DAMAGES = [
    (slice(0, 1), b"X"),
    (slice(23, None), b""),
    (slice(4, 5), b"\2"),
    (slice(10, 11), b"\1"),
    (slice(7, 8), b"\x11"),
    (slice(8, 10), struct.pack("<H", 1025)),
    (slice(16, 24), u64(2**40)),
    (slice(5, 6), b"\xff"),
    (slice(6, 7), b"\xff"),
    (slice(len(FRAME) - 1, None), b""),
    (slice(24, 32), u64(2**40)),
    (slice(39, 40), b"\1"),
    (slice(len(FRAME), None), b"more"),
    (slice(40, 41), b"\xff"),
]


def documented_order() -> list[str]:
    return re.findall(r"^\| \d+ \|.*\| `(\w+Error)` \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("first", range(len(DAMAGES)))
def test_checks_come_in_the_order_of_the_document(first: int) -> None:
    order = documented_order()
    assert len(order) == len(DAMAGES)
    damaged = bytearray(FRAME)
    # From the last to the first, as an early damage may cut off the place of a later one.
    for where, patch in reversed(DAMAGES[first:]):
        damaged[where] = patch
    with pytest.raises(errors.FrameError) as caught:
        wire.parse(damaged)
    assert type(caught.value).__name__ == order[first]


def test_frames_before_the_bad_one_are_delivered() -> None:
    iterator = wire.frames(FRAME + FRAME[:-1])
    assert next(iterator).codec == "fp32"
    with pytest.raises(errors.TruncatedError):
        next(iterator)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"codec": "no such codec"}, errors.SpecError),
        ({"dtype": torch.int32}, errors.UnknownDtypeError),
        ({"shape": (1,) * 17}, errors.ShapeError),
        ({"shape": (2**63,)}, errors.SizeLimitError),
        ({"shape": (-1,)}, errors.SizeLimitError),
        ({"params": bytes(1025)}, errors.SizeLimitError),
        ({"body": torch.zeros(2)}, errors.EncodeError),
        ({"body": torch.zeros(2, 2, dtype=torch.uint8)}, errors.EncodeError),
    ],
)
def test_what_no_reader_would_take_is_not_written(changes: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        wire.to_bytes(payload(**changes))


def test_strided_view_is_refused() -> None:
    with pytest.raises(TypeError, match="contiguous"):
        wire.parse(memoryview(FRAME)[::2])


@pytest.mark.parametrize("field", ["max_elements", "max_body_bytes"])
@pytest.mark.parametrize("value", [0, -1, 2**63, True, 1.5, None])
def test_limits_name_the_field_that_is_wrong(field: str, value: object) -> None:
    with pytest.raises(errors.SpecError, match=f"Limits.{field} is"):
        wire.Limits(**{field: value})  # type: ignore[arg-type]
