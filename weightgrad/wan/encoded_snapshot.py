"""A snapshot in fewer bytes, for a site that comes late: what a codec makes smaller goes as frames, the rest as it is.

    ┌────────────┬───────────────────────────────────────────┐
    │ u32: count │ count times: u16: name_len · name · frame │
    └────────────┴───────────────────────────────────────────┘

It stands before the exact rest (`snapshot_bytes`), sorted by name. A tensor without a negative entry stays exact:
it is a second moment or a count, which optimizers divide by, and where a codec makes a small one zero the next
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
from weightgrad.wan import snapshot_bytes
from weightgrad.wan.pace import MAX_TEXT_BYTES
from weightgrad.wan.snapshot_bytes import MAX_NAME_BYTES, Snapshot

Encoded: TypeAlias = Mapping[str, Payload]

_COUNT = struct.Struct("<I")
_NAME = struct.Struct("<H")
_LEAST_BYTES = _NAME.size + 32  # of a tensor: an empty name, and a frame of nothing


def codec_of(spec: str) -> Codec:
    """The codec of a first base; SpecError for one that cannot be read, or that has a memory."""
    if not spec.isascii() or not 1 <= len(spec) <= MAX_TEXT_BYTES:
        raise SpecError(f"the codec {spec[:40]!r}; wanted 1 to {MAX_TEXT_BYTES} ASCII characters, such as qsgd(bits=8)")
    codec = codecs.parse(spec)
    if codec.init(torch.zeros(1)):
        raise SpecError(
            f"{codec} keeps a memory from one tensor to the next, and a base is sent once; take a codec without, "
            "such as qsgd(bits=8) or bf16"
        )
    return codec


def encode(snapshot: Snapshot, codec: Codec, key: int) -> tuple[dict[str, Tensor], dict[str, Payload]]:
    """What stays exact, and the rest through the codec."""
    exact, encoded = {}, {}
    for place, name in enumerate(sorted(snapshot)):
        payload = _payload(snapshot[name], codec, derive(key, place))
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
        return None  # not finite, or too large for this codec
    return payload if wire.frame_bytes(payload) < tensor.numel() * tensor.element_size() else None


def whole(exact: Snapshot, encoded: Encoded, max_elements: int) -> dict[str, Tensor]:
    """All tensors, decoded; none of them may be longer than the vector that is trained."""
    for name, payload in encoded.items():
        if payload.numel > max_elements:
            raise ProtocolError(
                f"{name!r} of a base has {payload.numel} elements, the model {max_elements}; "
                "both ends must train the same model"
            )
    return {**exact, **{name: codecs.decode(payload) for name, payload in encoded.items()}}


def nbytes(encoded: Encoded) -> int:
    """How long the block is, without making it; nothing takes no bytes."""
    if not encoded:
        return 0
    frames = (_NAME.size + len(name.encode()) + wire.frame_bytes(payload) for name, payload in encoded.items())
    return _COUNT.size + sum(frames)


def to_buffers(encoded: Encoded) -> list[bytes | memoryview]:
    """The block as buffers to be sent one after the other."""
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
    """The block that starts `view`, and how many bytes it took; all bodies are copies if `view` is read-only."""
    rest = view
    (count,) = _COUNT.unpack(_front(rest, _COUNT.size))
    rest = rest[_COUNT.size :]
    if count > max_tensors:
        raise SizeLimitError(
            f"{count} encoded tensors; the reader's limit is {max_tensors}; raise it if you trust the sender"
        )
    if not count:
        raise ProtocolError("an encoded base of no tensors; its writer is wrong")
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
        payload, taken = wire.parse_prefix(rest, limits=limits)
        _check_dtype(name, payload)
        found[name], last, rest = payload, name, rest[taken:]
    return found, len(view) - len(rest)


def _front(view: memoryview, size: int) -> memoryview:
    if size > len(view):
        raise TruncatedError(f"an encoded base: {len(view)} bytes came of {size}; it was cut short; send it again")
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
        raise UnknownDtypeError(f"{name!r} is {payload.dtype}; an encoded base holds float32; its writer is wrong")
