"""One payload as one self-describing frame of bytes, parsed as if a stranger had sent it.

    ┌─────────────┬─────────────┬──────────────────┬──────────┬──────────┐
    │ header (24) │ shape (8·d) │ params, 0-padded │   body   │ XXH3 (8) │
    └─────────────┴─────────────┴──────────────────┴──────────┴──────────┘
                                          a multiple of 8 ┘

Everything is little-endian; `docs/wire-format.md` gives every field, a worked frame and the order of the checks. The
body starts at a multiple of 8, so that a decoder can view it as words of any width without a copy.

A length is only believed after it was compared with a limit and with the bytes at hand, and
nothing is allocated before the last check has passed: a frame of a hundred bytes that claims
a terabyte costs a hundred bytes. The checksum (XXH3-64, https://xxhash.com) comes last, as it
alone takes time in proportion to the frame. It finds accidents, not forgers.

Left out: compression (the task of codecs), authentication (the task of the transport), and alignment from one frame
to the next (a reader that needs it copies, see `parse`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from weightgrad.codecs import registry
from weightgrad.codecs.payload import Payload
from weightgrad.errors import (
    ChecksumError,
    EncodeError,
    MagicError,
    ReservedError,
    ShapeError,
    SizeLimitError,
    SpecError,
    TrailingBytesError,
    TruncatedError,
    UnknownCodecError,
    UnknownDtypeError,
    VersionError,
)
from weightgrad.wire.versions import FRAME_VERSION

MAGIC = b"WGRD"
HEADER_BYTES = 24
CHECKSUM_BYTES = 8
MAX_NDIM = 16
MAX_PARAMS_BYTES = 1024
_ALIGN = 8

# These numbers are part of the format: once given they never change and are never used again. Zero is unused, so that a
# header of zeros is not a valid one.
_DTYPE_BY_ID = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16, 4: torch.float64}
_ID_BY_DTYPE = {dtype: number for number, dtype in _DTYPE_BY_ID.items()}
_KNOWN_DTYPES = ", ".join(f"{number} {str(dtype).removeprefix('torch.')}" for number, dtype in _DTYPE_BY_ID.items())

# magic, version, codec id, dtype id, ndim, params_len, reserved (2 + 4), body_len
_HEADER = struct.Struct("<4sBBBBH6sQ")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a reader accepts from a stranger.

    Attributes:
        max_elements: bounds what a decoder must allocate: a sparse body of a few bytes may stand for that many
            elements, so set it to the largest tensor you expect.
        max_body_bytes: bounds what a reader must hold to parse a frame.
    """

    max_elements: int = 2**32
    max_body_bytes: int = 2**32

    def __post_init__(self) -> None:
        for field in ("max_elements", "max_body_bytes"):
            value = getattr(self, field)
            # bool is an int in Python, and True as a limit is a misplaced flag.
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
                raise SpecError(f"Limits.{field} is {value!r}; it must be an int from 1 to 2**63 - 1")


_DEFAULT_LIMITS = Limits()


class _Layout(NamedTuple):
    """Where the fields of a frame lie, by its header."""

    codec_id: int
    dtype_id: int
    ndim: int
    params_bytes: int
    body_bytes: int

    @property
    def params_at(self) -> int:
        return HEADER_BYTES + 8 * self.ndim

    @property
    def padding_at(self) -> int:
        return self.params_at + self.params_bytes

    @property
    def body_at(self) -> int:
        return self.padding_at + -self.padding_at % _ALIGN

    @property
    def checksum_at(self) -> int:
        return self.body_at + self.body_bytes

    @property
    def frame_bytes(self) -> int:
        return self.checksum_at + CHECKSUM_BYTES


def frame_bytes(payload: Payload) -> int:
    """The length of `to_bytes(payload)`, without making it."""
    padding_at = HEADER_BYTES + 8 * len(payload.shape) + len(payload.params)
    return padding_at + -padding_at % _ALIGN + payload.body.numel() + CHECKSUM_BYTES


def to_bytes(payload: Payload) -> bytes:
    """Write a payload as one frame. Copies the body once; `to_buffers` does not."""
    return b"".join(to_buffers(payload))


def to_buffers(payload: Payload) -> list[bytes | memoryview]:
    """Write a payload as the buffers of one frame: header, body and checksum, for `socket.sendmsg`.

    The body is a read-only view of `payload.body` (of a copy, if that is not on the CPU). Send it before the tensor is
    written again: the checksum is that of its present contents.
    """
    header = _header(payload)
    body = _body_view(payload.body)
    digest = xxhash.xxh3_64(header)
    digest.update(body)
    return [header, body, _CHECKSUM.pack(digest.intdigest())]


