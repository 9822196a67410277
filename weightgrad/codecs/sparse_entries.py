"""The entries of a payload of the format "sparse": where they are and what they are.

A body is the low bits of the gaps between indices, their unary part, zeros to a multiple of 8, and the body of the
values, which any codec may have written.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from weightgrad.codecs import registry
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.sign import one_size
from weightgrad.errors import BodyContentError, ParamsError
from weightgrad.kernels import bits, dense, fixed, gaps
from weightgrad.kernels.local_model import AddedEntries

PARAMS = "<QQBBBx"  # entries, bits of the unary stream, Rice?, width, format of the values


@dataclass(frozen=True)
class SparseEntries:
    """The sections of a sparse payload; the indices may still turn out to be bad. Nothing is copied.

    Attributes:
        streams: of the indices.
        inner: the payload of the values.
    """

    streams: gaps.GapStreams
    inner: Payload

    @staticmethod
    def of(payload: Payload) -> SparseEntries:
        """Read the parameters of a sparse payload.

        Raises:
            DecodeError: They are not something that the encoder writes.
        """
        size = struct.calcsize(PARAMS)
        if len(payload.params) < size:
            raise ParamsError(f"sparse: {len(payload.params)} bytes of parameters, expected at least {size}")
        count, unary_bits, rice, width, identifier = struct.unpack(PARAMS, payload.params[:size])
        name = registry.wire_name(identifier)
        n = payload.numel
        streams = unary_bits >= count if rice else unary_bits == 0
        if name in (None, "sparse") or count > n or width > bits.MAX_WIDTH or rice > 1 or not streams:
            raise ParamsError(
                f"sparse: {count} entries of {n}, width {width}, rice {rice}, values format {identifier}: "
                "not something the encoder writes"
            )
        code = bits.GapCode(bool(rice), width, unary_bits)
        low_bytes = code.low_bytes(count)
        indexed = low_bytes + code.unary_bytes
        start = indexed + -indexed % 8
        rest = max(0, payload.body.numel() - start)
        low, unary, gap, body = registry.sections(payload, low_bytes, code.unary_bytes, start - indexed, rest)
        found = gaps.GapStreams(low, unary, count, code, n)
        if bool(gap.any()):
            raise _bad_indices(found)
        return SparseEntries(found, Payload(str(name), payload.dtype, (count,), payload.params[size:], body))

    @cached_property
    def _signs(self) -> gaps.Signs | None:
        """The values, if they are signs of one size on the host: on a device the size would have to be read back."""
        on_host = self.inner.body.device.type == "cpu"
        return one_size(self.inner) if on_host and self.inner.codec == "sign" else None

    def _in_scratch(self, memory: str, device: torch.device) -> Tensor:
        """The values, decoded into scratch memory of this name."""
        values = fixed.scratch(memory, torch.empty(1, device=device, dtype=torch.float32).expand(self.streams.count))
        registry.decode_into(self.inner, values, fixed.STORE)
        return values

    def write(self, areas: Sequence[tuple[int, Tensor]], mode: int, share: float = 1.0) -> None:
        """Write the entries to their places in several tensors, and with `fixed.STORE` zeros to the others.

        Args:
            areas: Flat contiguous float32 tensors, each with the place of its first element in the payload, ascending.
                An entry that lies in none of them is left out. They are where the payload is, or there is only one.
            mode: `fixed.STORE`, `ADD` or `SUBTRACT`.
            share: What each value is multiplied by.

        Raises:
            DecodeError: It is not something that the encoder writes; nothing was written.
        """
        if mode == fixed.STORE and not self.streams.good():
            raise _bad_indices(self.streams)
        values: Tensor | gaps.Signs | None = None
        if all(out.device.type == "cpu" for _, out in areas):
            values = self._signs
        if values is None:
            values = self._in_scratch("entries", areas[0][1].device if areas else torch.device("cpu"))
        if mode == fixed.STORE:
            for _, out in areas:
                dense.clear(out)
        if not self.streams.scatter(values, areas, mode, share):
            raise _bad_indices(self.streams)

    def added(self, first: int, share: float, memory: str) -> AddedEntries:
        """The entries, on the CPU, as part of the place of a local model; their indices are not checked yet.

        Args:
            first: The element from which on places count.
            share: What each value is multiplied by.
            memory: The name of scratch memory for values that must be decoded first.

        Raises:
            DecodeError: The values are not something that the encoder writes.
        """
        signs = self._signs
        values = self._in_scratch(memory, torch.device("cpu")) if signs is None else signs
        return AddedEntries(self.streams, values, first, share)

    def indices(self) -> Tensor:
        """The indices, ascending.

        Raises:
            DecodeError: They are not something that the encoder writes.
        """
        found = self.streams.indices()
        if found is None:
            raise _bad_indices(self.streams)
        return found

    def values(self, device: torch.device | None = None) -> Tensor:
        """The float32 values, decoded on a device; None is the payload's."""
        device = self.inner.body.device if device is None else device
        found = torch.empty(self.inner.numel, dtype=torch.float32, device=device)
        registry.decode_into(self.inner, found, fixed.STORE)
        return found

    def checked_values(self) -> Tensor:
        """The values alone; the indices are checked all the same.

        Raises:
            DecodeError: They are not something that the encoder writes.
        """
        if not self.streams.good():
            raise _bad_indices(self.streams)
        return self.values()


@registry.register("sparse", 9, PARAMS, ("entries", "unary_bits", "rice", "width", "values_format"))
def decode_sparse(payload: Payload, out: Tensor, mode: int) -> None:
    """Write the entries to their places in `out`, and with `fixed.STORE` zeros to the others."""
    SparseEntries.of(payload).write([(0, out)], mode)


def unpack_entries(payload: Payload, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Unpack the entries of a sparse payload.

    Args:
        payload: A payload of the format "sparse".
        device: Where the values are decoded; None is the payload's device.

    Returns:
        The indices, ascending, and the float32 values at them.

    Raises:
        DecodeError: It is not something that the encoder writes.
    """
    entries = SparseEntries.of(payload)
    return entries.indices(), entries.values(device)


def check_streams(good: bool, entries: Sequence[AddedEntries]) -> None:
    """Raise BodyContentError, with the first bad entries, if something found that not all streams are good."""
    if not good:
        raise _bad_indices(next(one.streams for one in entries if not one.streams.good()))


def _bad_indices(streams: gaps.GapStreams) -> BodyContentError:
    return BodyContentError(
        f"sparse: the index stream does not hold {streams.count} ascending indices below {streams.numel}"
    )
