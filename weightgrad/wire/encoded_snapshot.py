"""A snapshot in fewer bytes, for a site that comes late: some tensors as frames of a codec, the rest exact.

    ┌────────────┬───────────────────────────────────────────┐
    │ u32: count │ count times: u16: name_len · name · frame │
    └────────────┴───────────────────────────────────────────┘

The block stands before the exact rest (`snapshot_bytes`), sorted by name. A tensor without a negative entry stays
exact: it is a second moment or a count. Optimizers divide by these, and if a codec rounded a small one to zero the next
step would be huge.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from weightgrad import codecs, wire
from weightgrad.codecs import Codec, Payload
from weightgrad.errors import EncodeError, ProtocolError, SizeLimitError, SpecError, TruncatedError, UnknownDtypeError
from weightgrad.kernels.noise import derive
from weightgrad.wire import snapshot_bytes
from weightgrad.wire.snapshot_bytes import MAX_NAME_BYTES, Snapshot
from weightgrad.wire.sync_schedule import MAX_TEXT_BYTES

Encoded: TypeAlias = Mapping[str, Payload]

_COUNT = struct.Struct("<I")
_NAME = struct.Struct("<H")
_LEAST_BYTES = _NAME.size + 32  # of a tensor: an empty name, and a frame of nothing


def codec_of(spec: str) -> Codec:
    """The codec of a download.

    Args:
        spec: the codec as text, such as qsgd(bits=8).

    Returns:
        The codec.

    Raises:
        SpecError: the text cannot be read, or the codec has a memory.
    """
    if not spec.isascii() or not 1 <= len(spec) <= MAX_TEXT_BYTES:
        raise SpecError(f"the codec {spec[:40]!r}; wanted 1 to {MAX_TEXT_BYTES} ASCII characters, such as qsgd(bits=8)")
    codec = codecs.parse(spec)
    if codec.init(torch.zeros(1)):
        raise SpecError(
            f"{codec} keeps a memory from round to round, and a download is sent once; take a codec without memory, "
            "such as qsgd(bits=8) or bf16"
        )
    return codec


def encode(snapshot: Snapshot, codec: Codec, key: int) -> tuple[dict[str, Tensor], dict[str, Payload]]:
    """Encode what the codec makes smaller.

    Args:
        snapshot: the tensors by name.
        codec: a codec without memory.
        key: the key of its random stream.

    Returns:
        The tensors that stay exact, and the payloads of the others.
    """
    exact, encoded = {}, {}
    for index, name in enumerate(sorted(snapshot)):
        payload = _payload(snapshot[name], codec, derive(key, index))
        if payload is None:
            exact[name] = snapshot[name]
        else:
            encoded[name] = payload
    return exact, encoded


def _payload(tensor: Tensor, codec: Codec, key: int) -> Payload | None:
    if tensor.dtype != torch.float32 or not bool((tensor < 0).any()):
        return None
    try:
        payload, _ = codec.encode(tensor, {}, key)
    except EncodeError:
        return None  # not finite, or too large for the codec
    return payload if wire.frame_bytes(payload) < tensor.numel() * tensor.element_size() else None


def whole(exact: Snapshot, encoded: Encoded, max_elements: int) -> dict[str, Tensor]:
    """All tensors, decoded.

    Args:
        exact: the tensors that came as they are.
        encoded: the payloads of the others.
        max_elements: the elements of the model; no tensor may have more.

    Raises:
        ProtocolError: a tensor is too large.
    """
    for name, payload in encoded.items():
        if payload.numel > max_elements:
            raise ProtocolError(
                f"{name!r} of a global model has {payload.numel} elements, the model {max_elements}; "
                "both ends must train the same model"
            )
    return {**exact, **{name: codecs.decode(payload) for name, payload in encoded.items()}}


def nbytes(encoded: Encoded) -> int:
    """The size of the block, without making it; 0 if there are no encoded tensors."""
    if not encoded:
        return 0
    frames = (_NAME.size + len(name.encode()) + wire.frame_bytes(payload) for name, payload in encoded.items())
    return _COUNT.size + sum(frames)


def to_buffers(encoded: Encoded) -> list[bytes | memoryview]:
    """The block as buffers, to be sent one after the other."""
    if not encoded:
        return []
    found: list[bytes | memoryview] = [_COUNT.pack(len(encoded))]
    for name in sorted(encoded):
        snapshot_bytes.check_name(name)
        _check_dtype(name, encoded[name])
        raw = name.encode()
        found += [_NAME.pack(len(raw)) + raw, *wire.to_buffers(encoded[name])]
    return found


def parse(view: memoryview, *, limits: wire.Limits, max_tensors: int) -> tuple[dict[str, Payload], int]:
    """Parse the block that starts `view`. All bodies are copies if `view` is read-only.

    Args:
        view: the bytes.
        limits: the limits of frames.
        max_tensors: how many tensors the reader accepts.

    Returns:
        The payloads by name, and the size of the block.

    Raises:
        FrameError: the bytes are damaged or exceed a limit.
        ProtocolError: no correct writer writes them.
    """
    rest = view
    (count,) = _COUNT.unpack(_front(rest, _COUNT.size))
    rest = rest[_COUNT.size :]
    if count > max_tensors:
        raise SizeLimitError(
            f"{count} encoded tensors; the reader's limit is {max_tensors}; raise it if you trust the sender"
        )
    if not count:
        raise ProtocolError("an encoded global model of no tensors; its writer is wrong")
    if count * _LEAST_BYTES > len(rest):
        raise TruncatedError(
            f"{count} encoded tensors take {count * _LEAST_BYTES} bytes or more; {len(rest)} came; send it again"
        )
    found: dict[str, Payload] = {}
    last: str | None = None
    for _ in range(count):
        (size,) = _NAME.unpack(_front(rest, _NAME.size))
        if size > MAX_NAME_BYTES:
            raise SizeLimitError(f"the name of an encoded tensor has {size} bytes; wanted at most {MAX_NAME_BYTES}")
        name = _read_name(_front(rest[_NAME.size :], size))
        if last is not None and name <= last:
            raise ProtocolError(f"tensor {name!r} after {last!r}; encoded tensors are sorted and each comes once")
        rest = rest[_NAME.size + size :]
        payload, frame_bytes = wire.parse_prefix(rest, limits=limits)
        _check_dtype(name, payload)
        found[name], last, rest = payload, name, rest[frame_bytes:]
    return found, len(view) - len(rest)


def _front(view: memoryview, size: int) -> memoryview:
    if size > len(view):
        raise TruncatedError(
            f"an encoded global model: {len(view)} bytes came of {size}; it was cut short; send it again"
        )
    return view[:size]


def _read_name(raw: memoryview) -> str:
    try:
        name = bytes(raw).decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"tensor name {raw.hex(' ')} is not UTF-8; its writer is wrong") from error
    if name == snapshot_bytes.METADATA:
        raise ProtocolError(f"an encoded tensor {name!r}, a name that safetensors keeps for itself; rename it")
    return name


def _check_dtype(name: str, payload: Payload) -> None:
    if payload.dtype != torch.float32:
        raise UnknownDtypeError(
            f"{name!r} is {payload.dtype}; an encoded global model holds float32; its writer is wrong"
        )
