"""The table of wire formats, and decoding through it.

A format is what a payload's body looks like; several codecs may write the same one (top-k,
thresholds and DGC all write `sparse`). Ids are for the wire and never reused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

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
        """Parameters by name."""
        size = struct.calcsize(self.params)
        return dict(zip(self.fields, struct.unpack(self.params, params[:size]), strict=True))


_by_name: dict[str, Format] = {}
_by_id: dict[int, Format] = {}


def register(name: str, wire_id: int, params: str, fields: tuple[str, ...]) -> Callable[[Decoder], Decoder]:
    """Enter a decoder under its name and id."""

    def enter(decoder: Decoder) -> Decoder:
        if name in _by_name or wire_id in _by_id:
            raise ValueError(f"format {name!r} or id {wire_id} is taken")
        entry = Format(name, wire_id, params, fields, decoder)
        _by_name[name] = _by_id[wire_id] = entry
        return decoder

    return enter


def formats() -> tuple[Format, ...]:
    """Every format, by id."""
    return tuple(_by_id[i] for i in sorted(_by_id))


def format_named(name: str) -> Format:
    """The format of that name."""
    if name not in _by_name:
        raise SpecError(f"no wire format {name!r}; there are {', '.join(sorted(_by_name))}")
    return _by_name[name]


def wire_id(name: str) -> int:
    """Id of a format."""
    return format_named(name).wire_id


def wire_name(identifier: int) -> str | None:
    """Name of a format, or None."""
    entry = _by_id.get(identifier)
    return None if entry is None else entry.name


def unpack_params(payload: Payload, layout: str) -> tuple[int, ...]:
    """The parameters, which must have exactly this layout."""
    if len(payload.params) != struct.calcsize(layout):
        raise ParamsError(
            f"{payload.codec}: {len(payload.params)} bytes of parameters, expected {struct.calcsize(layout)}"
        )
    return struct.unpack(layout, payload.params)


def sections(payload: Payload, *sizes: int) -> list[Tensor]:
    """The body cut into parts of these sizes, which must add up to all of it."""
    if sum(sizes) != payload.body.numel():
        raise BodyLengthError(f"{payload.codec}: a body of {payload.body.numel()} bytes, expected {sum(sizes)}")
    return list(torch.split(payload.body, list(sizes)))


def floats(section: Tensor) -> Tensor:
    """Bytes of a body as float32."""
    return section.view(torch.float32) if section.storage_offset() % 4 == 0 else section.clone().view(torch.float32)


def decode_into(payload: Payload, out: Tensor, mode: int) -> None:
    """out (mode)= decoded, for a flat float32 tensor of the right size."""
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
    """The tensor a payload stands for, in the dtype and shape it came from.

    `out`, contiguous float32, is filled instead of a new tensor: a fresh 100 MB tensor costs
    more than the decoding.
    """
    if out is not None:
        decode_into(payload, _flat_target(payload, out), fixed.STORE)
        return out
    flat = torch.empty(payload.numel, dtype=torch.float32, device=payload.body.device)
    decode_into(payload, flat, fixed.STORE)
    return flat.view(payload.shape).to(payload.dtype)


def decode_add(payload: Payload, out: Tensor) -> Tensor:
    """out += decoded: how a server adds up many payloads in one buffer."""
    decode_into(payload, _flat_target(payload, out), fixed.ADD)
    return out
