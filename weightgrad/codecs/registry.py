"""The table of wire formats, and decoding through it.

A format is what a payload's body looks like; several codecs may write the same one (top-k,
thresholds and DGC all write `sparse`). Ids are for the wire and never reused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from weightgrad.codecs.payload import Payload
from weightgrad.errors import BodyLengthError, DecodeError, ParamsError, SpecError, UnknownCodecError
from weightgrad.kernels import fixed

Decoder = Callable[[Payload, Tensor, int], None]
"""decode(payload, out, mode): out is flat float32; mode is STORE, ADD or SUBTRACT."""


@dataclass(frozen=True)
class Format:
    """How one kind of body is written and read."""

    name: str
    wire_id: int
    params: str  # struct of the parameters, little-endian
    fields: tuple[str, ...]  # their names, for people
    decode: Decoder

    def describe(self, params: bytes) -> dict[str, object]:
        """Return the parameters by name."""
        size = struct.calcsize(self.params)
        return dict(zip(self.fields, struct.unpack(self.params, params[:size]), strict=True))


_by_name: dict[str, Format] = {}
_by_id: dict[int, Format] = {}


def register(name: str, wire_id: int, params: str, fields: tuple[str, ...]) -> Callable[[Decoder], Decoder]:
    """Enter a decoder under the name and id of its wire format.

    Args:
        name: Name of the format, which a payload has as `codec`.
        wire_id: Its id on the wire; an id is never reused.
        params: Layout of the parameters for `struct`, little-endian.
        fields: Names of the parameters.

    Returns:
        A decorator for the decoder.

    Raises:
        ValueError: Name or id is taken.
    """

    def enter(decoder: Decoder) -> Decoder:
        if name in _by_name or wire_id in _by_id:
            raise ValueError(f"format {name!r} or id {wire_id} is taken")
        entry = Format(name, wire_id, params, fields, decoder)
        _by_name[name] = _by_id[wire_id] = entry
        return decoder

    return enter


def formats() -> tuple[Format, ...]:
    """Return every format, ordered by id."""
    return tuple(_by_id[i] for i in sorted(_by_id))


def format_named(name: str) -> Format:
    """Return the format of that name, or raise SpecError."""
    if name not in _by_name:
        raise SpecError(f"no wire format {name!r}; there are {', '.join(sorted(_by_name))}")
    return _by_name[name]


def wire_id(name: str) -> int:
    """Return the id of a format, or raise SpecError."""
    return format_named(name).wire_id


def wire_name(identifier: int) -> str | None:
    """Return the name of the format with this id, or None."""
    entry = _by_id.get(identifier)
    return None if entry is None else entry.name


def unpack_params(payload: Payload, layout: str) -> tuple[int, ...]:
    """Unpack the parameters of a payload; raise ParamsError if they do not have exactly this layout."""
    if len(payload.params) != struct.calcsize(layout):
        raise ParamsError(
            f"{payload.codec}: {len(payload.params)} bytes of parameters, expected {struct.calcsize(layout)}"
        )
    return struct.unpack(layout, payload.params)


def sections(payload: Payload, *sizes: int) -> list[Tensor]:
    """Cut a body into sections of these sizes; raise BodyLengthError if they are not all of it."""
    if sum(sizes) != payload.body.numel():
        raise BodyLengthError(f"{payload.codec}: a body of {payload.body.numel()} bytes, expected {sum(sizes)}")
    ends = list(accumulate(sizes))
    return [payload.body[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def floats(section: Tensor) -> Tensor:
    """View bytes of a body as float32."""
    return section.view(torch.float32) if section.storage_offset() % 4 == 0 else section.clone().view(torch.float32)


def decode_into(payload: Payload, out: Tensor, mode: int) -> None:
    """Decode into a flat float32 tensor of the right size: store, add or subtract, as `mode` says."""
    if payload.codec not in _by_name:
        raise UnknownCodecError(f"no wire format {payload.codec!r}; there are {', '.join(sorted(_by_name))}")
    _by_name[payload.codec].decode(payload, out, mode)


def _flat_target(payload: Payload, out: Tensor) -> Tensor:
    if tuple(out.shape) != payload.shape:
        raise DecodeError(f"out has shape {list(out.shape)}, the payload {list(payload.shape)}")
    if out.dtype != torch.float32 or not out.is_contiguous():
        raise DecodeError(f"out must be contiguous float32, not {out.dtype}; or let decode make it")
    return out.view(-1)


def decode(payload: Payload, *, out: Tensor | None = None) -> Tensor:
    """Decode a payload.

    Args:
        payload: What a codec made, here or on another machine.
        out: Contiguous float32 to fill instead of a new tensor: a fresh 100 MB tensor costs more than the decoding.

    Returns:
        The tensor, in the dtype and shape it came from; or `out`.

    Raises:
        DecodeError: The payload is not what a codec writes, or `out` does not fit.
    """
    if out is not None:
        decode_into(payload, _flat_target(payload, out), fixed.STORE)
        return out
    flat = torch.empty(payload.numel, dtype=torch.float32, device=payload.body.device)
    decode_into(payload, flat, fixed.STORE)
    return flat.view(payload.shape).to(payload.dtype)


def decode_add(payload: Payload, out: Tensor) -> Tensor:
    """Decode a payload and add it to a tensor: this is how a server adds up many payloads in one buffer.

    Args:
        payload: What a codec made.
        out: Contiguous float32 of the payload's shape.

    Returns:
        `out`.

    Raises:
        DecodeError: The payload is not what a codec writes, or `out` does not fit.
    """
    decode_into(payload, _flat_target(payload, out), fixed.ADD)
    return out
