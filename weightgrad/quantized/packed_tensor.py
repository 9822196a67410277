"""One tensor as packed codes and the floats that give them their values.

Two layouts. `pack-quantized` is that of compressed-tensors: rows of codes of 2, 4 or 8 bits, the first in the lowest
bits, each row padded to whole int32 words,

    value = (code - 2**(bits - 1)) * scale        one scale a tensor, a row, or a group of a row

`weightgrad` is for what does not fit: the body of a wire format (docs/wire-format.md), cut into its floats (scales, or
the values of a codebook) and its codes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs import Payload, decode
from weightgrad.codecs.codebook import PARAMS as CODEBOOK
from weightgrad.codecs.qsgd import UNIFORM
from weightgrad.codecs.registry import floats
from weightgrad.codecs.sign import SIGN
from weightgrad.codecs.terngrad import TERNARY
from weightgrad.errors import DecodeError, ModelFileError
from weightgrad.kernels import bits as bitstream
from weightgrad.kernels import ternary

PACK_QUANTIZED = "pack-quantized"
WEIGHTGRAD = "weightgrad"
WIDTHS = (2, 4, 8)
"""Bits of a code in the layout pack-quantized. Versions of compressed-tensors differ in how they pack other widths."""

FORMATS = {"codebook": CODEBOOK, "sign": SIGN, "ternary": TERNARY, "uniform": UNIFORM}
"""Wire formats that the layout weightgrad takes, and the struct of their parameters."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedTensor:
    """One quantized tensor as it is in the file.

    Attributes:
        name: Its name in the state dict.
        shape: Its shape when decoded.
        dtype: Its dtype when decoded.
        layout: "pack-quantized" or "weightgrad".
        bits: Bits of a code; for five trits in a byte it is 2, what one trit needs alone.
        codes: The packed codes: int32 of (rows, words) in the layout pack-quantized, otherwise bytes.
        scales: float32. In the layout pack-quantized of shape (1,), (rows, 1) or (rows, groups). Otherwise flat, one
            for each `group` elements; for a codebook, the values of its codes.
        format: The wire format of the codes in the layout weightgrad; "" otherwise.
        group: Elements that share a scale in the layout weightgrad; 0 otherwise, and for a codebook.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    bits: int
    codes: Tensor
    scales: Tensor
    format: str = ""
    group: int = 0

    @property
    def numel(self) -> int:
        """Elements of the decoded tensor."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Rows of the tensor as a matrix: its first dimension."""
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """Elements of a row: all other dimensions."""
        return math.prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @staticmethod
    def of(name: str, payload: Payload, layout: str = "auto") -> PackedTensor | None:
        """What a codec has made of a tensor of two dimensions or more.

        Args:
            name: The name of the tensor.
            payload: The encoded tensor.
            layout: "auto" takes pack-quantized where it fits; "weightgrad" never does, and ternary weights then take
                1.6 bits each.

        Returns:
            The tensor, or None if neither layout can hold the payload.
        """
        if payload.codec not in FORMATS or not payload.numel:
            return None
        if layout == "auto" and (found := _packed(name, payload)) is not None:
            return found
        numbers = struct.unpack(FORMATS[payload.codec], payload.params)
        bits = {"sign": 1, "ternary": 2}.get(payload.codec, numbers[0])
        group = 0 if payload.codec == "codebook" else min(numbers[-1], payload.numel)
        cut = 4 * (2**bits if payload.codec == "codebook" else -(-payload.numel // group))
        return PackedTensor(
            name=name,
            shape=payload.shape,
            dtype=payload.dtype,
            layout=WEIGHTGRAD,
            bits=bits,
            codes=payload.body[cut:].clone(),
            scales=floats(payload.body[:cut]).clone(),
            format=payload.codec,
            group=group,
        )

    def levels(self) -> Tensor:
        """The integers of the layout pack-quantized, int8 of (rows, columns): a value is one of them times its scale.

        Raises:
            ModelFileError: A code is below the smallest that a symmetric quantizer writes.
        """
        assert self.layout == PACK_QUANTIZED, self.layout
        found = unpack_int32(self.codes, self.bits, self.columns)
        lowest = 1 - 2 ** (self.bits - 1)
        if found.numel() and int(found.min()) < lowest:
            raise ModelFileError(
                f"{self.name}: a level of {int(found.min())} in {self.bits} bits; symmetric levels begin at {lowest}; "
                "export the model again"
            )
        return found

    def decode(self) -> Tensor:
        """The tensor in its own shape and dtype.

        Raises:
            ModelFileError: The codes are not what a codec writes.
        """
        if self.layout == WEIGHTGRAD:
            try:
                return decode(self.to_payload())
            except DecodeError as error:
                raise ModelFileError(f"{self.name}: {error}; export the model again") from error
        levels = self.levels().to(torch.float32)
        if self.scales.dim() == 1:
            return (levels * self.scales).view(self.shape).to(self.dtype)
        table = levels.view(self.rows, self.scales.shape[1], -1) * self.scales[:, :, None]
        return table.view(self.shape).to(self.dtype)

    def to_payload(self) -> Payload:
        """The payload of the layout weightgrad, which `codecs.decode` takes."""
        assert self.layout == WEIGHTGRAD, self.layout
        numbers = {"codebook": (self.bits,), "uniform": (self.bits, self.group)}.get(self.format, (self.group,))
        body = torch.cat((self.scales.view(torch.uint8), self.codes))
        return Payload(self.format, self.dtype, self.shape, struct.pack(FORMATS[self.format], *numbers), body)


def _packed(name: str, payload: Payload) -> PackedTensor | None:
    """The payload in the layout pack-quantized, or None if it does not fit."""
    if payload.codec not in ("ternary", "uniform") or len(payload.shape) < 2:
        return None
    numbers = struct.unpack(FORMATS[payload.codec], payload.params)
    bits, group = 2 if payload.codec == "ternary" else numbers[0], numbers[-1]
    rows, columns = payload.shape[0], payload.numel // payload.shape[0]
    if bits not in WIDTHS or (group < payload.numel and columns % group):
        return None
    cut = 4 * -(-payload.numel // group)
    scales, codes = floats(payload.body[:cut]).clone(), payload.body[cut:]
    if payload.codec == "ternary":
        levels = ternary.unpack_trits(codes, payload.numel).to(torch.int16) - 1
    else:
        levels = bitstream.unpack(codes, payload.numel, bits).to(torch.int16) - (2 ** (bits - 1) - 1)
    return PackedTensor(
        name=name,
        shape=payload.shape,
        dtype=payload.dtype,
        layout=PACK_QUANTIZED,
        bits=bits,
        codes=pack_int32(levels.to(torch.int8).view(rows, columns), bits),
        scales=scales if group >= payload.numel else scales.view(rows, columns // group),
    )


def pack_int32(levels: Tensor, bits: int) -> Tensor:
    """Pack levels into int32 words, row by row.

    Args:
        levels: int8 of (rows, columns), from -2**(bits - 1) on.
        bits: 2, 4 or 8.

    Returns:
        int32 of (rows, words). A word holds 32/bits levels, each plus 2**(bits - 1), the first in the lowest bits.
    """
    rows, columns = levels.shape
    padded = torch.zeros(rows, -(-columns * bits // 32) * (32 // bits), dtype=torch.uint8)
    padded[:, :columns] = (levels.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    packed: Tensor = bitstream.pack(padded.view(-1), bits).view(torch.int32).view(rows, -1)
    return packed


def unpack_int32(words: Tensor, bits: int, columns: int) -> Tensor:
    """Undo `pack_int32`.

    Args:
        words: int32 of (rows, words).
        bits: 2, 4 or 8.
        columns: Levels in a row.

    Returns:
        int8 of (rows, columns).
    """
    per_row = words.shape[1] * (32 // bits)
    codes = bitstream.unpack(words.contiguous().view(-1).view(torch.uint8), words.shape[0] * per_row, bits)
    levels: Tensor = codes.view(-1, per_row)[:, :columns].to(torch.int16) - 2 ** (bits - 1)
    return levels.to(torch.int8)