def frame_size(data: bytes | bytearray | memoryview, *, limits: Limits = _DEFAULT_LIMITS) -> int:
    """The length of the frame that starts `data`, from its first 24 bytes alone.

    A reader of a stream receives 24 bytes, asks for the length, receives the rest, and calls `parse`. The length is at
    most `limits.max_body_bytes` + 1,184. Codec, dtype and shape are not checked, so a relay can pass on or skip what it
    cannot decode.
    """
    return _read_layout(_byte_view(data), limits).frame_bytes


def parse(data: bytes | bytearray | memoryview, *, limits: Limits = _DEFAULT_LIMITS) -> Payload:
    """Parse exactly one frame.

    The body is not copied if `data` is writable and its body lies at an address divisible by 8: it then shares memory
    with `data`, which cannot be resized while the payload lives and must not be written to. Otherwise it is copied.

    Args:
        data: the bytes of the frame.
        limits: what the reader accepts.

    Returns:
        The payload.

    Raises:
        FrameError: the bytes are not one good frame; each check has its own subclass.
    """
    view = _byte_view(data)
    layout = _check_structure(view, limits)
    if len(view) > layout.frame_bytes:
        raise TrailingBytesError(
            f"{len(view) - layout.frame_bytes} bytes follow a frame of {layout.frame_bytes}; wanted none; "
            "use frames() or parse_prefix() for several frames in one buffer"
        )
    return _read_payload(view, layout)


def parse_prefix(data: bytes | bytearray | memoryview, *, limits: Limits = _DEFAULT_LIMITS) -> tuple[Payload, int]:
    """Parse the frame that starts `data`.

    Returns:
        The payload, and the length of the frame.

    Raises:
        FrameError: the bytes do not start with a good frame.
    """
    view = _byte_view(data)
    layout = _check_structure(view, limits)
    return _read_payload(view, layout), layout.frame_bytes


def frames(data: bytes | bytearray | memoryview, *, limits: Limits = _DEFAULT_LIMITS) -> Iterator[Payload]:
    """Parse frames that follow one another in `data`; none if it is empty.

    A bad frame raises when the iterator comes to it. What lies behind it is not read.
    """
    rest = _byte_view(data)
    while len(rest):
        payload, length = parse_prefix(rest, limits=limits)
        yield payload
        rest = rest[length:]


def _header(payload: Payload) -> bytes:
    """Everything before the body: fields, shape, params and padding."""
    shape, params = payload.shape, payload.params
    _check_ndim(len(shape))
    _check_params_bytes(len(params))
    for axis, size in enumerate(shape):
        if not 0 <= size < 2**63:
            raise SizeLimitError(f"dimension {axis} is {size}; a frame holds 0 to 2**63 - 1; fix Payload.shape")
    fields = _HEADER.pack(
        MAGIC,
        FRAME_VERSION,
        registry.wire_id(payload.codec),
        _dtype_id(payload.dtype),
        len(shape),
        len(params),
        bytes(6),
        payload.body.numel(),
    )
    return fields + struct.pack(f"<{len(shape)}Q", *shape) + params + bytes(-len(params) % _ALIGN)


def _body_view(body: Tensor) -> memoryview:
    if body.dtype != torch.uint8 or body.dim() != 1:
        raise EncodeError(
            f"Payload.body is {body.dtype} of shape {tuple(body.shape)}; a frame takes a 1-D uint8 tensor; "
            "use body.contiguous().view(-1).view(torch.uint8)"
        )
    return body.cpu().contiguous().numpy().data.toreadonly()


def _byte_view(data: bytes | bytearray | memoryview) -> memoryview:
    # A view may come with items of any width; offsets below are in bytes.
    return memoryview(data).cast("B")


def _read_layout(view: memoryview, limits: Limits) -> _Layout:
    """Check the fields that decide the length of a frame, in the order the document gives."""
    start = bytes(view[: len(MAGIC)])
    # Also of fewer than four bytes: noise should not be mistaken for the start of a frame.
    if not MAGIC.startswith(start):
        raise MagicError(
            f"starts with {start!r}; a frame starts with {MAGIC!r}; check what was sent, and "
            "that the reader is at the start of a frame"
        )
    if len(view) < HEADER_BYTES:
        raise TruncatedError(f"{len(view)} bytes came; a header has {HEADER_BYTES}; receive the rest and retry")
    _, version, codec, dtype, ndim, params_bytes, reserved, body_bytes = _HEADER.unpack_from(view)
    if version != FRAME_VERSION:
        raise VersionError(f"frame version {version}; this build reads {FRAME_VERSION}; use one release at both ends")
    _check_zeros("reserved fields", reserved)
    _check_ndim(ndim)
    _check_params_bytes(params_bytes)
    if body_bytes > limits.max_body_bytes:
        raise SizeLimitError(
            f"a body of {body_bytes} bytes; Limits.max_body_bytes is {limits.max_body_bytes}; "
            "raise it if you trust the sender"
        )
    return _Layout(codec, dtype, ndim, params_bytes, body_bytes)


