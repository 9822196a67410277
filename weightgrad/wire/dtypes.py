"""The number that stands for a tensor's dtype in a frame.

The numbers are part of the format: once given they never change and are never used again.
Zero is nobody's, so that a header of zeros is not a valid one.
"""

from __future__ import annotations

import torch

from weightgrad.errors import UnknownDtypeError

_DTYPE_BY_ID = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16, 4: torch.float64}
_ID_BY_DTYPE = {dtype: number for number, dtype in _DTYPE_BY_ID.items()}
_KNOWN = ", ".join(f"{number} {str(dtype).removeprefix('torch.')}" for number, dtype in _DTYPE_BY_ID.items())


def dtype_id(dtype: torch.dtype) -> int:
    """The id of `dtype` on the wire."""
    number = _ID_BY_DTYPE.get(dtype)
    if number is None:
        raise UnknownDtypeError(
            f"{dtype} has no id on the wire; the ids are {_KNOWN}; convert the tensor before encoding it"
        )
    return number


def dtype_of(number: int) -> torch.dtype:
    """The dtype that `number` stands for."""
    dtype = _DTYPE_BY_ID.get(number)
    if dtype is None:
        raise UnknownDtypeError(
            f"dtype id {number} is unknown; this build knows {_KNOWN}; upgrade the reader, "
            "or check that the bytes are a frame"
        )
    return dtype
