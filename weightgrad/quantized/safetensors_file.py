"""Safetensors files whose bytes depend on their contents alone.

The library writes tensors in a fixed order, but the metadata in one that differs from process to process. Here the keys
of the metadata are sorted, so that the same model is the same file, byte for byte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

_SIZE = struct.Struct("<Q")


def save_file(tensors: Mapping[str, Tensor], path: str | Path, metadata: Mapping[str, str]) -> None:
    """Write tensors and metadata.

    Args:
        tensors: By name; on the CPU, contiguous, and none shares memory with another.
        path: The file.
        metadata: Text by name.

    Raises:
        OSError: The file cannot be written.
        SafetensorError: The same, as the library says it.
    """
    safetensors.torch.save_file(dict(tensors), str(path), metadata=dict(metadata))
    with open(path, "r+b") as file:
        (size,) = _SIZE.unpack(file.read(_SIZE.size))
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= size:  # it is; a library that escapes otherwise would only cost the sorting
            file.seek(_SIZE.size)
            file.write(text.ljust(size))