def _check_structure(view: memoryview, limits: Limits) -> _Layout:
    """Every check but the checksum's. What passes lies within `view`, whatever follows it."""
    layout = _read_layout(view, limits)
    _codec_of(layout.codec_id)
    _dtype_of(layout.dtype_id)
    if len(view) < layout.frame_bytes:
        raise TruncatedError(f"{len(view)} bytes came; the frame has {layout.frame_bytes}; receive the rest and retry")
    shape = _read_shape(view, layout)
    # A 0 counts as a 1: a shape such as (0, 2**62, 2**62) has no elements, yet the strides that
    # torch computes for it overflow.
    elements = math.prod(max(size, 1) for size in shape)
    if elements > limits.max_elements:
        raise SizeLimitError(
            f"shape {shape} spans {elements} elements; Limits.max_elements is {limits.max_elements}; "
            "raise it if you trust the sender"
        )
    _check_zeros("padding after the params", bytes(view[layout.padding_at : layout.body_at]))
    return layout


def _read_payload(view: memoryview, layout: _Layout) -> Payload:
    """Check the checksum of a frame whose structure was checked, then read it."""
    (written,) = _CHECKSUM.unpack_from(view, layout.checksum_at)
    computed = xxhash.xxh3_64_intdigest(view[: layout.checksum_at])
    if written != computed:
        raise ChecksumError(
            f"the frame carries checksum {written:#018x}; its bytes give {computed:#018x}; ask for it again"
        )
    return Payload(
        codec=_codec_of(layout.codec_id),
        dtype=_dtype_of(layout.dtype_id),
        shape=_read_shape(view, layout),
        params=bytes(view[layout.params_at : layout.padding_at]),
        body=_read_body(view[layout.body_at : layout.checksum_at]),
    )


def _codec_of(number: int) -> str:
    name = registry.wire_name(number)
    if name is None:
        raise UnknownCodecError(
            f"codec id {number} is unknown to this build; upgrade the reader, or encode with a codec both ends have"
        )
    return name


def _dtype_id(dtype: torch.dtype) -> int:
    number = _ID_BY_DTYPE.get(dtype)
    if number is None:
        raise UnknownDtypeError(
            f"{dtype} has no id on the wire; the ids are {_KNOWN_DTYPES}; convert the tensor before encoding it"
        )
    return number


def _dtype_of(number: int) -> torch.dtype:
    dtype = _DTYPE_BY_ID.get(number)
    if dtype is None:
        raise UnknownDtypeError(
            f"dtype id {number} is unknown; this build knows {_KNOWN_DTYPES}; upgrade the reader, "
            "or check that the bytes are a frame"
        )
    return dtype


def _read_shape(view: memoryview, layout: _Layout) -> tuple[int, ...]:
    return struct.unpack_from(f"<{layout.ndim}Q", view, HEADER_BYTES)


def _read_body(view: memoryview) -> Tensor:
    if not len(view):
        # torch.frombuffer refuses an empty buffer.
        return torch.empty(0, dtype=torch.uint8)
    # torch has no read-only tensors and warns of a buffer that is one.
    body = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    # torch lets a misaligned view(torch.float32) pass, and some machines trap on it.
    return body if body.data_ptr() % _ALIGN == 0 else body.clone()


def _check_zeros(what: str, found: bytes) -> None:
    if any(found):
        raise ReservedError(f"{what}: came {found.hex(' ')}; wanted zeros; the frame is damaged or its writer is wrong")


def _check_ndim(ndim: int) -> None:
    if ndim > MAX_NDIM:
        raise ShapeError(f"{ndim} dimensions; a frame has at most {MAX_NDIM}; flatten the tensor first")


def _check_params_bytes(size: int) -> None:
    if size > MAX_PARAMS_BYTES:
        raise SizeLimitError(
            f"{size} bytes of params; a frame has at most {MAX_PARAMS_BYTES}; put what grows in the body"
        )
